"""A server that asks a site again, to see one client in the difference of two answers: real vaults,
real folders, the sites' own way in (`answer_from_disk`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Toy, toy_federation
from vaults import make_vaults

from fedlens import Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.memory import NEVER
from fedlens.core.message import Header
from fedlens.core.replies import Arrival
from fedlens.engines.flower.site import Site, answer_from_disk, federation_of_one
from fedlens.layers import Scaffold
from fedlens.trust import SecureSum
from fedlens.trust.secure_sum import GREET, WORK
from fedlens.trust.server_memory import put_fields
from fedlens.trust.vault import Declined

N = 3
AGAIN = "answered another request with the same key"


def make() -> SecureSum:
    made = stack(FedAvg(Toy(), batch=8), Scaffold(), SecureSum())
    assert isinstance(made, SecureSum)
    return made


class Folders:
    """Three sites, each with its folder; SCAFFOLD's clients remember."""

    def __init__(self, folder: Path) -> None:
        whole, vaults = toy_federation(N), make_vaults(folder, N)
        self.sites = [
            Site(
                i,
                make().with_vault(vaults[i]),
                federation_of_one(i, whole.holdings[i], whole.held_out_of(i)),
                folder / str(i),
            )
            for i in range(N)
        ]
        self.asked: list[tuple[Message, Mapping[int, int]]] = []

    def ids(self) -> Sequence[int]:
        return range(N)

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        self.asked.append((message, dict(heard)))
        for i in ids:
            yield self.ask(i, message, "job", heard.get(i, NEVER))

    def ask(self, i: int, message: Message, job: str, heard: int, **more: Any) -> Message:
        sent = Message.from_bytes(bytearray(message.to_bytes()))
        return answer_from_disk(self.sites[i], sent, job, heard, **more)

    def work(self, number: int) -> tuple[Message, Mapping[int, int]]:
        asked = (m for m in self.asked if (m[0].round, m[0].header.trip) == (number, WORK))
        return next(m for m in asked if not m[0].header.evaluate)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: {}


def same(a: Message, b: Message) -> bool:
    return all(torch.equal(t, b.trees["masked"][n]) for n, t in a.trees["masked"].items())


def test_the_same_masks_under_another_name_of_the_job(tmp_path: Path) -> None:
    """Under it the site remembers nothing: the difference to its first answer would be its own."""
    here = Folders(tmp_path)
    run(make(), here, 2)
    message, heard = here.work(1)
    first = here.ask(0, message, "job", heard[0])
    for how in ({}, {"forgive": True}):
        with pytest.raises(Declined, match=AGAIN):
            here.ask(0, message, "other", NEVER, **how)
        with pytest.raises(Declined, match=AGAIN):
            here.ask(0, message, "another", heard[0], forgive=True)
    assert same(here.ask(0, message, "job", heard[0]), first)


def test_the_same_masks_after_the_first_answer_was_deleted(tmp_path: Path) -> None:
    """No trip but work deletes what was stored; and with it deleted the site makes the same answer
    again, or none."""
    here = Folders(tmp_path)
    run(make(), here, 2)
    message, heard = here.work(1)
    first = here.ask(0, message, "job", heard[0])
    answers = tmp_path / "0" / "job" / "answers"
    before = {p.name for p in answers.iterdir()}
    far = put_fields(Message(), job="x").with_header(Header(round=900, trip=GREET))
    here.ask(0, far, "job", 1)
    assert before < {p.name for p in answers.iterdir()}
    for path in answers.iterdir():
        path.unlink()
    with pytest.raises(Declined, match=AGAIN):
        here.ask(0, message, "job", 1)  # "your draft of round 1 counts"
    assert same(here.ask(0, message, "job", heard[0]), first)


def test_an_evaluation_under_another_name_of_the_job(tmp_path: Path) -> None:
    """Masks of metrics hide one set of them too."""
    here = Folders(tmp_path)
    run(make(), here, 1, evaluate_every=1, personal=True)
    (message,) = [m for m, _ in here.asked if m.header.evaluate and m.header.trip == WORK]
    first = here.ask(0, message, "job", 0)
    site = here.sites[0]
    scorer = type(site.algorithm.inner)
    with pytest.MonkeyPatch.context() as patch:  # as after some more training: other metrics
        patch.setattr(scorer, "evaluate", lambda *_: {"accuracy": 0.25, "loss": 1.0})
        with pytest.raises(Declined, match=AGAIN):
            here.ask(0, message, "other", NEVER)
    assert same(here.ask(0, message, "job", 0), first)

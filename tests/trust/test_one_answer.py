"""A server that asks a site again, to see one client in the difference of two answers: real vaults,
real folders, the sites' own way in (`answer_from_disk`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import torch
from toy import Toy, toy_federation
from vaults import Sites, make_vaults

from fedlens import Message, Progress, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Brought, Trips
from fedlens.core.memory import NEVER
from fedlens.core.message import Header
from fedlens.core.replies import Arrival, Lost
from fedlens.core.rounds import make_trips
from fedlens.engines.flower.site import (
    Site,
    _reason,
    answer_from_disk,
    federation_of_one,
    sentence,
)
from fedlens.layers import Scaffold
from fedlens.trust import SecureSum
from fedlens.trust.secure_sum import GREET, WORK
from fedlens.trust.server_memory import ServerMemory, put_fields
from fedlens.trust.vault import MOST_TRIES, Declined, RanBefore

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


# -- a round asked for again, with fresh keys ------------------------------------------------------

OTHER = "added to another sum of this round"


class Asked:
    """Five sites with vaults of their own, and a server that asks for a round as it likes."""

    def __init__(self, folder: Path, dropouts: str) -> None:
        made = stack(FedAvg(Toy(), batch=8), Scaffold(), SecureSum(dropouts=dropouts))  # type: ignore[arg-type]
        assert isinstance(made, SecureSum)
        self.algorithm, self.heard = made, dict[int, int]()
        self.vaults = make_vaults(folder, 5)
        self.sites = Sites(made, toy_federation(5), self.vaults)
        self.state = made.init()

    def play(self) -> None:
        def keep(here: Progress, _: Round) -> None:
            self.state, self.heard = here.state, dict(here.heard)

        run(self.algorithm, self.sites, 1, after_round=keep)

    def attempt(
        self, number: int, asked: Sequence[int], heard: Mapping[int, int], evaluate: bool = False
    ) -> Brought:
        """With keys of their own each time: under another name of the job."""
        memory = replace(
            ServerMemory.of(self.state),
            job=token_hex(4),
            greetings={},
            dealt=None,
            metrics=["accuracy"],
        )
        state = memory.into(self.state).with_header(Header(number, 10, 0, len(asked), len(asked)))
        trips = Trips(list(asked), evaluate=evaluate)
        make_trips(self.algorithm, self.sites, state, trips, heard)
        return self.algorithm.read(state, trips)


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("dropouts", ["skip", "recover"])
def test_a_second_sum_of_a_round_without_one_client(
    tmp_path: Path, dropouts: str, evaluate: bool
) -> None:
    """The difference would be client 4's update, or its accuracy. The very same sum again is what a
    server asks for that was killed before it wrote it down."""
    here = Asked(tmp_path, dropouts)
    first = here.attempt(0, range(5), {}, evaluate)
    again = here.attempt(0, range(5), {}, evaluate)
    assert len(first.replies) == len(again.replies) == 5
    if evaluate:
        assert first.replies.totals == again.replies.totals
    else:
        second = again.replies.mean("delta")
        assert all(torch.equal(t, second[n]) for n, t in first.replies.mean("delta").items())
    without = here.attempt(0, range(4), {}, evaluate)
    assert not len(without.replies)
    told = [r.reason for _, _, r in here.sites.sent if isinstance(r, Lost)]
    assert len(told) == 4 and all(OTHER in why for why in told)


@pytest.mark.parametrize("dropouts", ["skip", "recover"])
def test_a_second_sum_of_a_round_with_another_memory(tmp_path: Path, dropouts: str) -> None:
    """Client 0 is told that it was heard in round 1 already: it would add what follows from another
    memory, and the difference is its own."""
    here = Asked(tmp_path, dropouts)
    here.play()
    assert len(here.attempt(1, range(5), here.heard).replies) == 5
    made = here.attempt(1, range(5), {**here.heard, 0: 1})
    assert not len(made.replies) or 0 not in made.replies.heard
    told = [i for i, _, r in here.sites.sent if isinstance(r, Lost) and OTHER in r.reason]
    assert told[0] == 0 and (dropouts == "recover" or told == [0])
    assert len(here.attempt(1, range(5), here.heard).replies) == 5


def test_the_server_hears_what_to_do_about_it(tmp_path: Path) -> None:
    """Its operator cannot read a site's log."""
    here = Asked(tmp_path, "skip")
    here.attempt(0, range(5), {})
    made = here.attempt(0, range(4), {})
    assert "added to another sum of this round" in made.skipped
    for why, reason in ((RanBefore("again"), "again"), (Declined("no"), "declined")):
        assert _reason(why).reason == reason
    assert "another federation.seed" in sentence("again")


def test_attempts_at_a_round_are_few(tmp_path: Path) -> None:
    here = Asked(tmp_path, "recover")
    for _ in range(MOST_TRIES):
        assert len(here.attempt(0, range(5), {}).replies) == 5
    assert not len(here.attempt(0, range(5), {}).replies)
    reasons = {r.reason for _, _, r in here.sites.sent if isinstance(r, Lost)}
    assert len(reasons) == 1 and f"was asked for {MOST_TRIES} times" in reasons.pop()
    assert len(here.attempt(1, range(5), {}).replies) == 5

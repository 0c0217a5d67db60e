"""A site without any Flower: what it remembers, what it declines, and in which words."""

from __future__ import annotations

import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import STACKS
from toy import same_bits, toy_federation

import fedlens
from fedlens import Message, run
from fedlens.data.source import DataError
from fedlens.engines.flower.site import (
    Site,
    SiteError,
    answer_from_disk,
    answer_request,
    federation_of_one,
    from_pieces,
    to_pieces,
)
from fedlens.engines.loopback import Loopback

NEVER = -1
EVERYONE = toy_federation(2)


def site(folder: Path, stack: str = "scaffold", id: int = 0, recipe: str = "r") -> Site:
    here = federation_of_one(id, EVERYONE.holdings[id], EVERYONE.held_out_of(id))
    return Site(id, STACKS[stack].make(), here, folder, recipe)


def message(stack: str, round: int, **header: bool) -> Message:
    algorithm = STACKS[stack].make()
    state = algorithm.init().with_header(round=round, rounds=9, seed=3, population=2, **header)
    return algorithm.broadcast(state).with_header(state.header, cohort=2)


def ask(
    make: Any, round: int = 0, heard: int = NEVER, **changes: Any
) -> tuple[dict[str, Any], list[bytes]]:
    request = {
        "version": fedlens.__version__,
        "recipe": "r",
        "job": "j",
        "heard": heard,
        "forgive": False,
        **changes,
    }
    return answer_request(
        {"kind": "train", "request": request, "node": {}, "run": {}},
        to_pieces(message("scaffold", round)),
        make,
    )


def test_pieces_carry_every_type_and_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.engines.flower.site.PIECE_BYTES", 1000)
    x = torch.randn(999, generator=torch.Generator().manual_seed(0))
    trees = {
        "a": {"x": x, "half": x.bfloat16(), "n": torch.arange(7)},
        "b": {"empty": torch.zeros(0, 3)},
    }
    sent = Message(trees, {"loss": 0.1}, {"a": {"mean": 1 / 3}}, 4)
    pieces = to_pieces(sent)
    assert len(pieces) > 5 and all(len(p) <= 1000 for p in pieces)
    got = from_pieces(pieces)
    assert same_bits(got, sent) and not pieces
    assert (dict(got.scalars), got.weights, got.sender) == (
        {"loss": 0.1},
        {"a": {"mean": 1 / 3}},
        4,
    )


def test_a_reply_that_arrived_is_built_upon_and_one_that_got_lost_is_not(tmp_path: Path) -> None:
    """Round 1 after round 0 was heard uses round 0's control variate; after it was lost, round 1 is
    as if round 0 had never been.
    """
    s = site(tmp_path)
    answer_from_disk(s, message("scaffold", 0), "j", NEVER)
    lost = answer_from_disk(s, message("scaffold", 1), "j", NEVER)
    assert same_bits(
        lost, answer_from_disk(site(tmp_path / "new"), message("scaffold", 1), "j", NEVER)
    )
    answer_from_disk(s, message("scaffold", 0), "k", NEVER)
    heard = answer_from_disk(s, message("scaffold", 1), "k", 0)
    assert not same_bits(heard, lost)
    # A server that died after round 1 and goes on from the checkpoint before it asks the same
    # again, and gets the same again.
    assert same_bits(answer_from_disk(s, message("scaffold", 1), "k", 0), heard)


@pytest.mark.parametrize("how", ["emptied", "old backup", "server went back too far"])
def test_amnesia_is_noticed(tmp_path: Path, how: str) -> None:
    s, folder = site(tmp_path / "site"), tmp_path / "site"
    answer_from_disk(s, message("scaffold", 0), "j", NEVER)
    shutil.copytree(folder, tmp_path / "backup")
    answer_from_disk(s, message("scaffold", 1), "j", 0)
    answer_from_disk(s, message("scaffold", 2), "j", 1)
    heard = 2
    if how != "server went back too far":
        shutil.rmtree(folder)
    if how == "old backup":
        shutil.copytree(tmp_path / "backup", folder)
    if how == "server went back too far":
        heard = 0
    with pytest.raises(
        SiteError, match=f"heard this site in round {heard}, but the site remembers"
    ):
        answer_from_disk(s, message("scaffold", 3), "j", heard)
    # Declining changed nothing; with forgiveness the site begins anew, and can go on from there.
    fresh = answer_from_disk(s, message("scaffold", 3), "j", heard, forgive=True)
    assert same_bits(
        fresh, answer_from_disk(site(tmp_path / "other"), message("scaffold", 3), "j", NEVER)
    )
    answer_from_disk(s, message("scaffold", 4), "j", 3)


def test_who_keeps_nothing_can_forget_nothing(tmp_path: Path) -> None:
    reply = answer_from_disk(site(tmp_path, "fedavg"), message("fedavg", 5), "j", 4)
    assert (reply.sender, reply.round) == (0, 5)


def test_versions_and_recipes_must_agree(tmp_path: Path) -> None:
    make = lambda node, run: site(tmp_path)  # noqa: E731
    fields, pieces = ask(make)
    assert fields == {"client": 0} and from_pieces(pieces).sender == 0
    fields, _ = ask(make, version="9.9")
    assert (
        fields["lost"]
        == f"the server runs FedLens 9.9, this site {fedlens.__version__}: install the same version"
        " at both"
    )
    fields, _ = ask(make, recipe="0123456789abcdef")
    assert "recipe (0123456789ab) is not the one this site agreed to (r)" in fields["lost"]


def test_trouble_at_a_site_is_one_sentence(tmp_path: Path) -> None:
    def empty(node: Any, run: Any) -> Site:
        raise DataError("no image in /data/scans")

    def broken(node: Any, run: Any) -> Site:
        raise KeyError("x")

    assert ask(empty)[0] == {"lost": "no image in /data/scans"}
    assert ask(broken)[0] == {"lost": "KeyError: 'x'"}


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond `size`: to the writer that is a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_reply_and_no_memory(tmp_path: Path) -> None:
    make = lambda node, run: site(tmp_path)  # noqa: E731
    ask(make)
    kept = {p: p.read_bytes() for p in (tmp_path / "j").iterdir()}
    with small_files(1000):
        fields, _ = ask(make, round=1, heard=0)
    assert fields["lost"].startswith(f"this site cannot write its memory to {tmp_path}: ")
    assert {p: p.read_bytes() for p in (tmp_path / "j").iterdir()} == kept
    assert "lost" not in ask(make, round=1, heard=0)[0]


def test_the_resident_worker_answers_as_the_site_itself_does(tmp_path: Path) -> None:
    """Over its socket, twice: the second time from what it has loaded already. A caller that hangs
    up costs nothing.
    """
    pytest.importorskip("flwr")
    from fedlens.engines.flower import client_app
    from fedlens.engines.flower.site import serve_socket

    # made here: hidden random state is one for all threads of a process
    path, asked = (
        tmp_path / "s",
        message("scaffold", 0),
    )
    threading.Thread(target=serve_socket, args=(path,), daemon=True).start()
    while not path.exists():
        time.sleep(0.01)
    assert path.stat().st_mode & 0o077 == 0
    run_config = {
        "site": "toy_app:make_site",
        "clients": 2,
        "stack": "scaffold",
        "delay": 0.0,
        "out": str(tmp_path),
    }
    node = {"client": 1, "folder": str(tmp_path / "memory"), "recipe": "r"}
    request = {
        "version": fedlens.__version__,
        "recipe": "r",
        "job": "j",
        "heard": NEVER,
        "forgive": False,
    }
    header = {"kind": "train", "request": request, "node": node, "run": run_config}
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(path))
        client_app.send_frame(rude, header, to_pieces(asked))
    for _ in range(2):
        fields, pieces = client_app.connect_worker(str(path))(header, to_pieces(asked))
        assert fields == {"client": 1}
        assert same_bits(
            from_pieces(pieces), answer_from_disk(site(tmp_path / "x", id=1), asked, "j", NEVER)
        )


def test_two_sites_and_a_server_are_a_federation(tmp_path: Path) -> None:
    """The whole protocol in one process: the loopback's bits."""

    class Sites(Loopback):
        def exchange(self, message: Message, ids: Any, heard: Any) -> Any:
            for i in ids:
                yield answer_from_disk(
                    site(tmp_path / str(i), id=i), message, "j", heard.get(i, NEVER)
                )

    algorithm = STACKS["scaffold"].make()
    wanted = run(algorithm, Loopback(algorithm, EVERYONE), 3, seed=3)
    assert same_bits(run(algorithm, Sites(algorithm, EVERYONE), 3, seed=3), wanted)

"""A site without any Flower: what it remembers, what it declines, and in which words."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import STACKS
from toy import same_bits, toy_federation

import fedlens
from fedlens import Message, run
from fedlens.core.message import BadMessage
from fedlens.data.source import DataError
from fedlens.engines.flower.site import (
    REASONS,
    Site,
    SiteError,
    answer_from_disk,
    answer_request,
    federation_of_one,
    from_pieces,
    sentence,
    to_pieces,
)
from fedlens.engines.loopback import Loopback
from fedlens.sites.worker import SiteWorker

NEVER = -1
EVERYONE = toy_federation(2)


def site(folder: Path, stack: str = "scaffold", id: int = 0, recipe: str = "r") -> Site:
    here = federation_of_one(id, EVERYONE.holdings[id], EVERYONE.held_out_of(id))
    return Site(id, STACKS[stack].make(), here, folder, recipe)


def message(stack: str, round: int, **header: bool) -> Message:
    algorithm = STACKS[stack].make()
    state = algorithm.init().with_header(round=round, rounds=9, seed=3, population=2, **header)
    return algorithm.broadcast(state).with_header(state.header, cohort=2)


said: list[str] = []  # what the site's own log got of the last request


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
    said.clear()
    header = {"kind": "train", "request": request, "asker": "run 7"}
    pieces = to_pieces(message("scaffold", round))
    fields, pieces = answer_request(header, pieces, {}, make, said.append)
    return dict(fields), pieces


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
        SiteError,
        match=f"remembers .*server heard this site in round {heard}; its folder is {folder}",
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
    """A recipe that differs is told by its keys; values stay at home."""
    tables = {"federation": {"rounds": 2}, "data": {"root": "x"}, "algorithm": [{"name": "FedAvg"}]}
    make = lambda node, run: replace(site(tmp_path), tables=tables)  # noqa: E731
    fields, pieces = ask(make)
    assert fields == {"client": 0} and from_pieces(pieces).sender == 0 and not said
    fields, _ = ask(make, version="9.9")
    assert fields == {"lost": "version", "detail": fedlens.__version__}
    assert sentence(**words(fields)) == (
        f"runs FedLens {fedlens.__version__}: install the same version everywhere"
    )
    theirs = (
        '[federation]\nrounds = 3\n[data]\nroot = "y"\n[[algorithm]]\nname = "FedAvg"\nlr = 1\n'
    )
    fields, _ = ask(make, recipe="0123456789abcdef", text=theirs)
    assert fields == {"lost": "recipe", "detail": "federation.rounds, algorithm.FedAvg.lr"}
    assert ask(make, recipe="0123", text="no = toml = at all")[0]["detail"] == "unknown"


def words(fields: dict[str, Any]) -> dict[str, Any]:
    return {"reason": fields["lost"], "detail": fields["detail"]}


SECRET = "/data/scans/Mustermann, Erika.png"
TROUBLE = {
    "data": DataError(f"no image in {SECRET}"),
    "error": KeyError(SECRET),
    "message": BadMessage(SECRET),
    "no-memory-left": MemoryError(SECRET),
}


@pytest.mark.parametrize("reason", TROUBLE)
def test_no_text_of_an_error_leaves_the_site(tmp_path: Path, reason: str) -> None:
    """The server gets a reason; the site's own log everything, and who asked."""

    def make(node: Any, request: Any) -> Site:
        raise TROUBLE[reason]

    assert ask(make) == ({"lost": reason, "detail": ""}, [])
    assert SECRET in said[0] and "run 7" in said[0]
    assert sentence(reason) == REASONS[reason]


def test_the_folder_of_a_full_disk_stays_at_home(tmp_path: Path) -> None:
    private = tmp_path / "Erika Mustermann"
    private.mkdir()
    private.chmod(0o500)
    if os.access(private, os.W_OK):
        (private / "j").write_text("in the way")  # root writes anywhere
    fields, _ = ask(lambda node, request: site(private))
    assert "Mustermann" not in json.dumps(fields) and "Mustermann" in said[0]


@pytest.mark.parametrize("job", ["../../elsewhere", "/tmp/x", "", "a/b", "x" * 65, "a\nb", 7.5])
def test_a_job_cannot_lead_out_of_the_sites_folder(tmp_path: Path, job: Any) -> None:
    assert ask(lambda node, request: site(tmp_path / "site"), job=job)[0]["lost"] == "stranger"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("job", ["vault", "Vault", "node", "at-work"])
def test_a_job_cannot_be_called_as_something_else_in_the_sites_folder(
    tmp_path: Path, job: str
) -> None:
    """Its memory would count as SecureSum's secrets, and `fedlens forget --job` would miss it; or a
    file of the connection would be in its way."""
    assert ask(lambda node, request: site(tmp_path / "site"), job=job)[0]["lost"] == "stranger"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("request_", [None, {}, {"version": 1}, [1], "text"])
def test_what_is_no_request_is_declined(request_: Any) -> None:
    def make(node: Any, request: Any) -> Site:
        raise AssertionError("nothing is made for a stranger")

    heard: list[str] = []
    header = {"kind": "train", "request": request_, "asker": "run 9 (thief/thief 1.0.0)"}
    fields, pieces = answer_request(header, [b"x"], {}, make, heard.append)
    assert fields["lost"] == "stranger" and not pieces
    assert "run 9 (thief/thief 1.0.0)" in heard[0]


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
    assert fields["lost"] == "disk" and str(tmp_path) in said[0]
    assert {p: p.read_bytes() for p in (tmp_path / "j").iterdir()} == kept
    assert "lost" not in ask(make, round=1, heard=0)[0]


def test_the_worker_answers_as_the_site_itself_does(tmp_path: Path) -> None:
    """A real process, twice: the second time from what it has loaded already. Killed, it is started
    again and says so; the next answer is right again."""
    asked = message("scaffold", 0)
    (tmp_path / "j.json").write_text(
        json.dumps({"clients": 2, "stack": "scaffold", "delay": 0.0, "out": str(tmp_path)})
    )
    node = {"client": 1, "folder": str(tmp_path / "memory"), "jobs": str(tmp_path), "agreed": "r"}
    request = {
        "version": fedlens.__version__,
        "recipe": "r",
        "job": "j",
        "heard": NEVER,
        "forgive": False,
    }
    header = {"kind": "train", "request": request, "asker": "run 7"}
    log: list[str] = []
    tests = Path(__file__).resolve().parents[2]
    command = (sys.executable, str(tests / "a_site.py"), "toy_app")
    wanted = answer_from_disk(site(tmp_path / "x", id=1), asked, "j", NEVER)
    with SiteWorker(node, log.append, command) as worker:
        assert worker.start() == {"examples": None, "remarks": []}
        for _ in range(2):
            fields, pieces = worker.handle(header, to_pieces(asked))
            assert fields == {"client": 1} and same_bits(from_pieces(pieces), wanted)
        assert worker.process is not None
        worker.process.kill()
        fields, pieces = worker.handle(header, to_pieces(asked))
        assert fields == {"lost": "died", "detail": ""} and not pieces and len(log) == 1
        fields, pieces = worker.handle(header, to_pieces(asked))
        assert same_bits(from_pieces(pieces), wanted)


def test_what_a_worker_died_of_is_not_handed_to_the_next(tmp_path: Path) -> None:
    """This one dies of any request. The next is only told that somebody died."""
    dies = """
import os, socket, sys
from fedlens.sites.worker import receive_frame, send_frame
line = socket.socket(fileno=int(sys.argv[-1]))
while frame := receive_frame(line):
    if "request" in frame[0]:
        os._exit(1)
    send_frame(line, {"lost": frame[0].get("reason", ""), "heard": sorted(frame[0])}, [])
"""
    header = {"kind": "train", "request": {"job": "j"}, "asker": "run 7", "overhead": {}}
    with SiteWorker({}, print, (sys.executable, "-c", dies)) as worker:
        worker.start()
        fields, _ = worker.handle(header, [])
    assert fields == {"lost": "died", "heard": ["asker", "kind", "overhead", "reason"]}


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

"""At a site's two doors, without any network: nothing leaves that is not in the ledger or that the
policy withholds, and the server's countersignatures are kept only if they are true.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stacks import STACKS
from toy import GroupToy, toy_federation

import fedlens
from fedlens import Client, Message, stack
from fedlens.algorithms import FedAvg
from fedlens.config import recipe as recipes
from fedlens.core.algorithm import Algorithm
from fedlens.engines.flower.site import Site, answer_request, federation_of_one, to_pieces
from fedlens.layers import DPSGD
from fedlens.sites.keys import make_authority, make_server_certificate, make_site_key
from fedlens.testing import SmallTask
from fedlens.trust import SecureSum
from fedlens.trust.departures import read_departures
from fedlens.trust.guard import Guard
from fedlens.trust.ledger import LEDGER_FILE, Head, Leaving
from fedlens.trust.policy import strict_policy, terms_of
from fedlens.trust.receipts import HEADS, Receipts, make_receipt, read_heads
from fedlens.trust.signing import (
    canonical,
    make_signing_key,
    parse_public_key,
    read_certificate_key,
    sign,
)
from fedlens.trust.verify import verify

EVERYONE = toy_federation(3)


class Place:
    """A site in a folder, with its key, and a server that asks it."""

    def __init__(self, folder: Path, algorithm: Algorithm | None = None, policy: str = "") -> None:
        self.folder, self.said = folder / "site", list[str]()
        self.algorithm = algorithm or STACKS["scaffold"].make()
        private, self.public = make_site_key(folder / "site-0")
        make_authority(folder / "keys")
        make_server_certificate(folder / "keys", ["127.0.0.1"])
        (folder / "policy.toml").write_text(policy)
        self.node: dict[str, Any] = {
            "client": 0,
            "folder": str(self.folder),
            "key": str(private),
            "ca": str(folder / "keys" / "ca.crt"),
            "policy": str(folder / "policy.toml"),
        }
        (folder / "run").mkdir()
        self.receipts = Receipts(folder / "run", "j", folder / "keys")
        here = federation_of_one(0, EVERYONE.holdings[0], EVERYONE.held_out_of(0))
        self.site = Site(0, self.algorithm, here, self.folder, "r")

    def ask(self, round: int = 0, kind: str = "train", **header: Any) -> tuple[Any, list[bytes]]:
        own = ("recipe", "receipt", "job", "heard")
        extra = {k: header.pop(k) for k in list(header) if k in own}
        state = self.algorithm.init().with_header(round=round, rounds=9, population=3, cohort=3)
        message = self.algorithm.broadcast(state).with_header(state.header, **header)
        request = {
            "version": fedlens.__version__,
            "recipe": "r",
            "job": "j",
            "heard": round - 1,
            "forgive": False,
            **self.receipts.fields(0),
            **extra,
        }
        fields, pieces = answer_request(
            {"kind": kind, "request": request, "asker": "run 7"},
            to_pieces(message),
            self.node,
            lambda node, request: self.site,
            self.said.append,
        )
        self.receipts.see(0, fields)
        return fields, pieces

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / LEDGER_FILE).read_text().splitlines()][
            1:
        ]

    def verify(self, **known: Any) -> Any:
        public = parse_public_key(self.public.read_text())
        server = read_certificate_key(self.folder.parent / "keys" / "server.pem")
        return verify(self.folder / LEDGER_FILE, public, server, **known)


def test_everything_that_leaves_is_written_down_and_countersigned(tmp_path: Path) -> None:
    """A greeting, two replies, an evaluation, a refusal: five messages, and after each the server
    signs the head it saw, which the next line holds. Line 1 names the key."""
    place = Place(tmp_path)
    greeting, _ = place.ask(kind="query")
    first, sent = place.ask(0)
    second, _ = place.ask(1)
    measured, _ = place.ask(1, evaluate=True)
    refused, nothing = place.ask(2, recipe="another")
    assert [line["kind"] for line in place.lines] == [
        "greeting",
        "reply",
        "reply",
        "evaluation",
        "failure",
    ]
    assert [line["round"] for line in place.lines] == [None, 0, 1, 1, None]
    assert place.lines[0]["said"] == {"client": 0, "examples": 20, "classes": ""}
    data = b"".join(sent)
    assert place.lines[1]["sha256"] == hashlib.sha256(data).hexdigest()
    assert place.lines[1]["bytes"] == len(data)
    assert set(place.lines[1]["trees"]) == {"delta", "control"}
    assert place.lines[4]["said"] == {"lost": "recipe", "detail": "unknown"} and not nothing
    heads = [fields["line"] for fields in (greeting, first, second, measured, refused)]
    assert heads == [2, 3, 4, 5, 6]
    assert [line.get("receipt", {}).get("line") for line in place.lines] == [None, 2, 3, 4, 5]
    found = place.verify(known=read_heads(tmp_path / "run")[0])
    assert found.intact and (found.lines, found.countersigned) == (6, 5)
    for path in (place.folder / LEDGER_FILE, tmp_path / "site-0"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_countersignature_that_is_not_true_is_not_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.ask(kind="query")
    key = make_signing_key(tmp_path / "thief")
    head = place.receipts.heads[0]
    for receipt, words in (
        (make_receipt(key, 0, "j", head), "is not the server's"),
        (make_receipt(place.receipts.key, 0, "j", Head(2, "0" * 64)), "about another ledger"),
        ({"line": "x"}, "cannot be read"),
        ([], "cannot be read"),
    ):
        place.said.clear()
        place.ask(0, kind="query", receipt=json.dumps(receipt))
        assert words in place.said[0]
        assert "receipt" not in place.lines[-1]
    # a server of another federation, whatever it signs
    make_authority(tmp_path / "others")
    make_server_certificate(tmp_path / "others", ["127.0.0.1"])
    (tmp_path / "other").mkdir()
    place.receipts = Receipts(tmp_path / "other", "j", tmp_path / "others")
    place.receipts.see(0, {"line": head.line, "head": head.hash})
    place.said.clear()
    place.ask(0, kind="query")
    assert "cannot be read" in place.said[0] and "receipt" not in place.lines[-1]
    assert place.verify().intact


@pytest.mark.parametrize(
    "receipt", ['{"line": Infinity, "head": "x"}', "[" * 100_000, '{"line": 1e999}', "7"]
)
def test_no_countersignature_keeps_a_site_from_answering(tmp_path: Path, receipt: str) -> None:
    place = Place(tmp_path)
    fields, _ = place.ask(0, receipt=receipt)
    assert fields["client"] == 0 and "cannot be read" in place.said[0]
    assert place.lines[-1]["kind"] == "reply" and "receipt" not in place.lines[-1]


def test_a_countersignature_of_half_a_receipt_is_not_kept(tmp_path: Path) -> None:
    """Signed by the right server, about the right line, and without the client."""
    place = Place(tmp_path)
    place.ask(kind="query")
    head = place.receipts.heads[0]
    table = {"line": head.line, "head": head.hash}
    receipt = {**table, "signature": sign(place.receipts.key, canonical(table))}
    fields, _ = place.ask(0, receipt=json.dumps(receipt))
    assert fields["client"] == 0 and "receipt" not in place.lines[-1]


def test_the_server_notices_a_ledger_that_went_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.ask(kind="query")
    place.ask(0)
    assert place.receipts.see(0, {"line": 2, "head": "1" * 64}) == (
        "client 0: its ledger was at line 3 and is now at 2"
    )
    for odd in ({}, {"line": "3", "head": "1" * 64}, {"line": 3, "head": "1"}, {"line": True}):
        before = dict(place.receipts.heads)
        assert place.receipts.see(0, odd) is None and place.receipts.heads == before
    assert (tmp_path / "run" / HEADS).is_file()


POLICIES = {
    "trees": "trees = ['delta']",
    "scalars": "scalars = ['examples']",
    "max_bytes_round": "max_bytes_round = 1000",
    "max_bytes_job": "max_bytes_job = 1000",
    "min_cohort": "min_cohort = 4",
}


@pytest.mark.parametrize("entry", POLICIES)
def test_what_the_policy_does_not_allow_does_not_leave(tmp_path: Path, entry: str) -> None:
    """The server hears the entry and nothing else; the operator's log has the sentence."""
    place = Place(tmp_path, policy=POLICIES[entry])
    fields, pieces = place.ask(0)
    assert (fields["lost"], fields["detail"], pieces) == ("policy", entry, [])
    assert [line["kind"] for line in place.lines] == ["failure"]
    assert place.lines[0]["bytes"] < 100 and place.lines[0]["trees"] == {}
    assert "could not answer run 7" in place.said[0]
    assert place.ask(kind="query")[0]["client"] == 0


@pytest.mark.parametrize("trip", [1, 7])
def test_a_reply_does_not_leave_as_a_trip_of_a_protocol(tmp_path: Path, trip: int) -> None:
    """A server calls its request a wire layer's own: nothing is computed where there is none."""
    place = Place(tmp_path, Slow(SmallTask(), batch=8), "trees = []\nmin_cohort = 4")
    fields, pieces = place.ask(0, trip=trip)
    assert (fields["lost"], pieces) == ("message", [])


def test_evaluation_can_be_withheld(tmp_path: Path) -> None:
    place = Place(tmp_path, policy="evaluation = 'withhold'")
    assert "lost" not in place.ask(0)[0]
    fields, pieces = place.ask(0, evaluate=True)
    assert (fields["lost"], fields["detail"], pieces) == ("policy", "evaluation", [])


def test_under_masks_nobody_says_how_many_examples_it_has(tmp_path: Path) -> None:
    """They are FedAvg's weight of its reply, which the masks hide. A budget for single examples is
    charged by them: there they are said."""
    masked = SecureSum().around(FedAvg(SmallTask(), batch=8))
    place = Place(tmp_path / "masked", masked)
    assert place.ask(kind="query")[0].keys() == {"client", "classes", "line", "head"}
    noisy = stack(FedAvg(GroupToy(), batch=8), DPSGD(max_epsilon=100.0), SecureSum())
    assert Place(tmp_path / "noisy", noisy).ask(kind="query")[0]["examples"] == 20


def test_an_evaluation_that_the_recipe_does_not_have(tmp_path: Path) -> None:
    """The page before joining did not name it."""
    place = Place(tmp_path)
    config = recipes.read("demo", ["personal=false"])
    terms = terms_of(config, config.build_algorithm(config.build_task()))
    place.site = replace(place.site, terms=terms)
    fields, pieces = place.ask(0, evaluate=True)
    assert (fields["lost"], fields["detail"], pieces) == ("recipe", "federation.personal", [])
    place.site = replace(place.site, terms=replace(terms, evaluates=True))
    assert place.ask(0, evaluate=True, heard=-1)[1]


def test_bytes_are_counted_over_restarts_and_names_of_jobs(tmp_path: Path) -> None:
    """Two replies fit, the third does not, also if the site's process is a new one: the ledger
    remembers."""
    place = Place(tmp_path)
    size = sum(map(len, place.ask(0)[1]))
    policy = tmp_path / "other.toml"
    policy.write_text(f"max_bytes_job = {2 * size + 200}")
    place.node["policy"] = str(policy)  # another guard, which reads the ledger
    assert "lost" not in place.ask(1)[0]
    assert place.ask(2)[0]["detail"] == "max_bytes_job"
    assert place.ask(0, job="other", heard=-1)[0]["detail"] == "max_bytes_job"
    assert read_departures(place.folder / LEDGER_FILE).bytes_of("r") > 2 * size


def test_a_torn_line_hides_nothing_that_leaves_after_it(tmp_path: Path) -> None:
    """A kill left half a line. The ledger removes it and goes on in its place; what leaves then is
    counted at once, not only by the next process."""
    place = Place(tmp_path)
    place.ask(0)
    with (place.folder / LEDGER_FILE).open("a") as file:
        file.write('{"bytes":1,"client":0,"half')
    guard = Guard.of(place.node)
    before = guard.so_far.bytes_of("r")
    cost = {"unit": "example", "noise": 1.0}
    guard.pass_words(Leaving("reply", 0, [b"x" * 1000], "j", "r", 1, privacy=cost))
    assert guard.so_far.bytes_of("r") == before + 1000
    assert sum(guard.so_far.charges.values()) == 1 and not guard.so_far.odd
    assert guard.so_far == read_departures(place.folder / LEDGER_FILE)


class Slow(FedAvg):
    def client_step(self, message: Message, client: Client) -> Message:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)
        return super().client_step(message, client)


def test_work_is_stopped(tmp_path: Path) -> None:
    place = Place(tmp_path, Slow(SmallTask(), batch=8), "max_seconds = 0.2")
    assert place.ask(0)[0]["detail"] == "max_seconds"


def test_a_recipe_is_refused_before_any_work(tmp_path: Path) -> None:
    config = recipes.read("demo")
    terms = terms_of(config, config.build_algorithm(config.build_task()))
    place = Place(tmp_path, Slow(SmallTask(), batch=8), "require = ['SecureSum']")
    place.site = replace(place.site, terms=terms)
    fields, _ = place.ask(kind="query")  # it does not even greet
    assert (fields["lost"], fields["detail"]) == ("policy", "require")
    assert "has no SecureSum" in place.said[0]
    assert strict_policy(terms).objections(terms) == []


def test_without_its_ledger_a_site_says_nothing(tmp_path: Path) -> None:
    """A line that cannot be written keeps the bytes in."""
    place = Place(tmp_path)
    place.ask(kind="query")
    with (place.folder / LEDGER_FILE).open("a") as file:
        file.write("null\n")
    with pytest.raises(ValueError, match="nothing leaves before its operator"):
        place.ask(0)


def test_a_site_without_a_key_has_no_ledger(tmp_path: Path) -> None:
    """A stock SuperNode has none unless its config names one."""
    place = Place(tmp_path)
    place.node["key"] = ""
    fields, pieces = place.ask(0)
    assert pieces and "head" not in fields and not (place.folder / LEDGER_FILE).exists()

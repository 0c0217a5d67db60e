"""The simulator writes the ledgers that real sites would, whoever computes what, and computes the
same bits as without them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from stacks import VECTORS
from toy import Toy, same_bits

from fedlens import Client, Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.cli.main import invoke
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import Scaffold
from fedlens.trust.departures import find_ledgers, read_departures
from fedlens.trust.ledger import Ledgers
from fedlens.trust.verify import verify

ROUNDS = 3


def lines(folder: Path, client: int) -> list[dict[str, Any]]:
    """Without the first, which names the key."""
    text = (folder / f"{client}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()][1:]


def seen_on_the_wire() -> tuple[dict[tuple[int, int], bytes], Message]:
    """What an observer of the network sees, by round and client; and the final state."""
    algorithm = stack(FedAvg(Toy(), batch=8), Scaffold())
    engine, seen = Loopback(algorithm, VECTORS), dict[tuple[int, int], bytes]()

    def note(here: Any, done: Any) -> None:
        seen.update({(done.number, k): data for k, data in enumerate(engine.traffic[1:])})

    return seen, run(algorithm, engine, ROUNDS, seed=3, after_round=note)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_ledger_holds_what_an_observer_of_the_network_sees(tmp_path: Path, workers: int) -> None:
    seen, expected = seen_on_the_wire()
    ledgers = Ledgers(tmp_path / "ledger", "job", "hash")
    algorithm = stack(FedAvg(Toy(), batch=8), Scaffold())
    with Simulator(algorithm, VECTORS, workers=workers, ledgers=ledgers) as engine:
        assert same_bits(run(algorithm, engine, ROUNDS, seed=3), expected)
    assert len(find_ledgers(tmp_path)) == len(VECTORS)
    for client in range(len(VECTORS)):
        assert verify(tmp_path / "ledger" / f"{client}.jsonl").intact
        written = lines(tmp_path / "ledger", client)
        assert [line["round"] for line in written] == list(range(ROUNDS))
        for line in written:
            data = seen[line["round"], client]
            assert line["bytes"] == len(data)
            assert line["sha256"] == hashlib.sha256(data).hexdigest()
            assert set(line["trees"]) == {"delta", "control"}


class Trouble(FedAvg):
    def client_step(self, message: Message, client: Client) -> Message:
        if client.id == 2:
            raise RuntimeError("ward 7 is full")
        return super().client_step(message, client)


def test_failures_and_evaluations_leave_too(tmp_path: Path) -> None:
    """Also the words of an error are bytes that leave. Round 0 is trained, its state evaluated."""
    algorithm = Trouble(Toy(), batch=8)
    ledgers = Ledgers(tmp_path, "job", "hash")
    with Simulator(algorithm, VECTORS, workers=0, ledgers=ledgers) as engine:
        run(algorithm, engine, 1, evaluate_every=1, personal=True)
    (failed, evaluated) = lines(tmp_path, 2)
    assert (failed["kind"], failed["trees"]) == ("failure", {})
    reason = failed["said"].pop("reason")
    assert not failed["said"] and reason.startswith("RuntimeError: ward 7 is full (")
    assert failed["bytes"] == len(reason)
    assert evaluated["kind"] == "evaluation" and "examples" in evaluated["scalars"]
    left = read_departures(tmp_path / "2.jsonl")
    assert {kind: item.times for kind, item in left.kinds.items()} == {
        "failure": 1,
        "evaluation": 1,
    }
    assert left.whole.bytes == failed["bytes"] + evaluated["bytes"]
    assert left.readable == 0 and read_departures(tmp_path / "0.jsonl").readable == 1


def test_what_left_is_added_up(tmp_path: Path) -> None:
    ledgers = Ledgers(tmp_path, "job", "hash")
    algorithm = FedAvg(Toy(), batch=8)
    with Simulator(algorithm, VECTORS, workers=0, ledgers=ledgers) as engine:
        run(algorithm, engine, 2)
    left = read_departures(tmp_path / "1.jsonl")
    first, second = lines(tmp_path, 1)
    assert (left.whole.times, left.whole.first, left.whole.last) == (2, 0, 1)
    assert (left.whole.began, left.whole.ended) == (first["time"], second["time"])
    assert left.rounds == {("hash", 0): first["bytes"], ("hash", 1): second["bytes"]}
    assert left.bytes_of("hash", 1) == second["bytes"]
    assert left.bytes_of("hash") == left.whole.bytes and left.bytes_of("other") == 0
    assert left.trees["delta"].bytes == 2 * first["trees"]["delta"]["bytes"]
    assert left.jobs == {"job": "hash"} and left.clients == {1}
    assert set(left.scalars) == {"loss", "examples"}  # steps and lr_sum are declared local


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["rounds=2", "data.images=60", "data.test_images=12", "clients=3", "cohort=none"]
    few.append("schedule=constant")
    command = ["run", "demo", *few, "--workers", "0", "--out", "run", "--ledger"]
    assert invoke(command) == 0
    assert invoke(["ledger", "run", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 ledgers are intact" in said
    assert "6 of 6 replies left in a form that the server can read" in said
    delta = next(line for line in said.splitlines() if line.startswith("tree"))
    assert delta.split()[1:5] == ["delta", "(10", "arrays)", "6"] and "0 to 1" in delta
    path = tmp_path / "run" / "ledger" / "1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"round":1', b'"round":7'))
    assert invoke(["ledger", "run", "--verify"]) == 1
    said = capsys.readouterr().out
    assert "1: place 3: line 3 was changed after signing" in said and "2 of 3 ledgers" in said
    path.write_bytes(whole)
    # what is only written down may change when a run goes on, and is not lost then
    assert invoke(["run", "run", "--resume", "rounds=3", "--workers", "0"]) == 0
    assert len(lines(tmp_path / "run" / "ledger", 1)) == 3
    assert invoke(["ledger", str(path), "--verify", "--key", "run/ledger/keys/2.pub"]) == 1
    assert "signed with another key" in capsys.readouterr().out
    assert invoke(["run", "demo", *few, "--workers", "0", "--out", "run", "--fresh"]) == 0
    assert not (tmp_path / "run" / "ledger").exists()


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["nowhere"], "there is no nowhere"),
        ([str(tmp_path)], "there is no ledger in"),
    ):
        assert invoke(["ledger", *arguments]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "0.jsonl").write_text("[]\n")
    assert invoke(["ledger", str(tmp_path), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "1 lines are not a ledger's" in said and "no line that a site has signed" in said
    assert invoke(["ledger", str(tmp_path), "--verify", "--key", str(tmp_path / "0.jsonl")]) == 2
    assert "0.jsonl is not a site's public key" in capsys.readouterr().err

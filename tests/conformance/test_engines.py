"""What every engine must do, for every algorithm: the same bits as the loopback, and one reply lost
never costs the run.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from contextlib import nullcontext as nothing
from functools import partial
from pathlib import Path

import pytest
import torch
from stacks import SCENES, STACKS, VECTORS, Case
from toy import Toy, same_bits

from fedlens import Algorithm, Client, Federation, Lost, Message, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.rounds import Engine, Progress, Stalled
from fedlens.core.tree import map_tree
from fedlens.engines.flaky import Flaky
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.engines.worker import Job
from fedlens.layers import Scaffold
from fedlens.testing import Faulty

Make = Callable[[Algorithm, Federation], Engine]
ENGINES: dict[str, Make] = {
    "in process": lambda a, f: Simulator(a, f, workers=0),
    "one worker": lambda a, f: Simulator(a, f, workers=1),
    "two workers": lambda a, f: Simulator(a, f, workers=2),
    "three workers": lambda a, f: Simulator(a, f, workers=3),
}


def final(case: Case, make: Make, rounds: int = 4, cohort: int = 5) -> Message:
    algorithm = case.make()
    engine = make(algorithm, case.federation)
    try:
        return run(algorithm, engine, rounds, cohort=cohort, seed=3)
    finally:
        engine.close()


@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_all_engines_end_in_the_same_bits(name: str) -> None:
    case = (STACKS | SCENES)[name]
    expected = final(case, Loopback)
    for engine, make in ENGINES.items():
        assert same_bits(final(case, make), expected), engine


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flaky_network_is_survived_and_repeats_itself(when: str, share: float) -> None:
    """With replies lost after the clients updated their control variates, a SCAFFOLD without
    transactional memory would drift: here the sum of the clients' kept control variates still
    equals what the server believes (c = mean of all c_i)."""

    def once() -> tuple[Message, list[Round], Simulator]:
        algorithm = stack(FedAvg(Toy(), batch=8, lr=0.05), Scaffold())
        engine = Simulator(algorithm, VECTORS, workers=0)
        rounds: list[Round] = []
        flaky = Flaky(engine, **{when: share}, seed=1)
        note = lambda p, r: rounds.append(r)  # noqa: E731
        state = run(algorithm, flaky, 12, seed=0, patience=12, after_round=note)
        engine.close()
        return state, rounds, engine

    state, rounds, engine = once()
    assert same_bits(state, once()[0])
    lost = sum(len(r.lost) for r in rounds)
    assert 0.5 * share < lost / sum(r.asked for r in rounds) < 1.5 * share
    heard: dict[int, int] = {}
    for r in rounds:
        heard.update(dict.fromkeys(r.scalars, r.number))
    assert engine.inline
    kept = [engine.inline.memory.load(i).settle(heard.get(i, -1)) for i in range(7)]
    for name, c in state.trees["control"].items():
        total = sum(
            (k["control"][name].double() for k in kept if "control" in k),
            torch.zeros_like(c, dtype=torch.float64),
        )
        assert torch.allclose(total / 7, c.double(), atol=1e-5)


def test_late_replies_are_used_up_to_the_limit() -> None:
    algorithm = FedAvg(Toy(), batch=8)
    for late, expected in ((2, True), (1, False)):
        rounds: list[Round] = []
        engine = Flaky(Simulator(algorithm, VECTORS, workers=0), delay=0.5, by=2, seed=2)
        run(
            algorithm,
            engine,
            6,
            late=late,
            after_round=lambda p, r, rounds=rounds: rounds.append(r),
        )  # type: ignore[misc]
        engine.close()
        used = [h.round for r in rounds for h in r.heard.values() if h.round < r.number]
        assert bool(used) is expected
        refused = [x for r in rounds for x in r.lost if x.reason.startswith("too late")]
        assert bool(refused) is not expected


def test_a_checkpoint_is_refused_while_replies_may_be_on_their_way(tmp_path: Path) -> None:
    """Resumed without them, such a run would not end where an uninterrupted one does."""
    from fedlens.runs.checkpoint import Checkpoint

    def go(share: float) -> None:
        algorithm = stack(FedAvg(Toy(), batch=8), Scaffold())
        checkpoint = Checkpoint(tmp_path / str(share))
        with contextlib.closing(
            Flaky(Simulator(algorithm, VECTORS, workers=0), delay=share, after=0.5, seed=2)
        ) as engine:
            run(
                algorithm,
                engine,
                1,
                late=1,
                after_round=lambda p, r: checkpoint.save(p, engine.snapshot()),
            )

    go(0.0)
    with pytest.raises(ValueError, match="delayed replies"):
        go(0.5)


class Trouble(FedAvg):
    """Client 1 sends float64, 2 raises, 3 sends NaN, 4 kills its process, 5 hangs."""

    def client_step(self, message: Message, client: Client) -> Message:
        if client.id == 2:
            raise RuntimeError("the disk of this hospital is full")
        if client.id == 4:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        if client.id == 5:
            time.sleep(600)
        reply = super().client_step(message, client)
        if client.id == 3:
            reply.trees["delta"]["head.bias"][0] = float("nan")
        return (
            reply.put(delta=map_tree(torch.Tensor.double, reply.trees["delta"]))
            if client.id == 1
            else reply
        )


def test_one_bad_client_costs_its_own_reply_only() -> None:
    said: list[str] = []
    rounds: list[Round] = []
    algorithm = stack(Trouble(Toy(), batch=8), Scaffold())
    with Simulator(algorithm, VECTORS, workers=2, timeout=1.5, log=said.append) as engine:
        state = run(algorithm, engine, 2, after_round=lambda p, r: rounds.append(r))
    for r in rounds:
        assert list(r.scalars) == [0, 6]
        assert [(x.sender, x.refused) for x in r.lost] == [
            (1, True),
            (2, False),
            (3, True),
            (4, False),
            (5, False),
        ]
    reasons = {x.sender: x.reason for x in rounds[0].lost}
    said_where = r"RuntimeError: the disk of this hospital is full \(test_engines.py, line \d+\)"
    assert re.fullmatch(said_where, reasons[2])
    assert "is torch.float64, expected torch.float32" in reasons[1]
    assert "NaN" in reasons[3] and "SIGKILL" in reasons[4] and "longer than 1.5 s" in reasons[5]
    assert all(any(f"client {i}:" in line for line in said) for i in (1, 2, 3, 4, 5))
    # The others' work is what a federation of just them would have done.
    healthy = stack(FedAvg(Toy(), batch=8), Scaffold())
    only = Only(Simulator(healthy, VECTORS, workers=0), [0, 6])
    assert same_bits(run(healthy, only, 2), state)
    only.engine.close()


class Weightless(FedAvg):
    """In round 1 nobody counts for anything."""

    def client_step(self, message: Message, client: Client) -> Message:
        return super().client_step(message, client).weigh("delta", float(message.round != 1))


def test_a_round_in_which_nobody_counts_is_skipped() -> None:
    """And nobody was heard in it: SCAFFOLD's clients forget what they did."""
    rounds: list[Round] = []
    algorithm = stack(Weightless(Toy(), batch=8), Scaffold())
    with Simulator(algorithm, VECTORS, workers=1) as engine:
        run(algorithm, engine, 3, after_round=lambda p, r: rounds.append(r))
    assert [len(r.scalars) for r in rounds] == [7, 0, 7]
    assert {(x.reason, x.refused) for x in rounds[1].lost} == {
        ("the weights 'mean' of 'delta' sum to zero", True)
    }
    assert all(
        torch.equal(t, rounds[1].state.trees["model"][n])
        for n, t in rounds[0].state.trees["model"].items()
    )


class Only:
    """An engine that reaches some clients only."""

    def __init__(self, engine: Simulator, reachable: list[int]) -> None:
        self.engine, self.reachable = engine, reachable

    def exchange(self, message: Message, ids, heard):  # type: ignore[no-untyped-def]
        places = sorted(ids)
        worker = self.engine.inline
        assert worker
        worker.begin(message, False)
        for i in ids:
            yield (
                worker.work([Job(places.index(i), i, heard.get(i, -1))])[0]
                if i in self.reachable
                else Lost(i, "cannot be reached")
            )

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)


def test_a_round_without_replies_is_skipped_as_long_as_patience_lasts() -> None:
    """Nobody is reached in rounds 0 and 1 (numbers 1 and 2): with patience 3 they are skipped and
    round 2 counts. With less the run ends, with the first client's reason, and in good order: what
    is done stays done."""
    algorithm = FedAvg(Toy(), batch=8)

    class Outage(Flaky):
        def exchange(self, message, ids, heard):  # type: ignore[no-untyped-def]
            self.before = float(message.round < 2)
            return super().exchange(message, ids, heard)

    for patience, done in ((3, 3), (2, 1), (1, 0)):
        rounds: list[Round] = []
        here = Progress(algorithm.init())
        engine = Outage(Simulator(algorithm, VECTORS, workers=0))
        note = lambda p, r: rounds.append(r)  # noqa: B023, E731
        with contextlib.closing(engine), pytest.raises(Stalled) if done < 3 else nothing() as said:
            run(algorithm, engine, 3, progress=here, patience=patience, after_round=note)
        assert [len(r.scalars) for r in rounds] == [0, 0, 7][:done] and here.done == done
        assert [(r.bytes_down, r.bytes_up, r.loss) for r in rounds[:2]] == [(0, 0, None)] * min(
            done, 2
        )
        assert same_bits(here.state, algorithm.init()) == (done < 3)
        if done < 3:
            when = {1: "in round 1", 2: "in 2 rounds up to 2"}[patience]
            why = f"nobody was heard {when}: client 0: unreachable, and 6 more were lost"
            assert str(said.value) == why


def test_bytes_are_what_was_sent_and_what_came_on_every_engine() -> None:
    """Seven clients: the model goes down to all, an update of its size comes up from six: of client
    2, which raises, nothing; of client 3, which sends NaN, what is then refused. Evaluation sends
    the model to all seven once more, and only numbers come back. Who is not reached does not count.
    """
    algorithm = Faulty(Toy(), batch=8)
    model = sum(t.nbytes for t in algorithm.init().trees["model"].values())
    for name, make in {"loopback": Loopback, **ENGINES}.items():
        rounds: list[Round] = []
        note = lambda p, r: rounds.append(r)  # noqa: B023, E731
        engine = make(algorithm, VECTORS)
        run(algorithm, engine, 2, evaluate_every=2, personal=True, after_round=note)
        engine.close()
        found = [(r.bytes_down, r.bytes_up, r.evaluation_bytes) for r in rounds]
        assert found == [(7 * model, 6 * model, 0), (14 * model, 6 * model, 7 * model)], name
    unreachable = Flaky(Simulator(algorithm, VECTORS, workers=0), before=0.5, seed=3)
    rounds = []
    run(algorithm, unreachable, 1, after_round=lambda p, r: rounds.append(r))
    unreachable.close()
    away = sum(x.reason == "unreachable" for x in rounds[0].lost)
    assert 0 < away < 7 and rounds[0].bytes_down == (7 - away) * model


def test_memory_beyond_the_budget_changes_nothing(tmp_path: Path) -> None:
    expected = final(STACKS["scaffold"], Loopback)
    for workers in (0, 2):
        make = partial(Simulator, workers=workers, budget=100, folder=tmp_path / str(workers))
        assert same_bits(final(STACKS["scaffold"], make), expected)

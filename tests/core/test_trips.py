"""A round of several trips: what a wire layer asks before clients work and after they have worked,
on engines that sum on the way and on those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from toy import Toy, same_bits, toy_federation

from fedlens import Algorithm, Client, Message, Round, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Brought, Layer, Stage, Trip, Trips
from fedlens.core.message import RING
from fedlens.core.replies import Lost, Replies
from fedlens.core.rounds import Engine
from fedlens.core.tree import Tree
from fedlens.engines.flaky import Flaky
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, Scaffold

GREET, WORK, CONFIRM = 1, 0, 2
MOST = 2**31 - 1


class Confirmed(Layer):
    """Clients say hello, work, and confirm. `count` is added in a ring: client i adds 2^31 - 1 - i.
    What a client confirms is what it was told in the greeting, so that a trip knows the last."""

    stage: ClassVar[Stage] = "wire"
    weighs: ClassVar[Mapping[str, tuple[str, ...]]] = {"count": (RING,)}

    def next_trip(self, state: Message, trips: Trips) -> Trip | None:
        if not trips.made:
            return Trip(Message(), trips.asked, GREET)
        last = trips.made[-1].number
        here = trips.replies[-1].senders
        if last == GREET:
            names = {str(i): h.texts["name"] for i, h in trips.replies[-1].heard.items()}
            return Trip(_with(self.inner.broadcast(state), **names), here, WORK)
        return Trip(trips.made[-1].message, here, CONFIRM) if last == WORK and here else None

    def client_step(self, message: Message, client: Client) -> Message:
        if message.header.trip == GREET:
            return _with(Message(), name=f"client {client.id}")
        if message.header.trip == CONFIRM:
            with pytest.raises(PermissionError):
                client.memory["x"] = {"x": torch.zeros(1)}
            return _with(Message(), name=message.texts[str(client.id)])
        reply = self.inner.client_step(message, client)
        count = torch.tensor([MOST - client.id], dtype=torch.int32)
        return reply.put(count={"n": count}).weigh("count", **{RING: 1.0})

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return {
            **self.inner.expects(message),
            "count": {"n": torch.zeros(1, dtype=torch.int32)},
        }

    def read(self, state: Message, trips: Trips) -> Brought:
        """Only if all who worked confirm does the round count."""
        work, end = trips.replies[1], trips.replies[-1]
        if work.senders != end.senders or len(trips.made) < 3:
            return Brought(state, Replies(), [Lost(i, "not confirmed") for i in work.senders])
        assert {h.texts["name"] for h in end.heard.values()} == {f"client {i}" for i in end.heard}
        total = int(work.ring_sum("count")["n"])
        return Brought(state.note(total=total), work, [x for lost in trips.lost for x in lost])


def _with(message: Message, **texts: str) -> Message:
    return Message(message.trees, message.scalars, texts=texts)


def make() -> Algorithm:
    return stack(FedAvg(Toy(), batch=8), Scaffold(), Confirmed())


def ended(engine: Engine, algorithm: Algorithm, rounds: int = 3) -> tuple[Message, list[Round]]:
    seen: list[Round] = []
    try:
        note = lambda _, r: seen.append(r)  # noqa: E731
        state = run(algorithm, engine, rounds, patience=rounds, after_round=note)
    finally:
        engine.close()
    return state, seen


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_engine_makes_the_trips_and_adds_in_the_ring(workers: int) -> None:
    """Seven clients: 7 (2^31 - 1) - 21 = 15032385508, less 4 x 2^32 (modulo 2^32, signed) leaves
    -2147483676. A mean of float64s would be off by its last bits at best."""
    algorithm = make()
    expected, _ = ended(Loopback(algorithm, toy_federation(7)), algorithm)
    state, seen = ended(Simulator(algorithm, toy_federation(7), workers=workers), algorithm)
    assert same_bits(state, expected)
    total = 7 * MOST - 21
    assert state.scalars["total"] == (total + 2**31) % 2**32 - 2**31
    assert [len(r.heard) for r in seen] == [7, 7, 7]
    plain = stack(FedAvg(Toy(), batch=8), Scaffold())
    without, _ = ended(Simulator(plain, toy_federation(7), workers=0), plain)
    assert all(torch.equal(t, state.trees["model"][n]) for n, t in without.trees["model"].items())


def test_a_draft_lives_until_the_round_it_belongs_to_counts() -> None:
    """A fifth of all messages is lost in every trip. Where a round counts, the drafts of those who
    worked in it become memory, though a later trip came after it: SCAFFOLD's sum of c_i is c."""
    algorithm = make()
    engine = Simulator(algorithm, toy_federation(7), workers=0)
    state, seen = ended(Flaky(engine, before=0.05, after=0.05, seed=5), algorithm, 12)
    counted = [r for r in seen if r.heard]
    assert 0 < len(counted) < len(seen)
    assert any(x.reason == "not confirmed" for r in seen for x in r.lost)
    assert any(len(r.heard) < 7 for r in counted)
    heard = {i: r.number for r in seen for i in r.heard}
    assert engine.inline
    kept = [engine.inline.memory.load(i).settle(heard.get(i, -1)) for i in range(7)]
    for name, c in state.trees["control"].items():
        total = sum(k["control"][name].double() for k in kept if "control" in k)
        assert torch.allclose(torch.as_tensor(total) / 7, c.double(), atol=1e-5)


class Touchy(Confirmed):
    """What came with the greeting of round 1, and of every evaluation, cannot be read: found out
    between two trips, or after the last."""

    between: ClassVar[bool] = True

    def next_trip(self, state: Message, trips: Trips) -> Trip | None:
        if trips.made and self.between and (trips.evaluate or state.round == 1):
            raise ValueError("client 2 wrote nonsense")
        return super().next_trip(state, trips)

    def read(self, state: Message, trips: Trips) -> Brought:
        if trips.evaluate:
            raise RecursionError("too deep")
        return super().read(state, trips)


@pytest.mark.parametrize("between", [True, False])
def test_what_cannot_be_read_costs_its_round_or_its_evaluation(between: bool) -> None:
    """Not the run: the round is skipped, as if its sum could not be used, and of an evaluation
    everybody is missing, with the reason."""
    layer = Touchy()
    layer.between = between  # type: ignore[misc]
    algorithm = stack(FedAvg(Toy(), batch=8), layer)
    seen: list[Round] = []
    run(
        algorithm,
        Loopback(algorithm, toy_federation(4)),
        3,
        evaluate_every=1,
        personal=True,
        after_round=lambda _, r: seen.append(r),
    )
    skipped = "ValueError: client 2 wrote nonsense" if between else ""
    assert [r.skipped for r in seen] == ["", skipped, ""]
    assert [len(r.heard) for r in seen] == [4, 0 if between else 4, 4]
    why = "ValueError: client 2 wrote nonsense" if between else "RecursionError: too deep"
    for r in seen:
        assert [(x.sender, x.reason) for x in r.unevaluated] == [(i, why) for i in range(4)]
        assert not r.metrics and r.evaluation_bytes >= 0


def test_a_cohort_that_cannot_work_still_ends_the_run() -> None:
    """Before the first trip nothing of a client's is looked at: that error is the operator's."""

    class Few(Confirmed):
        def next_trip(self, state: Message, trips: Trips) -> Trip | None:
            raise ValueError("at least 9")

    algorithm = stack(FedAvg(Toy(), batch=8), Few())
    with pytest.raises(ValueError, match="at least 9"):
        ended(Loopback(algorithm, toy_federation(4)), algorithm)


class Otherwise(Confirmed):
    """Client 1 averages what is to be added, client 2 adds in another ring."""

    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        if message.header.trip or client.id not in (1, 2):
            return reply
        if client.id == 1:
            return reply.weigh("count", 1.0)
        return reply.put(count={"n": reply.trees["count"]["n"].long()})


def test_who_leaves_the_ring_is_refused() -> None:
    algorithm = stack(FedAvg(Toy(), batch=8), Otherwise())
    _, seen = ended(Simulator(algorithm, toy_federation(4), workers=0), algorithm, 1)
    assert {x.sender: x.reason for x in seen[0].lost} == {
        1: "tree 'count' must have one weight, 'ring', of 1",
        2: "tree 'count': n is torch.int64, expected torch.int32",
    }


class Hides(Confirmed):
    hides_replies: ClassVar[bool] = True


def test_nothing_stands_outside_what_hides_replies_and_nothing_comes_late() -> None:
    with pytest.raises(StackError, match="Confirmed stands outside Hides"):
        stack(FedAvg(Toy()), Hides(), Confirmed())
    algorithm = stack(FedAvg(Toy()), FedProx(0.1), Hides())
    with pytest.raises(ValueError, match="late replies"):
        run(algorithm, Loopback(algorithm, toy_federation(3)), 1, late=1)

"""Only sums reach the server: FedVSR's loss-aware weighting behind pairwise masks (Bonawitz et al.,
2017), without any change to the core.

`Masked` is a wire layer made for this test. A client multiplies every tree by each of its weights,
adds the weights themselves and its scalars, writes all of it as integers modulo 2^44 and adds a
mask: for every other client a stream of uniform numbers that the two of them share, added by one
and subtracted by the other. The masks cancel in the sum of all replies and in no other. What the
server needs then follows from that sum alone. How two clients agree on their stream, and what
happens when one of them is lost, is not part of this: here they draw it from a secret that the
server's half never reads, and everybody answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from toy import Toy, toy_federation

from fedlens import Message, Replies, Round, StackError, Tree, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Algorithm, Layer, Stage
from fedlens.core.client import Client, generator
from fedlens.core.replies import Heard, Sum, counted
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, LossAware, Median, Scaffold
from fedlens.runs.records import describe

RING, ONE = 1 << 44, 1 << 24  # numbers are multiples of 1 / ONE, up to RING / (2 ONE) = 2^19
SECRET = 0xA11CE
SCALARS = ("loss", "examples")


def encoded(x: Tensor) -> Tensor:
    return (x.double() * ONE).round().long() % RING


def decoded(x: Tensor) -> Tensor:
    return torch.where(x >= RING // 2, x - RING, x).double() / ONE


def counted_as(mean: Tensor, like: Tensor) -> Tensor:
    return mean.to(counted(like).dtype)


@dataclass
class Masked(Layer):
    """weights: the names of each tree's weights, which the server must know to take the sum apart
    again.
    """

    weights: Mapping[str, Sequence[str]]
    stage: ClassVar[Stage] = "wire"
    hides_replies: ClassVar[bool] = True

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        plain: Tree = {
            f"scalar {n}": torch.tensor(reply.scalars[n], dtype=torch.float64) for n in SCALARS
        }
        for tree, names in self.weights.items():
            for name in names:
                w = reply.weights.get(tree, {"mean": 1.0})[name]
                plain[f"{tree} {name}"] = torch.tensor(w, dtype=torch.float64)
                plain |= {
                    f"{tree} {name} {k}": w * t.double() for k, t in reply.trees[tree].items()
                }
        others = [i for i in range(message.header.population) if i != client.id]
        streams = {
            i: generator(SECRET, message.round, min(i, client.id), max(i, client.id))
            for i in others
        }
        out = {k: encoded(t) for k, t in plain.items()}
        for i, stream in streams.items():
            for k, t in out.items():
                mask = torch.randint(RING, t.shape, generator=stream)
                out[k] = (t + mask if client.id < i else t - mask) % RING
        return Message({"masked": out})

    def expects(self, message: Message) -> Mapping[str, Tree]:
        one = torch.zeros((), dtype=torch.int64)
        out: Tree = {f"scalar {n}": one for n in SCALARS}
        for tree, names in self.weights.items():
            for name in names:
                plain = self.inner.expects(message)[tree]
                out |= {
                    f"{tree} {name}": one,
                    **{
                        f"{tree} {name} {k}": torch.zeros_like(t, dtype=torch.int64)
                        for k, t in plain.items()
                    },
                }
        return {"masked": out}

    def server_step(self, state: Message, replies: Replies) -> Message:
        n = len(replies)
        total = {
            k: decoded((t * n).round().long() % RING) for k, t in replies.mean("masked").items()
        }
        sums = {}
        for tree, names in self.weights.items():
            for name in names:
                weight, lead = float(total[f"{tree} {name}"]), f"{tree} {name} "
                like = self.inner.expects(self.inner.broadcast(state))[tree]
                sums[tree, name] = Sum(
                    {
                        k.removeprefix(lead): counted_as(t / weight, like[k.removeprefix(lead)])
                        for k, t in total.items()
                        if k.startswith(lead)
                    },
                    weight,
                )
        means = {name: float(total[f"scalar {name}"]) / n for name in SCALARS}
        return self.inner.server_step(
            state, Replies({-1: Heard(-1, state.round, means, 0, {})}, sums)
        )


CASES: dict[str, tuple[list[Layer], Mapping[str, Sequence[str]]]] = {
    "LossAware": (
        [LossAware(tau=0.0, decay="paper")],
        {"delta": ("uniform", "loss"), "importance": ("mean",)},
    ),
    "greedy": ([LossAware(greedy=True)], {"delta": ("uniform", "loss"), "importance": ("mean",)}),
    "FedProx": ([FedProx(mu=0.1)], {"delta": ("mean",)}),
    "Scaffold": ([Scaffold()], {"delta": ("mean",), "control": ("mean",)}),
}


def heard(algorithm: Algorithm, workers: int = 0, rounds: int = 2) -> tuple[Message, list[Heard]]:
    """The state after some rounds, and every message that came from a single client."""
    arrived: list[Heard] = []
    with Simulator(algorithm, toy_federation(3), workers=workers) as engine:
        whole = engine.exchange

        def listen(message: Message, ids: Any, known: Any) -> Any:
            for item in whole(message, ids, known):
                if isinstance(item, Heard):
                    arrived.append(item)
                assert not isinstance(item, Message)
                yield item

        engine.exchange = listen  # type: ignore[method-assign,assignment]
        return run(algorithm, engine, rounds), arrived


@pytest.mark.parametrize("case", CASES)
def test_the_same_model_comes_from_masked_sums(case: str) -> None:
    """Fixed point rounds to 2^-25, and a mean over weights of one or more keeps that; training on
    passes it on a little larger. The masks themselves cancel exactly: they are some 2^44 / ONE =
    10^6 times larger than what they hide, so anything left of them would show."""
    layers, weights = CASES[case]
    open_state, _ = heard(stack(FedAvg(Toy(), lr=0.1, batch=8), *layers))
    state, arrived = heard(stack(FedAvg(Toy(), lr=0.1, batch=8), *layers, Masked(weights)))
    for name, t in open_state.trees["model"].items():
        torch.testing.assert_close(
            state.trees["model"][name], t, atol=5e-6, rtol=0, check_dtype=True
        )
    if case == "LossAware":
        assert 0 < state.scalars["mix"] == pytest.approx(open_state.scalars["mix"], abs=1e-6)
    assert len(arrived) == 6
    # no tree, no loss, no weight of a single client: the engine added the masked trees up on the
    # way
    for reply in arrived:
        assert isinstance(reply, Heard) and not reply.scalars


def test_a_reply_alone_says_nothing() -> None:
    """A masked number is uniform on the ring whatever it hides: 527 of them have a mean within 5
    standard errors of the middle, for one client and for the sum of two out of three. All three
    together give the truth, here the number of their examples, 20 + 23 + 26."""
    layers, weights = CASES["LossAware"]
    algorithm = stack(FedAvg(Toy(), lr=0.1, batch=8), *layers, Masked(weights))
    federation = toy_federation(3)
    message = algorithm.broadcast(algorithm.init()).with_header(population=3, cohort=3)
    replies = [
        algorithm.client_step(message, Client(i, federation.holdings[i], generator(0, 0, i), {}))
        for i in range(3)
    ]
    rows = [torch.cat([t.flatten() for t in r.trees["masked"].values()]) for r in replies]
    assert len(rows[0]) == 527
    for row in (rows[0], (rows[0] + rows[1]) % RING, (rows[1] + rows[2]) % RING):
        share = row.double() / RING
        assert abs(float(share.mean()) - 0.5) < 5 * (12 * len(share)) ** -0.5
        assert float(share.std()) == pytest.approx(12**-0.5, rel=0.1)
    total = sum(r.trees["masked"]["scalar examples"] for r in replies)
    assert isinstance(total, Tensor) and float(decoded(total % RING)) == 69


def test_a_layer_that_needs_single_replies_is_refused_behind_it() -> None:
    with pytest.raises(StackError, match="Masked hides single replies, but Median needs them"):
        stack(FedAvg(Toy()), Median(), Masked({"delta": ("mean",)}))


def test_what_reads_single_clients_is_absent() -> None:
    """No worst client, no spread, no table per client behind a layer that hides single replies."""
    layers, weights = CASES["FedProx"]
    rounds: list[Round] = []
    for algorithm in (
        stack(FedAvg(Toy(), batch=8), *layers),
        stack(FedAvg(Toy(), batch=8), *layers, Masked(weights)),
    ):
        with Simulator(algorithm, toy_federation(3), workers=0) as engine:
            run(
                algorithm,
                engine,
                1,
                evaluate_every=1,
                personal=True,
                after_round=lambda _, done: rounds.append(done),
            )
        assert bool(describe(rounds[-1], algorithm)["clients"]) is not algorithm.hides_singles
    seen, hidden = (set(r.metrics) for r in rounds)
    assert seen - hidden == {"client_accuracy_spread", "client_accuracy_worst"}

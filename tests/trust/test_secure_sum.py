"""SecureSum: the same state as the plain fixed-point sum, whoever is lost and wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from losing import LOST, Failing, Losing
from stacks import SCENES, STACKS
from toy import Toy, flat, same_bits, toy_federation
from vaults import Sites, make_vaults

from fedlens import Algorithm, Client, Message, Progress, Round, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.replies import Arrival, Heard
from fedlens.core.rounds import Engine, Stalled
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import LossAware, Median, MixedWeights, Scaffold
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.records import describe
from fedlens.trust import SecureSum
from fedlens.trust.secure_sum import DEAL, GREET, OPEN_SUM, WORK


def secured(*layers: Any, **options: Any) -> Algorithm:
    return stack(FedAvg(Toy(), batch=8, lr=0.05), *layers, SecureSum(**options))


def ended(
    algorithm: Algorithm, engine: Engine, rounds: int = 4, **options: Any
) -> tuple[Message, list[Round]]:
    seen: list[Round] = []
    try:
        state = run(algorithm, engine, rounds, after_round=lambda _, r: seen.append(r), **options)
    finally:
        engine.close()
    return state, seen


def simulated(algorithm: Algorithm, plan: Mapping[Any, str] | None = None, **options: Any) -> Any:
    engine = Losing(Simulator(algorithm, toy_federation(7), workers=0), plan or {})
    return (*ended(algorithm, engine, **options), engine)


def equal_trees(a: Message, b: Message) -> bool:
    x, y = flat(a), flat(b)
    return x.keys() == y.keys() and all(torch.equal(t, y[n]) for n, t in x.items())


# -- the sum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", LOST)
def test_whoever_is_lost_the_state_is_that_of_the_plain_sum(when: str) -> None:
    """The plain sum, `masks = false`, is run over just those who were heard in the masked one. With
    SCAFFOLD, whose clients remember, so a wrong word about who was heard would show."""
    state, seen, engine = simulated(secured(Scaffold()), LOST[when])
    assert [len(r.heard) for r in seen] != [7, 7, 7, 7] or when == "after"
    gone = {(r.number, WORK, i): "after" for r in seen for i in range(7) if i not in r.heard}
    plain, again, _ = simulated(secured(Scaffold(), masks=False), gone)
    assert [list(r.heard) for r in again] == [list(r.heard) for r in seen]
    assert equal_trees(state, plain)
    heard = {i: r.number for r in seen for i in r.heard}
    kept = [engine.inline.memory.load(i).settle(heard.get(i, -1)) for i in range(7)]
    for name, c in state.trees["control"].items():
        total = sum(k["control"][name].double() for k in kept if "control" in k)
        assert torch.allclose(torch.as_tensor(total) / 7, c.double(), atol=1e-5)


@pytest.mark.parametrize("dropouts", ["recover", "skip"])
def test_every_engine_ends_in_the_same_bits(dropouts: str) -> None:
    def make() -> Algorithm:
        return secured(Scaffold(), LossAware(tau=0.0), dropouts=dropouts)

    expected, _ = ended(make(), Loopback(make(), toy_federation(7)), 3)
    for workers in (0, 2):
        algorithm = make()
        found, _ = ended(algorithm, Simulator(algorithm, toy_federation(7), workers=workers), 3)
        assert equal_trees(found, expected)


@pytest.mark.parametrize("when", LOST)
def test_losses_cost_the_same_on_every_engine(when: str) -> None:
    """Loopback and simulator, any number of workers; the same plan, the same bits."""
    expected, seen, _ = simulated(secured(Scaffold()), LOST[when])
    algorithm = secured(Scaffold())
    loopback = Losing(Loopback(algorithm, toy_federation(7)), LOST[when])
    found, again = ended(algorithm, loopback)
    assert equal_trees(found, expected)
    assert [list(r.heard) for r in again] == [list(r.heard) for r in seen]
    for workers in (1, 3) if when == "all at once" else ():
        algorithm = secured(Scaffold())
        pool = Simulator(algorithm, toy_federation(7), workers=workers)
        assert equal_trees(ended(algorithm, Losing(pool, LOST[when]))[0], expected)


def test_clients_that_break_at_work_leave_partial_sums_right() -> None:
    """Nothing is kept of single replies here: workers have summed the others' already."""
    found = []
    for masks, workers in ((True, 0), (True, 2), (False, 2)):
        algorithm = stack(Failing(Toy(), batch=8, lr=0.05), Scaffold(), SecureSum(masks=masks))
        pool = Simulator(algorithm, toy_federation(7), workers=workers)
        state, seen = ended(algorithm, pool, 3)
        assert [sorted(x.sender for x in r.lost) for r in seen] == [[3], [0, 6], []]
        found.append(state)
    assert equal_trees(found[0], found[1]) and equal_trees(found[0], found[2])


def test_real_vaults_end_in_the_same_bits(tmp_path: Path) -> None:
    """Sites with keys from the operating system and signatures of their own."""
    algorithm = secured(Scaffold())
    expected, _, _ = simulated(secured(Scaffold()), rounds=2)
    sites = Sites(algorithm, toy_federation(7), make_vaults(tmp_path, 7))  # type: ignore[arg-type]
    state, seen = ended(algorithm, sites, 2)
    assert [len(r.heard) for r in seen] == [7, 7]
    assert equal_trees(state, expected)
    # of secrets, those of the last two rounds are kept
    assert {p.parent.name.split("-")[1] for p in tmp_path.glob("vault-0/*/*.secret")} == {
        "000000",
        "000001",
    }


def test_trips_of_a_round() -> None:
    """Greeting and dealing once, then two trips a round; a partial cohort that is announced needs
    no more once everybody has been greeted; skipping dropouts takes one."""
    whole = simulated(secured())[2].trips
    assert whole[:4] == [(0, GREET), (0, DEAL), (0, WORK), (0, OPEN_SUM)]
    assert whole[4:] == [(n, t) for n in (1, 2, 3) for t in (WORK, OPEN_SUM)]
    one = simulated(secured(dropouts="skip"))[2].trips
    assert one == [(0, DEAL), (0, WORK), (1, WORK), (2, WORK), (3, WORK)]
    some = simulated(secured(dropouts="recover"), cohort=4, rounds=12)[2].trips
    late = [t for n, t in some if n == 11]
    assert late == [WORK, OPEN_SUM]
    open_ = simulated(secured(masks=False))[2].trips
    assert open_ == [(n, WORK) for n in range(4)]


def test_a_client_without_keys_for_the_round_costs_one_more_trip() -> None:
    _, seen, engine = simulated(secured(), {(0, OPEN_SUM, 3): "before"})
    assert [t for n, t in engine.trips if n == 1] == [DEAL, WORK, OPEN_SUM]
    assert [len(r.heard) for r in seen] == [7, 7, 7, 7]


def test_skipping_gives_a_round_up_and_nobody_was_heard() -> None:
    """A reply lost in round 1: the masks of the others do not cancel, the state stays, and
    SCAFFOLD's clients forget what they did. Round 2 goes on with new keys."""
    state, seen, engine = simulated(secured(Scaffold(), dropouts="skip"), {(1, WORK, 4): "after"})
    assert [len(r.heard) for r in seen] == [7, 0, 7, 7]
    assert {x.reason for x in seen[1].lost} == {
        "reply lost on the way",
        "the sum was not made: without client 4 the masks do not cancel",
    }
    assert equal_trees(seen[0].state, seen[1].state)
    assert seen[1].skipped == (
        "the sum was not made: without client 4 the masks do not cancel; client 4: reply lost on"
        ' the way; dropouts = "recover" of SecureSum would make up for 2 of 7'
    )
    assert [t for n, t in engine.trips if n == 2] == [DEAL, WORK]
    heard = {i: r.number for r in seen for i in r.heard}
    kept = [engine.inline.memory.load(i).settle(heard[i]) for i in range(7)]
    for name, c in state.trees["control"].items():
        total = sum(k["control"][name].double() for k in kept)
        assert torch.allclose(torch.as_tensor(total) / 7, c.double(), atol=1e-5)


def test_too_few_survivors_open_nothing() -> None:
    """Seven clients, five of seven shares: with five left the sum is theirs, with four the round is
    given up."""
    plan = {(1, WORK, i): "after" for i in (0, 2, 4)}
    plan |= {(2, WORK, i): "after" for i in (0, 6)}
    plan |= {(3, OPEN_SUM, i): "before" for i in (1, 5)}
    _, seen, _ = simulated(secured(), plan)
    assert [len(r.heard) for r in seen] == [7, 0, 5, 7]
    assert "4 of 7 were heard, not 5" in str([x.reason for x in seen[1].lost])


# -- what is learned of a client -------------------------------------------------------------------


def test_a_reply_alone_is_noise_and_two_of_three_are_noise() -> None:
    """What two out of three send adds up to uniform numbers: their mean lies within five standard
    errors of the middle. All three together give the truth."""
    algorithm = secured(LossAware(tau=0.0, decay="paper"))
    engine = Loopback(algorithm, toy_federation(3))
    replies: dict[tuple[int, int], list[Message]] = {}

    def keep(message: Message, ids: Any, heard: Any) -> Iterator[Arrival]:
        for item in exchange(message, ids, heard):
            if isinstance(item, Message):
                replies.setdefault((message.round, message.header.trip), []).append(item)
            yield item

    exchange, engine.exchange = engine.exchange, keep  # type: ignore[method-assign]
    ended(algorithm, engine, 3)
    rows = [r.trees["masked"]["ring32"].long() for r in replies[2, WORK]]
    assert len(rows) == 3 and len(rows[0]) > 400
    for row in (rows[0], rows[0] + rows[1], rows[1] + rows[2]):
        share = (row % 2**32).double() / 2**32
        assert abs(float(share.mean()) - 0.5) < 5 * (12 * len(share)) ** -0.5
        assert float(share.std()) == pytest.approx(12**-0.5, rel=0.1)
    for reply in replies[2, WORK]:
        assert not reply.scalars and reply.weights == {"masked": {"ring": 1.0}}


def test_numbers_of_single_clients_are_absent_and_their_means_are_right() -> None:
    plain_state, plain = ended(
        stack(FedAvg(Toy(), batch=8, lr=0.05)),
        Simulator(stack(FedAvg(Toy(), batch=8, lr=0.05)), toy_federation(7), workers=0),
        evaluate_every=2,
        personal=True,
    )
    algorithm = secured()
    state, seen, _ = simulated(algorithm, evaluate_every=2, personal=True)
    for open_, hidden in zip(plain, seen, strict=True):
        assert hidden.loss == pytest.approx(open_.loss, rel=1e-4)
        assert all(not h.scalars and not h.weights for h in hidden.heard.values())
    assert seen[3].metrics["client_accuracy"] == pytest.approx(
        plain[3].metrics["client_accuracy"], abs=1e-6
    )
    gone = {"client_accuracy_spread", "client_accuracy_worst"}
    assert set(plain[3].metrics) - gone == set(seen[3].metrics)
    assert describe(seen[3], algorithm)["clients"] == {}
    for name, t in plain_state.trees["model"].items():
        assert torch.allclose(state.trees["model"][name].double(), t.double(), atol=1e-5)


# -- stacks ----------------------------------------------------------------------------------------

SUMS = [n for n, case in {**STACKS, **SCENES}.items() if case.make().needs == "sums"]


@pytest.mark.parametrize("name", SUMS)
def test_every_stack_of_sums_runs_under_it(name: str) -> None:
    """Masked or not the state is the same bit for bit, and after one round it is that without
    SecureSum up to rounding: 1e-5 of the largest entry of each array."""
    case = {**STACKS, **SCENES}[name]
    plain_stack = case.make()
    plain, _ = ended(plain_stack, Simulator(plain_stack, case.federation, workers=0), 1, seed=3)
    found = []
    for masks in (True, False):
        algorithm = SecureSum(masks=masks).around(case.make())
        state, seen = ended(
            algorithm, Simulator(algorithm, case.federation, workers=0), 2, seed=3, cohort=5
        )
        assert all(len(r.heard) == 5 for r in seen), [r.lost for r in seen]
        found.append(state)
    assert equal_trees(*found)
    algorithm = SecureSum(masks=False).around(case.make())
    once, _ = ended(algorithm, Simulator(algorithm, case.federation, workers=0), 1, seed=3)
    truth = flat(plain)
    for array, t in flat(once).items():
        scale = max(1e-3, float(truth[array].abs().max()))
        assert float((t - truth[array]).abs().max()) < 1e-5 * scale, array


def test_what_needs_single_replies_is_refused_in_words() -> None:
    for layer in (Median(), LossAware(by="replies")):
        name = type(layer).__name__
        with pytest.raises(StackError, match=f"SecureSum hides single replies, but {name}"):
            stack(FedAvg(Toy()), layer, SecureSum())
    with pytest.raises(StackError, match="stands outside SecureSum"):
        stack(FedAvg(Toy()), SecureSum(), Scaffold())
    with pytest.raises(StackError, match="ring=16 is for updates of a network"):
        SecureSum(ring=16).around(SCENES["feddeblur"].make())


SINGLES = [n for n, case in STACKS.items() if case.make().needs != "sums"]


@pytest.mark.parametrize("name", SINGLES)
def test_every_stack_of_single_replies_is_refused(name: str) -> None:
    """Medians, Krum and the like among them: one chooses."""
    with pytest.raises(StackError, match=r"SecureSum hides .*, but \w+ needs them"):
        SecureSum().around(STACKS[name].make())


def test_two_are_too_few_to_hide_among() -> None:
    algorithm = secured()
    with pytest.raises(ValueError, match="at least 3, but 2 are asked"):
        ended(algorithm, Simulator(algorithm, toy_federation(2), workers=0), 1)
    with pytest.raises(ValueError, match="of at least 3"):
        SecureSum(min_cohort=2)


def test_sixteen_bits_halve_what_goes_up() -> None:
    """Two bytes less for each of the 259 real numbers of each of 7 clients; what is right on
    average ends close by.
    """
    state, seen, _ = simulated(secured(ring=16, masks=False))
    wide, more, _ = simulated(secured(masks=False))
    assert more[3].bytes_up - seen[3].bytes_up == 2 * 259 * 7
    for name, t in wide.trees["model"].items():
        if t.is_floating_point():
            assert torch.allclose(state.trees["model"][name], t, atol=0.05)


# -- clipping --------------------------------------------------------------------------------------


class Jumps(FedAvg):
    """In round 2 client 3's update is a million times what it was."""

    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        if message.round != 2 or client.id != 3:
            return reply
        delta = {
            n: t * 1e6 if t.is_floating_point() else t for n, t in reply.trees["delta"].items()
        }
        return reply.put(delta=delta)


def test_clipping_skips_the_round_where_clients_remember() -> None:
    """Bounds have grown by then: the same jump in the next round would fit."""
    for layers, heard in (((), [7, 7, 7, 7]), ((Scaffold(),), [7, 7, 0, 7])):
        algorithm = stack(Jumps(Toy(), batch=8, lr=0.05), *layers, SecureSum(masks=False))
        engine = Simulator(algorithm, toy_federation(7), workers=0)
        state, seen = ended(algorithm, engine)
        assert [len(r.heard) for r in seen] == heard
        saturated = [r.state.scalars["saturated"] for r in seen if r.heard]
        if layers:
            assert "beyond their bounds" in seen[2].lost[0].reason and not any(saturated)
            assert equal_trees(seen[1].state, seen[2].state)
        else:
            assert saturated[2] > 0 and not saturated[3]
        assert all(bool(torch.isfinite(t).all()) for t in flat(state).values())


def test_a_loss_of_nothing_claims_no_more_than_the_public_limit() -> None:
    class Perfect(FedAvg):
        def client_step(self, message: Message, client: Client) -> Message:
            reply = super().client_step(message, client)
            return reply.note(loss=0.0) if client.id == 2 else reply

    algorithm = stack(Perfect(Toy(), batch=8), LossAware(greedy=True), SecureSum(masks=False))
    engine = Simulator(algorithm, toy_federation(3), workers=0)
    state, seen = ended(algorithm, engine, 2)
    assert [len(r.heard) for r in seen] == [3, 3]
    assert all(bool(torch.isfinite(t).all()) for t in flat(state).values())


class Liar(FedAvg):
    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        return reply.weigh("delta", 1e12) if client.id == 1 else reply


def test_a_weight_beyond_the_limit_does_not_leave_an_honest_client() -> None:
    algorithm = stack(Liar(Toy(), batch=8), SecureSum("recover"))
    _, seen = ended(algorithm, Simulator(algorithm, toy_federation(5), workers=0), 1)
    assert not seen[0].lost and seen[0].state.scalars["broken"] == 1


def test_a_sum_that_cannot_be_is_not_used() -> None:
    """A client that lies under the mask about its weight: nobody can say who it was."""
    algorithm = secured(masks=False)
    engine = Simulator(algorithm, toy_federation(5), workers=0)
    exchange = engine.exchange

    def lie(message: Message, ids: Any, heard: Any) -> Iterator[Arrival]:
        for item in exchange(message, ids, heard):
            if isinstance(item, Message) and item.sender == 4:
                few = item.trees["masked"]["few"].clone()
                few[12:16] = torch.tensor([0, 0, 0, 1 << 31])
                yield replace(item, trees={"masked": {**item.trees["masked"], "few": few}})
            else:
                yield item

    engine.exchange, engine.keep_singles = lie, True  # type: ignore[method-assign,assignment]
    with pytest.raises(Stalled, match=r"3 rounds in a row .* the sum of the weights is impossible"):
        ended(algorithm, engine, 5)


# -- going on --------------------------------------------------------------------------------------


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    expected, _, _ = simulated(secured(Scaffold()))
    algorithm = secured(Scaffold())
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    engine = Simulator(algorithm, toy_federation(7), workers=0, folder=tmp_path / "memory")

    def stop(here: Progress, done: Round) -> None:
        checkpoint.save(here, engine.snapshot())
        if here.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(algorithm, engine, 4, after_round=stop)
    engine.close()
    found = Checkpoint(tmp_path / "checkpoint").load()
    assert found is not None
    algorithm = secured(Scaffold())
    with Simulator(algorithm, toy_federation(7), workers=0) as engine:
        engine.restore(found[1])
        assert equal_trees(run(algorithm, engine, 4, progress=found[0]), expected)


def test_heard_says_what_a_client_said() -> None:
    h = Heard(1, 0, {}, 5, {}, {"secure": "x"})
    assert same_bits(Message(), Message()) and h.texts["secure"] == "x"


def test_mixed_weights_are_two_sums() -> None:
    plain = stack(FedAvg(Toy(), batch=8), MixedWeights(0.5))
    truth, _ = ended(plain, Simulator(plain, toy_federation(4), workers=0), 2)
    algorithm = stack(FedAvg(Toy(), batch=8), MixedWeights(0.5), SecureSum())
    state, _ = ended(algorithm, Simulator(algorithm, toy_federation(4), workers=0), 2)
    for name, t in truth.trees["model"].items():
        assert torch.allclose(state.trees["model"][name].double(), t.double(), atol=1e-5)

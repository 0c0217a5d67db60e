"""FBL's layer: balance points, choices and shifts by hand, what stays at home, who decides what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import Blobs, Net, Toy, same_bits, toy_federation

from fedlens import Batch, Facts, Federation, Layer, Message, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import SiteSettings
from fedlens.core.client import Client, generator
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.data.source import DataError
from fedlens.engines.loopback import Loopback
from fedlens.generators import ImageGenerator
from fedlens.layers import (
    BackboneOnly,
    Balance,
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedCDA,
    FedDyn,
    FedGen,
    FedNova,
    FedNTD,
    FedYogi,
    GeometricMedian,
    Krum,
    LossAware,
    Median,
    MixedWeights,
    Moon,
    MovingMean,
    MultiKrum,
    NormClip,
    Scaffold,
    TrimmedMean,
    UploadFailures,
)  # fmt: skip
from fedlens.layers.balance import ALIGN, Balanced, Shifts, balance, choose_samples
from fedlens.tasks.classification import Classification

RNG = torch.Generator


class Plain(Net):
    """Without BatchNorm: a network that says the same in training and evaluation."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.backbone = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)


class PlainTask(Toy):
    def model(self) -> nn.Module:
        return Plain()


def data(*counts: int, seed: int = 0) -> Tensors:
    """So many samples of each class, in this order."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Tensors({"x": torch.randn(len(y), 8, generator=RNG().manual_seed(seed)), "y": y})


def client_of(
    held: Tensors, id: int = 0, memory: dict[str, dict[str, Tensor]] | None = None
) -> Client:
    return Client(id, held, generator(0, 0, id), {} if memory is None else memory)


def message_of(algorithm: FedAvg | Balance, round: int = 0, population: int = 1) -> Message:
    return algorithm.broadcast(algorithm.init()).with_header(
        round=round, rounds=9, seed=0, population=population, cohort=1
    )


def stacked(
    task: type[LearningTask] = PlainTask, *, fedavg: dict[str, object] | None = None, **keys: object
) -> Balance:
    made = stack(
        FedAvg(task(), **{"batch": 8, "lr": 0.1, **(fedavg or {})}),
        Balance(Blobs(), **{"cache": "", **keys}),
    )  # type: ignore[arg-type]
    assert isinstance(made, Balance)
    return made


# -- the balance point -----------------------------------------------------------------------------


def test_constrained_by_hand() -> None:
    """7, 2, 0: the mean is 3. Class 0 is excessive (3 of 7 stay), class 1 scarce (one more), class
    2 missing (three).
    """
    plan = balance([7, 2, 0], False, RNG())
    assert (plan.point, list(plan.made), plan.total) == (3, [0, 1, 3], 9)
    plan = balance([7, 2, 2], False, RNG())  # 11 / 3 = 3.67 is floored
    assert (plan.point, list(plan.made), plan.total) == (3, [0, 1, 1], 9)
    assert list(balance([3, 3, 3], False, RNG()).made) == [0, 0, 0]


def test_unconstrained_by_hand() -> None:
    """Everything is filled up to the largest class, nothing is left out."""
    plan = balance([7, 2, 0], True, RNG())
    assert (plan.point, list(plan.made), plan.total) == (7, [0, 5, 7], 21)


def test_fewer_samples_than_classes() -> None:
    """Three samples of class 0 and five classes: the mean is 0.6, its floor 0, so B = 1. One stays,
    two of four missing ones are filled.
    """
    plan = balance([3, 0, 0, 0, 0], False, RNG().manual_seed(1))
    assert plan.point == 1 and plan.made[0] == 0 and sum(plan.made) == 2 and plan.total == 3
    drawn = {tuple(balance([3, 0, 0, 0, 0], False, RNG().manual_seed(s)).made) for s in range(60)}
    assert len(drawn) == 6  # 4 choose 2: none of them is left out for ever
    assert sum(balance([1, 1, 0, 0, 0], False, RNG()).made) == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=30).filter(sum))
def test_a_constrained_client_never_works_on_more(held: list[int]) -> None:
    plan = balance(held, False, RNG().manual_seed(0))
    assert plan.total <= sum(held)
    assert plan.point >= 1 and all(
        m == 0 or n + m == plan.point for n, m in zip(held, plan.made, strict=True)
    )
    if sum(held) >= len(held):
        assert plan.total == plan.point * len(held)  # all classes are even
        assert sum(held) - plan.total < len(held)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(sum), st.integers(0, 5))
def test_nor_does_it_in_a_round(held: list[int], round: int) -> None:
    """The reply says how many samples were trained on."""
    layer = stacked(period=2)
    reply = layer.client_step(message_of(layer, round), client_of(data(*held)))
    assert reply.scalars["examples"] <= sum(held)


# -- sampling and replay ---------------------------------------------------------------------------


def test_choice_by_hand() -> None:
    """Scores 5 1 4 2 3. First the two largest: 5 and 4, places 0 and 2. With places 0 and 2 chosen
    before and B = 2: nothing is kept at 0 %, the best two of the others are 3 and 2 (places 4, 3);
    at 50 % the 5 stays and the 3 comes."""
    scores, old = torch.tensor([5.0, 1, 4, 2, 3]), torch.tensor([True, False, True, False, False])
    nobody = torch.zeros(5, dtype=torch.bool)
    assert choose_samples(scores, nobody, 2, 0.5).tolist() == [0, 2]
    assert choose_samples(scores, old, 2, 0.0).tolist() == [4, 3]
    assert choose_samples(scores, old, 2, 0.5).tolist() == [0, 4]
    assert choose_samples(scores, old, 2, 1.0).tolist() == [0, 2]
    # Four of five with 25 %: one from the old two, three new. With 0 % four new are wanted and
    # three there: one comes back.
    assert choose_samples(scores, old, 4, 0.25).tolist() == [0, 4, 3, 1]
    assert choose_samples(scores, old, 4, 0.0).tolist() == [0, 4, 3, 1]


def test_ten_percent_of_fifty_is_five() -> None:
    """gamma B = 0.1 * 50 must not fall to 4 because 0.1 is not quite 0.1; 0.29 * 100 is 28.999...
    in floating point.
    """
    old = torch.arange(200) < 50
    chosen = choose_samples(torch.arange(200.0), old, 50, 0.1)
    assert int(old[chosen].sum()) == 5 and len(set(chosen.tolist())) == 50
    old = torch.arange(300) < 100
    assert int(old[choose_samples(torch.arange(300.0), old, 100, 0.29)].sum()) == 29


def test_the_largest_losses_stay() -> None:
    """Nine samples, six of class 0: B = 3. The three with the largest loss under the received
    model, computed here one by one.
    """
    layer, held, memory = stacked(), data(6, 3, 0), {}
    message = message_of(layer)
    model = Plain()
    model.load_state_dict(dict(message.trees["model"]))
    with torch.no_grad():
        scores = [model.head(model.features(held.columns["x"][k : k + 1])) for k in range(6)]
        losses = [float(nn.functional.cross_entropy(s, torch.tensor([0]))) for s in scores]
    worst = sorted(range(6), key=lambda k: -losses[k])[:3]
    layer.client_step(message, client_of(held, memory=memory))
    assert memory["balance"]["kept"].tolist() == [*sorted(worst), 6, 7, 8]


def test_sampling_looks_at_the_model_as_it_is_used() -> None:
    """With BatchNorm: evaluation mode, so that a loss does not depend on who else is in the
    batch.
    """
    layer, held, memory = stacked(Toy), data(6, 3, 0), {}
    layer.client_step(message_of(layer), client_of(held, memory=memory))
    net = Net().eval()
    net.load_state_dict(dict(message_of(layer).trees["model"]))
    losses = nn.functional.cross_entropy(
        net.head(net.features(held.columns["x"][:6])),
        torch.zeros(6, dtype=torch.long),
        reduction="none",
    )
    assert set(memory["balance"]["kept"].tolist()) == {*losses.topk(3).indices.tolist(), 6, 7, 8}


def test_cycles() -> None:
    """m = 2, gamma = 1/3, B = 3: rounds 0 and 1 use the same samples, round 2 keeps one of them. A
    client that was away in between makes its new choice when it comes back."""
    layer, held = stacked(period=2, replay=1 / 3), data(9, 0, 0)
    memory: dict[str, dict[str, Tensor]] = {}
    kept = []
    for round in (0, 1, 2, 7):
        layer.client_step(message_of(layer, round), client_of(held, memory=memory))
        kept.append(set(memory["balance"]["kept"].tolist()))
    assert kept[0] == kept[1] and len(kept[0] & kept[2]) == 1 and len(kept[2] & kept[3]) == 1
    still = stacked(period=0)
    memory = {}
    still.client_step(message_of(still, 0), client_of(held, memory=memory))
    first = memory["balance"]["kept"]
    still.client_step(message_of(still, 500), client_of(held, memory=memory))
    assert torch.equal(first, memory["balance"]["kept"])


def test_random_sampling_does_not_look() -> None:
    """Whatever the model says, the draw is the same; and it is another one for another client."""
    layer, held = stacked(sampling="random"), data(30, 0, 0)
    drawn = []
    for id, shift in ((0, 0.0), (0, 5.0), (1, 0.0)):
        memory: dict[str, dict[str, Tensor]] = {}
        message = message_of(layer, population=2)
        message = message.put(model={n: t + shift for n, t in message.trees["model"].items()})
        layer.client_step(message, client_of(held, id, memory))
        drawn.append(memory["balance"]["kept"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


# -- alignment and drop ----------------------------------------------------------------------------


def test_the_first_step_is_fedavg_on_the_balanced_data() -> None:
    """Shifts start at zero, so one step of the whole method, one without alignment and one of plain
    FedAvg on the same balanced samples move the model by the same bits."""
    held, one = data(6, 3, 0), {"steps": 1, "batch": 9}
    layer = stacked(fedavg=one, drop=0.25)
    message, memory = message_of(layer), {}
    whole = layer.client_step(message, client_of(held, memory=memory))
    bare = stacked(fedavg=one, align=False).client_step(message, client_of(held))
    made = {
        label: Blobs().generate(label, n, generator(0, 0, label, 0xF1)) for label, n in ((2, 3),)
    }
    base = FedAvg(PlainTask(), lr=0.1, steps=1, batch=9)
    plain = base.client_step(message, client_of(Balanced.of(held, memory["balance"]["kept"], made)))  # type: ignore[arg-type]
    assert same_bits(Message(whole.trees), Message(bare.trees)) and same_bits(
        Message(whole.trees), Message(plain.trees)
    )
    assert bool(memory[ALIGN]["shift"].any())
    # A second step is another one: by then the shifts are there.
    two = {"steps": 2, "batch": 9}
    a, b = (
        stacked(fedavg=two, drop=0.0, align=x).client_step(message, client_of(held))
        for x in (True, False)
    )
    assert not same_bits(Message(a.trees), Message(b.trees))


@pytest.mark.parametrize("pace", [1.0, 0.25])
def test_a_shift_moves_against_its_gradient(pace: float) -> None:
    """Cross-entropy of W z + b has the gradient W^T (p - e_c) / B in z; the shift of class c gets
    the sum over its generated samples. At pace 1/4 it moves a quarter of that, and is kept as twice
    what it is."""
    held, memory = data(6, 3, 0), {}
    layer = stacked(fedavg={"steps": 1, "batch": 9, "lr": 0.5}, drop=0.0, pace=pace)
    message = message_of(layer)
    layer.client_step(message, client_of(held, memory=memory))
    model = Plain()
    model.load_state_dict(dict(message.trees["model"]))
    x = Blobs().generate(2, 3, generator(0, 0, 2, 0xF1))
    with torch.no_grad():
        p = model.head(model.features(x)).softmax(1)
        p[:, 2] -= 1
        expected = -0.5 * pace * (p @ model.head.weight).sum(0) / 9
    assert torch.allclose(pace**0.5 * memory[ALIGN]["shift"][2], expected, atol=1e-6)
    assert not memory[ALIGN]["shift"][:2].any()  # nothing was generated for these


def test_the_mean_gradient_sees_the_shifts() -> None:
    """SCAFFOLD's option I asks for the gradient of what is trained. A head alone, z = x + P for
    generated samples: dL/dW = (p - e_c) z^T, summed here sample by sample."""
    held, shift = data(6, 3, 0), torch.randn(3, 6, generator=RNG().manual_seed(5))
    layer = stacked(drop=0.0)
    message, kept, x = (
        message_of(layer),
        torch.arange(6),
        Blobs().generate(2, 3, RNG().manual_seed(1)),
    )
    mixed, memory = Balanced.of(held, kept, {2: x}), {ALIGN: {"shift": shift}}
    adapted = client_of(mixed, memory=memory).adapt(ALIGN, Shifts(3, 6, 0.0, RNG()))  # type: ignore[arg-type]
    found = layer.fedavg.gradient(message, adapted)["head.weight"]
    model = Plain()
    model.load_state_dict(dict(message.trees["model"]))
    with torch.no_grad():
        z = torch.cat([model.features(held.columns["x"][:6]), model.features(x) + shift[2]])
        p = model.head(z).softmax(1)
        p[torch.arange(9), torch.tensor([0] * 6 + [2] * 3)] -= 1
    assert torch.allclose(found, p.T @ z / 9, atol=1e-6)


def test_drop_leaves_out_exactly_its_share() -> None:
    """zeta B = 1/32 * 64 = 2 of the generated samples, never a real one; in a batch of 16 it rounds
    to 1, in one of 15 to 0.
    """
    for size, made, expected in ((64, 40, 38), (64, 1, 0), (16, 9, 8), (15, 9, 9)):
        shifts = Shifts(3, 4, 1 / 32, RNG().manual_seed(0))
        with torch.no_grad():
            shifts.shift.fill_(1.0)
        batch = {"y": torch.arange(size) % 3, "made": torch.arange(size) < made}
        moved = shifts(torch.zeros(size, 4), batch)[:, 0] == 1
        assert int(moved.sum()) == expected and not bool(moved[made:].any())


def test_dropped_ones_change() -> None:
    shifts = Shifts(1, 1, 0.1, RNG().manual_seed(0))
    with torch.no_grad():
        shifts.shift.fill_(1.0)
    batch = {"y": torch.zeros(20, dtype=torch.long), "made": torch.ones(20, dtype=torch.bool)}
    assert len({tuple(shifts(torch.zeros(20, 1), batch)[:, 0].tolist()) for _ in range(20)}) > 5


def test_shifts_stay_at_home_and_out_of_the_test() -> None:
    layer, federation = (
        stacked(period=1),
        Federation([data(6, 3, 0), data(0, 2, 7, seed=1)], test=data(5, 5, 5, seed=2)),
    )
    engine = Loopback(layer, federation)
    state = run(layer, engine, 3)
    for raw in engine.traffic:
        names = {n for tree in Message.from_bytes(raw).trees.values() for n in tree}
        assert names == {"backbone.0.weight", "backbone.0.bias", "head.weight", "head.bias"}
    kept = engine.worker.memory.load(0).settle(2)
    assert kept[ALIGN]["shift"].shape == (3, 6) and bool(kept[ALIGN]["shift"].any())
    message = layer.broadcast(state)
    assert layer.evaluate(message, federation.test, kept) == layer.evaluate(
        message, federation.test, {}
    )


def test_generated_samples_are_not_augmented() -> None:
    """Augmentation puts real samples to 1; generated uint8 images become floats in [0, 1]; the
    order asked for is kept.
    """
    real = Tensors(
        {"x": torch.zeros(4, 1, 2, 2), "y": torch.tensor([0, 0, 1, 1])},
        augment=lambda x, rng: x + 1,
    )
    mixed = Balanced.of(
        real, torch.tensor([0, 3]), {2: torch.full((2, 1, 2, 2), 51, dtype=torch.uint8)}
    )
    batch = mixed.batch(torch.tensor([3, 1, 0, 2]), RNG())
    assert (
        len(mixed) == 4
        and batch["y"].tolist() == [2, 1, 0, 2]
        and batch["made"].tolist() == [True, False, False, True]
    )
    assert batch["x"][:, 0, 0, 0].tolist() == pytest.approx([0.2, 1, 1, 0.2])
    assert mixed.batch(torch.tensor([0, 1]))["x"].max() == 0


# -- who decides what ------------------------------------------------------------------------------


def test_roles_have_exactly_their_shares() -> None:
    layer = stacked(unconstrained=0.25, weak=0.3)
    message = message_of(layer, population=20)
    assert Counter(layer.role(message, i) for i in range(20)) == {
        "unconstrained": 5,
        "no": 6,
        "constrained": 9,
    }
    assert {stacked(unconstrained=1.0).role(message, i) for i in range(20)} == {"unconstrained"}
    more = [i for i in range(20) if stacked(unconstrained=0.5).role(message, i) == "unconstrained"]
    # lambda grows, nobody changes back
    assert {i for i in range(20) if layer.role(message, i) == "unconstrained"} < set(more)


def test_a_weak_client_is_plain_fedavg() -> None:
    held = data(6, 3, 0)
    layer, plain = stacked(weak=1.0), FedAvg(PlainTask(), batch=8, lr=0.1)
    a, b = (x.client_step(message_of(plain), client_of(held)) for x in (layer, plain))
    assert same_bits(Message(a.trees), Message(b.trees)) and a.scalars["examples"] == 9


def test_an_unconstrained_client_fills_to_its_largest_class() -> None:
    layer = stacked(unconstrained=1.0)
    reply = layer.client_step(message_of(layer), client_of(data(6, 3, 0)))
    assert reply.scalars["examples"] == 18 and reply.scalars["made"] == 9


def test_a_site_may_say_for_itself() -> None:
    """Whatever the shares of the recipe are; without its option the draw decides, which here makes
    everybody weak.
    """
    layer = stacked(weak=1.0)
    message = message_of(layer)
    for options, examples, made in (
        ({"generate": "unconstrained"}, 18, 9),
        ({"generate": "no"}, 9, 0),
        ({"generate": "constrained"}, 9, 3),
        ({}, 9, 0),
    ):
        reply = layer.at_site(SiteSettings(options)).client_step(message, client_of(data(6, 3, 0)))
        assert (reply.scalars["examples"], reply.scalars["made"]) == (examples, made)
    inside = Median().around(stacked(weak=1.0)).at_site(SiteSettings({"generate": "constrained"}))
    reply = inside.client_step(message, client_of(data(6, 3, 0)))
    assert reply.scalars["made"] == 3  # also with a layer around it
    with pytest.raises(
        StackError, match="generate is one of constrained, unconstrained, no, not 'perhaps'"
    ):
        layer.at_site(SiteSettings({"generate": "perhaps"}))


@dataclass
class Absent(Blobs):
    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        raise DataError("there is no such generator here")


def test_who_does_not_generate_needs_no_generator() -> None:
    facts = Facts(classes=("a", "b", "c"), shape=(8,))
    layer = stack(FedAvg(PlainTask()), Balance(Absent(), cache=""))
    layer.at_site(SiteSettings({"generate": "no"})).given(facts)
    with pytest.raises(DataError, match="no such generator here"):
        layer.given(facts)


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    """As many samples as in earnest, none of them from the generator, and no file."""
    counting = Counting()
    layer = stack(FedAvg(PlainTask(), batch=8), Balance(counting, cache=str(tmp_path)))
    assert isinstance(layer, Balance)
    reply = layer.client_step(
        message_of(layer).with_header(rehearsal=True), client_of(data(6, 3, 0))
    )
    assert (reply.scalars["examples"], reply.scalars["made"], reply.scalars["generated"]) == (
        9,
        3,
        0,
    )
    assert not counting._calls and not list(tmp_path.iterdir())


# -- the cache -------------------------------------------------------------------------------------


@dataclass
class Counting(Blobs):
    _calls: list[tuple[int, int]] = field(default_factory=list)

    def generate(self, label: int, n: int, rng: torch.Generator) -> Tensor:
        self._calls.append((label, n))
        # a generator may use hidden random numbers: those of the training must not notice
        torch.rand(3)
        return super().generate(label, n, rng)


def test_a_second_run_generates_nothing_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    federation = toy_federation(4)

    def once(seed: int = 0) -> tuple[Message, int]:
        counting = Counting()
        layer = stack(FedAvg(Toy(), batch=8), Balance(counting, cache=str(tmp_path)))
        return run(layer, Loopback(layer, federation), 3, seed=seed), len(counting._calls)

    first, calls = once()
    again, none = once()
    assert calls > 0 and none == 0 and same_bits(first, again)
    other, more = once(seed=1)
    assert more > 0 and not same_bits(first, other)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"broken")
    healed, redone = once()
    assert redone == calls and same_bits(first, healed)


def test_within_a_run_nothing_is_generated_twice(tmp_path: Path) -> None:
    """Three rounds: once for every class that a client has less of than its mean."""
    counting, federation = Counting(), toy_federation(4)
    layer = stack(FedAvg(Toy(), batch=8), Balance(counting, cache=str(tmp_path), period=1))
    run(layer, Loopback(layer, federation), 3)
    counts = [torch.bincount(held.columns["y"], minlength=3) for held in federation.holdings]
    assert len(counting._calls) == sum(int((c < c.sum() // 3).sum()) for c in counts) > 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == sum(
        bool((c < c.sum() // 3).any()) for c in counts
    )


def test_the_cache_knows_generators_apart(tmp_path: Path) -> None:
    for far in (1.0, 2.0):
        layer = stack(FedAvg(Toy(), batch=8), Balance(Blobs(far), cache=str(tmp_path)))
        run(layer, Loopback(layer, toy_federation(2)), 1)
    assert len(list(tmp_path.iterdir())) == 2


# -- what is refused -------------------------------------------------------------------------------


class Wrong(Blobs):
    def generate(self, label: int, n: int, rng: torch.Generator) -> Tensor:
        return super().generate(label, n, rng)[:, :5]


class Few(Blobs):
    def generate(self, label: int, n: int, rng: torch.Generator) -> Tensor:
        return super().generate(label, n - 1, rng)


def test_generators_that_do_not_deliver() -> None:
    for kind, why in (
        (Wrong, r"Wrong makes images of shape \(5,\), but the clients' are shape \(8,\)"),
        (Few, "Few made 2 images of class 2"),
    ):
        layer = stack(FedAvg(PlainTask()), Balance(kind(), cache=""))
        assert isinstance(layer, Balance)
        with pytest.raises(DataError, match=why):
            layer.client_step(message_of(layer), client_of(data(6, 3, 0)))


def test_empty_client_and_labels_out_of_range() -> None:
    layer = stacked()
    with pytest.raises(ValueError, match="client 0 holds no images: there is nothing to balance"):
        layer.client_step(message_of(layer), client_of(data(0, 0, 0)))
    with pytest.raises(ValueError, match="a sample is of class 3, but the head knows 3 classes"):
        layer.client_step(message_of(layer), client_of(data(1, 1, 1, 1)))


def test_a_balance_point_of_zero_is_announced() -> None:
    with pytest.warns(
        UserWarning,
        match=(
            r"clients with fewer images than there are classes: 1 \(client 1: 2 for 3\); their"
            r" balance point would be 0"
        ),
    ):
        stacked().given(Facts(labels=((3, 3, 0), (2, 0, 0)), classes=("a", "b", "c")))


def test_a_head_for_more_classes_than_there_are() -> None:
    with pytest.raises(
        StackError, match=r"Balance fills 3 classes, but the data has 2: set task\.classes=2"
    ):
        stacked().given(Facts(classes=("a", "b")))


class Headless(LearningTask):
    def model(self) -> nn.Module:
        return nn.Linear(8, 3)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return output.prediction.sum()

    def evaluate(self, result: object, data: object) -> dict[str, float]:
        return {}


def test_stacks_that_cannot_work() -> None:
    with pytest.raises(StackError, match="Linear has no split into features and a linear head"):
        stack(FedAvg(Headless()), Balance(Blobs()))
    with pytest.raises(
        StackError, match="Balance needs the whole model, but BackboneOnly hides a part of it"
    ):
        stack(FedAvg(Toy()), BackboneOnly(), Balance(Blobs()))
    for keys, why in (
        ({"replay": 1.5}, "replay is 1.5, but it must be of at least 0 and at most 1"),
        ({"unconstrained": 0.8, "weak": 0.3}, "together are more than all"),
        ({"period": -1}, "period is -1, but it must be of at least 0"),
    ):
        with pytest.raises(ValueError, match=why):
            Balance(Blobs(), **keys)  # type: ignore[arg-type]


def test_other_methods_stand_around_it() -> None:
    """Outside and inside: all of them run, and MOON's previous model is there in the second
    round.
    """
    federation = toy_federation(4)
    own = Balance(Blobs(), cache="")
    for layers in ([Moon(), own], [own, FedNTD(), Scaffold()], [FedGen(), own]):
        algorithm = stack(FedAvg(Toy(), batch=8), *layers)
        state = run(algorithm, Loopback(algorithm, federation), 2)
        assert all(bool(torch.isfinite(t).all()) for t in state.trees["model"].values())


def test_generator_is_an_interface() -> None:
    with pytest.raises(TypeError):
        ImageGenerator()  # type: ignore[abstract]


AGGREGATORS: dict[str, Layer] = {
    type(x).__name__: x
    for x in (
        Median(),
        TrimmedMean(),
        Krum(),
        MultiKrum(),
        GeometricMedian(),
        Bulyan(liars=1),
        FedAvgM(),
        FedAdagrad(),
        FedAdam(),
        FedYogi(),
        LossAware(),
        FedNova(),
        FedCDA(),
        FedDyn(),
        NormClip(),
        MovingMean(),
        MixedWeights(),
        UploadFailures(0.2),
    )
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_aggregator_stands_around_it(name: str) -> None:
    """Two rounds of seven clients; what is merged differs from what plain averaging gives, or the
    aggregator only looks at replies.
    """
    federation = toy_federation(7)
    algorithm = stack(
        FedAvg(Toy(), batch=8, lr=0.05), Balance(Blobs(), cache=""), AGGREGATORS[name]
    )
    state = run(algorithm, Loopback(algorithm, federation), 2)
    assert all(bool(torch.isfinite(t).all()) for t in state.trees["model"].values())
    assert not same_bits(
        Message({"model": state.trees["model"]}),
        Message({"model": algorithm.init().trees["model"]}),
    )


@dataclass
class Noise(ImageGenerator):
    size: int = 32

    def generate(self, label: int, n: int, rng: torch.Generator) -> Tensor:
        return torch.rand(n, 3, self.size, self.size, generator=rng)


@pytest.mark.parametrize(
    "model", ["cnn", "niid", "resnet8", "resnet18", "timm:mobilenetv3_small_050"]
)
def test_classification_models(model: str) -> None:
    """Shifts are as wide as what the head reads, whatever the network."""
    if model.startswith("timm"):
        pytest.importorskip("timm")
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (6, 3, 32, 32), generator=rng, dtype=torch.uint8)
    held = Tensors({"x": x, "y": torch.tensor([0, 0, 0, 0, 1, 1])})
    layer = stack(
        FedAvg(Classification(model, classes=3), lr=0.01, steps=1, batch=6),
        Balance(Noise(), cache=""),
    )
    assert isinstance(layer, Balance)
    memory: dict[str, dict[str, Tensor]] = {}
    reply = layer.client_step(message_of(layer), client_of(held, memory=memory))  # type: ignore[arg-type]
    width = {"cnn": 128, "niid": 84, "resnet8": 64, "resnet18": 512}.get(model, 1024)
    assert memory[ALIGN]["shift"].shape == (3, width) and reply.scalars["made"] == 2
    assert bool(memory[ALIGN]["shift"][2].any()) and not bool(memory[ALIGN]["shift"][:2].any())

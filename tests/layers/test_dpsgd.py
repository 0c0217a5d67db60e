from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import Rounds, fedavg, federation
from torch import Tensor, nn
from toy import GroupNet, GroupToy, Toy, make_data, toy_federation

from fedlens import Federation, Message, stack
from fedlens.algorithms import FedAvg
from fedlens.core import tree
from fedlens.core.algorithm import StackError
from fedlens.core.client import Batch, NoisySteps
from fedlens.core.memory import Memory
from fedlens.core.noise import draw_chosen, draw_normal
from fedlens.core.noisy_steps import ExampleGradients, chosen, noisy_gradients
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.engines.worker import Job, Worker
from fedlens.layers import (
    DPSGD,
    FedAvgM,
    FedPer,
    FedProx,
    FedRep,
    HighFrequency,
    LossAware,
    Median,
    PrivateMean,
    Scaffold,
)
from fedlens.tasks import (
    VCOP,
    ActionRecognition,
    Classification,
    ClipAgreement,
    CtP,
    Pose,
    Speed,
    SuperResolution,
)

# -- gradients of single examples ------------------------------------------------------------------


def images(count: int, *shape: int) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))


def labelled(classes: int, *shape: int) -> Batch:
    return {"x": images(4, *shape), "y": torch.arange(4) % classes}


def joints(count: int, size: tuple[int, int]) -> Tensor:
    places = images(count, 14, 3) * torch.tensor([size[1], size[0], 1.0])
    places[..., 2] = 1
    return places


CLIP = {"frames": 4, "size": 32, "backbone": "r3d10s", "norm": "group"}
BOXES = torch.tensor([[4.0, 4, 20, 20], [8, 2, 30, 24]]).expand(4, 2, 4).clone()
SMALL_POSE = {"network": "vit-nano", "size": (32, 24), "norm": "group"}
OFFERED: dict[str, tuple[Callable[[], LearningTask], Batch]] = {
    "cnn": (lambda: Classification("cnn"), labelled(10, 3, 32, 32)),
    "niid": (lambda: Classification("niid"), labelled(10, 3, 32, 32)),
    "resnet8": (lambda: Classification("resnet8", norm="group"), labelled(10, 3, 32, 32)),
    "resnet18": (lambda: Classification("resnet18", norm="group"), labelled(10, 3, 32, 32)),
    "action": (lambda: ActionRecognition(5, dropout=0.0, **CLIP), labelled(5, 3, 4, 32, 32)),
    "speed": (lambda: Speed(**CLIP), labelled(2, 3, 4, 32, 32)),
    "vcop": (lambda: VCOP(**CLIP), labelled(6, 3, 3, 4, 32, 32)),
    "ctp": (
        lambda: CtP(patches=2, **CLIP),
        {"x": images(4, 3, 4, 32, 32), "boxes": BOXES, "y": images(4, 2, 4, 4)},
    ),
    "pose, transformer": (
        lambda: Pose(**SMALL_POSE),
        {"x": images(4, 3, 32, 24), "y": joints(4, (32, 24))},
    ),
    "pose, resnet": (
        lambda: Pose(network="resnet-18", stages=2, norm="group"),
        {"x": images(4, 3, 32, 32), "y": joints(4, (32, 32))},
    ),
    "vsr, light": (
        lambda: SuperResolution("light", options={"width": 8, "blocks": 1}),
        {"x": images(4, 3, 3, 8, 8), "y": images(4, 3, 3, 32, 32)},
    ),
    "vsr, bidirectional": (
        lambda: SuperResolution("bidirectional", options={"width": 8, "blocks": 1}),
        {"x": images(4, 3, 3, 8, 8), "y": images(4, 3, 3, 32, 32)},
    ),
}
ONE_BY_ONE = {"ctp"}  # its operator for regions knows no vmap


def trained(task: LearningTask) -> nn.Module:
    """Weights that are not those of the beginning, where a last layer may be zero; no dropout."""
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape))
    return model


@pytest.mark.parametrize("name", OFFERED)
def test_gradients_of_single_examples_are_exact(name: str) -> None:
    make, batch = OFFERED[name]
    task = make()
    model = trained(task)
    stack(FedAvg(task), DPSGD())  # it is offered

    def loss(part: Batch) -> Tensor:
        return task.loss(task.forward(model, part), part)

    single = ExampleGradients(model, loss)
    found, losses = single(batch)
    assert single.by_vmap == (name not in ONE_BY_ONE)
    for k in range(4):
        model.zero_grad()
        one = loss({key: v[k : k + 1] for key, v in batch.items()})
        one.backward()
        assert one.item() == pytest.approx(losses[k].item(), rel=1e-5)
        whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gap = {n: found[n][k] - g for n, g in whole.items()}
        assert all(not found[n][k].any() for n in found.keys() - whole.keys())
        assert tree.norm(gap) <= 1e-6 * max(1.0, tree.norm(whole)) and tree.norm(whole) > 0


# -- a step, by hand -------------------------------------------------------------------------------


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def test_a_step_clips_each_example_and_divides_by_the_expected_batch() -> None:
    """Loss -x.w, so g_i = -x_i: (3, 4) has norm 5 and becomes (.6, .8) C; (0, .5) stays. With
    C = 1 the sum is (.6, 1.3), over an expected batch of 4: -(.15, .325)."""
    model = Line()
    noisy = NoisySteps(1.0, 0.0, microbatch=1, rng=torch.Generator())
    step = noisy_gradients(model, lambda b: -(b["x"] * model.w).sum(1).mean(), noisy, 4)
    step({"x": torch.tensor([[3.0, 4.0], [0.0, 0.5]])})
    assert model.w.grad is not None
    assert model.w.grad.tolist() == pytest.approx([-0.15, -0.325])


def test_an_example_without_a_finite_gradient_leaves_no_trace() -> None:
    model = Line()
    noisy = NoisySteps(1.0, 0.0, rng=torch.Generator())
    step = noisy_gradients(model, lambda b: -(b["x"] * model.w).sum(1).mean(), noisy, 1)
    step({"x": torch.tensor([[0.0, 0.5], [float("nan"), 1.0], [float("inf"), 0.0]])})
    assert model.w.grad is not None and model.w.grad.tolist() == [0.0, -0.5]


def test_an_empty_batch_is_a_step_of_noise() -> None:
    model = Line()
    noisy = NoisySteps(2.0, 3.0, rng=torch.Generator().manual_seed(0))
    noisy_gradients(model, lambda b: b["x"].sum(), noisy, 2)({})
    expected = torch.randn(2, generator=torch.Generator().manual_seed(0)) * 6 / 2
    assert model.w.grad is not None and torch.equal(model.w.grad, expected)


@pytest.mark.parametrize("rng", [None, torch.Generator().manual_seed(0)], ids=["system", "seed"])
def test_noise_has_the_deviation_it_is_said_to_have(rng: torch.Generator | None) -> None:
    """Of 400,000: the mean within 6 and the variance within 6 standard errors, and half of them
    within .6745 deviations."""
    count, deviation = 400_000, 2.5
    x = draw_normal(count, deviation, rng).double() / deviation
    assert abs(float(x.mean())) < 6 / count**0.5
    assert abs(float(x.var()) - 1) < 6 * (2 / count) ** 0.5
    assert abs(float((x.abs() < 0.67449).double().mean()) - 0.5) < 3 / count**0.5
    assert abs(float((x[:-1] * x[1:]).mean())) < 6 / count**0.5
    assert len(draw_normal(3, 1.0, rng)) == 3


@pytest.mark.parametrize("rng", [None, torch.Generator().manual_seed(0)], ids=["system", "seed"])
def test_batches_are_drawn_example_by_example(rng: torch.Generator | None) -> None:
    """1000 of 50 with a chance of 1/5 each: binomial, not of one size, and nobody is preferred."""
    draws = [draw_chosen(50, 0.2, rng) for _ in range(1000)]
    sizes = torch.tensor([float(len(d)) for d in draws])
    assert abs(float(sizes.mean()) - 10) < 6 * (8 / 1000) ** 0.5
    assert 6 < float(sizes.var()) < 10.5
    seen = torch.bincount(torch.cat(draws), minlength=50)
    assert float(seen.min()) > 200 - 6 * 12.7 and float(seen.max()) < 200 + 6 * 12.7


def test_a_clients_round_is_poisson_batches_of_noisy_steps() -> None:
    """Of 23 examples with batches of 8: three steps, each example in a third of them."""
    data = make_data(23, torch.Generator().manual_seed(0))
    noisy = NoisySteps(1.0, 1.0, rng=torch.Generator().manual_seed(0))
    base = FedAvg(GroupToy(), batch=8)
    found = list(chosen(data, 8, base.steps_of(23), noisy, torch.Generator()))
    assert len(found) == 3
    mechanism = stack(base, DPSGD(noise=1.5)).mechanism(23, 7, 7)
    assert mechanism is not None
    assert (mechanism.rate, mechanism.steps, mechanism.noise) == (8 / 23, 3, 1.5)


# -- the layer -------------------------------------------------------------------------------------


def private(**fedavg: Any) -> FedAvg:
    return FedAvg(GroupToy(), batch=8, **fedavg)


def test_no_loss_leaves() -> None:
    engine = Loopback(algorithm := stack(private(), DPSGD()), toy_federation(3))
    from fedlens import run

    run(algorithm, engine, 1)
    _, *up = [Message.from_bytes(b) for b in engine.traffic]
    assert up and all(reply.scalars.keys() == {"examples"} for reply in up)


def test_by_hand_without_noise_worth_mentioning() -> None:
    """Target 1 at w = 0: gradient -1, clipped to .5; lr .1: w = .05. Every example is in every
    batch, for the batch is as large as the data."""
    base = fedavg(lr=0.1)
    game = Rounds(stack(base, DPSGD(noise=1e-9, clip=0.5)), federation(1.0))
    game.play()
    assert game.w == pytest.approx([0.05], abs=1e-6)


def test_at_a_real_site_noise_is_not_the_seeds() -> None:
    def once(real: bool) -> Tensor:
        algorithm = stack(private(), DPSGD())
        algorithm = algorithm.deployed() if real else algorithm
        from fedlens import run

        state = run(algorithm, Loopback(algorithm, toy_federation(2)), 1)
        return state.trees["model"]["head.weight"]

    assert torch.equal(once(False), once(False))
    assert not torch.equal(once(True), once(True))
    mechanism = stack(private(), DPSGD()).deployed().mechanism(20, 2, 2)
    assert mechanism is not None and not mechanism.seeded


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: stack(FedAvg(Toy()), DPSGD()), "BatchNorm1d.*use a network without"),
        (
            lambda: stack(FedAvg(Classification("resnet8")), DPSGD()),
            "BatchNorm2d.*set task.norm=group",
        ),
        (
            lambda: stack(FedAvg(ClipAgreement(**CLIP)), DPSGD()),
            "compares the examples of a batch",
        ),
        (lambda: stack(private(), FedProx(), DPSGD()), "FedProx pulls the weights"),
        (lambda: stack(private(), DPSGD(), FedProx()), "FedProx looks at a client's data"),
        (lambda: stack(private(), DPSGD(), Scaffold()), "Scaffold looks at"),
        (lambda: stack(private(), DPSGD(), LossAware()), "LossAware looks at"),
        (lambda: stack(private(), DPSGD(), FedRep()), "FedRep looks at"),
        (lambda: stack(private(mixed_precision=True), DPSGD()), "mixed_precision=false"),
        (lambda: stack(private(), PrivateMean(), DPSGD()), "each state an epsilon"),
    ],
)
def test_what_noise_cannot_cover_is_refused(build: Callable[[], Any], why: str) -> None:
    with pytest.raises(StackError, match=why):
        build()


def test_what_only_handles_updates_goes_with_it() -> None:
    stack(private(), DPSGD(), FedPer(), FedAvgM())
    stack(private(), DPSGD(), Median())
    light = SuperResolution("light", options={"width": 8, "blocks": 1})
    stack(FedAvg(light), HighFrequency(), DPSGD())
    frozen = FedAvg(Toy(), freeze=("backbone.*",))
    stack(frozen, DPSGD())


class Coupled(GroupToy):
    """A loss of one's own that looks at the whole batch, and says nothing about it."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        scores = output.prediction
        return nn.functional.cross_entropy(scores - scores.mean(0), batch["y"])


def test_a_loss_that_compares_examples_is_found_out() -> None:
    where = toy_federation(2)
    stack(FedAvg(GroupToy()), DPSGD()).rehearse(where)
    with pytest.raises(ValueError, match="the mean over single examples"):
        stack(FedAvg(Coupled()), DPSGD()).rehearse(where)
    assert isinstance(where, Federation)


class Remembering(GroupNet):
    """Keeps a moving mean of what it sees, as BatchNorm does, but is none. assigns: anew, not in
    place."""

    assigns = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def features(self, x: Tensor) -> Tensor:
        if self.training and self.assigns:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        elif self.training:
            self.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().features(x)


@pytest.mark.parametrize("assigns", [False, True])
def test_what_a_network_remembers_of_examples_does_not_leave(assigns: bool) -> None:
    class Own(GroupToy):
        def model(self) -> nn.Module:
            network = Remembering()
            network.assigns = assigns
            return network

    algorithm = stack(FedAvg(Own(), batch=8), DPSGD())
    from fedlens import run

    state = run(algorithm, Loopback(algorithm, toy_federation(2)), 1)
    assert not state.trees["model"]["seen"].any()
    assert not torch.equal(state.trees["model"]["head.weight"], Own().model().head.weight)


def test_at_a_real_site_nobody_knows_the_stream_of_augmentation() -> None:
    """With it, one example more in a batch would change what is drawn for all behind it."""

    class Listening(Tensors):
        def batch(self, index: Tensor, rng: torch.Generator | None = None) -> Batch:
            if rng is not None:
                drawn.append((float(torch.rand(1, generator=rng)), float(torch.rand(1))))
            return super().batch(index, rng)

    def once(algorithm: Any) -> list[tuple[float, float]]:
        drawn.clear()
        data = Listening(make_data(20, torch.Generator().manual_seed(0)).columns)
        worker = Worker(algorithm, Federation([data]), Memory())
        message = algorithm.broadcast(algorithm.init()).with_header(population=1, cohort=1)
        worker.begin(message, False)
        assert isinstance(worker.work([Job(0, 0, -1)])[0], Message)
        return list(drawn)

    drawn: list[tuple[float, float]] = []
    simulated = stack(private(), DPSGD())
    assert once(simulated) == once(simulated)
    real = [once(simulated.deployed()) for _ in range(2)]
    for one, other in zip(*real, strict=False):
        assert one[0] != other[0] and one[1] != other[1]


def test_data_that_counts_an_example_twice_is_refused() -> None:
    """As video windows do with data.repeat: one could be in a batch as often."""

    class Twice(Tensors):
        repeat = 2

        def __len__(self) -> int:
            return 2 * super().__len__()

        def batch(self, index: Tensor, rng: torch.Generator | None = None) -> Batch:
            return super().batch(index % super().__len__(), rng)

    where = Federation([Twice(make_data(9, torch.Generator().manual_seed(0)).columns)])
    algorithm = stack(private(), DPSGD())
    with pytest.raises(ValueError, match=r"counted 2 times .* set data\.repeat=1"):
        algorithm.rehearse(where)
    worker = Worker(algorithm, where, Memory())
    worker.begin(algorithm.broadcast(algorithm.init()).with_header(population=1, cohort=1), False)
    (outcome,) = worker.work([Job(0, 0, -1)])
    assert "counted 2 times" in outcome.reason  # type: ignore[union-attr]

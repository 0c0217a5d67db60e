"""The layer is tried on tasks that have nothing to do with pose: a map times a number,
segmentation, super-resolution, classification.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy import same_bits

from fedlens import Batch, Data, Federation, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.facts import Facts
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, MultiResolution, Scaffold


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Scaled(LearningTask):
    """The prediction is w times the input; a lower view is the mean of 2x2 pixels, which is easy to
    do by hand.
    """

    def model(self) -> nn.Module:
        return Times()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return (output.prediction - batch["y"]).square().mean()

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        return {}

    def lower(self, batch: Batch, size: tuple[int, int]) -> Batch:
        return {**batch, "x": F.adaptive_avg_pool2d(batch["x"], size)}


def layer(task: LearningTask, *layers: Any, **options: Any) -> MultiResolution:
    built = stack(FedAvg(task), *layers, MultiResolution(**options))
    assert isinstance(built, MultiResolution)
    return built


def test_distance_and_gradient_by_hand() -> None:
    """Rows (0, 0, 1, 1), w = 2. The lower view has rows (0, 1); bilinear doubling gives w (0, 1/4,
    3/4, 1). Against w (0, 0, 1, 1) the differences are w (0, 1/4, -1/4, 0), mean square w^2 / 32 =
    1/8. The gradient through the student alone is the mean of 2 u (w u - t) with u = (0, 1/4, 3/4,
    1): it is 2 (1/4 * 1/2 - 3/4 * 1/2) / 4 = -1/8. Without the stop it would be 2 w / 32 = +1/8."""
    x = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(1, 1, 4, 4)
    model = Times()
    raf = layer(Scaled(), sizes=((4, 4), (2, 2)))
    value = raf.distil(model, {"x": x}, Output(model(x)))
    assert value.item() == pytest.approx(1 / 8)
    value.backward()
    assert model.w.grad is not None
    assert model.w.grad.item() == pytest.approx(-1 / 8)
    assert layer(Scaled(), sizes=((2, 2),), alpha=0.5).distil(
        model, {"x": x}, Output(model(x))
    ).item() == pytest.approx(1 / 16)


def test_a_level_that_trains_nothing_is_said() -> None:
    facts = Facts(resolutions=((4, 4), (2, 2)))
    with pytest.raises(
        StackError, match=r"train nothing: none of its levels \(8x8, 4x4\) is below"
    ):
        layer(Scaled(), sizes=((8, 8), (4, 4))).given(facts)
    with pytest.warns(UserWarning, match=r"8x8 of its levels train nothing.* highest is 4x4"):
        layer(Scaled(), sizes=((8, 8), (4, 4), (2, 2))).given(facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(Scaled(), sizes=((4, 4), (2, 2))).given(facts)


def test_every_level_learns_from_the_one_above() -> None:
    """Three levels: the second distance is taken against the middle level, not against the native
    one; corners aligned, doubling (0, 1) gives (0, 1/3, 2/3, 1)."""
    rng = torch.Generator().manual_seed(0)
    x, model = torch.rand(2, 3, 8, 8, generator=rng), Times()
    raf = layer(Scaled(), sizes=((2, 2), (8, 8), (4, 4)))
    y = [2 * x, 2 * F.avg_pool2d(x, 2), 2 * F.avg_pool2d(x, 4)]

    def up(t: Tensor, n: int) -> Tensor:
        return F.interpolate(t, size=(n, n), mode="bilinear")

    expected = (up(y[1], 8) - y[0]).square().mean() + (up(y[2], 4) - y[1]).square().mean()
    assert raf.distil(model, {"x": x}, Output(model(x))).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    edge = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(1, 1, 4, 4)
    corners = layer(Scaled(), sizes=((2, 2),), corners=True).distil(
        model, {"x": edge}, Output(model(edge))
    )
    assert corners.item() == pytest.approx(4 * (2 / 9) / 4)


class Net(nn.Module):
    def __init__(self, out: int, up: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, out * up * up, 3, padding=1),
        )
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.body(x), self.up)


class Segmentation(LearningTask):
    """Which pixels are bright: a class map. Distillation compares probabilities, as the task
    says.
    """

    def model(self) -> nn.Module:
        return Net(2)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def distance(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (
            F.kl_div(prediction.log_softmax(1), target.softmax(1), reduction="none").sum(1).mean()
        )

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        batch = data.batch(torch.arange(len(data)))
        return {"accuracy": float((result(batch["x"]).argmax(1) == batch["y"]).float().mean())}


class SuperResolution(Segmentation):
    """Twice the size: the levels are those of the input, whatever size comes out."""

    def model(self) -> nn.Module:
        return Net(3, up=2)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.l1_loss(output.prediction, F.interpolate(batch["x"], scale_factor=2.0))

    def distance(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(prediction, target)


class Classification(Segmentation):
    def model(self) -> nn.Module:
        return nn.Sequential(Net(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"].float().mean((1, 2)).gt(0.5).long())

    def distance(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(prediction, target)


SIZES = ((16, 12), (12, 8), (8, 4))


def cameras(count: int = 3) -> Federation:
    """Clients with native resolutions high, middle, low, ..."""
    rng = torch.Generator().manual_seed(1)

    def data(n: int, size: tuple[int, int]) -> Tensors:
        x = F.interpolate(torch.rand(n, 3, 5, 4, generator=rng), size=size, mode="bilinear")
        return Tensors({"x": x, "y": (x.mean(1) > 0.5).long()})

    return Federation([data(8 + 2 * i, SIZES[i % 3]) for i in range(count)], test=data(10, (8, 4)))


@pytest.mark.parametrize(
    "task", [Segmentation(), SuperResolution(), Classification()], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize(
    "inner", [(), (FedProx(0.1),), (Scaffold(),)], ids=["FedAvg", "FedProx", "Scaffold"]
)
def test_any_task_any_stack_same_bits_on_engines(
    task: LearningTask, inner: tuple[Any, ...]
) -> None:
    federation = cameras()
    raf = stack(FedAvg(task, lr=0.1, batch=4), *inner, MultiResolution(sizes=SIZES))
    plain = stack(FedAvg(task, lr=0.1, batch=4), *inner)
    reference = run(raf, Loopback(raf, federation), 2)
    with Simulator(raf, federation, workers=2) as engine:
        assert same_bits(reference, run(raf, engine, 2))
    assert not same_bits(reference, run(plain, Loopback(plain, federation), 2))


def test_the_lowest_client_trains_plainly() -> None:
    whole = cameras()
    low = Federation([whole.holdings[2]])
    raf = stack(FedAvg(Segmentation()), MultiResolution(sizes=SIZES))
    plain = FedAvg(Segmentation())
    assert same_bits(run(raf, Loopback(raf, low), 2), run(plain, Loopback(plain, low), 2))


@pytest.mark.parametrize("statistics", ["all", "native"])
def test_statistics_follow_what_was_asked(statistics: Any) -> None:
    model = Net(2).train()
    batch = cameras().holdings[0].batch(torch.arange(8))
    raf = layer(Segmentation(), sizes=SIZES, statistics=statistics)
    output = Output(model(batch["x"]))
    before = {
        n: t.clone() for n, t in model.state_dict().items() if "running" in n or "tracked" in n
    }
    raf.distil(model, batch, output)
    after = model.state_dict()
    assert after["body.1.num_batches_tracked"] == (3 if statistics == "all" else 1)
    assert all(torch.equal(after[n], t) for n, t in before.items()) == (statistics == "native")


def test_gamma_pulls_and_is_not_loss() -> None:
    """One step of SGD from w = 2 on x = y = 0: the loss and its gradient are 0, the pull's is gamma
    w = 1, so w = 2 - 0.1 * 1.
    """
    blank = Federation([Tensors({"x": torch.zeros(4, 1, 2, 2), "y": torch.zeros(4, 1, 2, 2)})])
    raf = stack(FedAvg(Scaled(), lr=0.1), MultiResolution(sizes=((2, 2),), gamma=0.5))
    losses: list[Any] = []
    end = run(raf, Loopback(raf, blank), 1, after_round=lambda _, r: losses.append(r.loss))
    assert end.trees["model"]["w"].item() == pytest.approx(1.9)
    assert losses == [0.0]


def test_refusals() -> None:
    class Patched(Segmentation):
        multiple = 8

    with pytest.raises(StackError, match="needs the sizes"):
        layer(Segmentation())
    with pytest.raises(StackError, match="8x12 is not below 16x12 in both directions"):
        layer(Segmentation(), sizes=((16, 12), (8, 12)))
    with pytest.raises(
        StackError, match="16x12 does not fit the model, whose inputs are multiples of 8"
    ):
        layer(Patched(), sizes=((16, 12), (8, 8)))


def test_segmentation_stays_right_at_resolutions_nobody_holds() -> None:
    """All clients hold high resolution only (the paper's Figure 6, as segmentation). Distillation
    makes the lower answers follow the native ones: the distance between them is several times
    smaller than after plain training."""
    whole = cameras(4)
    high = Federation([whole.holdings[0], whole.holdings[3]])
    gaps = []
    for layers in ((), (MultiResolution(sizes=SIZES, alpha=5.0),)):
        algorithm = stack(FedAvg(Segmentation(), lr=0.3, batch=4, steps=8), *layers)
        model = algorithm.result(run(algorithm, Loopback(algorithm, high), 6))
        batch = high.holdings[0].batch(torch.arange(8))
        judge = layer(Segmentation(), sizes=SIZES)
        with torch.no_grad():
            gaps.append(judge.distil(model, batch, Output(model(batch["x"]))).item())
    assert gaps[1] < 0.7 * gaps[0], gaps

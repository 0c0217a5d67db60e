from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Toy, toy_federation

from fedlens import Batch, Federation, Layer, Message, Output, StackError, experiment, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.client import generator
from fedlens.core.task import LearningTask
from fedlens.core.weights import load_weights, read_weights
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.layers import Adapters, Ditto, FedPer, FedProx
from fedlens.runs.personal import run_of_client
from fedlens.tasks import Classification


class Matrix(LearningTask):
    """y = W x with W of 3 x 3, squared error."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, bias=False))

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 0.5 * (output.prediction - batch["y"]).square().sum(1).mean()

    def evaluate(self, result: nn.Module, data: object) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (3.0, 3.0)])
def test_one_step_is_a_projected_gradient(alpha: float | None, scale: float) -> None:
    """W = W0 + s u d with u = 0: dL/du = s G d^T and dL/dd = s u^T G = 0, where G = (W0 x - y) x^T.
    After one step of lr, W = W0 - lr s^2 G d^T d: the gradient as far as the row d reaches."""
    x, y = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.3, 0.2, -1.0]])
    layer = Adapters(rank=1, alpha=alpha, also=())
    algorithm = stack(FedAvg(Matrix(), lr=0.1, device="cpu"), layer)
    plain = FedAvg(Matrix(), lr=0.1, device="cpu").init().trees["model"]["0.weight"]
    start = algorithm.init()
    down = start.trees["model"]["0.parametrizations.weight.0.down"]
    federation = Federation([Tensors({"x": x, "y": y})])
    state = run(algorithm, Loopback(algorithm, federation), 1)
    gradient = (x @ plain.T - y).T @ x
    expected = plain - 0.1 * scale**2 * gradient @ down.T @ down
    saved = algorithm.as_saved(state).trees["model"]
    assert saved.keys() == {"0.weight"}
    assert torch.allclose(saved["0.weight"], expected, atol=1e-6)
    assert torch.equal(algorithm.as_saved(start).trees["model"]["0.weight"], plain)


def test_only_adapters_and_head_travel_and_the_rest_stays_to_the_bit() -> None:
    algorithm = stack(FedAvg(Toy(), batch=8, device="cpu"), Adapters(rank=2), FedProx(0.1))
    before = FedAvg(Toy(), batch=8, device="cpu").init().trees["model"]
    engine = Loopback(algorithm, toy_federation(3))
    state = run(algorithm, engine, 2)
    low = "backbone.0.parametrizations.weight.0"
    for message in map(Message.from_bytes, engine.traffic):
        sent = {n for k, tree in message.trees.items() if k != "fixed" for n in tree}
        assert sent == {f"{low}.down", f"{low}.up", "head.weight", "head.bias"}
    after = algorithm.as_saved(state).trees["model"]
    assert after.keys() == before.keys()
    moved = {n for n, t in after.items() if not torch.equal(t, before[n])}
    # BatchNorm is frozen, too: neither its weights nor its statistics move
    assert moved == {"backbone.0.weight", "head.weight", "head.bias"}


def test_a_site_with_other_frozen_weights_refuses() -> None:
    here, there = (
        stack(FedAvg(Toy(), batch=8, seed=seed, device="cpu"), Adapters(2)) for seed in (0, 1)
    )
    message = here.broadcast(here.init()).with_header(rounds=1)
    engine = Loopback(there, toy_federation(1))
    (lost,) = engine.exchange(message, [0], {})
    assert "the frozen weights here are not the server's" in lost.reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((FedProx(0.1), Adapters()), "put it right after FedAvg"),
        ((Adapters(), Ditto()), "Ditto needs the whole model"),
        ((Adapters(rank=500),), "no layer to adapt with rank 500"),
    ],
)
def test_stacks_that_cannot_work_are_refused(layers: tuple[Layer, ...], why: str) -> None:
    with pytest.raises(StackError, match=why):
        stack(FedAvg(Toy()), *layers).init()


def test_a_transformer_is_tuned_by_sending_a_twentieth_of_it() -> None:
    """5.5 million weights, 22 MB."""
    pytest.importorskip("timm")
    task = Classification(model="timm:vit_tiny_patch16_224", classes=6)
    algorithm = stack(FedAvg(task, device="cpu"), Adapters(rank=4))
    sent = algorithm.broadcast(algorithm.init()).count_bytes()
    whole = sum(p.numel() * 4 for p in task.model().parameters())
    assert whole > 2.1e7 and sent < whole / 20


def test_a_run_leaves_the_merged_network(tmp_path: Path) -> None:
    """It loads by its own names and gives what the run's result gives; private heads are not in it,
    and a client's own model has its own."""
    pytest.importorskip("timm")
    done = experiment(
        "demo",
        algorithm="FedAvg+Adapters+FedPer",
        out=tmp_path / "run",
        **{
            "task.model": "timm:test_vit", "task.size": 32, "data.size": 32, "data.images": 24,
            "data.test_images": 6, "data.holdout": 0.2, "federation.clients": 2,
            "federation.cohort": 2, "federation.rounds": 1, "federation.workers": 0,
        },
    )  # fmt: skip
    saved = read_weights(tmp_path / "run" / "model.safetensors")
    assert not any("parametrizations" in n or n.startswith("head.") for n in saved)
    task, algorithm = done.setup.task, done.setup.algorithm
    assert isinstance(task, Classification)
    with run_of_client(tmp_path / "run", 1) as folder:
        mine: Any = load_weights(task.model(), folder / "model.safetensors").eval()
    x = torch.rand(2, 3, 32, 32, generator=generator(0))
    with torch.no_grad():
        features = algorithm.result(done.state).features(x)
        assert torch.allclose(mine.features(x), features, atol=1e-5)


def test_classification_needs_no_head_to_be_adapted() -> None:
    """Layers by pattern: only the projections of attention, say, or one convolution."""
    task = Classification(model="niid", classes=3, size=20)
    algorithm = stack(FedAvg(task, device="cpu"), Adapters(rank=2, modules=("body.4",)), FedPer())
    assert algorithm.init().trees["model"].keys() == {
        "body.4.parametrizations.weight.0.down",
        "body.4.parametrizations.weight.0.up",
    }

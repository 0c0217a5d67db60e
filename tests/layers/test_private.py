from __future__ import annotations

import pytest
import torch
from by_hand import Rounds, federation
from torch import Tensor, nn
from toy import Toy, toy_federation

from fedlens import Batch, Message, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.engines.loopback import Loopback
from fedlens.layers import BackboneOnly, FedBN


class Sum(nn.Module):
    """Prediction w + b: w is the backbone, b the head, and both have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1, dtype=torch.float64))})
        self.head = nn.ParameterDict({"b": nn.Parameter(torch.zeros(1, dtype=torch.float64))})

    def forward(self, x: Tensor) -> Tensor:
        return (self.body["w"] + self.head["b"]).expand(len(x), 1)


class Halves(LearningTask):
    def model(self) -> nn.Module:
        return Sum()

    def forward(self, model: nn.Module, batch: Batch, adapt: object = None) -> Output:
        return Output(model(batch["x"]))

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 0.5 * (output.prediction - batch["y"]).square().sum(1).mean()

    def evaluate(self, result: nn.Module, data: object) -> dict[str, float]:
        return {"sum": float(result.body["w"] + result.head["b"])}  # type: ignore[index]


def test_two_rounds_by_hand() -> None:
    """Targets 1 and 3, lr 0.1, one step. Round 1: gradients -1 and -3: w becomes 0.1 and 0.3, mean
    0.2; heads stay at home: 0.1 and 0.3. Round 2: predictions 0.3 and 0.5, gradients -0.7 and -2.5:
    w becomes 0.27 and 0.45, mean 0.36; heads 0.17 and 0.55."""
    game = Rounds(
        stack(FedAvg(Halves(), lr=0.1, device="cpu"), BackboneOnly("body")), federation(1.0, 3.0)
    )
    game.play()
    assert game.state.trees["model"]["body.w"].tolist() == pytest.approx([0.2])
    game.play()
    assert game.state.trees["model"].keys() == {"body.w"}
    assert game.state.trees["model"]["body.w"].tolist() == pytest.approx([0.36])
    memory = game.engine.worker.memory
    assert [memory.load(i).settle(1)["private"]["head.b"].item() for i in (0, 1)] == pytest.approx(
        [0.17, 0.55]
    )


def test_a_client_is_evaluated_with_its_own_head() -> None:
    """After round 1 above: 0.2 + 0.1 and 0.2 + 0.3. Mean 0.4, spread 0.1, worst 0.3."""
    fed = federation(1.0, 3.0)
    fed = type(fed)(fed.holdings, fed.holdings)
    algorithm = stack(FedAvg(Halves(), lr=0.1, device="cpu"), BackboneOnly("body"))
    seen: dict[str, float] = {}
    run(
        algorithm,
        Loopback(algorithm, fed),
        1,
        evaluate_every=1,
        personal=True,
        after_round=lambda p, r: seen.update(r.metrics),
    )
    assert seen == pytest.approx(
        {"client_sum": 0.4, "client_sum_spread": 0.1, "client_sum_worst": 0.3}
    )


def test_fedbn_keeps_batchnorm_and_nothing_else_at_home() -> None:
    algorithm = stack(FedAvg(Toy(), batch=8), FedBN())
    engine = Loopback(algorithm, toy_federation(3))
    run(algorithm, engine, 1)
    names = {n for m in engine.traffic for t in Message.from_bytes(m).trees.values() for n in t}
    assert names == {"backbone.0.weight", "backbone.0.bias", "head.weight", "head.bias"}
    own = engine.worker.memory.load(0).settle(0)["private"]
    assert own.keys() == {
        f"backbone.1.{n}"
        for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert (
        int(own["backbone.1.num_batches_tracked"]) == 3
        and own["backbone.1.num_batches_tracked"].dtype == torch.int64
    )


def test_nothing_or_everything_private_is_refused() -> None:
    with pytest.raises(
        StackError,
        match=(
            r"everything private: the model consists of backbone, head; say"
            r" .*BackboneOnly.backbone=backbone"
        ),
    ):
        stack(FedAvg(Toy()), BackboneOnly("trunk")).init()
    with pytest.raises(StackError, match="would keep nothing private"):
        stack(FedAvg(Halves()), FedBN()).init()

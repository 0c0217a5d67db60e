from __future__ import annotations

import pytest
import torch
from by_hand import Rounds, federation
from torch import Tensor, nn
from toy import Toy, toy_federation

from fedlens import Batch, Layer, Message, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.engines.loopback import Loopback
from fedlens.layers import BackboneOnly, FedBN, FedPer, FedRep, LGFedAvg


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


@pytest.mark.parametrize(
    ("layer", "travels", "stays"),
    [(FedPer(), "body.w", "head.b"), (LGFedAvg(), "head.b", "body.w")],
)
def test_fedper_and_lg_fedavg_by_hand(layer: Layer, travels: str, stays: str) -> None:
    """The numbers above; in this problem w and b play the same part, so LG-FedAvg has them with w
    and b exchanged.
    """
    game = Rounds(stack(FedAvg(Halves(), lr=0.1, device="cpu"), layer), federation(1.0, 3.0))
    game.play()
    game.play()
    assert game.state.trees["model"].keys() == {travels}
    assert game.state.trees["model"][travels].tolist() == pytest.approx([0.36])
    memory = game.engine.worker.memory
    assert [memory.load(i).settle(1)["private"][stays].item() for i in (0, 1)] == pytest.approx(
        [0.17, 0.55]
    )


def test_fedrep_by_hand() -> None:
    """Targets 1 and 3, lr 0.1. Round 1: heads first, 0.1 and 0.3; then, at predictions 0.1 and 0.3,
    w moves by 0.09 and 0.27: mean 0.18. Round 2: predictions 0.28 and 0.48, heads 0.172 and 0.552;
    predictions 0.352 and 0.732, w moves by 0.0648 and 0.2268: mean 0.3258."""
    game = Rounds(stack(FedAvg(Halves(), lr=0.1, device="cpu"), FedRep()), federation(1.0, 3.0))
    game.play()
    assert game.state.trees["model"]["body.w"].tolist() == pytest.approx([0.18])
    game.play()
    assert game.state.trees["model"]["body.w"].tolist() == pytest.approx([0.3258])
    memory = game.engine.worker.memory
    assert [memory.load(i).settle(1)["private"]["head.b"].item() for i in (0, 1)] == pytest.approx(
        [0.172, 0.552]
    )


def test_fedrep_gives_the_head_more_time() -> None:
    """Twice: 0.1, then at a gap of 0.9 another 0.09: 0.19. The body moves by 0.081."""
    game = Rounds(stack(FedAvg(Halves(), lr=0.1, device="cpu"), FedRep(times=2)), federation(1.0))
    game.play()
    assert game.state.trees["model"]["body.w"].tolist() == pytest.approx([0.081])
    own = game.engine.worker.memory.load(0).settle(0)["private"]["head.b"]
    assert own.item() == pytest.approx(0.19)


def test_the_result_has_the_head_that_everybody_began_with() -> None:
    """Not what the last client happened to leave in the network of this process."""
    algorithm = stack(FedAvg(Toy(), batch=8, device="cpu"), FedPer())
    start = FedAvg(Toy(), batch=8, device="cpu").init().trees["model"]
    state = run(algorithm, Loopback(algorithm, toy_federation(3)), 1)
    found = algorithm.result(state).state_dict()
    assert torch.equal(found["head.weight"], start["head.weight"])
    assert torch.equal(found["backbone.0.weight"], state.trees["model"]["backbone.0.weight"])


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
    with pytest.raises(StackError, match=r"say which one stays, such as FedPer.own=head\.\*$"):
        stack(FedAvg(Toy()), FedPer(own=("tail.*",))).init()
    with pytest.raises(StackError, match="would keep nothing private"):
        stack(FedAvg(Halves()), FedBN()).init()

from __future__ import annotations

import pytest
import torch
from by_hand import Rounds, federation
from torch import Tensor, nn
from toy import Toy

from fedlens import Batch, Output, StackError, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.layers import BackboneOnly, Distances, FedBN, FedU


class Sum(nn.Module):
    """Prediction w + b: w is the backbone, as a 1 x 1 matrix, b the head; both have the same
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))})
        self.head = nn.ParameterDict({"b": nn.Parameter(torch.zeros(1, dtype=torch.float64))})


class Halves(LearningTask):
    def model(self) -> nn.Module:
        return Sum()

    def forward(self, model: nn.Module, batch: Batch, adapt: object = None) -> Output:
        return Output((model.body["w"][0] + model.head["b"]).expand(len(batch["x"]), 1))  # type: ignore[index]

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 0.5 * (output.prediction - batch["y"]).square().sum(1).mean()

    def evaluate(self, result: nn.Module, data: object) -> dict[str, float]:
        return {}


def play(mu: float) -> Rounds:
    game = Rounds(
        stack(FedAvg(Halves(), lr=0.1, device="cpu"), FedU(mu=mu, backbone="body")),
        federation(1.0, 3.0),
    )
    game.play()
    game.play()
    return game


def test_those_that_drifted_keep_their_head_by_hand() -> None:
    """Targets 1 and 3, lr .1, one step, prediction w + b. Round 1: w and b move by .1 and .3: means
    .2, distances .1 and .3. With mu = .2 client 0 takes the global head .2, client 1 keeps .3.
    Round 2: predictions .4 and .5, steps .06 and .25. w: .26 and .45, mean .355. Heads: .26 and
    .55, mean .405."""
    model = play(0.2).state.trees["model"]
    assert float(model["body.w"]) == pytest.approx(0.355)
    assert float(model["head.b"]) == pytest.approx(0.405)


def test_with_a_large_mu_it_is_fedavg() -> None:
    """Round 2: both predict .4; steps .06 and .26; means .2 + .16 for both."""
    model = play(10.0).state.trees["model"]
    assert (float(model["body.w"]), float(model["head.b"])) == pytest.approx((0.36, 0.36))


def test_the_distance_is_a_mean_over_convolutions() -> None:
    """Two convolutions moved by 3 and 5, a bias by 100, a head by 7: 4."""
    delta = {
        "backbone.a": torch.full((1, 1, 3, 3), 1.0),
        "backbone.b": torch.tensor([[[3.0, 4.0]]]),
        "backbone.bias": torch.tensor([100.0]),
        "head.a": torch.full((1, 1, 1), 7.0),
    }
    assert FedU().distance(delta) == pytest.approx(4.0)


def test_it_is_refused_where_heads_stay_at_home() -> None:
    with pytest.raises(StackError, match="with BackboneOnly there is no global one"):
        stack(FedAvg(Toy()), BackboneOnly(), FedU())
    with pytest.raises(StackError, match="BackboneOnly and FedU both decide what stays"):
        stack(FedAvg(Toy()), FedU(), BackboneOnly())
    with pytest.raises(StackError, match="FedBN and BackboneOnly both decide"):
        stack(FedAvg(Toy()), BackboneOnly(), FedBN())
    with pytest.raises(StackError, match="the model consists of backbone, head"):
        stack(FedAvg(Toy()), FedU(backbone="trunk")).init()


def test_distances_by_hand() -> None:
    """Round 1 of the game above: backbones and heads move by .1 and .3: mean .2, spread .1; behind
    BackboneOnly the head is still seen.
    """
    game = Rounds(
        stack(FedAvg(Halves(), lr=0.1, device="cpu"), Distances("body"), BackboneOnly("body")),
        federation(1.0, 3.0),
    )
    game.play()
    noted = {k: v for k, v in game.state.scalars.items() if k.startswith("distance")}
    assert noted == pytest.approx(
        {
            "distance_backbone": 0.2,
            "distance_backbone_spread": 0.1,
            "distance_head": 0.2,
            "distance_head_spread": 0.1,
        }
    )
    with pytest.raises(StackError, match="right after the base"):
        stack(FedAvg(Toy()), BackboneOnly(), Distances())

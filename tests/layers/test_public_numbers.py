"""Rivals held to their public code: its own functions were run on the problem of `two_classes.py`
(three full-batch steps of 0.1, weight decay 0.01), and what they printed stands here.

SCAFFOLD and FedProx: Xtra-Computing/NIID-Bench. FedDyn: alpemreacar/FedDyn. MOON: QinbinLi/MOON.
FedGen: zhuangdizhu/FedGen. FedU: EasyFL. FedCDA has no official code: a third party's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import Rounds
from torch import nn
from two_classes import ONE, TWO, two_classes

from fedlens import Message, stack
from fedlens.core.client import Client, Output, generator
from fedlens.core.facts import Facts
from fedlens.layers import FedCDA, FedDyn, FedGen, FedProx, FedU, Moon, Scaffold
from fedlens.layers.fedcda import choose_models
from fedlens.layers.fedgen import diversity, ensemble_loss


def close(found: torch.Tensor, expected: list[float], within: float = 2e-6) -> None:
    assert found.flatten().tolist() == pytest.approx(expected, abs=within)


def test_scaffold() -> None:
    """Momentum 0.9, controls at zero; both clients, client 1 alone, both again. The weights after
    each round, and the server's control after the last.
    """
    game = Rounds(stack(two_classes(momentum=0.9), Scaffold()), TWO)
    weights = [
        [0.12730211, -0.24991314, 0.27045584, 0.05103418],
        [0.15654485, -0.30504912, 0.23898356, 0.10728493],
        [0.19266099, -0.33947191, 0.20064914, 0.14281686],
    ]
    for asked, expected in zip(((0, 1), (1,), (0, 1)), weights, strict=True):
        state = game.play(*asked)
        close(state.trees["model"]["weight"], expected)
    close(state.trees["model"]["bias"], [-0.01967667, 0.1180042])
    control = [-0.12110458, 0.10147323, 0.12849464, -0.1051682]
    close(state.trees["control"]["weight"], control, 1e-5)


def test_fedprox() -> None:
    """mu 0.5, momentum 0.9, two rounds of both clients."""
    game = Rounds(stack(two_classes(momentum=0.9), FedProx(0.5)), TWO)
    close(game.play().trees["model"]["weight"], [0.12622906, -0.2477047, 0.27162385, 0.04877826])
    state = game.play()
    close(state.trees["model"]["weight"], [0.14579169, -0.2844291, 0.24992561, 0.08657046])
    close(state.trees["model"]["bias"], [-0.01535424, 0.11428356])


@pytest.mark.parametrize(
    ("by_size", "cloud", "heard"),
    [
        (
            True,
            [
                [0.1586075, -0.255348, 0.2391176, 0.0564855],
                [0.1017187, -0.2996503, 0.2933609, 0.1021105],
                [0.1609161, -0.3476868, 0.2307323, 0.1518626],
            ],
            [0.131031, -0.3070602, 0.2631531, 0.1099681],
        ),
        (
            False,
            [
                [0.1604643, -0.2557822, 0.237256, 0.056922],
                [0.1059278, -0.2999081, 0.2891963, 0.102346],
                [0.1719465, -0.3492789, 0.2197635, 0.1534238],
            ],
            [0.1379492, -0.3079422, 0.2562805, 0.1108272],
        ),
    ],
)
def test_feddyn(by_size: bool, cloud: list[list[float]], heard: list[float]) -> None:
    """alpha 0.5, clip 10; both clients, client 1 alone, both again: "cloud" after each, and "sel"
    after the last. By size the clients' alphas are 0.625 and 0.41667 (5 / 4 and 5 / 6 of it).
    """
    layer = FedDyn(0.5, by_size=by_size, report="heard")
    algorithm = stack(two_classes(clip=10.0), layer).given(TWO.facts)
    game = Rounds(algorithm, TWO)
    for asked, expected in zip(((0, 1), (1,), (0, 1)), cloud, strict=True):
        state = game.play(*asked)
        close(state.trees["model"]["weight"], expected)
    close(algorithm.result(state).weight.detach(), heard)
    tested = algorithm.evaluate(algorithm.broadcast(state), ONE, {})
    scores = algorithm.result(state)(ONE.columns["x"]).detach()
    loss = nn.functional.cross_entropy(scores, ONE.columns["y"])
    assert tested["loss"] == pytest.approx(float(loss))


def test_feddyn_learns_the_mean_size_where_nothing_is_known() -> None:
    """Without facts round 1 has one alpha for all; then the mean of those heard, 5, goes down."""
    algorithm = stack(two_classes(clip=10.0), FedDyn(0.5, by_size=True)).given(Facts())
    game = Rounds(algorithm, TWO)
    state = game.play()
    close(state.trees["model"]["weight"], [0.1604643, -0.2557822, 0.237256, 0.056922])
    assert algorithm.broadcast(state).scalars["mean_size"] == 5.0
    assert "h" not in algorithm.broadcast(state).trees


def test_moon() -> None:
    """mu 2, tau 0.5, momentum 0.9, three rounds of both clients; features are what its public code
    calls the projection, on which its classifier sits. In the first round there is no previous
    model.
    """
    game = Rounds(stack(two_classes(body=True, momentum=0.9), Moon(2.0, 0.5)), TWO)
    bodies = [
        [0.4903975, -0.2916995, 0.1923482, 0.4082857],
        [0.4872199, -0.2818072, 0.1883639, 0.4150514],
        [0.4840717, -0.2779193, 0.1757992, 0.4247469],
    ]
    for expected in bodies:
        state = game.play()
        close(state.trees["model"]["body.weight"], expected)
    close(state.trees["model"]["head.weight"], [0.176962, -0.2657219, 0.2163495, 0.0690661])
    close(state.trees["model"]["head.bias"], [-0.0670231, 0.1653509])


class Fixed(nn.Module):
    """Of FedGen: a generator that answers with one feature vector a class."""

    def forward(self, y: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.6, -0.2], [-0.5, 0.7]])[y]


def test_fedgen_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 in round 3 with alpha = beta = 10 and drawn labels 1, 0, 0, 1: prediction 0.7371007,
    KL to the generator's answers 0.0005488, drawn labels 0.7063935; in all 7.3907843.
    """
    algorithm = stack(two_classes(body=True), FedGen())
    layer: Any = algorithm
    monkeypatch.setattr(layer, "_network", lambda weights=None: Fixed())
    drawn = torch.tensor([1, 0, 0, 1])
    monkeypatch.setattr(torch, "multinomial", lambda *a, **k: drawn)
    client = Client(0, ONE, generator(0), {})
    message = Message({"generator": {}}).with_header(round=3)
    model: Any = layer.fedavg.resident
    features = model.features(ONE.columns["x"])
    output = Output(model.head(features), features)
    term = layer._term(message, client, torch.ones(2))(model, dict(ONE.columns), output)
    plain = nn.functional.cross_entropy(output.prediction, ONE.columns["y"])
    assert float(plain.detach()) == pytest.approx(0.7371007)
    assert float((plain + term).detach()) == pytest.approx(7.3907843, rel=1e-5)


def test_fedgen_server() -> None:
    """Diversity as `DiversityLoss("l1")`; the teachers' loss as `train_generator` means it, every
    weight with its own sample (as it is written there all get the mean weight: 0.6698927).
    """
    noise = torch.tensor([[0.0, 1], [2, 0], [1, 1]])
    z = torch.tensor([[1.0, 0, 2], [0, 0, 1], [3, 1, 0]])
    assert float(diversity(noise, z)) == pytest.approx(0.3961644)
    weights = torch.tensor(
        [[[0.1, -0.2, 0.3], [0.4, 0, 0.2]], [[-0.1, 0.5, 0.2], [0.3, -0.4, 0.1]]]
    )
    biases = torch.tensor([[0.0, 0.1], [0.2, 0.0]])
    shares = torch.tensor([[3 / 4, 2 / 8], [1 / 4, 6 / 8]])
    found = ensemble_loss(z, torch.tensor([0, 1, 1]), weights, biases, shares)
    assert float(found) == pytest.approx(0.7116874, rel=1e-5)


def test_fedu() -> None:
    """`calculate_model_distance` between zeros and a first convolution of 0, .1, ... .7, a second
    of .3 and .4; a linear layer, a normalisation and biases do not count.
    """
    delta = {
        "backbone.conv1.weight": torch.arange(8.0).view(2, 1, 2, 2) / 10,
        "backbone.conv1.bias": torch.full((2,), 5.0),
        "backbone.bn.weight": torch.ones(2),
        "backbone.conv2.weight": torch.tensor([0.3, 0.4]).view(1, 2, 1, 1),
        "backbone.fc.weight": torch.full((1, 1), 7.0),
        "head.weight": torch.ones(3, 3, 3, 3),
    }
    assert FedU().distance(delta) == pytest.approx(0.841608, rel=1e-5)


@pytest.mark.parametrize(
    ("smoothness", "best"), [(None, [1, 1, 2]), (1.0, [1, 1, 2]), (0.1, [2, 0, 1])]
)
def test_fedcda(smoothness: float | None, best: list[int]) -> None:
    """Three clients with three, two and three models in the plane and their losses; the third
    party's `_objective`, all 18 combinations tried.
    """
    models = [[[0, 0], [1, 2], [3, 1]], [[4, 4], [1, 1]], [[2, -1], [0, 3], [1.5, 1.5]]]
    losses = [[0.9, 0.5, 0.1], [0.2, 0.8], [0.3, 0.3, 0.6]]
    options = [[torch.tensor(m, dtype=torch.float64) for m in pool] for pool in models]
    by = 2 / smoothness if smoothness else 0.0
    extra = [[by * v for v in row] for row in losses]
    found = choose_models(options, [1 / 3] * 3, torch.zeros(2).double(), 3, 4096, extra)
    assert found == best


def test_fedcda_with_losses_plays_rounds() -> None:
    """A tiny L makes the losses decide: each client's model with the smallest reported loss, which
    need not be the newest; without them those that agree.
    """
    chosen = {}
    for smoothness in (None, 1e-6):
        game = Rounds(stack(two_classes(), FedCDA(smoothness=smoothness)), TWO)
        for _ in range(3):
            state = game.play()
        losses = state.trees["cda_loss"]
        chosen[smoothness] = [int(state.scalars[f"cda:{i}"]) for i in (0, 1)]
    assert chosen[1e-6] == [int(losses[str(i)].argmin()) for i in (0, 1)]
    assert len(losses["0"]) == 3 and len(set(losses["0"].tolist())) == 3
    assert chosen[None] != chosen[1e-6]

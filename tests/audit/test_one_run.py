"""An attack with a lower bound (Steinke, Nasr and Jagielski, 2023): one run, many planted examples,
each of them in the data by the toss of a coin. Guessing which were used better than epsilon allows
would show that the noise is less than it is said to be; here it is also done to noise that is.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from by_hand import Rounds
from torch import Tensor, nn

from fedlens import Batch, Federation, Output, stack
from fedlens.algorithms import FedAvg
from fedlens.core.privacy import Mechanism
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.layers import DPSGD

PLANTED, GUESSED, DELTA, SURE = 1000, 200, 1e-6, 0.95


class Directions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(PLANTED))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Worst(LearningTask):
    """Every example pulls in a direction of its own, as far as the clip lets it."""

    def model(self) -> nn.Module:
        return Directions()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return -output.prediction.mean()

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        return {"w": 0.0}


def guesses_right(noise: float, batch: int, steps: int) -> int:
    """Of the examples whose directions moved most and least, how many are guessed right."""
    rng = torch.Generator().manual_seed(3)
    used = torch.rand(PLANTED, generator=rng) < 0.5
    data = Tensors({"x": torch.eye(PLANTED)[used]})
    base = FedAvg(Worst(), lr=1.0, batch=batch, steps=steps, device="cpu")
    game = Rounds(stack(base, DPSGD(noise=noise, clip=1.0)), Federation([data]), seed=5)
    game.play()
    order = torch.tensor(game.w).argsort()
    low, high = order[: GUESSED // 2], order[-GUESSED // 2 :]
    return int(used[high].sum() + (~used[low]).sum())


def lower_bound(right: int) -> float:
    """The largest epsilon that so many right guesses speak against, with confidence SURE: under
    epsilon they are at most binomial with e^eps / (1 + e^eps), but for a chance of 2 m delta."""
    unlikely = 1 - SURE - 2 * PLANTED * DELTA
    low, high = 0.0, 20.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        chance = 1 / (1 + math.exp(-middle))
        tail = sum(
            math.exp(
                math.lgamma(GUESSED + 1)
                - math.lgamma(k + 1)
                - math.lgamma(GUESSED - k + 1)
                + k * math.log(chance)
                + (GUESSED - k) * math.log1p(-chance)
            )
            for k in range(right, GUESSED + 1)
        )
        low, high = (middle, high) if tail <= unlikely else (low, middle)
    return low


def gaussian_epsilon(noise: float, steps: int) -> float:
    """Exact (Balle and Wang, 2018), of sums that everybody is in."""
    phi, one = NormalDist().cdf, noise / math.sqrt(steps)
    low, high = 0.0, 50.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        a, b = 1 / (2 * one), middle * one
        found = phi(a - b) - math.exp(middle) * phi(-a - b)
        low, high = (middle, high) if found > DELTA else (low, middle)
    return high


def test_the_bound_is_below_epsilon_and_not_far_below() -> None:
    epsilon = gaussian_epsilon(noise=4.0, steps=9)
    bound = lower_bound(guesses_right(noise=4.0, batch=PLANTED, steps=9))
    assert 0.25 < bound < epsilon


def test_a_third_of_the_noise_is_found_out() -> None:
    """The same claim with a third of the noise that it needs."""
    epsilon = gaussian_epsilon(noise=8.0, steps=9)
    bound = lower_bound(guesses_right(noise=8.0 / 3, batch=PLANTED, steps=9))
    assert bound > epsilon * 0.8
    assert lower_bound(guesses_right(noise=0.5, batch=PLANTED, steps=9)) > epsilon


def test_with_batches_by_chance() -> None:
    pytest.importorskip("dp_accounting")
    from fedlens.trust.accounting import epsilon_of

    batch, steps, noise = 100, 50, 1.0
    cost = Mechanism("example", noise, batch / (PLANTED / 2), "poisson", steps, DELTA)
    bound = lower_bound(guesses_right(noise, batch, steps))
    assert bound < epsilon_of([(cost, 1)], DELTA)

from __future__ import annotations

import pytest
import torch

from fedlens.core.client import generator
from fedlens.runs.landscape import filter_normalised, loss_line, loss_plane, perturbed


def test_every_filter_of_a_direction_is_as_long_as_the_weights() -> None:
    weights = {"conv": torch.randn(4, 2, 3, 3, generator=generator(1)), "bias": torch.ones(4)}
    found = filter_normalised(weights, generator(0))
    assert torch.allclose(
        found["conv"].flatten(1).norm(dim=1), weights["conv"].flatten(1).norm(dim=1), rtol=1e-5
    )
    assert not found["bias"].any()


def test_a_line_and_a_plane_through_a_parabola() -> None:
    """loss = w0^2 + 3 w1^2 around (1, 0), along (1, 0) and (0, 2): (1 + a)^2 + 12 b^2."""

    def loss(w: object) -> float:
        t = w["w"]  # type: ignore[index]
        return float(t[0, 0] ** 2 + 3 * t[0, 1] ** 2)

    weights = {"w": torch.tensor([[1.0, 0.0]])}
    one, two = {"w": torch.tensor([[1.0, 0.0]])}, {"w": torch.tensor([[0.0, 2.0]])}
    assert loss_line(loss, weights, one, [-1, 0, 1]) == [0, 1, 4]
    assert loss_plane(loss, weights, one, two, [-1, 0, 1]).tolist() == [
        [12, 13, 16],
        [0, 1, 4],
        [12, 13, 16],
    ]


def test_a_perturbation_has_the_strength_it_says() -> None:
    found = perturbed({"w": torch.full((100, 1000), 7.0)}, 0.3, generator(0))["w"] - 7
    assert float(found.std()) == pytest.approx(0.3, rel=0.01) and abs(float(found.mean())) < 0.005

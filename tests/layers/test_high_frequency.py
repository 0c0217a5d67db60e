from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toy import Toy

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import stack
from fedlens.layers import HighFrequency, LossAware
from fedlens.layers.high_frequency import BANDS, haar_details, high_frequency_loss


def reference(clip: torch.Tensor) -> dict[str, np.ndarray]:
    """PyWavelets over time, height and width of (B, T, C, H, W); a = low, d = high."""
    pywt = pytest.importorskip("pywt")
    found = pywt.dwtn(clip.numpy(), "haar", mode="symmetric", axes=(1, 3, 4))
    return {name: found[name.replace("L", "a").replace("H", "d")] for name in BANDS}


@pytest.mark.parametrize("shape", [(2, 4, 3, 6, 8), (1, 5, 3, 7, 9), (1, 1, 1, 4, 5)])
def test_bands_equal_pywavelets_also_for_odd_sizes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bands = haar_details(x)
    assert list(bands) == list(BANDS)
    for name, theirs in reference(x).items():
        np.testing.assert_allclose(bands[name].numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 4, 3, 6, 8), (1, 3, 2, 5, 7), (3, 2, 3, 600, 500)])
def test_loss_equals_charbonnier_of_pywavelets_bands(shape: tuple[int, ...]) -> None:
    """The last shape is more than one piece."""
    rng = torch.Generator().manual_seed(1)
    a, b = (torch.rand(shape, generator=rng) for _ in range(2))
    gaps = [
        x - y
        for x, y in zip(reference(a.double()).values(), reference(b.double()).values(), strict=True)
    ]
    expected = np.sqrt(np.concatenate([g.ravel() for g in gaps]) ** 2 + 1e-9).mean()
    assert float(high_frequency_loss(a, b)) == pytest.approx(expected, rel=2e-6)


def test_loss_of_a_corner_by_hand() -> None:
    """One sample of a 2x2x2 block differs by 1: each of the seven bands has one coefficient,
    +-(1/sqrt 2)^3 = 0.353553. The mean of sqrt(0.125 + eps) over the seven is 0.353553."""
    a = torch.zeros(1, 2, 1, 2, 2, dtype=torch.float64)
    b = a.clone()
    b[0, 0, 0, 0, 0] = 1
    assert float(high_frequency_loss(a, b)) == pytest.approx(math.sqrt(0.125 + 1e-9), rel=1e-12)


def test_brightness_costs_nothing() -> None:
    """A constant difference is all in LLL: what is left is sqrt(eps) everywhere."""
    a = torch.rand(1, 4, 3, 8, 8, dtype=torch.float64)
    assert float(high_frequency_loss(a, a + 0.25)) == pytest.approx(math.sqrt(1e-9), rel=1e-4)


@pytest.mark.parametrize("shape", [(1, 2, 1, 4, 4), (2, 3, 1, 3, 2)])
def test_gradient(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    a = torch.randn(shape, dtype=torch.float64, generator=rng, requires_grad=True)
    b = torch.randn(shape, dtype=torch.float64, generator=rng, requires_grad=True)
    assert torch.autograd.gradcheck(high_frequency_loss, (a, b))


def test_gradient_equals_autograd_through_the_bands() -> None:
    rng = torch.Generator().manual_seed(3)
    a = torch.rand(2, 5, 3, 12, 10, generator=rng, dtype=torch.float64, requires_grad=True)
    b = torch.rand(2, 5, 3, 12, 10, generator=rng, dtype=torch.float64)
    (ours,) = torch.autograd.grad(high_frequency_loss(a, b), a)
    plain = torch.cat(
        [
            (x - y).flatten()
            for x, y in zip(haar_details(a).values(), haar_details(b).values(), strict=True)
        ]
    )
    (theirs,) = torch.autograd.grad((plain.square() + 1e-9).sqrt().mean(), a)
    torch.testing.assert_close(ours, theirs)


def test_ptwt_agrees() -> None:
    ptwt = pytest.importorskip("ptwt")
    x = torch.rand(1, 4, 1, 8, 8, dtype=torch.float64)
    theirs = ptwt.wavedec3(x[:, :, 0], "haar", level=1, mode="zero")[1]
    ours = haar_details(x)
    for name in BANDS:
        torch.testing.assert_close(
            ours[name][:, :, 0], theirs[name.replace("L", "a").replace("H", "d").lower()]
        )


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        high_frequency_loss(torch.zeros(1, 2, 3, 4, 4), torch.zeros(1, 2, 3, 4, 6))
    with pytest.raises(ValueError, match="dimensions"):
        high_frequency_loss(torch.zeros(3, 4, 4), torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match="eps is 0, but it must be above 0"):
        HighFrequency(eps=0)


def test_stacks_on_what_trains_and_half_precision_is_raised() -> None:
    parts = [type(p).__name__ for p in stack(FedAvg(Toy()), HighFrequency(), LossAware()).parts()]
    assert parts == ["FedAvg", "HighFrequency", "LossAware"]
    a = torch.rand(1, 2, 3, 4, 4)
    assert high_frequency_loss(a.bfloat16(), a.bfloat16() * 0).dtype == torch.float32

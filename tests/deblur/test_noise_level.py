"""How noisy a photo is, from the photo alone."""

from __future__ import annotations

import pytest
import torch

from fedlens.data.images.reading import shipped
from fedlens.deblur.blur import gaussian
from fedlens.deblur.noise_level import ROUNDING, is_clipped, noise_level
from fedlens.deblur.spectrum import circular_blur


@pytest.mark.parametrize("noise", [1.0, 2.0, 5.0])
def test_the_noise_of_a_blurred_photo_is_found(noise: float) -> None:
    """Rounded to whole grey levels, of which the deviation is 0.29."""
    clean = circular_blur(
        torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 2), gaussian(9, 2)
    )
    rng = torch.Generator().manual_seed(0)
    view = (clean + noise * torch.randn(clean.shape, generator=rng)).clamp(0, 255).round().float()
    assert noise_level(view) == pytest.approx((noise**2 + ROUNDING**2) ** 0.5, rel=0.15)


def test_a_photo_without_noise_has_that_of_rounding() -> None:
    assert noise_level(torch.full((3, 20, 20), 90.0)) == ROUNDING
    assert noise_level(torch.full((1, 1, 20), 90.0)) == ROUNDING


def test_what_was_cut_off_at_white_says_nothing_about_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    view = (torch.full((1, 80, 80), 120.0) + 3 * torch.randn(1, 80, 80, generator=rng)).round()
    view[:, :60] = (view[:, :60] + 135).clamp(0, 255)
    assert noise_level(view) == pytest.approx(3, rel=0.1)
    assert float(is_clipped(view)[:60].float().mean()) > 0.4

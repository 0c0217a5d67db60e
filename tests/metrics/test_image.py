"""PSNR and SSIM against torchmetrics and scikit-image."""

from __future__ import annotations

import math

import pytest
import torch

from fedlens.metrics import psnr, ssim


@pytest.mark.parametrize("channels", [1, 3])
def test_both_agree_with_torchmetrics(channels: int) -> None:
    from torchmetrics.functional.image import (
        peak_signal_noise_ratio,
        structural_similarity_index_measure,
    )

    rng = torch.Generator().manual_seed(0)
    truth = torch.rand(channels, 40, 33, generator=rng) * 255
    image = (truth + 12 * torch.randn(truth.shape, generator=rng)).clamp(0, 255)
    assert psnr(image, truth) == pytest.approx(
        float(peak_signal_noise_ratio(image, truth, data_range=255.0)), abs=1e-4
    )
    want = float(structural_similarity_index_measure(image[None], truth[None], data_range=255.0))
    assert ssim(image, truth) == pytest.approx(want, abs=1e-4)


def test_ssim_agrees_with_scikit_image_inside_the_window() -> None:
    """scikit-image's Wang et al. settings; its map is compared where the 11-pixel window fits."""
    from skimage.metrics import structural_similarity

    rng = torch.Generator().manual_seed(1)
    truth = torch.rand(1, 32, 32, generator=rng) * 255
    image = truth + 9 * torch.randn(truth.shape, generator=rng)
    _, full = structural_similarity(
        truth[0].double().numpy(),
        image[0].double().numpy(),
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=255,
        full=True,
    )
    assert ssim(image, truth, border="valid") == pytest.approx(full[5:-5, 5:-5].mean(), abs=1e-6)


def test_by_hand() -> None:
    """Off by one everywhere: 20 log10(255) = 48.1308 dB. Equal: no error, and an SSIM of 1."""
    x = torch.full((1, 16, 16), 9.0)
    assert psnr(x, x + 1) == pytest.approx(48.1308, abs=1e-4)
    assert psnr(x, x) == math.inf and ssim(x, x) == 1
    with pytest.raises(ValueError, match="11 x 11"):
        ssim(x[..., :8], x[..., :8])

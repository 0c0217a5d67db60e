"""Image quality. Images are (..., C, H, W); `peak` is the largest value a pixel can have."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Border = Literal["reflect", "valid"]


def psnr(image: Tensor, truth: Tensor, peak: float = 255.0) -> float:
    """Peak signal-to-noise ratio in dB, over all pixels and channels together. Callers clamp first
    where that is the convention.

    Args:
        image: what is judged.
        truth: the true image, of the same shape.
        peak: the largest value of a pixel.
    """
    error = float((image.double() - truth.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(peak * peak / error)


def ssim(
    image: Tensor,
    truth: Tensor,
    peak: float = 255.0,
    size: int = 11,
    sigma: float = 1.5,
    border: Border = "reflect",
) -> float:
    """Structural similarity (Wang et al., 2004) with a Gaussian window; mean over pixels and
    channels.

    Args:
        image: what is judged.
        truth: the true image, of the same shape.
        peak: the largest value of a pixel.
        size: side of the window, in pixels.
        sigma: of the window.
        border: where the window does not fit, reflect the image (as torchmetrics does) or leave
            those pixels out ("valid", as the original).
    """
    if min(image.shape[-2:]) < size:
        raise ValueError(
            f"SSIM needs at least {size} x {size} pixels, this image has {image.shape[-2]} x"
            f" {image.shape[-1]}"
        )
    a, b = (t.double().reshape(-1, 1, *t.shape[-2:]) for t in (image, truth))
    if border == "reflect":
        a, b = (torch.nn.functional.pad(t, [size // 2] * 4, mode="reflect") for t in (a, b))
    axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    window = torch.exp(-axis.square() / (2 * sigma**2))
    window = window / window.sum()

    def smooth(t: Tensor) -> Tensor:
        across = torch.nn.functional.conv2d(t, window.reshape(1, 1, 1, -1))
        return torch.nn.functional.conv2d(across, window.reshape(1, 1, -1, 1))

    mean_a, mean_b = smooth(a), smooth(b)
    var_a, var_b = smooth(a * a) - mean_a**2, smooth(b * b) - mean_b**2
    both = smooth(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    map = (
        (2 * mean_a * mean_b + c1)
        * (2 * both + c2)
        / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    )
    return float(map.mean())

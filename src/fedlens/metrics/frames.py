"""PSNR and SSIM of clips as the super-resolution literature reports them: on pixels rounded to 8
bits, over RGB or luma, border cut off.

Y = (65.481 R + 128.553 G + 24.966 B) / 255 + 16 for R, G, B in 0...255. SSIM: 11x11 Gaussian window
with sigma 1.5, valid part only, C1 = (0.01 * 255)^2, C2 = (0.03 * 255)^2, mean over channels. All
functions give one number per frame; the mean of a clip's frames is the clip's, the mean of clips
the data set's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Channel = Literal["rgb", "y"]
CAP = 100.0  # dB of a perfect frame: keeps means finite


def levels(clip: Tensor, channel: Channel = "rgb", border: int = 0) -> Tensor:
    """(..., 3, H, W) in [0, 1] to the values that are compared: 0...255, rounded as an 8-bit file
    would be; luma is not rounded again.
    """
    x = (clip.detach().float().clamp(0, 1) * 255).round()
    if border:
        h, w = x.shape[-2:]
        if border < 0 or 2 * border >= min(h, w):
            raise ValueError(f"a border of {border} pixels leaves nothing of frames of {w}x{h}")
        x = x[..., border:-border, border:-border]
    if channel == "y":
        weights = torch.tensor([65.481, 128.553, 24.966], device=x.device) / 255
        return torch.einsum("...chw,c->...hw", x, weights).unsqueeze(-3) + 16
    return x


def frame_psnr(
    prediction: Tensor, target: Tensor, channel: Channel = "rgb", border: int = 0
) -> Tensor:
    """PSNR of every frame, after rounding to 8 bits.

    Args:
        prediction: frames (..., 3, H, W) in [0, 1].
        target: the true ones, of the same shape.
        channel: "rgb" or "y" (luma).
        border: pixels at the edge that are left out.
    """
    gap = levels(prediction, channel, border) - levels(target, channel, border)
    mean = gap.double().square().mean((-3, -2, -1))
    return (10 * torch.log10(255**2 / mean.clamp_min(1e-30))).clamp_max(CAP)


def frame_ssim(
    prediction: Tensor, target: Tensor, channel: Channel = "rgb", border: int = 0
) -> Tensor:
    """SSIM of every frame, after rounding to 8 bits.

    Args:
        prediction: frames (..., 3, H, W) in [0, 1].
        target: the true ones, of the same shape.
        channel: "rgb" or "y" (luma).
        border: pixels at the edge that are left out.
    """
    a, b = levels(prediction, channel, border), levels(target, channel, border)
    lead = a.shape[:-3]
    out = (
        [_ssim(x, y) for x, y in zip(a.flatten(0, -4), b.flatten(0, -4), strict=True)]
        if lead
        else [_ssim(a, b)]
    )
    return torch.stack(out).reshape(lead)


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    if min(a.shape[-2:]) < 11:
        raise ValueError(
            f"SSIM needs frames of at least 11x11 pixels, these have {a.shape[-1]}x{a.shape[-2]}"
        )
    # Moments around mid-grey: variances do not change and lose fewer digits.
    x, y = a - 128, b - 128
    mx, my, xx, yy, xy = (
        torch.stack([gaussian_blur(m) for m in maps]) for maps in (x, y, x * x, y * y, x * y)
    )
    vx, vy, cov = xx - mx * mx, yy - my * my, xy - mx * my
    mx, my = mx + 128, my + 128
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    score = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return score.double().mean()


def gaussian_blur(x: Tensor) -> Tensor:
    """Gaussian window 11, sigma 1.5, valid part only, as two passes of shifted sums: quicker than a
    convolution on one core.
    """
    taps = torch.exp(-((torch.arange(11) - 5.0) ** 2) / (2 * 1.5**2))
    weights = (taps / taps.sum()).tolist()
    for axis in (-2, -1):
        n = x.shape[axis] - 10
        out = x.narrow(axis, 0, n) * weights[0]
        for k in range(1, 11):
            out.add_(x.narrow(axis, k, n), alpha=weights[k])
        x = out
    return x


def temporal_gap(prediction: Tensor, target: Tensor) -> Tensor:
    """Temporal consistency: how much the change from frame to frame differs from the true change,
    mean absolute in 8-bit levels. Flicker and trailing raise it, a constant error does not. Zero
    for a single frame.

    Args:
        prediction: frames (..., 3, H, W) in [0, 1].
        target: the true ones, of the same shape.
    """
    a, b = levels(prediction), levels(target)
    if a.shape[-4] < 2:
        return torch.zeros(())
    return (a.diff(dim=-4) - b.diff(dim=-4)).abs().mean()

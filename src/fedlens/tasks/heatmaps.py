"""Heat maps: where a joint is, as a picture, and back.

Targets: a Gaussian around each joint, cut off at three sigmas. "udp" (Huang et al., 2020) keeps its
centre between pixels and measures in steps of (W - 1) / (w - 1); "msra" (Xiao et al., 2018) rounds
it to a pixel and measures in strides of W / w.

Decoding: "argmax"; "quarter" moves it a quarter of a pixel towards the higher neighbour; "dark"
(Zhang et al., 2020) smooths the map and takes one Newton step on its logarithm.

RAF's paper leaves sigma at other resolutions open. Fixed at 2 pixels, a map of half the size would
mean a Gaussian twice as wide on the person, and a low-resolution client would be taught what
distillation forbids. So sigma is 2 at a map height of 64 and grows with it; scaled=False keeps 2
everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlens.data.pose.people import ImageSize

Coding = Literal["udp", "msra"]
Decoding = Literal["argmax", "quarter", "dark"]


def draw_targets(
    joints: Tensor, size: ImageSize, maps: ImageSize, coding: Coding, sigma: float, scaled: bool
) -> tuple[Tensor, Tensor]:
    """(N, J, 3) in pixels of an input of `size` -> heat maps (N, J, h, w) and weights (N, J)."""
    h, w = maps
    sigma = sigma * h / 64 if scaled else sigma
    points, weight = joints[..., :2], (joints[..., 2] > 0).to(joints.dtype)
    if coding == "udp":
        centre = points * joints.new_tensor([(w - 1) / (size[1] - 1), (h - 1) / (size[0] - 1)])
    else:
        # as public code, which cuts towards zero
        centre = (points * joints.new_tensor([w / size[1], h / size[0]]) + 0.5).trunc()
    reach = 3 * sigma
    last = joints.new_tensor([w - 1, h - 1])
    weight = weight * ((centre >= -reach) & (centre <= last + reach)).all(-1)

    def along(n: int, middle: Tensor) -> Tensor:
        gap = torch.arange(n, device=joints.device, dtype=joints.dtype) - middle[..., None]
        return torch.exp(-gap.square() / (2 * sigma**2)) * (gap.abs() <= reach)

    return along(h, centre[..., 1])[..., :, None] * along(w, centre[..., 0])[..., None, :], weight


def decode_heatmaps(maps: Tensor, how: Decoding) -> tuple[Tensor, Tensor]:
    """Peaks: (N, J, 2) as x, y in pixels of the map, and their height (N, J)."""
    h, w = maps.shape[-2:]
    peaks, where = maps.flatten(2).max(2)
    x, y = where % w, where // w
    points = torch.stack([x, y], -1).to(maps.dtype)
    if how == "quarter":
        gx, gy = (
            _around(maps, x, y, 1, 0) - _around(maps, x, y, -1, 0),
            _around(maps, x, y, 0, 1) - _around(maps, x, y, 0, -1),
        )
        inner = (x > 0) & (x < w - 1) & (y > 0) & (y < h - 1)
        points = points + 0.25 * torch.stack([gx.sign(), gy.sign()], -1) * inner[..., None]
    elif how == "dark":
        points = points + newton(smooth(maps).clamp(1e-3, 50).log(), x, y)
    return points, peaks


def _around(maps: Tensor, x: Tensor, y: Tensor, dx: int, dy: int) -> Tensor:
    """The value beside a peak; beyond the edge, the edge's own."""
    h, w = maps.shape[-2:]
    index = (y + dy).clamp(0, h - 1) * w + (x + dx).clamp(0, w - 1)
    return maps.flatten(2).gather(2, index[..., None])[..., 0]


def newton(logs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """-H^-1 g at the peak of a logarithm, by central differences: exact for a Gaussian. Steps
    beyond a pixel and a half are not trusted.
    """
    f = {(dx, dy): _around(logs, x, y, dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)}
    gx, gy = (f[1, 0] - f[-1, 0]) / 2, (f[0, 1] - f[0, -1]) / 2
    xx, yy = f[1, 0] - 2 * f[0, 0] + f[-1, 0], f[0, 1] - 2 * f[0, 0] + f[0, -1]
    xy = (f[1, 1] - f[1, -1] - f[-1, 1] + f[-1, -1]) / 4
    det = xx * yy - xy**2
    step = (
        -torch.stack([yy * gx - xy * gy, xx * gy - xy * gx], -1)
        / torch.where(det.abs() < 1e-9, torch.inf, det)[..., None]
    )
    return torch.where((step.abs() <= 1.5).all(-1, keepdim=True), step, 0.0)


def smooth(maps: Tensor) -> Tensor:
    """DARK's modulation: a Gaussian of sigma 2 over 11 pixels at a map height of 64, in proportion
    elsewhere.
    """
    sigma = 2.0 * maps.shape[-2] / 64
    reach = max(1, min(round(2.5 * sigma), min(maps.shape[-2:]) - 1))
    kernel = torch.exp(
        -torch.arange(-reach, reach + 1, device=maps.device).to(maps.dtype).square()
        / (2 * sigma**2)
    )
    kernel = kernel / kernel.sum()
    flat = F.pad(maps.flatten(0, 1)[:, None], (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(flat, kernel[None, None, None]), kernel[None, None, :, None]).reshape(
        maps.shape
    )

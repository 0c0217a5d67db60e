"""Heat maps: where a joint is, as a picture, and back.

Targets: a Gaussian around each joint, cut off at three sigmas. "udp" (Huang et al., 2020) keeps its
centre between pixels and measures in steps of (W - 1) / (w - 1); "msra" (Xiao et al., 2018) rounds
it to a pixel and measures in strides of W / w.

Weights: a joint outside the map still counts while its window would touch it, in the public codes'
reading: the centre is rounded (towards zero), and it counts from 3 sigma + 1 pixels before the
first pixel to 3 sigma after the last one.

Decoding: "argmax"; "quarter" moves it a quarter of a pixel towards the higher neighbour; "dark"
(Zhang et al., 2020) smooths the map and takes one Newton step on its logarithm, however long: on
noisy maps that can be pixels. Each as ViTPose's code has it, the same numbers on noisy maps too:
- dark of udp maps: smoothed with reflected borders, values within 1e-3 and 50, second differences
  over one pixel, the mixed one along the diagonal. At a border the edge's value goes on.
- dark of msra maps ("unbiased"): smoothed with zeros beyond the border and scaled to the old peak,
  values from 1e-10, second differences over two pixels. A peak in the two outer rows or columns
  stays where it is.
- quarter: a peak in the first two or in the last row or column stays where it is.

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
    # the window is that of whole pixels around the rounded centre
    pixel = (centre + 0.5).trunc() if coding == "udp" else centre
    size_of_map = joints.new_tensor([w, h])
    touches = ((pixel - reach).trunc() < size_of_map) & ((pixel + reach + 1).trunc() >= 0)
    weight = weight * touches.all(-1)

    def along(n: int, axis: int) -> Tensor:
        place = torch.arange(n, device=joints.device, dtype=joints.dtype)
        gap = place - centre[..., axis, None]
        inside = (place - pixel[..., axis, None]).abs() <= reach
        return torch.exp(-gap.square() / (2 * sigma**2)) * inside

    return along(h, 1)[..., :, None] * along(w, 0)[..., None, :], weight


def decode_heatmaps(maps: Tensor, how: Decoding, coding: Coding = "udp") -> tuple[Tensor, Tensor]:
    """Peaks: (N, J, 2) as x, y in pixels of the map, and their height (N, J)."""
    w = maps.shape[-1]
    peaks, where = maps.flatten(2).max(2)
    x, y = where % w, where // w
    points = torch.stack([x, y], -1).to(maps.dtype)
    if how == "quarter":
        points = points + quarter_step(maps, x, y)
    elif how == "dark" and coding == "udp":
        logs = smooth(maps, "reflect").clamp(1e-3, 50).log()
        points = points + udp_step(logs, x, y)
    elif how == "dark":
        smoothed = smooth(maps, "constant")
        highest = smoothed.amax((-2, -1), keepdim=True)
        smoothed = smoothed * (maps.amax((-2, -1), keepdim=True) / highest)
        points = points + unbiased_step(smoothed.clamp_min(1e-10).log(), x, y)
    return points, peaks


def _around(maps: Tensor, x: Tensor, y: Tensor, dx: int, dy: int) -> Tensor:
    """The value beside a peak; beyond the edge, the edge's own."""
    h, w = maps.shape[-2:]
    index = (y + dy).clamp(0, h - 1) * w + (x + dx).clamp(0, w - 1)
    return maps.flatten(2).gather(2, index[..., None])[..., 0]


def quarter_step(maps: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A quarter of a pixel towards the higher neighbour."""
    h, w = maps.shape[-2:]
    gx = _around(maps, x, y, 1, 0) - _around(maps, x, y, -1, 0)
    gy = _around(maps, x, y, 0, 1) - _around(maps, x, y, 0, -1)
    inner = (x > 1) & (x < w - 1) & (y > 1) & (y < h - 1)
    return 0.25 * torch.stack([gx.sign(), gy.sign()], -1) * inner[..., None]


def udp_step(logs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Newton's step with the public UDP code's differences: exact for a Gaussian."""
    f = {(dx, dy): _around(logs, x, y, dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)}
    gx, gy = (f[1, 0] - f[-1, 0]) / 2, (f[0, 1] - f[0, -1]) / 2
    xx, yy = f[1, 0] - 2 * f[0, 0] + f[-1, 0], f[0, 1] - 2 * f[0, 0] + f[0, -1]
    forwards = f[1, 1] - f[1, 0] - f[0, 1] + f[0, 0]
    backwards = f[0, 0] - f[-1, 0] - f[0, -1] + f[-1, -1]
    tiny = torch.finfo(torch.float32).eps  # keeps a flat map's step finite
    return _newton(gx, gy, xx.double() + tiny, yy.double() + tiny, (forwards + backwards) / 2)


def unbiased_step(logs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Newton's step with the differences of DARK's public code; none near a border."""
    h, w = logs.shape[-2:]
    here = _around(logs, x, y, 0, 0)
    gx = (_around(logs, x, y, 1, 0) - _around(logs, x, y, -1, 0)) / 2
    gy = (_around(logs, x, y, 0, 1) - _around(logs, x, y, 0, -1)) / 2
    xx = (_around(logs, x, y, 2, 0) - 2 * here + _around(logs, x, y, -2, 0)) / 4
    yy = (_around(logs, x, y, 0, 2) - 2 * here + _around(logs, x, y, 0, -2)) / 4
    rising = _around(logs, x, y, 1, 1) + _around(logs, x, y, -1, -1)
    falling = _around(logs, x, y, 1, -1) + _around(logs, x, y, -1, 1)
    step = _newton(gx, gy, xx, yy, (rising - falling) / 4)
    inner = (x > 1) & (x < w - 2) & (y > 1) & (y < h - 2)
    return torch.where(inner[..., None], step, 0.0)


def _newton(gx: Tensor, gy: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """-H^-1 g, in double: near a flat top the determinant is small. None where H is singular."""
    like = gx.dtype
    gx, gy, xx, yy, xy = (t.double() for t in (gx, gy, xx, yy, xy))
    det = xx * yy - xy**2
    step = -torch.stack([yy * gx - xy * gy, xx * gy - xy * gx], -1)
    return (step / torch.where(det == 0, torch.inf, det)[..., None]).to(like)


def smooth(maps: Tensor, border: Literal["reflect", "constant"]) -> Tensor:
    """DARK's modulation. The kernel is that of public code, 11 pixels at a map height of 64 (their
    256x192), 17 at 96 (384x288), in proportion elsewhere; its sigma is the one OpenCV gives it. On
    smaller maps, for which nothing is published, that would be wider than the targets (errors of
    four pixels at 24x18): there sigma shrinks in proportion too.
    """
    height = maps.shape[-2]
    reach = max(1, min(round(5 * height / 64), min(maps.shape[-2:]) - 1))
    sigma = 0.3 * (reach - 1) + 0.8 if reach >= 5 else 2 * height / 64
    kernel = torch.exp(
        -torch.arange(-reach, reach + 1, device=maps.device).to(maps.dtype).square()
        / (2 * sigma**2)
    )
    kernel = kernel / kernel.sum()
    flat = F.pad(maps.flatten(0, 1)[:, None], (reach,) * 4, mode=border)
    return F.conv2d(F.conv2d(flat, kernel[None, None, None]), kernel[None, None, :, None]).reshape(
        maps.shape
    )

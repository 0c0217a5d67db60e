"""Degradation of clips: MATLAB's imresize, as all super-resolution benchmarks use it ("BI").

Keys' cubic with a = -1/2, stretched by the factor when shrinking, pixel centres aligned, borders
mirrored with the edge pixel repeated, weights normalised per output pixel. PyTorch's antialiased
bicubic is the same away from the border, where it cuts the kernel off instead of mirroring; so:
mirror, resize, cut.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# low-resolution pixels of margin; the kernel reaches 2, and a margin of whole pixels keeps the
# grids aligned
REACH = 4


def mirrored(x: Tensor, by: int) -> Tensor:
    """`by` pixels more on every side, mirrored with the edge pixel repeated; works for pictures
    smaller than the margin too.
    """
    for axis in (-2, -1):
        n = x.shape[axis]
        place = torch.arange(-by, n + by, device=x.device) % (2 * n)
        x = x.index_select(axis, torch.where(place < n, place, 2 * n - 1 - place))
    return x


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., C, H, W) to another size, the kernel cut off at the border."""
    flat = x.reshape(-1, *x.shape[-3:])
    out = F.interpolate(flat, size=size, mode="bicubic", antialias=True, align_corners=False)
    return out.reshape(*x.shape[:-2], *size)


def shrink(x: Tensor, scale: int) -> Tensor:
    """(..., C, H, W) to (..., C, H/scale, W/scale). Sides must be multiples of the scale: see
    `cut_to`.
    """
    h, w = x.shape[-2:]
    if h % scale or w % scale:
        raise ValueError(f"{w}x{h} pixels are not divisible by the scale {scale}")
    if scale == 1:
        return x
    wide = mirrored(x, REACH * scale)
    small = resized(wide, (h // scale + 2 * REACH, w // scale + 2 * REACH))
    return small[..., REACH:-REACH, REACH:-REACH].contiguous()


def enlarge(x: Tensor, scale: int) -> Tensor:
    """(..., C, h, w) to (..., C, h scale, w scale): the bicubic baseline."""
    if scale == 1:
        return x
    wide = mirrored(x, REACH)
    big = resized(wide, (wide.shape[-2] * scale, wide.shape[-1] * scale))
    edge = REACH * scale
    return big[..., edge:-edge, edge:-edge].contiguous()


def cut_to(x: Tensor, scale: int) -> Tensor:
    """Take rows and columns off at the bottom and the right until the sides are multiples of the
    scale.
    """
    h, w = x.shape[-2:]
    return x[..., : h - h % scale, : w - w % scale]


def degrade(clip: Tensor, scale: int) -> Tensor:
    """The low-resolution clip of a benchmark: shrunk, rounded to 8 bits. Takes uint8 or [0, 1],
    gives [0, 1].
    """
    x = clip.float() / 255 if clip.dtype == torch.uint8 else clip
    return in_8_bits(shrink(cut_to(x, scale), scale))


def in_8_bits(clip: Tensor) -> Tensor:
    """Rounded, in [0, 1]."""
    return (clip.clamp(0, 1) * 255).round() / 255

r"""A blur kernel from the blurred photo alone, on the client: nothing of it is sent.

Coarse to fine, in turns: the sharp picture x that explains the photo y with few edges, and the
kernel k that takes its edges to those of y (Xu, Zheng and Jia 2013; Pan et al. 2014).

    x = argmin |k * x - y|^2 + lambda |grad x|_0        by half-quadratic splitting
    k = argmin |k * grad x - grad y|^2 + gamma |k|^2,   then k >= 0, small values out, sum 1

A step edge in x costs the same whatever its height, so a picture of few edges that is sharp is
preferred to the photo itself with no blur at all, which is what a prior on |grad x| would prefer.
x serves the kernel only: what is restored later comes from FedDeblur and its own prior.

Of a large photo the part with the most detail is used, at most MOST_PIXELS wide. A kernel found so
is known up to a shift; its centre of mass is put in the middle, and registration (`views.py`) finds
what is left of it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError
from fedlens.deblur import spectrum

MOST_PIXELS = 400
EDGES = 4e-3  # lambda, for pixels in [0, 1]
GAMMA = 2.0  # gamma, in units of a thousandth of the strength of the edges
TURNS = 5


def blind_kernel(pixels: Tensor, size: int, whose: str = "a view") -> Tensor:
    """The kernel, size x size with size made odd, of a photo (C, H, W) in [0, 255]."""
    size += 1 - size % 2
    y = busiest_part(pixels.double().mean(0), MOST_PIXELS) / 255
    if min(y.shape) < 3 * size:
        raise DataError(
            f"the photo of {whose} ({pixels.shape[-2]} x {pixels.shape[-1]}) is too small to find a"
            f" kernel of {size} x {size} in it: set kernel_size"
        )
    if float(y.std()) < 2 / 255:
        raise DataError(f"the photo of {whose} is flat: no kernel can be found in it")
    kernel = torch.zeros(3, 3, dtype=torch.float64)
    kernel[1, 1:] = kernel[1:, 1] = 0.25  # about nothing, in no direction
    kernel /= kernel.sum()
    edges = EDGES
    for level in reversed(range(_levels(size))):
        by = 2 ** (-level / 2)
        side = max(3, 2 * round((size - 1) / 2 * by) + 1)
        small = y if level == 0 else _resized(y, by)
        kernel = _grown(kernel, side)
        for _ in range(TURNS):
            sharp = few_edges(small, kernel, edges)
            kernel = kernel_between(sharp, small, side)
            edges = max(edges / 1.1, 1e-4)
    return _centred(kernel, size)


def few_edges(y: Tensor, kernel: Tensor, strength: float) -> Tensor:
    """argmin |k * x - y|^2 + strength |grad x|_0. Beyond its edge a photo is joined to its other
    side by a ramp, so that the Fourier transform sees no jump there."""
    height, width = y.shape
    whole = _joined(y, max(kernel.shape))
    size = (int(whole.shape[0]), int(whole.shape[1]))
    h = spectrum.otf(kernel, *size, torch.float64)
    right, down = _difference_spectra(*size)
    gram = right.abs().square() + down.abs().square()
    top, below = h.conj() * torch.fft.rfft2(whole), h.abs().square()
    x, penalty = whole, 2 * strength
    while penalty < 1e5:
        g, v = x.roll(-1, 1) - x, x.roll(-1, 0) - x
        kept = (g * g + v * v) >= strength / penalty
        pulled = right.conj() * torch.fft.rfft2(g * kept) + down.conj() * torch.fft.rfft2(v * kept)
        x = torch.fft.irfft2((top + penalty * pulled) / (below + penalty * gram), s=size)
        penalty *= 2
    return x[:height, :width]


def kernel_between(sharp: Tensor, y: Tensor, side: int) -> Tensor:
    """The kernel that takes the edges of `sharp` to those of `y`: the normal equations over its
    side x side values, from correlations at those lags."""
    window = _window(sharp.shape, side)
    alike = cross = torch.zeros(1, dtype=torch.float64)
    for axis in (0, 1):
        a = (sharp.roll(-1, axis) - sharp) * window
        b = (y.roll(-1, axis) - y) * window
        fa, fb = torch.fft.rfft2(a), torch.fft.rfft2(b)
        alike = alike + torch.fft.irfft2(fa.conj() * fa, s=sharp.shape)
        cross = cross + torch.fft.irfft2(fa.conj() * fb, s=sharp.shape)
    spots = torch.arange(side) - side // 2
    rows, columns = (g.flatten() for g in torch.meshgrid(spots, spots, indexing="ij"))
    gram = alike[rows[:, None] - rows[None], columns[:, None] - columns[None]]
    gram = gram + torch.eye(side**2, dtype=torch.float64) * (
        GAMMA * 1e-3 * float(alike[0, 0]) + 1e-12
    )
    found = torch.linalg.solve(gram, cross[rows, columns]).view(side, side).clamp_min(0)
    found[found < 0.05 * found.max()] = 0
    if float(found.sum()) <= 0:
        found[side // 2, side // 2] = 1
    return _without_specks(found / found.sum())


def _without_specks(kernel: Tensor) -> Tensor:
    """Connected pieces with less than a tenth of the light are noise: a camera has one path."""
    from scipy.ndimage import label

    pieces, count = label((kernel > 0).numpy(), structure=np.ones((3, 3)))
    shares = [float(kernel[torch.from_numpy(pieces == i)].sum()) for i in range(1, count + 1)]
    kept = kernel.clone()
    for i, share in enumerate(shares, 1):
        if share < 0.1 and share < max(shares):
            kept[torch.from_numpy(pieces == i)] = 0
    return kept / kept.sum()


def _levels(size: int) -> int:
    """Halvings of the area until a kernel is about three pixels wide, and the first."""
    return max(1, 1 + math.floor(2 * math.log2(max(size, 3) / 3)))


def busiest_part(y: Tensor, side: int) -> Tensor:
    """The part of a photo in [0, 255], at most side x side, with the most detail that was not cut
    off at white."""
    height, width = y.shape
    tall, wide = min(side, height), min(side, width)
    detail = (y.roll(-1, 0) - y).abs() + (y.roll(-1, 1) - y).abs()
    detail = torch.where(y < 254, detail, 0.0)
    total = torch.nn.functional.pad(detail.cumsum(0).cumsum(1), (1, 0, 1, 0))
    inside = (
        total[tall:, wide:] - total[:-tall, wide:] - total[tall:, :-wide] + total[:-tall, :-wide]
    )
    top, left = divmod(int(inside.argmax()), inside.shape[1])
    return y[top : top + tall, left : left + wide].contiguous()


def _resized(y: Tensor, by: float) -> Tensor:
    out: Tensor = torch.nn.functional.interpolate(
        y[None, None], scale_factor=by, mode="bicubic", antialias=True, align_corners=False
    )
    return out[0, 0]


def _grown(kernel: Tensor, side: int) -> Tensor:
    """The kernel of the level before on this level's grid."""
    if kernel.shape[0] == side:
        return kernel
    out = torch.nn.functional.interpolate(
        kernel[None, None], size=(side, side), mode="bilinear", align_corners=True
    )[0, 0].clamp_min(0)
    return out / out.sum()


def _centred(kernel: Tensor, size: int) -> Tensor:
    """Moved by whole pixels so that its centre of mass is in the middle."""
    spots = torch.arange(size, dtype=torch.float64) - size // 2
    down = round(float((kernel.sum(1) * spots).sum()))
    right = round(float((kernel.sum(0) * spots).sum()))
    wide = torch.nn.functional.pad(kernel, [size] * 4)
    top, left = size + down, size + right
    moved = wide[top : top + size, left : left + size].clone()
    return moved / moved.sum()


def _joined(y: Tensor, rim: int) -> Tensor:
    """Continued by a ramp of 2 rim pixels from the last row to the first, and so for columns."""
    for axis in (0, 1):
        first, last = y.narrow(axis, 0, 1), y.narrow(axis, y.shape[axis] - 1, 1)
        steps = torch.linspace(0, 1, 2 * rim + 2, dtype=y.dtype)[1:-1]
        steps = steps[:, None] if axis == 0 else steps[None]
        y = torch.cat([y, last + (first - last) * steps], axis)
    return y


def _difference_spectra(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Of x(p + 1) - x(p), to the right and down."""
    columns = torch.fft.rfftfreq(width, dtype=torch.float64)
    rows = torch.fft.fftfreq(height, dtype=torch.float64)
    right = torch.exp(2j * torch.pi * columns) - 1
    down = torch.exp(2j * torch.pi * rows) - 1
    return right[None].expand(height, -1), down[:, None].expand(-1, len(columns))


def _window(size: torch.Size, rim: int) -> Tensor:
    """One inside, falling to zero over `rim` pixels: what lies beyond the photo has no edges."""
    sides = []
    for length in size:
        distance = torch.minimum(torch.arange(length), torch.arange(length).flip(0))
        sides.append(torch.sin((distance.double() / rim).clamp(0, 1) * torch.pi / 2) ** 2)
    return sides[0][:, None] * sides[1][None]

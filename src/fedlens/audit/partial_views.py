r"""FedDeblur's messages from partial views: where a client looks, through which kernel, and what it
sees. The dual u and the local estimates x_k are known exactly (`audit/duals.py`).

**Field of view.** In the first round u' = conj(H) / (1 + |H|^2) F d, and d is 0 outside the view:
|u'| is large where the client looked. A rectangle with two levels (Otsu, 1979) finds it, roughly.

**Kernel.** With D_t = F d_t, s = 1 - rho / (2/n + rho) and q the kernel's autocorrelation, the
client's step (lines 17-19 of the paper's Algorithm 1) says, for the rounds t = 0, 1, ...
    u_{t+1} + q * (x_{t+1} - x_t) = h~ * d_t                   h~: the mirrored kernel
    d_{t+1} = s (y + h * x_t + d_t - 2 h * x_{t+1})            on the view, 0 elsewhere
Deep enough inside the view the second line may be blurred by h~ as well. The difference of two
rounds then has no y and no d left in it:
    (u_{t+2} - u_{t+1}) - s (u_{t+1} - u_t) = q * [(1 - s)(x_{t+1} - x_t) - (x_{t+2} - x_{t+1})]
which is linear in q: a few hundred unknowns, thousands of pixels a round. Phase retrieval makes h
of q.

**Photo.** h~ * d_0 = u_1 + q * (x_1 - x_0) everywhere; divided by conj(H) it is d_0, which is
s (y - h * x_0) on the view and 0 elsewhere: the photo. All d_t are 0 outside the view: the exact
field of view. It also tells a lopsided kernel from its mirror image, which complete views do not:
with the wrong one something is left outside. A shift stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.audit.duals import Iterate
from fedlens.audit.phase_retrieval import retrieve_kernel
from fedlens.core.client import generator
from fedlens.data.video.frames import Box
from fedlens.deblur import spectrum

_SIDES = (7, 11, 15, 19, 23, 27)  # kernels that are tried, the smallest first
EQUATIONS = 5  # for each unknown
# misfits: only the rounding of float32 is left; this may be it; this is not the model
EXACT, GOOD, POOR = 1e-9, 1e-6, 1e-3


@dataclass(frozen=True)
class View:
    """What came out: where the client looked, its kernel and its pixels, (C, h, w). misfit: what
    the linear system leaves unexplained, relative.
    """

    box: Box
    kernel: Tensor
    pixels: Tensor
    misfit: float


def find_partial(rounds: Sequence[Iterate], n: float, rho: float, width: int) -> View | None:
    """The whole chain; None where no kernel explains the messages."""
    s = 1 - rho / (2 / n + rho)
    rough = find_view(rounds[0].u, width)
    best: tuple[float, Tensor] | None = None
    for side in _SIDES:
        fitted = _fit_autocorrelation(rounds, rough, side, s, width)
        if fitted is None:
            break
        # a larger one explains no more
        enough = best is not None and best[0] < GOOD and fitted[0] > 0.2 * best[0]
        if best is None or fitted[0] < best[0]:
            best = fitted
        if enough or best[0] < EXACT:
            break
    if best is None or best[0] > POOR:
        return None
    misfit, alike = best
    found, _ = retrieve_kernel(alike)
    tried = [(k, *_uncover(rounds, k, s, width)) for k in (found, found.flip(0, 1))]
    kernel, box, pixels, _ = min(tried, key=lambda t: t[3])
    return View(box, kernel, pixels, misfit)


def _fit_autocorrelation(
    rounds: Sequence[Iterate], box: Box, side: int, s: float, width: int
) -> tuple[float, Tensor] | None:
    """(misfit, q) by least squares over pixels of the view that are `side` or more from its edges;
    None where there are too few of them.
    """
    top, left, tall, wide = box
    margin = side + 2
    unknown = [(i, j) for i in range(side) for j in range(1 - side, side) if i or j >= 0]
    shifts = torch.tensor(unknown)
    inner = torch.cartesian_prod(
        torch.arange(top + margin, top + tall - margin),
        torch.arange(left + margin, left + wide - margin),
    )
    x = [
        spectrum.backward(rounds[0].x, width),
        *(spectrum.backward(r.local, width) for r in rounds),
    ]
    u = [torch.zeros_like(x[0]), *(spectrum.backward(r.u, width) for r in rounds)]
    usable = range(1, len(x) - 2)
    if len(inner) * len(usable) * len(x[0]) < 1.5 * len(unknown):
        return None
    most = math.ceil(EQUATIONS * len(unknown) / len(usable) / len(x[0]))
    order = torch.randperm(len(inner), generator=generator(side, 0xA0D1))[:most]
    places = inner[order]
    rows, columns = [], []
    for t in usable:
        right = (1 - s) * (x[t + 1] - x[t]) - (x[t + 2] - x[t + 1])
        known = (u[t + 2] - u[t + 1]) - s * (u[t + 1] - u[t])
        for channel in range(len(right)):
            rows.append(_neighbours(right[channel], places, shifts))
            columns.append(known[channel][places[:, 0], places[:, 1]])
    a, b = torch.cat(rows), torch.cat(columns)
    gram = a.T @ a
    gram.diagonal().add_(1e-13 * gram.diagonal().mean())
    q = torch.linalg.solve(gram, a.T @ b)
    misfit = float((a @ q - b).square().sum() / b.square().sum())
    alike = torch.zeros(x[0].shape[-2:], dtype=torch.float64)
    alike[shifts[:, 0], shifts[:, 1]] = q
    alike[-shifts[:, 0], -shifts[:, 1]] = q
    return misfit, alike


def _neighbours(image: Tensor, places: Tensor, shifts: Tensor) -> Tensor:
    """What each unknown of q meets at each place: the two pixels that lie `shift` away, the one in
    the middle once.
    """
    height, width = image.shape
    flat = image.reshape(-1)

    def at(sign: int) -> Tensor:
        i = (places[:, None, 0] + sign * shifts[None, :, 0]) % height
        j = (places[:, None, 1] + sign * shifts[None, :, 1]) % width
        return flat[i * width + j]

    both = at(-1) + at(1)
    both[:, (shifts == 0).all(1)] /= 2
    return both


def _uncover(
    rounds: Sequence[Iterate], kernel: Tensor, s: float, width: int
) -> tuple[Box, Tensor, float]:
    """d_t of every round, hence where they are not 0, the photo there, and how much of them is left
    outside. The first alone would not do: it is 0 too where the photo happens to be as grey as the
    image that everybody began at.
    """
    first = rounds[0]
    height = first.x.shape[-3]
    h = spectrum.otf(kernel, height, width, torch.float64)
    power = h.abs().square()
    floor = 1e-6
    spectra = []
    before = first.x
    for after in rounds:
        moved = torch.view_as_complex((after.local - before).contiguous())
        blurred = torch.view_as_complex(after.u.contiguous()) + power * moved
        spectra.append(h * blurred / (power + floor))
        before = after.local
    sizes = torch.fft.irfft2(torch.stack(spectra), s=(height, width)).abs().sum((0, 1))
    # little is left outside the view, so that fainter places inside it can show
    top, left, tall, wide = box = find_box(sizes, dark=0.03 * float(sizes.quantile(0.9)))
    seen = torch.fft.irfft2(
        spectra[0] / s + h * torch.view_as_complex(first.x.contiguous()), s=(height, width)
    )
    inside = float(sizes[top : top + tall, left : left + wide].sum())
    outside = float(sizes.sum()) / inside - 1
    return box, seen[..., top : top + tall, left : left + wide], outside


def find_view(u: Tensor, width: int) -> Box:
    """Where the image of this half-spectrum is large."""
    size = spectrum.backward(u, width).abs().sum(0)
    return find_box(size, dark=0.1 * float(size.quantile(0.9)))


def find_box(size: Tensor, dark: float, coarse: int = 24) -> Box:
    """The rectangle that splits the logarithm best into two levels, where what is below `dark`
    counts alike. All rectangles of a grid of `coarse` lines are tried, then each edge moves until
    none gains by it.
    """
    height, width = size.shape
    size = (size + max(dark, 1e-12)).log()
    table = torch.zeros(height + 1, width + 1, dtype=torch.float64)
    table[1:, 1:] = size.cumsum(0).cumsum(1)
    edges = _all_boxes(height, width, coarse)
    found = edges[int(_cost(table, edges).argmin())]
    for _ in range(50):
        before = found.clone()
        for edge in range(4):
            most = height if edge < 2 else width
            tried = found.repeat(most + 1, 1)
            tried[:, edge] = torch.arange(most + 1)
            found = tried[int(_cost(table, tried).argmin())]
        if torch.equal(before, found):
            break
    top, bottom, left, right = (int(k) for k in found)
    return top, left, bottom - top, right - left


def _all_boxes(height: int, width: int, lines: int) -> Tensor:
    """(top, bottom, left, right) of all rectangles between these lines."""
    rows = torch.linspace(0, height, min(lines, height) + 1).round().long()
    columns = torch.linspace(0, width, min(lines, width) + 1).round().long()
    down = torch.combinations(rows, 2)
    across = torch.combinations(columns, 2)
    return torch.cat([down.repeat_interleave(len(across), 0), across.repeat(len(down), 1)], dim=1)


def _cost(table: Tensor, edges: Tensor) -> Tensor:
    """How much two levels, inside and outside, explain (Otsu's criterion, 1979), negative."""
    top, bottom, left, right = edges.unbind(1)
    inside = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
    area = ((bottom - top) * (right - left)).double()
    count = (table.shape[0] - 1) * (table.shape[1] - 1)
    rest = count - area
    cost = -(inside - table[-1, -1] * area / count).square() / (area * rest)
    cost[(bottom - top < 4) | (right - left < 4) | (rest < 1)] = math.inf
    return cost


def overlap(a: Box, b: Box) -> float:
    """Intersection over union."""
    tall = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    wide = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    both = max(0, tall) * max(0, wide)
    return both / (a[2] * a[3] + b[2] * b[3] - both)

r"""A blur that differs across the photo: a grid of kernels, blended from place to place.

    (A x)(p) = sum_m w_m(p) (h_m * x)(p),     A^T r = sum_m h_m^T * (w_m r)

h_m is the kernel at place m of the grid, h_m^T its mirror image, w_m the window of that place: one
at the middle of its cell, falling linearly to zero at the middles of its neighbours, level beyond
the outermost ones. Windows lie on the photo's pixels p and sum to one, so that every pixel has a
kernel of its own, the blend of the four around it.

A window is two cells wide, so h_m * x is needed there only: of a patch that is wider by a kernel,
with a Fourier transform of that size. All patches together are a few times as large as the photo,
however fine the grid.

A client's step needs A^T A from above: |A x|^2 <= bound |x|^2, by Schur's test the largest row sum
of A times its largest column sum, since A has no negative entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.deblur import spectrum

# on the bound, for rounding
SLACK = 1.001


@dataclass(frozen=True)
class _Window:
    """One place of the grid along one axis.

    Args:
        shown: the pixels of the photo on which its window lies.
        patch: what of the scene around the photo is needed for them.
        inner: where they are in the patch.
        weight: the window.
    """

    shown: slice
    patch: slice
    inner: slice
    weight: Tensor


class VaryingBlur:
    """The blur of one view, from half-spectra of the scene to the view's pixels and back.

    Args:
        grid: (rows, columns, k, k): the kernels.
        view: height and width of the photo, over which the grid lies.
        scene: height and width of the scene.
        place: top and left of the photo in the scene.
        dtype: of what it is applied to.
    """

    def __init__(
        self,
        grid: Tensor,
        view: tuple[int, int],
        scene: tuple[int, int],
        place: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.view, self.scene = view, scene
        rows, columns = (windows(grid.shape[a], view[a], grid.shape[2 + a], dtype) for a in (0, 1))
        self.size = rows[0].patch.stop, columns[0].patch.stop  # of a patch: the first begins at 0
        self.near = [
            (torch.arange(w[-1].patch.stop) + place[a] - w[0].inner.start) % scene[a]
            for a, w in enumerate((rows, columns))
        ]
        self.places = [
            (r, c, spectrum.otf(grid[i, j], *self.size, dtype))
            for i, r in enumerate(rows)
            for j, c in enumerate(columns)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """A x, (C, h, w), of a half-spectrum."""
        image = spectrum.backward(x, self.scene[1])
        near = image.index_select(-2, self.near[0]).index_select(-1, self.near[1])
        out = torch.zeros(x.shape[0], *self.view, dtype=x.dtype)
        for r, c, h in self.places:
            patch = torch.fft.rfft2(near[:, r.patch, c.patch]).mul_(h)
            blurred = torch.fft.irfft2(patch, s=self.size)[:, r.inner, c.inner]
            out[:, r.shown, c.shown] += blurred * r.weight[:, None] * c.weight
        return out

    def adjoint(self, d: Tensor) -> Tensor:
        """A^T d, a half-spectrum, of (C, h, w)."""
        near = torch.zeros(d.shape[0], len(self.near[0]), len(self.near[1]), dtype=d.dtype)
        for r, c, h in self.places:
            patch = torch.zeros(d.shape[0], *self.size, dtype=d.dtype)
            patch[:, r.inner, c.inner] = d[:, r.shown, c.shown] * r.weight[:, None] * c.weight
            back = torch.fft.rfft2(patch).mul_(h.conj())
            near[:, r.patch, c.patch] += torch.fft.irfft2(back, s=self.size)
        tall = torch.zeros(d.shape[0], self.scene[0], len(self.near[1]), dtype=d.dtype)
        tall.index_add_(-2, self.near[0], near)
        image = torch.zeros(d.shape[0], *self.scene, dtype=d.dtype)
        return spectrum.forward(image.index_add_(-1, self.near[1], tall))

    def bound(self) -> float:
        """No less than the largest eigenvalue of A^T A."""
        ones = torch.ones(1, *self.scene, dtype=self.places[0][0].weight.dtype)
        rows = self.forward(spectrum.forward(ones))
        columns = spectrum.backward(self.adjoint(torch.ones_like(rows)), self.scene[1])
        return SLACK * float(rows.max()) * float(columns.max())


def windows(count: int, length: int, kernel: int, dtype: torch.dtype) -> list[_Window]:
    """Along one axis: `count` windows over `length` pixels, with what a kernel of this many pixels,
    its middle at kernel // 2, needs before and after them."""
    at = ((torch.arange(length).double() + 0.5) * count / length - 0.5).clamp(0, count - 1)
    hats = (1 - (at - torch.arange(count).double()[:, None]).abs()).clamp_min(0)
    spans = [(int(hat.nonzero()[0]), int(hat.nonzero()[-1]) + 1) for hat in hats]
    before = kernel - 1 - kernel // 2
    size = quick_length(max(stop - start for start, stop in spans) + kernel - 1)
    return [
        _Window(
            slice(start, stop),
            slice(start, start + size),
            slice(before, before + stop - start),
            hat[start:stop].to(dtype),
        )
        for hat, (start, stop) in zip(hats, spans, strict=True)
    ]


def quick_length(least: int) -> int:
    """The next length that Fourier transforms are quick at: 2^a 3^b 5^c."""
    while True:
        rest = least
        for p in (2, 3, 5):
            while rest % p == 0:
                rest //= p
        if rest == 1:
            return least
        least += 1


def one_size(kernels: list[list[Tensor]]) -> Tensor:
    """(rows, columns, k, k): kernels of any sizes laid into one, each with its middle, at size //
    2, on the others'."""
    every = [k for row in kernels for k in row]
    before = [max(k.shape[axis] // 2 for k in every) for axis in (0, 1)]
    after = [max((k.shape[axis] - 1) // 2 for k in every) for axis in (0, 1)]
    tall, wide = (b + a + 1 for b, a in zip(before, after, strict=True))
    out = torch.zeros(len(kernels), len(kernels[0]), tall, wide, dtype=torch.float64)
    for r, row in enumerate(kernels):
        for c, k in enumerate(row):
            top, left = before[0] - k.shape[0] // 2, before[1] - k.shape[1] // 2
            out[r, c, top : top + k.shape[0], left : left + k.shape[1]] = k
    return out

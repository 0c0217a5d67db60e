"""Phase retrieval: a kernel from its autocorrelation (Fienup, "Phase retrieval algorithms: a
comparison", 1982).

A blur kernel is small and not negative. The square root of its power spectrum is |H|; hybrid
input-output steps, then error reduction, from many random beginnings at once, look for a phase
under which the kernel is what a kernel is; least squares polish the best. What |H| cannot tell:
where the kernel's centre is, and whether it is mirrored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlens.core.client import generator

TRIES = 24  # random beginnings
_STEPS = 600  # of each


def retrieve_kernel(alike: Tensor, most: int = 31, tries: int = TRIES) -> tuple[Tensor, float]:
    """The kernel, its sum 1, whose circular autocorrelation (H, W) is `alike`, with its peak in the
    corner; and how far its |H| is from the wanted one, relative.
    """
    rows, columns = _extent(alike, most)
    grid = [_even(2 * rows), _even(2 * columns)]
    magnitude = _magnitude(alike, rows, columns, grid)
    pixels, residual = _retrieve(magnitude, rows, columns, grid, tries)
    tight = _without_empty_rim(pixels)
    if tight.shape != pixels.shape:  # noise made the autocorrelation look larger than it is
        pixels, residual = _polish(tight, magnitude, grid)
    pixels, residual = _if_symmetric(alike, pixels, residual, magnitude, grid)
    return pixels / pixels.sum(), residual


def _if_symmetric(
    alike: Tensor, pixels: Tensor, residual: float, magnitude: Tensor, grid: Sequence[int]
) -> tuple[Tensor, float]:
    """Around a symmetric kernel |H|^2 does not change, to first order, with what is antisymmetric,
    so that a small error of the autocorrelation becomes its square root in the kernel. Where a
    symmetric kernel explains it as well, it is taken; there a faint rim can be told from noise too.
    """
    even = (pixels + pixels.flip(0, 1)) / 2
    found, misfit = _polish(even, magnitude, grid, symmetric=True)
    if misfit > 1.2 * residual:
        return pixels, residual
    rows, columns = (n + 2 for n in found.shape)
    larger = [_even(2 * rows), _even(2 * columns)]
    if larger[0] > alike.shape[0] or larger[1] > alike.shape[1]:
        return found, misfit
    wider = _magnitude(alike, rows, columns, larger)
    grown, rest = _polish(pad(found, [1, 1, 1, 1]), wider, larger, symmetric=True)
    _, before = _polish(found, wider, larger, symmetric=True)
    return (grown, rest) if rest < 0.8 * before else (found, misfit)


def _magnitude(alike: Tensor, rows: int, columns: int, grid: Sequence[int]) -> Tensor:
    """|H| of a kernel of so many rows and columns, on a grid that holds its autocorrelation."""
    small = _wrap(alike, rows, columns, grid)
    found: Tensor = torch.fft.rfft2(small).real.clamp_min(0).sqrt()
    return found


def _extent(alike: Tensor, most: int) -> tuple[int, int]:
    """How far the autocorrelation reaches: a kernel of K pixels has one of 2K - 1."""
    level = alike.abs() / alike.abs().max()
    # nearly all of it is empty, or holds nothing but the error of a fit; where only a small part
    # was fitted at all, that may be full of kernel
    noise = 10 * float(level[level > 0].median())
    if float((level > 0).double().mean()) < 0.5:
        noise = min(noise, 3e-3)
    sides = []
    for axis in (0, 1):
        line = level.amax(1 - axis)
        half = min(most, len(line) // 2)
        reach = [k for k in range(half) if line[k] > max(1e-4, noise)]
        sides.append((max(reach) if reach else 0) + 1)
    return sides[0], sides[1]


def _without_empty_rim(kernel: Tensor, least: float = 5e-3) -> Tensor:
    """The smallest box that holds everything above a share of the peak."""
    held = (kernel > least * kernel.max()).nonzero()
    (top, left), (bottom, right) = held.amin(0).tolist(), held.amax(0).tolist()
    return kernel[top : bottom + 1, left : right + 1]


def _even(n: int) -> int:
    return n + n % 2


def _wrap(alike: Tensor, rows: int, columns: int, grid: Sequence[int]) -> Tensor:
    """The autocorrelation on a grid that is just large enough, its centre still at the corner."""
    out = torch.zeros(*grid, dtype=alike.dtype)
    i = torch.arange(-(rows - 1), rows)
    j = torch.arange(-(columns - 1), columns)
    out[(i % grid[0])[:, None], (j % grid[1])[None]] = alike[
        (i % alike.shape[0])[:, None], (j % alike.shape[1])[None]
    ]
    return out


def _retrieve(
    magnitude: Tensor, rows: int, columns: int, grid: Sequence[int], tries: int
) -> tuple[Tensor, float]:
    """Hybrid input-output and error reduction from many beginnings at once; the best is
    polished.
    """
    rng = generator(0, rows, columns, 0xF1E)
    inside = torch.zeros(*grid, dtype=torch.bool)
    inside[:rows, :columns] = True
    g = torch.rand(tries, *grid, generator=rng, dtype=torch.float64) * inside
    # one of them with no phase at all: a Gaussian's or a box's H is (nearly) positive
    zero = torch.fft.irfft2(magnitude.to(torch.complex128), s=tuple(grid))
    g[0] = zero.roll((rows // 2, columns // 2), (0, 1)) * inside
    for step in range(_STEPS):
        spectra = torch.fft.rfft2(g)
        p = torch.fft.irfft2(magnitude * torch.sgn(spectra), s=tuple(grid))
        good = inside & (p >= 0)
        if step % 40 < 25 and step < _STEPS - 100:
            g = torch.where(good, p, g - 0.9 * p)
        else:
            g = torch.where(good, p, 0.0)
    scale = magnitude.norm()
    errors = (torch.fft.rfft2(g).abs() - magnitude).flatten(1).norm(dim=1) / scale
    return _polish(g[int(errors.argmin())][:rows, :columns], magnitude, grid)


def _polish(
    kernel: Tensor, magnitude: Tensor, grid: Sequence[int], symmetric: bool = False
) -> tuple[Tensor, float]:
    """Least squares on |H|^2, kernel = square of what is free, so that it stays positive."""
    # a faint rim has to be able to grow: at 0 a square has no slope
    least = 1e-4 * float(kernel.max()) if symmetric else 1e-8
    root = kernel.clamp_min(least).sqrt().requires_grad_()
    target = magnitude.square()
    optimiser = torch.optim.LBFGS(
        [root], max_iter=300, history_size=20, tolerance_grad=1e-14, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    size = target.norm()

    def positive() -> Tensor:
        squares = root.square()
        return (squares + squares.flip(0, 1)) / 2 if symmetric else squares

    def misfit() -> Tensor:
        optimiser.zero_grad()
        found = torch.fft.rfft2(positive(), s=tuple(grid)).abs().square()
        loss: Tensor = ((found - target) / size).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(misfit)  # type: ignore[no-untyped-call]
    pixels = positive().detach()
    error = (torch.fft.rfft2(pixels, s=tuple(grid)).abs() - magnitude).norm() / magnitude.norm()
    return pixels, float(error)

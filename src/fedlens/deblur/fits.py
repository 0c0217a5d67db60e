"""A client's own step of FedDeblur: of a complete view, of a partial one, of one whose blur differs
from place to place, and of a part of the scene alone. The equations are in `feddeblur.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fedlens.core.tree import Tree
from fedlens.deblur import spectrum
from fedlens.deblur.observation import Observation
from fedlens.deblur.varying import quick_length

# numbers worked on at a time: five arrays of this size fit into a second-level cache or nearly
CACHED_NUMBERS = 1 << 17


class ClientFit(Protocol):
    """The client's half for one scene: from the broadcast x and what was kept, w and what to
    keep. `width`: of the image whose half-spectrum it keeps.
    """

    width: int

    def step(self, x: Tensor, kept: Tree | None) -> tuple[Tensor, Tree]: ...


class CompleteFit:
    """Option A of Algorithm 1. `a` and `c` = B - 1 never change, so a round is two sums and a
    product.
    """

    def __init__(
        self, seen: Observation, n: float, rho: float, dtype: torch.dtype, relax: float = 1.0
    ) -> None:
        self.relax, self.width = relax, seen.width
        h = seen.otf(torch.float64)
        y = torch.fft.rfft2(seen.pixels.double())
        power = 2 / n * h.abs().square()
        self.a = torch.view_as_real(2 / n * h.conj() * y / (power + rho)).to(dtype)
        self.c = spectrum.twice((-power / (power + rho)).to(dtype), self.a.shape[0])

    def step(self, x: Tensor, kept: Tree | None) -> tuple[Tensor, Tree]:
        if self.relax != 1:
            return self._relaxed(x, kept)
        old = kept["u"] if kept else torch.zeros_like(x)
        v, u = torch.empty_like(x), torch.empty_like(x)
        whole = (x, old, self.a, self.c, v, u)
        # A large scene goes through the cache once, piece by piece, instead of three times.
        pieces = (
            [whole]
            if x.numel() <= CACHED_NUMBERS
            else zip(*(torch.split(t.view(-1), CACHED_NUMBERS) for t in whole), strict=True)
        )
        for x_, old_, a_, c_, v_, u_ in pieces:
            torch.sub(x_, old_, out=v_)
            torch.addcmul(a_, c_, v_, out=u_)
            v_.add_(u_, alpha=2)
        return v, {"u": u}

    def _relaxed(self, x: Tensor, kept: Tree | None) -> tuple[Tensor, Tree]:
        """v' = v + relax (x - x_k), x_k = v + u."""
        v = x
        if kept:
            v = torch.sub(x, kept["v"]).sub_(kept["u"]).mul_(self.relax).add_(kept["v"])
        u = torch.addcmul(self.a, self.c, v)
        return torch.add(v, u, alpha=2), {"u": u, "v": v}


class PartialFit:
    """Option B of Algorithm 1."""

    def __init__(
        self, seen: Observation, n: float, rho: float, dtype: torch.dtype, relax: float = 1.0
    ) -> None:
        self.relax, self.width = relax, seen.width
        self.seen, self.pixels = seen, seen.pixels.to(dtype)
        self.h = seen.otf(dtype)
        self.inverse = spectrum.twice(1 / (1 + self.h.abs().square()))
        self.share = _share(seen, n, rho, dtype)
        # zero outside the view, for ever
        self.canvas = torch.zeros(*seen.pixels.shape[:-2], seen.height, seen.width, dtype=dtype)

    def step(self, x: Tensor, kept: Tree | None) -> tuple[Tensor, Tree]:
        if kept is None:
            blurred = self.forward(x)
            kept = {"x": x, "u": torch.zeros_like(x), "b": torch.zeros_like(blurred), "hx": blurred}
        d = (self.pixels + kept["b"]).sub_(kept["hx"]).mul_(self.share)
        v = x - kept["u"] if self.relax == 1 else self._overshot(x, kept["x"]).sub_(kept["u"])
        new = self.adjoint(d)
        new.add_(v).sub_(kept["x"]).mul_(self.inverse).add_(kept["x"])
        u = new - v
        blurred = self.forward(new)
        b = d.add_(kept["hx"]).sub_(blurred)
        return new + u, {"x": new, "u": u, "b": b, "hx": blurred}

    def forward(self, x: Tensor) -> Tensor:
        """h * x on the view."""
        return self.seen.through(x, self.h).contiguous()

    def adjoint(self, d: Tensor) -> Tensor:
        """conj(H) F d."""
        self.seen.cut(self.canvas).copy_(d)
        return torch.view_as_real(torch.fft.rfft2(self.canvas).mul_(self.h.conj()))

    def _overshot(self, x: Tensor, own: Tensor) -> Tensor:
        return torch.lerp(own, x, self.relax)


class VaryingFit(PartialFit):
    """Option B with A (`varying.py`) in place of h *. (A^T A + 1)^-1 is no product in the spectrum
    any more, so x_k takes one step towards it: with a number B >= A^T A,
        x_k' = x_k + (v - x_k + A^T d) / (B + 1)
    which is ADMM with the proximal term |x_k' - x_k|^2 / 2 in the norm of B - A^T A, and ends where
    ADMM ends. B is about 1, and A^T A + 1 lies between 1 and 2: little is lost.
    """

    def __init__(
        self, seen: Observation, n: float, rho: float, dtype: torch.dtype, relax: float = 1.0
    ) -> None:
        self.relax, self.width, self.seen = relax, seen.width, seen
        self.pixels, self.share = seen.pixels.to(dtype), _share(seen, n, rho, dtype)
        self.blur = seen.varying(dtype)
        self.inverse = torch.tensor(1 / (1 + self.blur.bound()), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.blur.forward(x)

    def adjoint(self, d: Tensor) -> Tensor:
        return self.blur.adjoint(d)


def fit_of(
    seen: Observation, n: float, rho: float, dtype: torch.dtype, relax: float = 1.0
) -> ClientFit:
    """The step that suits a view."""
    if seen.grid is not None:
        return VaryingFit(seen, n, rho, dtype, relax)
    return (PartialFit if seen.partial else CompleteFit)(seen, n, rho, dtype, relax)


def _share(seen: Observation, n: float, rho: float, dtype: torch.dtype) -> Tensor | float:
    """1 - c, for a pixel each where they count differently."""
    weight = 1.0 if seen.confidence is None else seen.weight(dtype)
    return 1 - rho / (2 / n * weight + rho)


class CroppedFit:
    """Option B on the field of view and a kernel's width around it. A pixel farther away is not in
    the client's misfit, so x_k = v and u = 0 there, and w is x: a smaller Fourier transform does,
    with the same solution. w stays as large as the scene; but w - x is zero outside the crop, so
    whoever sees one w sees the field of view (under SecureSum nobody does).

    `as_image`: from a half-spectrum and its width to the image; whoever runs several clients in one
    process makes it once for all.
    """

    def __init__(
        self,
        seen: Observation,
        n: float,
        rho: float,
        dtype: torch.dtype,
        relax: float,
        as_image: Callable[[Tensor, int], Tensor],
    ) -> None:
        assert seen.top is not None and seen.left is not None
        tall, wide = seen.pixels.shape[-2:]
        rows, top = _around(seen.top, tall, seen.kernel.shape[0], seen.height)
        columns, left = _around(seen.left, wide, seen.kernel.shape[1], seen.width)
        near = replace(seen, height=len(rows), width=len(columns), top=top, left=left)
        self.fit = fit_of(near, n, rho, dtype, relax)
        self.rows, self.columns, self.as_image = rows[:, None], columns, as_image
        self.width, self.whole = len(columns), seen.width

    def step(self, x: Tensor, kept: Tree | None) -> tuple[Tensor, Tree]:
        image = self.as_image(x, self.whole)
        crop = image[..., self.rows, self.columns]
        w, kept = self.fit.step(spectrum.forward(crop), kept)
        beyond = torch.zeros_like(image)
        beyond[..., self.rows, self.columns] = spectrum.backward(w, self.width).sub_(crop)
        return spectrum.forward(beyond).add_(x), kept


def _around(start: int, length: int, margin: int, whole: int) -> tuple[Tensor, int]:
    """The places of a crop with its margin along one axis, round the edge where need be, and where
    the view begins in it. The length is one that Fourier transforms are quick at."""
    wanted = quick_length(length + 2 * margin)
    if wanted >= whole:
        return torch.arange(whole), start
    return torch.arange(start - margin, start - margin + wanted) % whole, margin


def is_small_view(seen: Observation) -> bool:
    """Whether a crop is worth its two transforms: less than half of the scene."""
    return seen.partial and 2 * seen.pixels.shape[-2:].numel() < seen.height * seen.width

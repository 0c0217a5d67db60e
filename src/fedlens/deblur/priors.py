r"""Priors: what the server believes about a sharp image. Clients never learn which one is in use.

A prior is R(W x) with a linear transform W and a proximal operator of R, both cheap. Split priors
(total variation, wavelets) enter the server step by the splitting z = W x (FedDeblur, Eqs. 7-9),
the others directly, x = prox(w) (Eq. 5); a denoiser may do either, with W = I. Intensities are [0,
255].

prox(a, t) minimises t R(z) + |z - a|^2 / 2. A denoiser stands in for the prox with noise level
sqrt(t): the prox of a log-prior is the best guess of an image under Gaussian noise of variance t
(the paper writes D with index eta / (n rho) for the same).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.deblur.denoisers import DenoiserName, check_weights, load_denoiser

PriorName = Literal["tv", "wavelet", "ridge", "box", "pnp"]


class Prior(ABC):
    """Images are (C, H, W). `transform` makes a fresh array; `prox` may overwrite what it is
    given.
    """

    split: bool = False

    def transform(self, x: Tensor) -> Tensor:
        return x.clone()

    def adjoint(self, q: Tensor) -> Tensor:
        return q

    def gram(self, height: int, width: int, dtype: torch.dtype) -> Tensor:
        """The half-spectrum of W^T W, (H, W // 2 + 1)."""
        return torch.ones(height, width // 2 + 1, dtype=dtype)

    @abstractmethod
    def prox(self, a: Tensor, t: float) -> Tensor: ...

    def add_rest(self, d: Tensor, a: Tensor, t: float) -> Tensor:
        """d + (a - prox(a, t)): what the prox takes away, a projection onto the dual ball. May
        overwrite both.
        """
        return d.add_(a).sub_(self.prox(a, t))

    def next_q(self, x: Tensor, q: Tensor, t: float) -> Tensor:
        """q = z + mu / rho for the next x-step: z' = prox(W x - mu'), mu' = q - W x. A prox that is
        not odd has no shortcut.
        """
        d = self.transform(x)
        if self.split:
            return self.add_rest(d, torch.sub(q, d, alpha=2), t)
        return self.prox(2 * d - q, t) + q - d

    def check(self, channels: int) -> None:  # noqa: B027  (most priors need nothing)
        """Raises a clear error when something is missing that can be known before the first
        round.
        """

    def value(self, x: Tensor) -> float | None:
        """R(W x), or None where nobody knows it (a denoiser)."""
        return None


@dataclass
class TotalVariation(Prior):
    """Isotropic, backward differences with wrap; one magnitude for all channels of a pixel (joint
    colour TV).
    """

    split = True

    def transform(self, x: Tensor) -> Tensor:
        """u - roll(u, 1) along both axes, written in place: (2, C, H, W)."""
        d = torch.empty((2, *x.shape), dtype=x.dtype)
        torch.sub(x[..., 1:], x[..., :-1], out=d[0][..., 1:])
        torch.sub(x[..., 0], x[..., -1], out=d[0][..., 0])
        torch.sub(x[..., 1:, :], x[..., :-1, :], out=d[1][..., 1:, :])
        torch.sub(x[..., 0, :], x[..., -1, :], out=d[1][..., 0, :])
        return d

    def adjoint(self, q: Tensor) -> Tensor:
        """u - roll(u, -1) along both axes, summed."""
        out = q[0] + q[1]
        out[..., :-1] -= q[0][..., 1:]
        out[..., -1] -= q[0][..., 0]
        out[..., :-1, :] -= q[1][..., 1:, :]
        out[..., -1, :] -= q[1][..., 0, :]
        return out

    def gram(self, height: int, width: int, dtype: torch.dtype) -> Tensor:
        """|1 - exp(-i w)|^2 = 2 - 2 cos w, for both axes."""
        rows = 2 - 2 * torch.cos(2 * torch.pi * torch.arange(height, dtype=torch.float64) / height)
        columns = 2 - 2 * torch.cos(
            2 * torch.pi * torch.arange(width // 2 + 1, dtype=torch.float64) / width
        )
        return (rows[:, None] + columns[None, :]).to(dtype)

    def prox(self, a: Tensor, t: float) -> Tensor:
        return self._scaled(a, a, t, -t)

    def add_rest(self, d: Tensor, a: Tensor, t: float) -> Tensor:
        return self._scaled(d, a, t, t)

    def _scaled(self, d: Tensor, a: Tensor, t: float, by: float) -> Tensor:
        """d + by a / max(|a|, t), with 1 / max(|a|, t) as rsqrt(max(|a|^2, t^2)): no division and
        no mask.
        """
        if t <= 0:
            return d
        parts = a.flatten(0, 1)
        square = parts[0] * parts[0]
        for part in parts[1:]:
            square.addcmul_(part, part)
        return d.addcmul_(a, square.clamp_min_(t * t).rsqrt_(), value=by)

    def value(self, x: Tensor) -> float:
        return float(self.transform(x).double().square().sum((0, 1)).sqrt().sum())


@dataclass
class Wavelet(Prior):
    """l1 of the undecimated Haar coefficients: a Parseval frame (W^T W = I) that does not care
    where its grid lies.

    Args:
        levels: of the transform.
    """

    levels: int = 3
    split = True

    def transform(self, x: Tensor) -> Tensor:
        parts, low = [], x
        for level in range(self.levels):
            step = 1 << level
            near, far = _halves(low, step, -1)
            low, *details = *_halves(near, step, -2), *_halves(far, step, -2)
            parts += details
        return torch.stack([low, *parts])

    def adjoint(self, q: Tensor) -> Tensor:
        low = q[0]
        for level in reversed(range(self.levels)):
            step, k = 1 << level, 1 + 3 * level
            near = _join(low, q[k], step, -2)
            far = _join(q[k + 1], q[k + 2], step, -2)
            low = _join(near, far, step, -1)
        return low

    def prox(self, a: Tensor, t: float) -> Tensor:
        a[1:] = nn.functional.softshrink(a[1:], t)
        return a

    def value(self, x: Tensor) -> float:
        return float(self.transform(x)[1:].double().abs().sum())


def _halves(x: Tensor, step: int, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and half difference with the neighbour `step` away: |cos|^2 + |sin|^2 = 1."""
    other = x.roll(step, dim)
    return (x + other) / 2, (x - other) / 2


def _join(low: Tensor, high: Tensor, step: int, dim: int) -> Tensor:
    return (low + low.roll(-step, dim) + high - high.roll(-step, dim)) / 2


@dataclass
class Ridge(Prior):
    """R(x) = |x|^2 / 2: the plainest prox there is."""

    def prox(self, a: Tensor, t: float) -> Tensor:
        return a.div_(1 + t)

    def value(self, x: Tensor) -> float:
        return float(x.double().square().sum() / 2)


@dataclass
class BoxConstraint(Prior):
    """Intensities lie in [0, 255], and nothing else is known."""

    def prox(self, a: Tensor, t: float) -> Tensor:
        return a.clamp_(0, 255)

    def value(self, x: Tensor) -> float:
        return 0.0


@dataclass
class PlugAndPlay(Prior):
    """A denoiser as the prox. `denoise(image in [0, 1] as (1, C, H, W), sigma in [0, 1])` gives the
    clean image.

    Args:
        denoiser: its name, as in `FedDeblur`.
        weights: a file with its weights.
        split: whether it enters by z = x or acts on the mean of w, as in `FedDeblur`.
    """

    denoiser: DenoiserName = "auto"
    weights: str | None = None
    split: bool = False
    _model: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def prox(self, a: Tensor, t: float) -> Tensor:
        channels = a.shape[0]
        if channels not in self._model:
            self._model[channels] = load_denoiser(self.denoiser, self.weights, channels)
        with torch.no_grad():
            clean: Tensor = self._model[channels]((a / 255).clamp(0, 1).float()[None], t**0.5 / 255)
        return clean[0].clamp(0, 1).mul(255).to(a.dtype)

    def check(self, channels: int) -> None:
        check_weights(self.denoiser, self.weights, channels)

    def add_rest(self, d: Tensor, a: Tensor, t: float) -> Tensor:
        """A denoiser is not odd, and images are positive: d + a + prox(-a), which for an odd prox
        is the same.
        """
        return d.add_(a).add_(self.prox(-a, t))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": {}}


def make_prior(
    name: PriorName,
    denoiser: DenoiserName = "auto",
    weights: str | None = None,
    split: bool = False,
) -> Prior:
    plain = {"tv": TotalVariation, "wavelet": Wavelet, "ridge": Ridge, "box": BoxConstraint}
    return PlugAndPlay(denoiser, weights, split) if name == "pnp" else plain[name]()

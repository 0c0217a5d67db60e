r"""FedDeblur's messages from complete views: kernel and photo. Everything below is a half-spectrum,
in the notation of `deblur/feddeblur.py`; a round is what `audit/duals.py` makes of it.

A client's step is u' = A + c v with v = x - u, where c = -P / (P + rho) is real, P = 2/n |H|^2 and
A = 2/n conj(H) Y / (P + rho): two unknowns per frequency for any number of rounds, of which each
brings w - x = v + 2 u' - x (an over-relaxed client has relax x + (1 - relax) x_k of its last round
in place of x in v). For a given |H|^2 the steps can be played from u = 0 and are linear in A:
    w_t - x_t = a_t A + b_t
so that A is found by least squares and |H|^2 by trying values until what was sent is explained
best. The client's u has no noise, whatever was added to its messages; a line through (v, u) as the
messages tell them would have it on both sides.

|H|^2 is the spectrum of the autocorrelation of a small kernel, hence a few hundred numbers and not
one per frequency (least squares again). Phase retrieval (`audit/phase_retrieval.py`) makes a kernel
of it; with the kernel's |H|^2 in place of the first one comes A, and Y = n/2 A (P + rho) / conj(H).
Two things cannot be known from the messages: where the kernel's centre is (the photo is found up to
a shift), and whether a lopsided kernel is the one found or its mirror image, since |H| is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.audit.duals import Iterate
from fedlens.audit.phase_retrieval import retrieve_kernel
from fedlens.deblur import spectrum

_TRIED = torch.logspace(-9, 0, 37, dtype=torch.float64)  # values of |H|^2, which is at most 1
_HALVINGS = 34  # of the interval between them, by the golden section
_SIDES = (5, 7, 9, 11, 13, 15, 19, 23, 27, 31)  # kernels that are tried, the smallest first
_EXPLAINED = 1.5  # mean square of what is left, in its standard errors


@dataclass(frozen=True)
class Sent:
    """What one client sent, round by round: x and moved = w - x are (C, H, W // 2 + 1). weight: how
    much a round counts, as if noise were a share of the message. relax: the recipe's.
    """

    x: Sequence[Tensor]
    moved: Sequence[Tensor]
    weight: Sequence[float]
    n: float
    rho: float
    relax: float


@dataclass(frozen=True)
class Played:
    """A client's steps with a given |H|^2, beside what it sent. height: A. misfit: weighted, summed
    over rounds and channels. doubt: the variance of A as a multiple of that of a message.
    """

    height: Tensor
    misfit: Tensor
    doubt: Tensor


@dataclass(frozen=True)
class Power:
    """|H|^2 of every frequency, (H, W // 2 + 1), and its standard error."""

    power: Tensor
    error: Tensor


def sent_by(rounds: Sequence[Iterate], n: float, rho: float, relax: float = 1.0) -> Sent:
    if len(rounds) < 3:
        raise ValueError("two unknowns and their error need three rounds of this client")
    x = [torch.view_as_complex(r.x.contiguous()) for r in rounds]
    moved = [torch.view_as_complex((r.local + r.u - r.x).contiguous()) for r in rounds]
    weight = [1 / max(float(m.abs().square().mean()), 1e-30) for m in moved]
    return Sent(x, moved, weight, n, rho, relax)


def play(sent: Sent, power: Tensor) -> Played:
    """The client's steps with this |H|^2, A by least squares."""
    p = 2 / sent.n * power
    c = -p / (p + sent.rho)
    # everything is known + A unknown; v is taken as a difference to x, which is large
    known, unknown = torch.zeros_like(sent.x[0]), torch.zeros_like(power)  # of v - x
    steps: list[tuple[Tensor, Tensor]] = []
    for k, (x, moved) in enumerate(zip(sent.x, sent.moved, strict=True)):
        dual, dual_unknown = c * (x + known), 1 + c * unknown
        steps.append((unknown + 2 * dual_unknown, moved - known - 2 * dual))
        if k + 1 < len(sent.x):
            local, later = x + known + dual, sent.x[k + 1]
            known = (1 - sent.relax) * (local - later) - dual
            unknown = (1 - sent.relax) * (unknown + dual_unknown) - dual_unknown
    weighed = list(zip(sent.weight, steps, strict=True))
    size = torch.stack([w * a.square() for w, (a, _) in weighed]).sum(0)
    height = torch.stack([w * a * left for w, (a, left) in weighed]).sum(0) / size
    misfit = torch.zeros_like(power)
    for w, (a, left) in weighed:
        misfit += w * (left - a * height).abs().square().sum(0)
    return Played(height, misfit, 1 / size)


def fit_power(sent: Sent) -> Power:
    """|H|^2 of every frequency by itself: the best of a few values, then the golden section."""
    shape = sent.x[0].shape[-2:]
    misfits = torch.stack([play(sent, value.expand(shape)).misfit for value in _TRIED])
    best = misfits.argmin(0)
    low = _TRIED[(best - 1).clamp_min(0)].log()
    high = _TRIED[(best + 1).clamp_max(len(_TRIED) - 1)].log()
    share = (math.sqrt(5) - 1) / 2

    def at(x: Tensor) -> Tensor:
        return play(sent, x.exp()).misfit

    inner, outer = high - share * (high - low), low + share * (high - low)
    at_inner, at_outer = at(inner), at(outer)
    for _ in range(_HALVINGS):
        left = at_inner < at_outer
        low, high = torch.where(left, low, inner), torch.where(left, outer, high)
        point = torch.where(left, high - share * (high - low), low + share * (high - low))
        found = at(point)
        inner, outer = torch.where(left, point, outer), torch.where(left, inner, point)
        at_inner, at_outer = torch.where(left, found, at_outer), torch.where(left, at_inner, found)
    power = ((low + high) / 2).exp()
    return Power(power, _error_of(sent, power))


def _error_of(sent: Sent, power: Tensor) -> Tensor:
    """From how sharply the misfit rises to both sides."""
    step = 1e-2 * power
    here = play(sent, power).misfit
    rise = play(sent, power + step).misfit + play(sent, power - step).misfit - 2 * here
    curvature = (rise / step.square() / 2).clamp_min(1e-30)
    freedom = 2 * (len(sent.x) - 1) * len(sent.x[0]) - 1
    return (2 * here / freedom / curvature).sqrt().clamp_max(1.0)


def find_kernel(sent: Sent, width: int) -> Tensor:
    """Up to its place and a mirror image: of the smallest kernel that explains |H|^2, and of the
    one that |H|^2 gives as it is, which without noise is the more exact, whichever explains better
    what was sent.
    """
    found = fit_power(sent)
    tried: list[tuple[float, Tensor]] = []
    for side in [s for s in _SIDES if 2 * s <= min(len(found.power), width)]:
        tried.append(_autocorrelation(found, width, side))
        if tried[-1][0] < _EXPLAINED:
            break
    _, small = min(tried, key=lambda t: t[0])
    whole = torch.fft.irfft2(found.power.to(torch.complex128), s=(len(found.power), width))

    def misfit(kernel: Tensor) -> float:
        h = spectrum.otf(kernel, len(found.power), width, torch.float64)
        return float(play(sent, h.abs().square()).misfit.sum())

    return min((retrieve_kernel(alike)[0] for alike in (small, whole)), key=misfit)


def _autocorrelation(found: Power, width: int, side: int) -> tuple[float, Tensor]:
    """(what is left, autocorrelation) of a kernel of at most side x side pixels: |H|^2 = sum over
    shifts s of q_s cos(2 pi f s), weighed by the errors. The normal equations hold the transform of
    the weights only.
    """
    height = len(found.power)
    weight = found.error.clamp_min(1e-6).pow(-2)
    of_weight, of_power = (
        torch.fft.irfft2(t.to(torch.complex128), s=(height, width), norm="forward")
        for t in (weight, weight * found.power)
    )
    pairs = [(i, j) for i in range(side) for j in range(1 - side, side) if i or j >= 0]
    shifts = torch.tensor(pairs)
    twice = torch.tensor([1.0 if s == (0, 0) else 2.0 for s in pairs], dtype=torch.float64)

    def at(image: Tensor, place: Tensor) -> Tensor:
        return image[place[..., 0] % height, place[..., 1] % width]

    both = at(of_weight, shifts[:, None] - shifts) + at(of_weight, shifts[:, None] + shifts)
    gram = both / 2 * twice[:, None] * twice
    gram.diagonal().add_(1e-10 * gram.diagonal().mean())
    q = torch.linalg.solve(gram, at(of_power, shifts) * twice)
    alike = torch.zeros(height, width, dtype=torch.float64)
    alike[shifts[:, 0], shifts[:, 1]] = q
    alike[-shifts[:, 0], -shifts[:, 1]] = q
    left = (torch.fft.rfft2(alike).real - found.power).square() * weight
    return float(left.mean()), alike


def find_photo(sent: Sent, kernel: Tensor, width: int, mirrored: bool = False) -> Tensor:
    """Y = n/2 A (P + rho) / conj(H). As far as noise leaves that in doubt, what the restored scene
    would look like through the kernel takes its place: both say what the scene is, and count as
    much as they are certain.
    """
    height = sent.x[0].shape[-2]
    h = spectrum.otf(kernel.flip(0, 1) if mirrored else kernel, height, width, torch.float64)
    power = h.abs().square()
    played = play(sent, power)
    scale = sent.n / 2 * (2 / sent.n * power + sent.rho)
    freedom = 2 * (len(sent.x) - 1) * len(sent.x[0])
    noise = 2 * played.misfit.mean() / freedom * played.doubt * scale.square()
    apart = sent.moved[-1].abs().square().mean().clamp_min(1e-30)  # of a client and the scene
    floor = (noise / apart).clamp_min(1e-14)
    seen = power * scale * played.height + floor * sent.x[-1]
    photo: Tensor = torch.fft.irfft2(h * seen / (power.square() + floor), s=(height, width))
    return photo

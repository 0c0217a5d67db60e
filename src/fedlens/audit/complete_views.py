r"""FedDeblur's messages from complete views: kernel and photo. The dual u and the local estimates
are known exactly (`audit/duals.py`); everything below is a half-spectrum, in the notation of
`deblur/feddeblur.py`.

u' = A + c v, where c = -P / (P + rho) is real, P = 2/n |H|^2 and A = 2/n conj(H) Y / (P + rho).
That is a line with two unknowns per frequency, and every round is a point on it. From its slope
and height,
    |H|^2 = n/2 rho (-c) / (1 + c),   conj(H) Y = n/2 A (P + rho)
|H|^2 is the spectrum of the kernel's autocorrelation, phase retrieval (`audit/phase_retrieval.py`)
makes a kernel of it, and Y = conj(H) Y / conj(H). Two things cannot be known from the messages:
where the kernel's centre is (the photo is found up to a shift), and whether a lopsided kernel is
the one found or its mirror image, since |H| is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.audit.duals import Iterate
from fedlens.audit.phase_retrieval import retrieve_kernel
from fedlens.deblur import spectrum


@dataclass(frozen=True)
class Line:
    """power: |H|^2 by the fit, (H, W // 2 + 1). product: conj(H) Y. doubt: the standard error of
    `power`, from what the line leaves unexplained.
    """

    power: Tensor
    product: Tensor
    doubt: Tensor


def fit_line(rounds: Sequence[Iterate], n: float, rho: float) -> Line:
    """u = A + c v per frequency, by least squares; channels share c. A kernel is not negative and
    sums to 1, so that |H| is at most 1.
    """
    if len(rounds) < 3:
        raise ValueError("a line and its error need three points, so three rounds of this client")
    u = torch.stack([torch.view_as_complex(r.u.contiguous()) for r in rounds])
    v = torch.stack([torch.view_as_complex(r.v.contiguous()) for r in rounds])
    du, dv = u - u.mean(0), v - v.mean(0)
    spread = dv.abs().square().sum((0, 1)).clamp_min(1e-30)
    slope = (du * dv.conj()).real.sum((0, 1)) / spread
    slope = slope.clamp(-1 / (1 + n / 2 * rho), 0)
    left = (du - slope * dv).abs().square().sum((0, 1)) / (len(rounds) - 2)
    height = u.mean(0) - slope * v.mean(0)
    power = n / 2 * rho * -slope / (1 + slope)
    doubt = n / 2 * rho / (1 + slope).square() * (left / spread).sqrt()
    return Line(power, n / 2 * height * (2 / n * power + rho), doubt)


def find_kernel(line: Line, width: int) -> Tensor:
    alike = torch.fft.irfft2(line.power.to(torch.complex128), s=(line.power.shape[-2], width))
    return retrieve_kernel(alike)[0]


def find_photo(
    line: Line, kernel: Tensor, scene: Tensor, width: int, mirrored: bool = False
) -> Tensor:
    """Y = conj(H) Y / conj(H). As far as |H|^2 is in doubt, what the restored scene would look like
    through the kernel takes its place.
    """
    height = line.power.shape[-2]
    h = spectrum.otf(kernel.flip(0, 1) if mirrored else kernel, height, width, torch.float64)
    floor = line.doubt.clamp_min(1e-7)
    x = torch.view_as_complex(scene.double().contiguous())
    y = h * (line.product + floor * x) / (h.abs().square() + floor)
    photo: Tensor = torch.fft.irfft2(y, s=(height, width))
    return photo

"""Images as half-spectra: rfft2 as a real array (C, H, W // 2 + 1, 2), which travels, is summed and
is checked like any other.

The boundary is circular. A kernel is laid into the corner of the scene and rolled by -(size // 2)
per axis, so that its centre pixel stands at the origin (MATLAB's psf2otf); a kernel of even size is
centred half a pixel off, for blurring and deblurring alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.rfft2(x))


def backward(s: Tensor, width: int) -> Tensor:
    image: Tensor = torch.fft.irfft2(torch.view_as_complex(s), s=(s.shape[-3], width))
    return image


def otf(kernel: Tensor, height: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The kernel's transfer function, complex, (H, W // 2 + 1). Computed in float64: it is made
    once and used in every round.
    """
    rows, columns = kernel.shape
    padded = torch.zeros(height, width, dtype=torch.float64)
    padded[:rows, :columns] = kernel
    spectrum: Tensor = torch.fft.rfft2(padded.roll((-(rows // 2), -(columns // 2)), (0, 1)))
    return spectrum.to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def twice(x: Tensor, *before: int) -> Tensor:
    """Real factors of a half-spectrum, each entry beside itself, and repeated for the axes
    `before`: multiplying two contiguous arrays is quicker than broadcasting one of them."""
    return x.unsqueeze(-1).expand(*before, *x.shape, 2).contiguous()


def circular_blur(x: Tensor, kernel: Tensor) -> Tensor:
    """Circular convolution, in float64."""
    height, width = x.shape[-2:]
    out: Tensor = torch.fft.irfft2(
        torch.fft.rfft2(x.double()) * otf(kernel, height, width, torch.float64), s=(height, width)
    )
    return out


def image_norm(s: Tensor, width: int) -> float:
    """The 2-norm of the image, by Parseval: columns of a half-spectrum count twice, except the
    first and, for even widths, the last.
    """
    columns = s.double().square().sum((*range(s.dim() - 2), -1))
    twice = 2 * columns.sum() - columns[0] - (columns[-1] if width % 2 == 0 else 0)
    return math.sqrt(float(twice) / (s.shape[-3] * width))

"""A kernel from a photo and a sharp picture of the same thing."""

from __future__ import annotations

import pytest
import torch

from fedlens.data.images.reading import shipped
from fedlens.data.source import DataError
from fedlens.deblur.blur import motion
from fedlens.deblur.kernel_fit import estimate_kernel
from fedlens.deblur.spectrum import circular_blur


@pytest.mark.parametrize("size", [9, 8])
def test_a_kernel_is_found_from_a_photo_and_a_sharp_picture(size: int) -> None:
    """Blurred by a known kernel, darkened, noise of one grey level: the estimate blurs the sharp
    picture into the same photo, within the noise, and lies on the same pixels. Odd and even sizes
    stand where `spectrum.otf` puts them."""
    sharp = torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 4)
    true = torch.zeros(size, size, dtype=torch.float64)
    line = motion(6, 30)
    true[1 : 1 + line.shape[0], 1 : 1 + line.shape[1]] = line
    clean = circular_blur(sharp, true)
    view = 0.9 * clean + 5 + torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    found = estimate_kernel(view.float(), sharp, size)
    assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
    inner = (slice(None), slice(size, -size), slice(size, -size))
    assert float((circular_blur(sharp, found) - clean)[inner].std()) < 1
    assert float((found - true).abs().sum()) < 0.25


def test_no_kernel_can_come_from_nothing() -> None:
    flat, busy = (
        torch.zeros(1, 40, 40),
        255 * torch.rand(1, 40, 40, generator=torch.Generator().manual_seed(0)),
    )
    for view, sharp, size, words in (
        (busy, flat, 5, "flat"),
        (-busy, busy, 1, "nothing in common"),
        (busy, busy, 25, "too small"),
    ):
        with pytest.raises(DataError, match=words):
            estimate_kernel(view, sharp, size)

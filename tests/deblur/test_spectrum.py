"""Images as half-spectra."""

from __future__ import annotations

import numpy as np
import pytest
import scenes
import torch

from fedlens.deblur.spectrum import circular_blur, forward, image_norm, twice


def test_norm_of_a_half_spectrum_is_the_images() -> None:
    for width in (20, 21):
        x = torch.randn(
            2, 12, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        spectrum = torch.view_as_real(torch.fft.rfft2(x))
        assert image_norm(spectrum, width) == pytest.approx(float(x.norm()))


def test_even_kernels_sit_half_a_pixel_off_like_matlabs_psf2otf() -> None:
    """A 1 x 2 kernel [a b] has its centre at index 1: out[j] = b x[j] + a x[j + 1] ... that is, x
    is blurred from its right.
    """
    x = torch.arange(6, dtype=torch.float64).reshape(1, 1, 6).expand(1, 4, 6)
    kernel = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    want = 0.75 * x + 0.25 * x.roll(-1, -1)
    torch.testing.assert_close(circular_blur(x, kernel), want)
    np.testing.assert_allclose(scenes.blur(x.numpy(), kernel.numpy()), want.numpy(), atol=1e-12)


def test_real_factors_multiply_both_parts() -> None:
    factors, s = torch.rand(4, 4), forward(torch.rand(3, 4, 6))
    want = torch.view_as_real(factors * torch.view_as_complex(s))
    assert torch.equal(twice(factors) * s, want) and torch.equal(twice(factors, 3) * s, want)
    assert twice(factors, 3).shape == s.shape and twice(factors, 3).is_contiguous()

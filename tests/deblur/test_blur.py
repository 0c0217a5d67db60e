"""Kernels: values worked out by hand or printed by MATLAB, and what the public facts say about the
authors' ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlens.deblur.blur import client_kernel, disk, gaussian, motion, shake


def test_motion_along_the_axes() -> None:
    """Length 9 at 0 degrees: nine ninths. Length 20: half 9.5, so 19 whole pixels and two halves;
    at 90 degrees the same, upright.
    """
    torch.testing.assert_close(motion(9, 0), torch.full((1, 9), 1 / 9, dtype=torch.float64))
    flat = motion(20, 0)
    assert flat.shape == (1, 21)
    torch.testing.assert_close(
        flat[0], torch.tensor([0.5, *[1.0] * 19, 0.5], dtype=torch.float64) / 20
    )
    torch.testing.assert_close(motion(20, 90), flat.T)
    torch.testing.assert_close(motion(25, 180), motion(25, 0))


def test_motion_turns_anti_clockwise() -> None:
    """At 45 degrees the line rises to the right: the upper right corner is heavier than the upper
    left; the kernel is its own half turn.
    """
    kernel = motion(15, 45)
    assert kernel[0, -1] + kernel[0, -2] + kernel[1, -1] > 0 and kernel[0, 0] == 0 == kernel[-1, -1]
    torch.testing.assert_close(kernel, kernel.flip(0, 1))
    torch.testing.assert_close(motion(15, 135), kernel.flip(1))
    spread = (kernel * (torch.arange(len(kernel)) - len(kernel) // 2)[:, None].abs()).sum()
    # mean distance of a line from its middle, seen at 45 degrees
    assert float(spread) == pytest.approx(15 / 4 / 2**0.5, rel=0.1)


def test_disk_of_radius_one_as_matlab_prints_it() -> None:
    want = [[0.0251, 0.1453, 0.0251], [0.1453, 0.3183, 0.1453], [0.0251, 0.1453, 0.0251]]
    np.testing.assert_allclose(disk(1).numpy(), want, atol=1e-4)


def test_disks_cover_what_they_should() -> None:
    """A pixel inside the circle weighs 1 / (pi r^2). The authors' disk of radius 5 has 81 equal
    pixels.
    """
    kernel = disk(5)
    assert kernel.shape == (11, 11) and float(kernel[5, 5]) == pytest.approx(
        1 / (np.pi * 25), rel=1e-4
    )
    hard = disk(5, "authors")
    assert int((hard > 0).sum()) == 81 and float(hard.max()) == pytest.approx(1 / 81)


def test_gaussian_is_a_product_and_may_be_even() -> None:
    kernel = gaussian(10, 3)
    ratio = float(kernel[4, 4] / kernel[4, 3])  # half a pixel and one and a half from the middle
    assert kernel.shape == (10, 10) and ratio == pytest.approx(np.exp((1.5**2 - 0.5**2) / 18))


def test_the_authors_motion_is_half_a_line() -> None:
    """Length 20 at 0 degrees: 10 whole pixels and a half, all on one side of the centre; whole only
    at 90 degrees.
    """
    half = motion(20, 0, "authors")
    assert int((half > 0).sum()) == 11 and bool((half[0, :10] == 0).all())
    assert torch.equal(motion(20, 90, "authors"), motion(20, 90))


@pytest.mark.parametrize("family", ["fspecial", "authors", "authors-dark"])
@pytest.mark.parametrize("blur", ["mixed", "motion", "synthesis"])
def test_every_kernel_is_a_blur(family: str, blur: str) -> None:
    """Non-negative, of sum 1 (less where a crop is left dark, as the authors' code does),
    reproducible, different for every client.
    """
    kernels = [client_kernel(blur, k, family, seed=3) for k in range(23)]  # type: ignore[arg-type]
    for k, kernel in enumerate(kernels):
        assert float(kernel.min()) >= 0
        assert (
            0.2 < float(kernel.sum()) <= 1 + 1e-12
            if family == "authors-dark"
            else float(kernel.sum()) == pytest.approx(1)
        )
        assert torch.equal(kernel, client_kernel(blur, k, family, seed=3))  # type: ignore[arg-type]
    if blur == "synthesis":
        assert len({k.numpy().tobytes() for k in kernels}) == 23
        assert {tuple(k.shape) for k in kernels} == {(15, 15)}


def test_camera_shake_fills_its_grid_and_the_authors_even_sizes_shrink() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        kernel = shake(25, rng)
        used = torch.nonzero(kernel > 0)
        assert int((used.max(0).values - used.min(0).values).max()) >= 22
        assert shake(12, rng, "authors").shape == (11, 11)

"""A kernel from the blurred photo alone. References: the kernel that blurred it, and the steps of
the method on pictures whose answer is known.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.data.images.reading import shipped
from fedlens.data.source import DataError
from fedlens.deblur.blind import blind_kernel, few_edges, kernel_between
from fedlens.deblur.blur import disk, motion
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import circular_blur


def likeness(found: Tensor, true: Tensor) -> float:
    """Largest correlation over shifts."""
    side = found.shape[0]
    wide = torch.zeros(side, side, dtype=torch.float64)
    top, left = side // 2 - true.shape[0] // 2, side // 2 - true.shape[1] // 2
    wide[top : top + true.shape[0], left : left + true.shape[1]] = true
    spectra = torch.fft.fft2(found, (2 * side, 2 * side)).conj() * torch.fft.fft2(
        wide, (2 * side, 2 * side)
    )
    return float(torch.fft.ifft2(spectra).real.max() / (found.norm() * wide.norm()))


@pytest.mark.parametrize("true", [motion(7, 0), disk(2.5)], ids=["motion", "defocus"])
def test_the_kernel_of_a_photo_is_found(true: Tensor) -> None:
    """Better than a kernel that knows nothing (flat, or none)."""
    sharp = torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 4)
    view = circular_blur(sharp, true)
    view = view + torch.randn(view.shape, generator=torch.Generator().manual_seed(0))
    found = blind_kernel(view.float(), 9)
    assert found.shape == (9, 9) and float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)
    flat, none = torch.full((9, 9), 1 / 81, dtype=torch.float64), torch.zeros(9, 9).double()
    none[4, 4] = 1
    assert likeness(found, true) > max(0.85, likeness(flat, true), likeness(none, true))


def test_the_kernel_between_two_pictures_is_exact() -> None:
    rng = torch.Generator().manual_seed(0)
    sharp = torch.rand(60, 60, generator=rng, dtype=torch.float64).round()
    kernel = torch.zeros(5, 5, dtype=torch.float64)
    kernel[1, 1:4], kernel[2, 3] = 0.2, 0.4
    found = kernel_between(sharp, circular_blur(sharp[None], kernel)[0], 5)
    torch.testing.assert_close(found, kernel, atol=0.02, rtol=0)


def test_a_picture_of_few_edges_keeps_its_edge_and_loses_its_noise() -> None:
    step = torch.zeros(40, 40, dtype=torch.float64)
    step[:, 20:] = 1
    noisy = step + 0.02 * torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).double()
    none = torch.ones(1, 1, dtype=torch.float64)
    clean = few_edges(noisy, none, 0.01)
    assert float((clean - step).abs().mean()) < 0.3 * float((noisy - step).abs().mean())
    assert float((clean[:, 20] - clean[:, 19]).mean()) > 0.9


def test_nothing_can_be_found_in_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the photo of anna is flat"):
        blind_kernel(torch.full((1, 60, 60), 80.0), 9, "anna")
    with pytest.raises(DataError, match="too small to find a kernel of 31 x 31"):
        blind_kernel(torch.rand(1, 60, 60) * 255, 30)
    (tmp_path / "anna").mkdir()
    np.save(tmp_path / "anna" / "observation.npy", np.full((60, 60), 80.0))
    with pytest.raises(DataError, match="anna is flat"):
        Scene(scene=str(tmp_path)).federation(1, 0)
    (tmp_path / "anna" / "kernel.json").write_text(json.dumps({"gaussian": {"sigma": 1}}))
    assert len(Scene(scene=str(tmp_path)).federation(1, 0)) == 1

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.data.video.degrade import cut_to, degrade, enlarge, shrink


def cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel, a = -1/2."""
    x = np.abs(x)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, near, np.where(x <= 2, far, 0))


def imresize_matrix(n: int, m: int, scale: float) -> np.ndarray:
    """The weights of MATLAB's imresize from n to m samples, written down from its definition:
    output pixel j looks at u = j/scale + (1 - 1/scale)/2 (from 1), with the kernel stretched by
    1/scale when shrinking; indices beyond the border are mirrored, the edge repeated."""
    stretch = min(scale, 1.0)
    out = np.zeros((m, n))
    for j in range(1, m + 1):
        u = j / scale + 0.5 * (1 - 1 / scale)
        reach = 2 / stretch
        index = np.arange(int(np.floor(u - reach)), int(np.ceil(u + reach)) + 1)
        weights = cubic((u - index) * stretch)
        weights /= weights.sum()
        around = np.mod(index - 1, 2 * n)
        around = np.where(around < n, around, 2 * n - 1 - around)
        np.add.at(out[j - 1], around, weights)
    return out


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_equals_matlab_imresize_up_to_the_border(scale: int) -> None:
    h, w = 12 * scale, 7 * scale
    x = torch.rand(2, 3, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    down = (
        imresize_matrix(h, h // scale, 1 / scale)
        @ x.numpy()
        @ imresize_matrix(w, w // scale, 1 / scale).T
    )
    np.testing.assert_allclose(shrink(x, scale).numpy(), down, atol=1e-12)
    up = imresize_matrix(h, h * scale, scale) @ x.numpy() @ imresize_matrix(w, w * scale, scale).T
    np.testing.assert_allclose(enlarge(x, scale).numpy(), up, atol=1e-12)


def test_known_values() -> None:
    """1 ... 8 halved. The kernel at +-0.25, 0.75, 1.25, 1.75 gives the weights (-3, -9, 29, 111,
    111, 29, -9, -3) / 256. The first output sees the mirrored samples 3 2 1 | 1 2 3 4 5: (-9 - 18 +
    29 + 111 + 222 + 87 - 36 - 15) / 256 = 371 / 256. The second sees 1 | 1 2 ... 7: (-3 - 9 + 58 +
    333 + 444 + 145 - 54 - 21) / 256 = 893 / 256. The others follow by symmetry."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64).repeat(8, 1)[None]
    row = shrink(x, 2)[0, 0]
    torch.testing.assert_close(
        row, torch.tensor([371 / 256, 893 / 256, 9 - 893 / 256, 9 - 371 / 256], dtype=torch.float64)
    )


def test_sizes() -> None:
    assert cut_to(torch.zeros(3, 13, 18), 4).shape == (3, 12, 16)
    assert degrade(torch.zeros(2, 3, 13, 18, dtype=torch.uint8), 4).shape == (2, 3, 3, 4)
    with pytest.raises(ValueError, match="18x13 pixels are not divisible by the scale 4"):
        shrink(torch.zeros(3, 13, 18), 4)
    assert shrink(torch.ones(3, 4, 4), 4).allclose(torch.ones(3, 1, 1))


def test_benchmark_frames(data_pack: Path) -> None:
    """The published BIx4 of Vid4 come from another copy of the originals: they agree to about 45
    dB, and a shifted grid does not.
    """
    from fedlens.data.video.files import open_frames

    high = open_frames(data_pack / "vid4" / "GT" / "city").read(0, 2)
    low = open_frames(data_pack / "vid4" / "BIx4" / "city").read(0, 2).float() / 255
    good = -10 * torch.log10((degrade(high, 4) - low).square().mean())
    shifted = -10 * torch.log10((degrade(high.roll(1, -1), 4) - low).square().mean())
    assert good > 45 > 40 > shifted

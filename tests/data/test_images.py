"""Images as tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.images import read_image, resize


def test_sixteen_bits_and_resizing(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 65535, np.uint16)).save(tmp_path / "deep.png")
    assert float(read_image(tmp_path / "deep.png").max()) == pytest.approx(255)
    rng = np.random.default_rng(0)
    big = rng.integers(0, 256, (40, 40)).astype(np.float32)
    want = np.asarray(Image.fromarray(big).resize((20, 20), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(resize(torch.from_numpy(big)[None], 20)[0].numpy(), want.clip(0, 255))

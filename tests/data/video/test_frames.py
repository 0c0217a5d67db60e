from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from films import save

from fedlens.data.source import DataError
from fedlens.data.video.frames import FolderFrames


def test_folder_in_natural_order_grey_and_alpha(tmp_path: Path) -> None:
    grey = [np.full((6, 8), k, np.uint8) for k in range(12)]
    frames = FolderFrames(save(tmp_path / "grey", grey))
    assert frames.read(0, 12)[:, 0, 0, 0].tolist() == list(range(12))  # f10 comes after f9
    alpha = np.dstack([np.full((6, 8, 3), 7, np.uint8), np.zeros((6, 8), np.uint8)])
    assert FolderFrames(save(tmp_path / "alpha", [alpha])).read(0, 1).unique().tolist() == [7]
    deep = np.array([[0, 255, 256, 40000]], np.uint16)  # 16 bits become 8 by the nearest 257th
    assert FolderFrames(save(tmp_path / "deep", [deep])).read(0, 1)[0, 2, 0].tolist() == [
        0,
        1,
        1,
        156,
    ]


def test_frames_of_different_sizes(tmp_path: Path) -> None:
    """Refused when the folder is opened, by headers alone: the pixels of f1 are cut off, which only
    decoding would notice.
    """
    folder = save(tmp_path / "odd", [np.zeros((6, 8, 3), np.uint8), np.zeros((6, 9, 3), np.uint8)])
    (folder / "f1.png").write_bytes((folder / "f1.png").read_bytes()[:44])
    with pytest.raises(
        DataError,
        match=(
            r"/odd has frames of different sizes: f1\.png has 9x6 pixels, but the clip began"
            r" with 8x6"
        ),
    ):
        FolderFrames(folder)
    frames = FolderFrames(save(tmp_path / "even", [np.zeros((6, 8, 3), np.uint8)] * 2))
    save(tmp_path / "even", [np.zeros((6, 9, 3), np.uint8)])
    with pytest.raises(DataError, match=r"f0\.png has 9x6 pixels"):
        frames.read(0, 2)

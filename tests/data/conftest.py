from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from films import ramp, shaded

from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.writer import writer


@pytest.fixture(scope="session")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ramp` as a file."""
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("film") / "ramp.mp4"
    frames = ArrayFrames(ramp(), rate=Fraction(25))
    with writer(path, frames, frames.size, quality=4) as write:
        write(frames.read(0, 25))
        write(frames.read(25, 40))
    return path


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, four clips each, two films a class."""
    root = tmp_path_factory.mktemp("shelf")
    for c, name in enumerate(("jump", "run", "wave")):
        for k in range(4):
            shaded(
                root / "videos" / name / f"v_{name}_g{k // 2:02d}_c{k % 2:02d}.mp4", 16 + k, 50 * c
            )
    return root

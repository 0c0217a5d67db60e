"""Clips small enough for tests, as folders of pictures and as video files."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.writer import writer


def ramp(n: int = 40, h: int = 48, w: int = 64) -> torch.Tensor:
    """Frame k is grey level 5 k, with a square that moves."""
    x = (torch.arange(n) * 5).byte().view(n, 1, 1, 1).expand(n, 3, h, w).clone()
    for k in range(n):
        x[k, :, 8:24, k % 32 : k % 32 + 16] = 250
    return x


def shaded(path: Path, frames: int = 20, shade: int = 100) -> Path:
    """A small video file whose frames get brighter."""
    pixels = (
        (torch.arange(frames) + shade)
        .clamp(max=255)
        .byte()[:, None, None, None]
        .expand(frames, 3, 32, 48)
        .contiguous()
    )
    with writer(path, ArrayFrames(pixels, rate=Fraction(10)), (32, 48)) as write:
        write(pixels)
    return path


def make_clips(
    root: Path, names: list[str], frames: int = 5, size: tuple[int, int] = (34, 50)
) -> Path:
    """Clip k is filled with noise around level 20 k."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(names):
        folder = root / name
        folder.mkdir(parents=True)
        for t in range(frames):
            Image.fromarray((20 * k + rng.integers(0, 20, (*size, 3))).astype(np.uint8)).save(
                folder / f"{t:08d}.png"
            )
    return root


def save(folder: Path, arrays: list[np.ndarray], mode: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, a in enumerate(arrays):
        Image.fromarray(a, mode).save(folder / f"f{k}.png")
    return folder


def converted(source: Path, target: Path, *how: str, before: tuple[str, ...] = ()) -> Path:
    """By the ffmpeg program, so that it is not our own code on both sides."""
    program = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    subprocess.run(
        [program, "-v", "error", "-y", *before, "-i", str(source), *how, str(target)], check=True
    )
    return target

from __future__ import annotations

import os
from pathlib import Path

import torch
from films import ramp
from PIL import Image

from fedlens.data.video.frame_cache import Cache, Cached, key_of, open_all
from fedlens.data.video.frames import Frames


class Counting(Frames):
    """Frames that count how often they are decoded."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array, self.name, self.size, self.reads, self.block = (
            array,
            "counted",
            (array.shape[2], array.shape[3]),
            0,
            4,
        )

    def __len__(self) -> int:
        return len(self.array)

    def read(self, low: int, high: int) -> torch.Tensor:
        self.reads += high - low
        return self.array[low:high]


def test_cache_decodes_once_and_stays_within_its_budget() -> None:
    inner = Counting(ramp(16))
    bytes_of_block = 4 * 3 * 48 * 64
    cache = Cache(budget=2 * bytes_of_block)
    frames = Cached(inner, cache, "k")
    assert torch.equal(frames.read(1, 7), inner.array[1:7]) and inner.reads == 8
    assert (
        torch.equal(frames.crop(2, 6, (4, 5, 10, 12)), inner.array[2:6, :, 4:14, 5:17])
        and inner.reads == 8
    )
    frames.read(12, 16)
    assert cache.held == 2 * bytes_of_block and inner.reads == 12
    frames.read(4, 5)  # used more recently than the first block, so still here
    assert inner.reads == 12


def test_cache_on_disk(tmp_path: Path) -> None:
    inner = Counting(ramp(9))
    frames = Cached(inner, Cache(folder=tmp_path), "k")
    assert torch.equal(frames.crop(3, 9, (0, 8, 20, 20)), inner.array[3:9, :, :20, 8:28])
    assert (
        torch.equal(Cached(inner, Cache(folder=tmp_path), "k").read(0, 9), inner.array)
        and inner.reads == 9
    )


def test_cache_on_disk_knows_a_rewritten_clip(tmp_path: Path, film: Path) -> None:
    """Bitmaps of one size have as many bytes, so it is the time of writing that tells, also that of
    a single frame in a folder.
    """
    folder, kept = tmp_path / "clip", tmp_path / "cache"
    folder.mkdir()
    for k in range(3):
        Image.new("RGB", (8, 6), (k, k, k)).save(folder / f"{k}.bmp")

    def levels() -> list[int]:
        (clip,) = open_all([folder], Cache(folder=kept))
        return clip.read(0, 3)[:, 0, 0, 0].tolist()

    assert levels() == levels() == [0, 1, 2] and len(list(kept.iterdir())) == 1
    written = (folder / "1.bmp").stat()
    Image.new("RGB", (8, 6), (9, 9, 9)).save(folder / "1.bmp")
    os.utime(folder / "1.bmp", ns=(written.st_atime_ns, written.st_mtime_ns + 1))
    assert (folder / "1.bmp").stat().st_size == written.st_size
    assert levels() == [0, 9, 2] and len(list(kept.iterdir())) == 2
    copy = tmp_path / "film.mp4"
    copy.write_bytes(film.read_bytes())
    before = key_of(copy)
    assert key_of(copy) == before != key_of(copy, side=16)
    os.utime(copy, ns=(0, copy.stat().st_mtime_ns + 1))
    assert key_of(copy) != before

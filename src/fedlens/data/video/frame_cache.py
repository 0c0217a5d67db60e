"""What was decoded is kept: up to a number of bytes in memory, or on disk as raw frames from which
a crop reads only its own rows.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.core.files import atomic_path
from fedlens.data.paths import frame_files
from fedlens.data.video.files import open_frames
from fedlens.data.video.frames import Box, Frames


class Cache:
    """Decoded blocks of many clips: the least recently used go first when `budget` bytes are full.
    With a `folder`, every clip is decoded once and for all into a raw file there, of which a crop
    reads only its own rows; what lies there of a clip that was rewritten since is not used again,
    nor deleted. A copy in another process starts empty."""

    def __init__(self, budget: int = 1 << 30, folder: Path | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self.held = 0

    def block(self, key: str, frames: Frames, number: int) -> Tensor:
        place = (key, number)
        if place in self.blocks:
            self.blocks.move_to_end(place)
            return self.blocks[place]
        low = number * frames.block
        block = frames.read(low, min(low + frames.block, len(frames)))
        self.blocks[place] = block
        self.held += block.numel()
        while self.held > self.budget and len(self.blocks) > 1:
            self.held -= self.blocks.popitem(last=False)[1].numel()
        return block

    def raw(self, key: str, frames: Frames) -> Any:
        """The clip as a memory-mapped (n, H, W, 3); written first if it is not there. Writing ends
        with a rename, so it is there whole.
        """
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}.npy"
        if not path.exists():
            with atomic_path(path) as part:
                out = np.lib.format.open_memmap(
                    part, mode="w+", dtype=np.uint8, shape=(len(frames), *frames.size, 3)
                )  # type: ignore[no-untyped-call]
                for low in range(0, len(frames), 16):
                    high = min(low + 16, len(frames))
                    out[low:high] = frames.read(low, high).permute(0, 2, 3, 1).numpy()
                out.flush()
        return np.load(path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "blocks": OrderedDict(), "held": 0}


def key_of(path: Path, side: int | None = None) -> str:
    """What a clip is called in a cache: by its place, its short side, and the bytes and the time of
    writing of its files, so that one that was rewritten is decoded anew."""
    files = [(f.name, f.stat()) for f in (frame_files(path) if path.is_dir() else [path])]
    identity = (
        f"{path.resolve()} {side} {[(name, now.st_size, now.st_mtime_ns) for name, now in files]}"
    )
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


class Cached(Frames):
    """A clip seen through a cache."""

    def __init__(self, frames: Frames, cache: Cache, key: str) -> None:
        self.frames, self.cache, self.key = frames, cache, key
        self.name, self.size, self.rate, self.block = (
            frames.name,
            frames.size,
            frames.rate,
            frames.block,
        )

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, low: int, high: int) -> Tensor:
        return self.crop(low, high, (0, 0, *self.size))

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        self._check(low, high)
        top, left, height, width = box
        if self.cache.folder is not None:
            piece = self.cache.raw(self.key, self.frames)[
                low:high, top : top + height, left : left + width
            ]
            return torch.from_numpy(np.array(piece)).permute(0, 3, 1, 2)
        parts: list[Tensor] = []
        for number in range(low // self.block, (high - 1) // self.block + 1):
            block, first = self.cache.block(self.key, self.frames, number), number * self.block
            parts.append(
                block[
                    max(0, low - first) : high - first, :, top : top + height, left : left + width
                ]
            )
        return torch.cat(parts)


def open_all(paths: Sequence[Path], cache: Cache) -> list[Frames]:
    return [Cached(open_frames(p), cache, key_of(p)) for p in paths]

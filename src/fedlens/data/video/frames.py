"""Frames, wherever they lie: an array, a folder of pictures, or a file (see `files`). Read in
stretches, so that memory stays bounded.

`Frames.read(low, high)` gives uint8 (n, 3, H, W). Grey pictures become RGB and an alpha channel is
dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.data.images.reading import converted, opened, upright_size
from fedlens.data.paths import frame_files
from fedlens.data.source import DataError
from fedlens.data.suffixes import IMAGE_SUFFIXES

Box = tuple[int, int, int, int]  # top, left, height, width


class Frames(ABC):
    """A clip. `size` is (height, width), `rate` frames a second where that is known."""

    name: str
    size: tuple[int, int]
    rate: Fraction | None = None
    block: int = 1  # frames that are cheapest to decode together

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, low: int, high: int) -> Tensor:
        """Frames low ... high - 1 as uint8 (n, 3, H, W)."""

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        top, left, height, width = box
        return self.read(low, high)[..., top : top + height, left : left + width]

    def _check(self, low: int, high: int) -> None:
        if not 0 <= low < high <= len(self):
            raise DataError(
                f"{self.name} has frames 0 to {len(self) - 1}; {low} to {high - 1} were asked for"
            )


class ArrayFrames(Frames):
    """Frames that are in memory already: uint8 (n, 3, H, W)."""

    def __init__(self, array: Tensor, name: str = "clip", rate: Fraction | None = None) -> None:
        if array.dim() != 4 or array.shape[1] != 3 or array.dtype != torch.uint8:
            raise DataError(
                f"{name}: frames are uint8 (n, 3, H, W), not {array.dtype} {tuple(array.shape)}"
            )
        self.array, self.name, self.rate = array, name, rate
        self.size = (array.shape[2], array.shape[3])

    def __len__(self) -> int:
        return len(self.array)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.array[low:high]


class Stretch(Frames):
    """Some frames of a clip, from `first` on; all that are left if no count is given."""

    def __init__(self, frames: Frames, count: int | None, first: int = 0) -> None:
        self.frames, self.name, self.size, self.rate = frames, frames.name, frames.size, frames.rate
        left = len(frames) - first
        self.first, self.count = first, left if count is None else min(count, left)

    def __len__(self) -> int:
        return self.count

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.frames.read(self.first + low, self.first + high)


class FolderFrames(Frames):
    """One picture per frame, in natural order of their names. All must have one size, which their
    headers tell.

    Args:
        size: as it was found when the folder was opened before; it is then not looked through
            again.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None = None) -> None:
        self.folder, self.name = folder, folder.name
        self.files = frame_files(folder)
        if not self.files:
            raise DataError(f"{folder} holds no pictures ({', '.join(IMAGE_SUFFIXES)})")
        self.size = size or read_picture(self.files[0]).shape[:2]
        for file in self.files[1:] if size is None else ():
            self._same(file, _header(file))

    def __len__(self) -> int:
        return len(self.files)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        out = np.empty((high - low, *self.size, 3), np.uint8)
        for k, file in enumerate(self.files[low:high]):
            picture = read_picture(file)
            self._same(file, picture.shape[:2])  # it may have been replaced since
            out[k] = picture
        return torch.from_numpy(out).permute(0, 3, 1, 2)

    def _same(self, file: Path, size: tuple[int, int]) -> None:
        if size != self.size:
            (h, w), (a, b) = self.size, size
            raise DataError(
                f"{self.folder} has frames of different sizes: {file.name} has {b}x{a} pixels, but"
                f" the clip began with {w}x{h}"
            )


def read_picture(file: Path) -> np.ndarray[Any, Any]:
    with _opened(file) as picture:
        return np.asarray(converted(picture, "RGB"))


def _header(file: Path) -> tuple[int, int]:
    """(height, width) as `read_picture` will give it, without decoding."""
    with _opened(file) as picture:
        width, height = upright_size(picture)
        return height, width


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with opened(file) as picture:
            yield picture
    except (OSError, ValueError) as e:
        raise DataError(f"{file} cannot be read as a picture: {e}") from e

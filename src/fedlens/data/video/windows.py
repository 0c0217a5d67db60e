"""Examples for super-resolution, cut from clips: crops of a few frames for clients, whole clips for
the server's test.

The low resolution is made as in the benchmarks (`degrade`), exactly as if the whole frame had been
shrunk: the crop is read with a margin. Or as a camera of one's own makes it (`degradations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from fedlens.core.client import Batch, generator
from fedlens.data.source import DataError
from fedlens.data.video.degradations import STREAM, BicubicShrink, Degradation
from fedlens.data.video.degrade import cut_to, in_8_bits
from fedlens.data.video.frames import Box, Frames

BICUBIC = BicubicShrink()


@dataclass(frozen=True)
class CropArea:
    """Where crops may be taken: a window of a clip, and a part of its frames."""

    clip: int
    start: int
    box: Box


@dataclass(frozen=True)
class Windows:
    """What a client owns. With a generator: random crops, flips and quarter turns. Without: the
    middle of the box, as it is.
    """

    clips: Sequence[Frames]
    pieces: Sequence[CropArea]
    frames: int
    scale: int
    crop: int
    repeat: int = 1
    degradation: Degradation = field(default_factory=BicubicShrink)

    def __len__(self) -> int:
        return len(self.pieces) * self.repeat

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        pairs = [self.example(self.pieces[int(i) % len(self.pieces)], rng) for i in index]
        return {"x": torch.stack([x for x, _ in pairs]), "y": torch.stack([y for _, y in pairs])}

    def example(self, piece: CropArea, rng: Generator | None) -> tuple[Tensor, Tensor]:
        top, left, height, width = piece.box
        place = torch.rand(2, generator=rng) if rng is not None else torch.tensor([0.5, 0.5])
        steps = [(room - self.crop) // self.scale + 1 for room in (height, width)]
        y0, x0 = (int(p * n) * self.scale for p, n in zip(place.tolist(), steps, strict=True))
        x, y = cut_pair(
            self.clips[piece.clip],
            piece.start,
            self.frames,
            (top + y0, left + x0, self.crop, self.crop),
            self.scale,
            self.degradation,
            rng,
        )
        if rng is not None:
            x, y = turn_pair(x, y, int(torch.randint(8, (), generator=rng)))
        return x, y


def cut_pair(
    clip: Frames,
    start: int,
    count: int,
    box: Box,
    scale: int,
    how: Degradation = BICUBIC,
    rng: Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Low and high resolution of a box whose corners lie on the low-resolution grid; for what looks
    no farther than its reach and is not random, equal to cropping the whole degraded frame.
    """
    top, left, height, width = box
    full = [n - n % scale for n in clip.size]
    margin = how.reach * scale
    up, before = min(top, margin), min(left, margin)
    down, after = min(full[0] - top - height, margin), min(full[1] - left - width, margin)
    wide = (
        clip.crop(
            start,
            start + count,
            (top - up, left - before, height + up + down, width + before + after),
        ).float()
        / 255
    )
    small = in_8_bits(how(wide, scale, rng))
    rows, columns = (
        slice(up // scale, up // scale + height // scale),
        slice(before // scale, before // scale + width // scale),
    )
    return (
        small[..., rows, columns].contiguous(),
        wide[..., up : up + height, before : before + width].contiguous(),
    )


def turn_pair(x: Tensor, y: Tensor, how: int) -> tuple[Tensor, Tensor]:
    """One of the eight symmetries of the square, the same for both."""

    def one(t: Tensor) -> Tensor:
        t = t.flip(-1) if how & 1 else t
        t = t.flip(-2) if how & 2 else t
        return (t.transpose(-1, -2) if how & 4 else t).contiguous()

    return one(x), one(y)


@dataclass(frozen=True)
class WholeClips:
    """What the server tests on: one clip at a time, whole. `low` are given low-resolution clips;
    otherwise they are made, the same each time.

    Args:
        also: other sets, by name.
    """

    clips: Sequence[Frames]
    scale: int
    low: Sequence[Frames] | None = None
    degradation: Degradation = field(default_factory=BicubicShrink)
    also: Mapping[str, WholeClips] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clips)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        pairs = [self.pair(int(i)) for i in index]
        if len({y.shape for _, y in pairs}) > 1:
            raise DataError("test clips of different sizes have to be read one at a time")
        return {"x": torch.stack([x for x, _ in pairs]), "y": torch.stack([y for _, y in pairs])}

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        y = cut_to(self.clips[i].read(0, len(self.clips[i])).float() / 255, self.scale)
        if self.low is not None:
            return self.low[i].read(0, len(self.clips[i])).float() / 255, y
        return in_8_bits(self.degradation(y, self.scale, generator(STREAM, i))), y

    def name(self, i: int) -> str:
        return self.clips[i].name

    def subset(self, index: Sequence[int]) -> WholeClips:
        return WholeClips(
            [self.clips[i] for i in index],
            self.scale,
            None if self.low is None else [self.low[i] for i in index],
            self.degradation,
        )


class ShrunkFrames(Frames):
    """A clip as a camera with 1 / by of the pixels along each side would have filmed it."""

    def __init__(self, frames: Frames, by: int) -> None:
        self.frames, self.by, self.name, self.rate, self.block = (
            frames,
            by,
            frames.name,
            frames.rate,
            frames.block,
        )
        self.size = (frames.size[0] // by, frames.size[1] // by)

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, low: int, high: int) -> Tensor:
        return self.crop(low, high, (0, 0, *self.size))

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        top, left, height, width = (n * self.by for n in box)
        return (
            (cut_pair(self.frames, low, high - low, (top, left, height, width), self.by)[0] * 255)
            .round()
            .byte()
        )

"""Clips for super-resolution without data on disk: a generator of moving textures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import generator
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural
from fedlens.data.source import Source
from fedlens.data.video.cut import Cut
from fedlens.data.video.degradations import TESTER, DegradationKind, degradation
from fedlens.data.video.frames import ArrayFrames, Frames
from fedlens.data.video.windows import WholeClips


@dataclass
class MovingTextures(Source):
    """Made-up scenes: gratings, checks and hard-edged shapes on noise, seen by a moving camera. A
    group is a family of scenes: its own spectrum, colours and speed.

    Args:
        split: "pooled" deals clips out at random, "groups" gives each client one group.
        scale: factor between low and high resolution; 1 keeps the size.
        frames: of a window, which is one example.
        crop: side of the high-resolution crop, in pixels.
        clips: scenes for training.
        groups: how many families of scenes.
        length: frames of a clip.
        height: of a frame, in pixels.
        width: of a frame, in pixels.
        regions: cut every frame into a grid of regions x regions cells, each dealt out by itself.
        stride: frames between the starts of two windows.
        repeat: crops for each window and epoch.
        held_out: share of each client's windows for its own evaluation.
        test_clips: scenes for testing.
        native: client i films with 1 / native[i mod n] of the pixels along each side.
        degradation: how low resolution is made, for client i the i mod n-th
            (`data/video/degradations.py`).
        test_degradation: the same for the test clips.
    """

    split: Literal["pooled", "groups"] = "pooled"
    scale: Literal[1, 2, 3, 4] = 4
    frames: Count = 5
    crop: Count = 64
    clips: Count = 12
    groups: Count = 12
    length: Count = 7
    height: Count = 128
    width: Count = 128
    regions: Count = 1
    stride: Count = 1
    repeat: Count = 1
    held_out: Fraction = 0.0
    test_clips: Natural = 2
    native: tuple[Count, ...] = (1,)
    degradation: tuple[DegradationKind, ...] = ("bi",)
    test_degradation: DegradationKind = "bi"

    def __post_init__(self) -> None:
        self.cut = Cut(
            self.split,
            self.frames,
            self.scale,
            self.crop,
            self.regions,
            self.stride,
            self.repeat,
            self.held_out,
            self.native,
            self.degradation,
        )

    def federation(self, clients: int, seed: int) -> Federation:
        families = [k % self.groups for k in range(self.clips)]
        clips = [self._scene(k, family, seed) for k, family in enumerate(families)]
        test = [self._scene(self.clips + k, self.groups + k, seed) for k in range(self.test_clips)]
        how = degradation(self.test_degradation, seed, TESTER)
        tested = WholeClips(test, self.scale, degradation=how)
        return self.cut.federation(clips, [f"family {f}" for f in families], tested, clients, seed)

    def _scene(self, number: int, family: int, seed: int) -> Frames:
        array = moving_texture(
            self.length,
            self.height,
            self.width,
            generator(seed, 0x5CE, family),
            generator(seed, 0x5CF, number),
        )
        return ArrayFrames(array, f"scene{number:02d}")


def moving_texture(
    length: int, height: int, width: int, family: Generator, own: Generator
) -> Tensor:
    """uint8 (length, 3, height, width)."""

    def between(low: float, high: float, rng: Generator, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng)

    period, speed, contrast = (
        float(between(a, b, family)) for a, b in ((4, 16), (0.3, 2.5), (0.3, 0.9))
    )
    tint = between(0.3, 1, family, 2, 3)
    h, w = height + 64, width + 64
    rows, columns = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    canvas = (
        F.interpolate(
            torch.rand(1, 3, h // 8, w // 8, generator=own),
            size=(h, w),
            mode="bicubic",
            align_corners=False,
        )[0]
        * 0.5
        + 0.2
    )
    for k in range(10):
        cy, cx, radius = between(0, h, own), between(0, w, own), between(8, 40, own)
        turn = float(between(0, 3.14, own))
        u = (rows - cy) * float(torch.tensor(turn).cos()) + (columns - cx) * float(
            torch.tensor(turn).sin()
        )
        v = (columns - cx) * float(torch.tensor(turn).cos()) - (rows - cy) * float(
            torch.tensor(turn).sin()
        )
        inside = (
            (u.square() + v.square() < radius.square())
            if k % 2
            else torch.maximum(u.abs(), v.abs()) < radius
        )
        wave = (
            torch.sin(u * 6.283 / period)
            if k % 3
            else torch.sign(torch.sin(u * 3.14 / period) * torch.sin(v * 3.14 / period))
        )
        paint = tint[k % 2].view(3, 1, 1) * (0.5 + 0.5 * contrast * wave)
        canvas = torch.where(inside, paint, canvas)
    heading = between(-1, 1, own, 2)
    heading = speed * heading / heading.norm().clamp_min(1e-3)
    out = []
    for t in range(length):
        dy, dx = (
            32 + float(heading[0]) * (t - length / 2),
            32 + float(heading[1]) * (t - length / 2),
        )
        grid = torch.stack(
            [
                (columns[:height, :width] + dx) * 2 / (w - 1) - 1,
                (rows[:height, :width] + dy) * 2 / (h - 1) - 1,
            ],
            -1,
        )
        out.append(
            F.grid_sample(
                canvas[None],
                grid[None],
                mode="bicubic",
                padding_mode="reflection",
                align_corners=True,
            )[0]
        )
    return (torch.stack(out).clamp(0, 1) * 255).round().byte()

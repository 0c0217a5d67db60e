"""Labelled videos without data on disk: a generator of moving shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Le
from torch import Generator, Tensor

from fedlens.core.client import generator
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Several
from fedlens.data.source import Source
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.video_set import Grouping, VideoSet, divide

ACTIONS = ("right", "left", "down", "up", "circle", "circle back", "grow", "shrink")
ActionCount = Annotated[Several, Le(len(ACTIONS))]


@dataclass
class MovingShapes(Source):
    """A shape on a textured ground does one of eight things: it moves right, left, down, up, in a
    circle one way or the other, grows or shrinks. Colour, form, place, speed and ground say nothing
    about it.

    Args:
        videos: for training.
        tests: for testing.
        length: frames of a video.
        side: of a frame, in pixels.
        actions: how many of the eight there are.
        partition: "iid", "classes" or "sources".
        classes_per_client: of the rule "classes".
        holdout: share of every client's videos for its own evaluation.
    """

    videos: Count = 160
    tests: Count = 64
    length: Count = 32
    side: Count = 40
    actions: ActionCount = 8
    partition: Grouping = "iid"
    classes_per_client: Count = 4
    holdout: Fraction = 0.0

    def federation(self, clients: int, seed: int) -> Federation:
        train, test = (self._some(n, seed, k) for k, n in enumerate((self.videos, self.tests)))
        names = ACTIONS[: self.actions]
        return divide(
            train,
            test,
            names,
            clients,
            seed,
            rule=self.partition,
            per_client=self.classes_per_client,
            holdout=self.holdout,
        )

    def _some(self, count: int, seed: int, part: int) -> VideoSet:
        labels = [k % self.actions for k in range(count)]
        clips = [
            ArrayFrames(
                moving_shape(y, self.length, self.side, generator(seed, 0x5AE, part, k)),
                f"{ACTIONS[y]} {k}",
            )
            for k, y in enumerate(labels)
        ]
        return VideoSet(clips, labels, [f"scene {k // 2}" for k in range(count)])


def moving_shape(action: int, length: int, side: int, rng: Generator) -> Tensor:
    """uint8 (length, 3, side, side)."""

    def some(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=rng))

    ground = torch.rand(1, 3, 5, 5, generator=rng) * 0.6
    canvas = torch.nn.functional.interpolate(
        ground, size=(side, side), mode="bicubic", align_corners=False
    )[0].clamp(0, 1)
    colour = torch.rand(3, 1, 1, generator=rng) * 0.6 + 0.4
    t = torch.linspace(-0.5, 0.5, length)
    travel, radius, phase = some(0.45, 0.65) * side, some(0.09, 0.15) * side, some(0, 2 * math.pi)
    x, y = torch.full_like(t, some(0.4, 0.6) * side), torch.full_like(t, some(0.4, 0.6) * side)
    r = torch.full_like(t, radius)
    if action < 4:
        way = travel * t * (1 if action in (0, 2) else -1)
        x, y = (x + way, y) if action < 2 else (x, y + way)
    elif action < 6:
        angle = phase + 2 * math.pi * some(0.8, 1.2) * t * (1 if action == 4 else -1)
        x, y = x + 0.28 * side * angle.cos(), y + 0.28 * side * angle.sin()
    else:
        r = radius * (1.1 * t * (1 if action == 6 else -1)).exp() * 1.3
    rows, columns = torch.meshgrid(
        torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij"
    )
    u, v = (columns - x[:, None, None]).abs(), (rows - y[:, None, None]).abs()
    form = int(torch.randint(3, (), generator=rng))
    distance = (
        (u.square() + v.square()).sqrt()
        if form == 0
        else torch.maximum(u, v)
        if form == 1
        else (u + v) / 1.3
    )
    inside = (r[:, None, None] - distance + 0.5).clamp(0, 1)[:, None]
    frames = canvas * (1 - inside) + colour * inside
    return (frames.clamp(0, 1) * 255).round().byte()

"""Speed: at which rate, and in which direction, is this played? Strides -4, -2, -1, 0, 1, 2, 4 are
the classes (0: one frame, standing still).

A video must be long enough for the largest stride, so that its length says nothing about the
answer. Head: dropout and one linear layer over the averaged map; 3,591 parameters on R3D-18.
Colours change as in the public code: a fifth of the clips each get another tint, brightness or
contrast, the same in all frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.limits import Fraction
from fedlens.core.picture import Picture
from fedlens.data.video.frames import Frames
from fedlens.tasks.patches import uniforms
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_colour import jitter_colours
from fedlens.tasks.video_ssl import VideoSSL, small_normal


class RateHead(nn.Module):
    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.rate = nn.Linear(width, classes)
        self.dropout = dropout
        small_normal(self.rate)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.rate(F.dropout(features, self.dropout, self.training))
        return scores


@dataclass
class Speed(VideoSSL):
    """
    Args:
        strides: the classes; 0 stands still, negative ones run backwards.
        dropout: before the last layer.
        colour: change colours.
    """

    strides: tuple[int, ...] = (-4, -2, -1, 0, 1, 2, 4)
    dropout: Fraction = 0.5
    colour: bool = True

    def __post_init__(self) -> None:
        if len(set(self.strides)) < 2 or len(set(self.strides)) != len(self.strides):
            raise ValueError(
                f"task.strides needs at least two different strides, not {self.strides}"
            )

    @property
    def least(self) -> int:
        return (self.frames - 1) * max(abs(s) for s in self.strides) + 1

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        y = int(torch.randint(len(self.strides), (), generator=rng))
        start = int(
            torch.randint(len(frames) - (self.frames - 1) * abs(self.strides[y]), (), generator=rng)
        )
        numbers = played(start, self.strides[y], self.frames)
        clip = cut_clip(frames, numbers, self.size, rng if augment else None)
        if augment and self.colour:
            clip = jitter_colours(clip, uniforms(rng), 0.2, 0.2, 32 / 255, 0.2, moving=False)
        return {"x": clip, "y": torch.tensor(y)}

    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        return RateHead(shape[0], len(self.strides), self.dropout)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        clip = made["x"]
        stride = self.strides[int(made["y"])]
        return Picture(
            f"A training example: played at stride {stride}",
            [larger(clip[:, t]) for t in range(clip.shape[1])],
            kind="strip",
        )


def played(start: int, stride: int, count: int) -> Sequence[int]:
    """Frame numbers; backwards they begin at the far end of the same stretch."""
    forward = [start + k * abs(stride) for k in range(count)]
    return forward[::-1] if stride < 0 else forward

"""Speed: at which rate, and in which direction, is this played? Strides -4, -2, -1, 0, 1, 2, 4 are
the classes (0: one frame, standing still).

A video must be long enough for the largest stride, so that its length says nothing about the
answer. Head: one linear layer over the averaged map; 3,591 parameters on R3D-18.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.picture import Picture
from fedlens.data.video.frames import Frames
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_ssl import VideoSSL


@dataclass
class Speed(VideoSSL):
    """strides: the classes; 0 stands still, negative ones run backwards. The rest as in every video
    pretext task: backbone (r3d18, r2plus1d18, r3d10, r3d10s, module:Class), frames and size of a
    clip, clips per video in retrieval, majority, init."""

    strides: tuple[int, ...] = (-4, -2, -1, 0, 1, 2, 4)

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
        return {
            "x": cut_clip(frames, numbers, self.size, rng if augment else None),
            "y": torch.tensor(y),
        }

    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        return nn.Linear(shape[0], len(self.strides))

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

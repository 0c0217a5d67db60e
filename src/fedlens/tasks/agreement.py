"""Clip agreement: two clips of a video, each with its own time, crop and colours, should look alike
to the network (VICReg, Bardes et al., ICLR 2022, on clips). No labels, no other videos, no second
network.

A head of two layers makes z of the averaged map. Loss: `pull` |z - z'|^2 (mean over coordinates)
+ `keep` mean over coordinates of max(0, 1 - deviation over the batch) + sum of squared covariances
of different coordinates / their number. The second keeps all clips from looking the same, the third
coordinates from saying the same; both are means over the two clips, the third a sum, as in the
public code. They are estimated within a batch: 8 are few, 32 are better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.limits import Count, NotNegative, Several
from fedlens.core.picture import Picture
from fedlens.core.task import Adapt
from fedlens.data.video.frames import Frames
from fedlens.models.video import SplitNet
from fedlens.tasks.patches import uniforms
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_colour import jitter_colours
from fedlens.tasks.video_ssl import VideoSSL

VIEWS = 2


@dataclass
class ClipAgreement(VideoSSL):
    """
    Args:
        stride: the largest between frames.
        width: of the head's layers.
        pull: weight of the agreement.
        keep: weight of the spread.
        colour: change colours.
    """

    stride: Count = 3
    width: Several = 128
    pull: NotNegative = 25.0
    keep: NotNegative = 25.0
    colour: bool = True

    by_example = False

    @property
    def least(self) -> int:
        return self.frames

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        clips = []
        for _ in range(VIEWS):
            numbers = self.numbers(len(frames), rng)
            clip = cut_clip(frames, numbers, self.size, rng if augment else None)
            if augment and self.colour:
                clip = jitter_colours(clip, uniforms(rng), 0.8, 0.8, 0.3, 0.4, moving=False)
            clips.append(clip)
        return {"x": torch.stack(clips)}

    def numbers(self, length: int, rng: Generator) -> Sequence[int]:
        fits = (length - 1) // max(1, self.frames - 1)
        stride = 1 + int(torch.randint(max(1, min(self.stride, fits)), (), generator=rng))
        start = int(torch.randint(length - stride * (self.frames - 1), (), generator=rng))
        return [start + k * stride for k in range(self.frames)]

    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
        )

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        assert isinstance(model, SplitNet)
        x = batch["x"]
        features = model.features(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        features = adapt(features, batch) if adapt else features
        # both clips of a video pass the head's normalisation together
        return Output(model.head(features.flatten(0, 1)).unflatten(0, x.shape[:2]), features)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        one, other = output.prediction.unbind(1)
        return disagreement(one, other, self.pull, self.keep)

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        images = [larger(clip[:, t]) for clip in made["x"] for t in (0, clip.shape[1] - 1)]
        return Picture(
            "A training example: two clips of one video, first and last frame of each",
            images,
            kind="strip",
        )


def disagreement(a: Tensor, b: Tensor, pull: float = 25.0, keep: float = 25.0) -> Tensor:
    """Of (B, width) each. A single pair has no spread: only its distance counts."""
    apart = pull * F.mse_loss(a, b)
    if len(a) < 2:
        return apart
    narrow = [F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b)]
    return apart + keep * (narrow[0] + narrow[1]) / 2 + covariance(a) + covariance(b)


def covariance(z: Tensor) -> Tensor:
    """Squared covariances of different coordinates, summed, over their number."""
    centred = z - z.mean(0)
    found = centred.T @ centred / (len(z) - 1)
    return (found.square().sum() - found.diagonal().square().sum()) / z.shape[1]

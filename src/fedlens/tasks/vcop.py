"""VCOP: three clips of one video are shown in some order; which of the six is it? (Xu et al., CVPR
2019)

The clips lie one after the other with a gap between them, from a random start; one crop for all.
Class k is the k-th permutation in lexicographic order: place j shows clip permutation[j]. Head:
features of the clips in pairs, concatenated, through one shared layer; the pairs side by side,
dropout, six classes; 534,022 parameters on R3D-18.

The crop is that of all pretext tasks here: one of three sizes, mirrored or not. The public code
cuts 112 from 171x128 and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.limits import Fraction, Natural
from fedlens.core.picture import Picture
from fedlens.core.task import Adapt
from fedlens.data.video.frames import Frames
from fedlens.models.video import SplitNet
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_ssl import VideoSSL, small_normal

CLIPS = 3
CLIP_ORDERS = tuple(permutations(range(CLIPS)))
PAIRS = tuple(map(list, combinations(range(CLIPS), 2)))


class OrderHead(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.pair = nn.Linear(2 * width, hidden)
        self.order = nn.Linear(len(PAIRS) * hidden, len(CLIP_ORDERS))
        self.dropout = dropout
        nn.init.kaiming_normal_(self.pair.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.pair.bias)
        small_normal(self.order)

    def forward(self, features: Tensor) -> Tensor:
        """(B, clips, width)"""
        pairs = [F.relu(self.pair(features[:, pair].flatten(1))) for pair in PAIRS]
        scores: Tensor = self.order(F.dropout(torch.cat(pairs, 1), self.dropout, self.training))
        return scores


@dataclass
class VCOP(VideoSSL):
    """
    Args:
        gap: frames between two clips.
        dropout: before the last layer.
    """

    gap: Natural = 8
    dropout: Fraction = 0.5

    @property
    def least(self) -> int:
        return CLIPS * self.frames + (CLIPS - 1) * self.gap

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        start = int(torch.randint(len(frames) - self.least + 1, (), generator=rng))
        y = int(torch.randint(len(CLIP_ORDERS), (), generator=rng))
        numbers = [n for j in CLIP_ORDERS[y] for n in self.clip(start, j)]
        together = cut_clip(frames, numbers, self.size, rng if augment else None)
        return {
            "x": together.unflatten(1, (CLIPS, self.frames)).transpose(0, 1).contiguous(),
            "y": torch.tensor(y),
        }

    def clip(self, start: int, j: int) -> range:
        """Frames of the j-th clip in the order of time."""
        low = start + j * (self.frames + self.gap)
        return range(low, low + self.frames)

    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        return OrderHead(shape[0], shape[0], self.dropout)

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        assert isinstance(model, SplitNet)
        x = batch["x"]
        features = model.features(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        features = adapt(features, batch) if adapt else features
        return Output(model.head(features), features)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        images = [larger(clip[:, t]) for clip in made["x"] for t in (0, clip.shape[1] - 1)]
        order = " ".join(str(j + 1) for j in CLIP_ORDERS[int(made["y"])])
        return Picture(
            f"A training example: clips shown in the order {order}, first and last frame of each",
            images,
            kind="strip",
        )

"""Action recognition: fine-tuning and linear probing of a pretrained backbone (FedVSSL, stage 2b),
or training from scratch.

Training sees one random clip a video; testing averages the scores of `clips` clips at even
distances before the softmax. A linear probe leaves the backbone as it is, BatchNorm's statistics
included, and trains one layer on its averaged map. The head begins at N(0, .001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Data, Output
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Several
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, in_batches
from fedlens.data.video.frames import Frames
from fedlens.data.video.video_set import RetrievalTest, VideoSet
from fedlens.models.norms import Norm, with_norm
from fedlens.models.video import SplitNet, backbone, map_shape, published_backbone
from fedlens.tasks.video_clips import admit, clip_batches, cut_clip, middle_frame
from fedlens.tasks.video_ssl import load_init

SHEET_VIDEOS = 12


class Frozen(SplitNet):
    """The backbone stays as it is: no gradients, and BatchNorm keeps the statistics it came
    with.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, motion: bool = False) -> None:
        super().__init__(backbone, head, motion)
        self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().features(x)


@dataclass
class ActionRecognition(LearningTask):
    """
    Args:
        classes: how many.
        backbone: r3d18, r2plus1d18, r3d10, r3d10s or module:Class.
        init: a saved model (RUN/model.safetensors) whose backbone to start from.
        pretrained: weights of the same network from elsewhere (a path, hub:OWNER/NAME).
        probe: train the last layer only.
        frames: of a clip.
        stride: between frames of a clip.
        size: side of a frame, in pixels.
        dropout: before the last layer.
        clips: for each test video; their scores are averaged.
        evaluation_batch: clips at a time.
        motion: the network sees differences of frames, as in the pretraining it starts from.
        norm: batch or group normalisation in the backbone.
    """

    classes: Several = 101
    backbone: str = "r3d18"
    init: str | None = None
    pretrained: bool | str = False
    probe: bool = False
    frames: Count = 16
    stride: Count = 2
    size: Count = 112
    dropout: Fraction = 0.5
    clips: Count = 10
    evaluation_batch: Count = 32
    motion: bool = False
    norm: Norm = "batch"

    @property
    def least(self) -> int:
        return (self.frames - 1) * self.stride + 1

    def model(self) -> nn.Module:
        body = with_norm(backbone(self.backbone), self.norm)
        last = nn.Linear(map_shape(body, self.frames, self.size)[0], self.classes)
        nn.init.normal_(last.weight, std=0.001)
        nn.init.zeros_(last.bias)
        return (Frozen if self.probe else SplitNet)(
            body, nn.Sequential(nn.Dropout(self.dropout), last), self.motion
        )

    def load_init(self, model: nn.Module) -> None:
        self.load_pretrained(model)
        load_init(model, self.init)

    def published(self) -> dict[str, Tensor]:
        return published_backbone(self.backbone)

    def fits(self, facts: Facts) -> None:
        if (held := len(facts.classes)) > self.classes:
            raise ValueError(
                f"the data has {held} classes, but the task says {self.classes}: set"
                f" task.classes={held}"
            )

    def admit(self, federation: Federation) -> Federation:
        return admit(federation, self, self.least)

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        room = len(frames) - self.least + 1
        start = int(torch.randint(room, (), generator=rng)) if augment else room // 2
        numbers = [start + k * self.stride for k in range(self.frames)]
        return {
            "x": cut_clip(frames, numbers, self.size, rng if augment else None),
            "y": torch.tensor(label),
        }

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        """Top-1 and top-5 over whole videos on the test set, over middle clips on a client's
        held-out part.
        """
        if isinstance(data, RetrievalTest):
            scores = self.scores(result, data.queries)
            y = torch.tensor(data.queries.labels)
        else:
            scores, y = self._middles(result, data)
        top = scores.topk(min(5, self.classes), 1).indices == y[:, None]
        return {
            "accuracy": float(top[:, 0].float().mean()),
            "accuracy_top5": float(top.any(1).float().mean()),
            "loss": float(F.cross_entropy(scores, y)),
        }

    def scores(self, net: Any, videos: VideoSet) -> Tensor:
        """(videos, classes): scores averaged over the clips; a video that is too short for one clip
        gets zeros.
        """
        place = next(net.parameters()).device
        total = torch.zeros(len(videos), self.classes)
        with torch.no_grad():
            for numbers, x in clip_batches(
                videos, self.frames, self.size, self.clips, self.stride, self.evaluation_batch
            ):
                total.index_add_(
                    0, torch.tensor(numbers), net(x.to(place)).float().cpu() / self.clips
                )
        return total

    def _middles(self, net: Any, data: Data) -> tuple[Tensor, Tensor]:
        place = next(net.parameters()).device
        with torch.no_grad():
            pairs = [
                (net(b["x"]).float().cpu(), b["y"].cpu())
                for b in in_batches(data, self.evaluation_batch, place)
            ]
        return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        if not isinstance(federation.test, RetrievalTest) or not len(federation.test):
            return ()
        test = federation.test
        picks = (
            torch.linspace(0, len(test.queries) - 1, min(SHEET_VIDEOS, len(test.queries)))
            .long()
            .tolist()
        )
        some = test.queries.take(picks)
        predicted = self.scores(result, some).argmax(1).tolist()
        names = test.classes or [str(k) for k in range(self.classes)]
        labels = [
            names[p] if p == t else f"{names[p]} (is {names[t]})"
            for p, t in zip(predicted, some.labels, strict=True)
        ]
        right = sum(p == t for p, t in zip(predicted, some.labels, strict=True))
        return [
            Picture(
                "Test videos and what the model says",
                [middle_frame(c) for c in some.clips],
                labels,
                "sheet",
                {"right": right, "shown": len(labels)},
            )
        ]

"""Self-supervised video: what the pretext tasks share. Each of them (CtP, VCOP, Speed) is one file
with its head, its transforms and its loss.

A pretext task says how a training example is made of a video (`sample`), how many frames that takes
(`least`), and what its head is. What is learned is tested by retrieval (`retrieval.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedlens.core.client import generator
from fedlens.core.federation import Federation
from fedlens.core.limits import Count
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.core.weights import result_file
from fedlens.data.video.frames import Frames
from fedlens.data.video.video_set import RetrievalTest
from fedlens.metrics.retrieval import most_similar
from fedlens.models.norms import Norm, with_norm
from fedlens.models.video import (
    SplitNet,
    backbone,
    load_backbone,
    map_shape,
    published_backbone,
)
from fedlens.tasks.retrieval import (
    SHEET_FOUND,
    SHEET_QUERIES,
    contact_sheet,
    embed,
    pixel_scores,
    retrieval_scores,
)
from fedlens.tasks.video_clips import admit, larger


def load_init(model: nn.Module, path: str | None) -> None:
    """Of a saved model the backbone alone: what its head was for need not be what this one is
    for.
    """
    if path:
        assert isinstance(model, SplitNet)
        load_backbone(model, path)


def small_normal(*layers: nn.Linear) -> None:
    """As the public code begins the last layers of all three heads: deviation .001, no bias."""
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.001)
        nn.init.zeros_(layer.bias)


@dataclass
class VideoSSL(LearningTask):
    """Abstract: a pretext task on video. These arguments are those of all of them.

    Args:
        backbone: r3d18, r2plus1d18, mvit_v1_b, mvit_v2_s, r3d10, r3d10s or module:Class.
        frames: of a clip.
        size: side of a frame, in pixels.
        clips: for each video in retrieval.
        majority: also report the vote among the nearest.
        init: a saved model whose backbone to start from.
        pretrained: weights of the same backbone from elsewhere (true: torchvision's, a path,
            hub:OWNER/NAME).
        motion: the network sees what changes from frame to frame instead of the frames.
        norm: batch or group normalisation in the backbone.
        evaluation_batch: clips at a time.
    """

    backbone: str = "r3d18"
    frames: Count = 16
    size: Count = 112
    clips: Count = 10
    majority: bool = False
    init: str | None = None
    pretrained: bool | str = False
    motion: bool = False
    norm: Norm = "batch"
    evaluation_batch: Count = 64

    last_stride = 2

    # -- what a pretext task says ------------------------------------------------------------------

    @property
    @abstractmethod
    def least(self) -> int:
        """Frames without which no example can be made."""

    @abstractmethod
    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        """A training example; the label is not looked at."""

    @abstractmethod
    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        """For maps of (width, t, h, w)."""

    # -- the rest follows --------------------------------------------------------------------------

    def model(self) -> nn.Module:
        body = with_norm(backbone(self.backbone, self.last_stride), self.norm)
        head = self.head(map_shape(body, self.frames, self.size))
        return SplitNet(body, head, self.motion)

    def load_init(self, model: nn.Module) -> None:
        self.load_pretrained(model)
        load_init(model, self.init)

    def published(self) -> dict[str, Tensor]:
        return published_backbone(self.backbone)

    def references(self, start: Any, data: Any) -> dict[str, dict[str, float]]:
        """Retrieval with the weights of the beginning, and without any network."""
        if not isinstance(data, RetrievalTest):
            return {}
        name = "weights of the beginning" if self.init or self.pretrained else "untrained weights"
        with torch.no_grad():
            found = self.evaluate(start, data)
        return {name: found, "mean frame's pixels": pixel_scores(data, self.size, self.majority)}

    def admit(self, federation: Federation) -> Federation:
        return admit(federation, self, self.least)

    def needs_head(self, data: Any) -> bool:
        return not isinstance(data, RetrievalTest)

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        """Retrieval where there is something to search; the pretext loss on a client's own held-out
        videos.
        """
        if isinstance(data, RetrievalTest):
            gallery, queries = (
                embed(result, s, self.frames, self.size, self.clips, self.evaluation_batch)
                for s in (data.gallery, data.queries)
            )
            return retrieval_scores(queries, data.queries, gallery, data.gallery, self.majority)
        place = next(result.parameters()).device
        losses, total = 0.0, 0
        with torch.no_grad():
            for batch in in_batches(data, self.evaluation_batch, place):
                losses += float(self.loss(self.forward(result, batch), batch)) * len(batch["x"])
                total += len(batch["x"])
        return {"pretext_loss": losses / max(1, total)}

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        out = [self._examples(federation)]
        if isinstance(federation.test, RetrievalTest) and len(federation.test):
            out.append(self._sheet(result, federation.test))
        return out

    def _examples(self, federation: Federation) -> Picture:
        data = next(h for h in federation.holdings if h is not None and len(h))
        made = data.task.sample(data.videos.clips[0], 0, generator(0x51C), True)
        return self.shown(made)

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        """An example as the network sees it."""
        clip = made["x"]
        return Picture(
            "A training example", [larger(clip[:, t]) for t in range(clip.shape[1])], kind="strip"
        )

    def _sheet(self, result: Any, search: RetrievalTest) -> Picture:
        picks = (
            torch.linspace(0, len(search.queries) - 1, min(SHEET_QUERIES, len(search.queries)))
            .long()
            .tolist()
        )
        some = search.queries.take(picks)
        gallery, queries = (
            embed(result, s, self.frames, self.size, min(2, self.clips), self.evaluation_batch)
            for s in (search.gallery, some)
        )
        found, alike = most_similar(queries, gallery, SHEET_FOUND)
        return contact_sheet(some, search.gallery, found, alike, search.classes)

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Find, for every video of a file or folder, the most similar ones: see
        `fedlens.tasks.apply.search`. Options: gallery, k, clips.
        """
        from fedlens.tasks.apply.search import search_folder

        check_options(self, options, "gallery", "k", "clips")
        net = self.model()
        assert isinstance(net, SplitNet)
        load_backbone(net, str(result_file(folder)))
        return search_folder(
            net.eval(),
            self.frames,
            self.size,
            source,
            target,
            weights=result_file(folder),
            clips=self.clips,
            options=options,
        )

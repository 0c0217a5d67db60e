"""Which videos are alike: what a video backbone has learned, tested and shown without any head.

`clips` clips a video at even distances, centre crop, the last map pooled by 2x2 (maximum) where it
is larger than 3x3, flattened and averaged over the clips; cosine. VCOP's protocol, except that
pixels are normalised as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlens.core.picture import Picture
from fedlens.data.source import DataError
from fedlens.data.video.video_set import RetrievalTest, VideoSet
from fedlens.metrics.retrieval import KS, most_similar, recall, vote
from fedlens.tasks.video_clips import clip_batches, middle_frame, skip

# queries on the contact sheet, and what was found for each: eight fill a row of the report
SHEET_QUERIES, SHEET_FOUND = (
    5,
    7,
)


def pool_maps(maps: Tensor) -> Tensor:
    """(B, C, t, h, w) by 2x2 maxima where that leaves more than one place, flattened."""
    return (F.max_pool3d(maps, (1, 2, 2)) if min(maps.shape[-2:]) > 3 else maps).flatten(1)


def embed(
    net: Any, videos: VideoSet, frames: int, size: int, clips: int, batch: int = 64
) -> Tensor:
    """A row for every video: its clips' features, averaged. A video that gives none gets a row of
    zeros, which is like nothing.
    """
    return embed_all(net, videos, frames, size, clips, batch)[0]


def embed_all(
    net: Any, videos: VideoSet, frames: int, size: int, clips: int, batch: int = 64
) -> tuple[Tensor, list[int]]:
    """As `embed`, and the numbers of the videos that gave clips."""
    place = next(net.parameters()).device
    total: Tensor | None = None
    seen: set[int] = set()
    with torch.no_grad():
        for numbers, x in clip_batches(videos, frames, size, clips, 1, batch):
            features = pool_maps(net.maps(x.to(place)).float()).cpu()
            if total is None:
                total = torch.zeros(len(videos), features.shape[1])
            total.index_add_(0, torch.tensor(numbers), features / clips)
            seen.update(numbers)
    if total is None:
        raise DataError(f"no video has {frames} frames of a clip that can be decoded")
    return total, sorted(seen)


def retrieval_scores(
    queries: Tensor,
    asked: VideoSet,
    gallery: Tensor,
    held: VideoSet,
    majority: bool = False,
    same: bool = False,
) -> dict[str, float]:
    y, labels = torch.tensor(asked.labels), torch.tensor(held.labels)
    found, _ = most_similar(queries, gallery, max(KS), same)
    return recall(found, y, labels) | (vote(found, y, labels) if majority else {})


def pixel_scores(data: RetrievalTest, size: int, majority: bool = False) -> dict[str, float]:
    """What the mean frame's pixels find, shrunk to size x size."""
    gallery, queries = (mean_frames(s, size) for s in (data.gallery, data.queries))
    return retrieval_scores(queries, data.queries, gallery, data.gallery, majority)


def mean_frames(videos: VideoSet, size: int, most: int = 64) -> Tensor:
    """A row for every video: the mean of its frames, of the `most` in the middle if it is long. One
    that cannot be decoded has a row of zeros.
    """
    rows = []
    for film in videos.clips:
        first = max(0, (len(film) - most) // 2)
        try:
            mean = film.read(first, min(len(film), first + most)).float().mean(0) / 255
        except DataError as e:
            skip(e)
            mean = torch.zeros(3, *film.size)
        rows.append(F.interpolate(mean[None], size=(size, size), mode="area").flatten())
    return torch.stack(rows)


def contact_sheet(
    asked: VideoSet, held: VideoSet, found: Tensor, alike: Tensor, classes: Sequence[str]
) -> Picture:
    """A row for every query: its middle frame, then those of the videos found, best first."""

    def name(label: int) -> str:
        return str(classes[label]) if 0 <= label < len(classes) else ""

    images, labels, right = [], [], 0
    for q, film in enumerate(asked.clips):
        images.append(middle_frame(film))
        labels.append(f"query: {name(asked.labels[q]) or film.name}")
        for g, score in zip(found[q].tolist(), alike[q].tolist(), strict=True):
            hit = held.labels[g] == asked.labels[q] and bool(classes)
            right += hit
            images.append(middle_frame(held.clips[g]))
            labels.append(
                f"{'✓' if hit else '·'} {name(held.labels[g]) or held.clips[g].name} {score:.2f}"
            )
    facts = {"queries": len(asked), "found for each": found.shape[1]} | (
        {"of the same class": right} if classes else {}
    )
    return Picture(
        "Nearest videos: each query is followed by what was found for it, best first",
        images,
        labels,
        "sheet",
        facts,
    )

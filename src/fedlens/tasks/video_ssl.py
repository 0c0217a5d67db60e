"""Self-supervised video: what the pretext tasks share. Each of them (CtP, VCOP, Speed) is one file
with its head, its transforms and its loss.

A pretext task says how a training example is made of a video (`sample`), how many frames that takes
(`least`), and what its head is. Clips that are too short are left out and counted, never looped: a
loop would destroy the order or the speed that is to be recognised.

What is learned is tested by retrieval, which needs no head: `clips` clips a video at even
distances, centre crop, the last map pooled by 2x2 (maximum) where it is larger than 3x3, flattened
and averaged over the clips; cosine. VCOP's protocol, except that pixels are normalised as in
training.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, generator
from fedlens.core.federation import Federation
from fedlens.core.limits import Count
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.data.source import DataError
from fedlens.data.video.frames import Frames
from fedlens.data.video.video_set import Search, VideoSet
from fedlens.metrics.retrieval import KS, nearest, recall, vote
from fedlens.models.video import SplitNet, backbone, load_backbone, map_shape

# short sides of 112, 128 and 144 for a crop of 112: the share of the frame that a crop sees
ZOOMS = (
    1.0,
    7 / 8,
    7 / 9,
)
# queries on the contact sheet, and what was found for each: eight fill a row of the report
SHOWN, NEAR = (
    5,
    7,
)


@dataclass(frozen=True)
class Examples:
    """A client's videos as a pretext task sees them. Without a generator every video gives the same
    example each time.
    """

    videos: VideoSet
    task: Any  # anything with sample(frames, label, rng)

    def __len__(self) -> int:
        return len(self.videos)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        asked = index.tolist()
        made = [m for i in asked if (m := self._made(i, rng))]
        if not made:  # a batch of broken files alone: another video of this client stands in for it
            other = next(
                (m for i in range(len(self)) if i not in asked and (m := self._made(i, rng))), None
            )
            if other is None:
                raise DataError(
                    f"none of the {len(self)} videos here can be decoded,"
                    f" {self.videos.clips[asked[0]].name} among them"
                )
            made = [other]
        return {k: torch.stack([m[k] for m in made]) for k in made[0]}

    def _made(self, i: int, rng: Generator | None) -> dict[str, Tensor] | None:
        own = rng if rng is not None else generator(0x7E57, i)
        try:
            made: dict[str, Tensor] = self.task.sample(
                self.videos.clips[i], self.videos.labels[i], own, rng is not None
            )
        except DataError as e:
            skip(e)
            return None
        return made


def admit(federation: Federation, task: Any, least: int) -> Federation:
    """Holdings as examples of a task; what is shorter than `least` frames goes, and is counted."""

    def view(videos: Any) -> Any:
        if not isinstance(videos, VideoSet):
            raise DataError(
                f"{type(task).__name__} learns from videos (data.name=Videos or MovingShapes), not"
                f" from {type(videos).__name__}"
            )
        return Examples(videos.at_least(least), task)

    holdings = [view(h) for h in federation.holdings]
    held_out = [None if h is None else view(h) for h in federation.held_out]
    short = [sum(len(c) < least for c in h.clips) for h in federation.holdings]
    if not any(len(h) for h in holdings):
        raise DataError(
            f"no video has the {least} frames that {type(task).__name__} needs here: lower"
            " task.frames"
        )
    if empty := [i for i, h in enumerate(holdings) if not len(h)]:
        raise DataError(
            f"client {empty[0]} has no video of {least} frames or more: lower task.frames or"
            " federation.clients"
        )
    left_out = {"least_frames": least, "excluded": sum(short), "excluded_by_client": short}
    facts = replace(federation.facts, details={**federation.facts.details, **left_out})
    if sum(short):
        note = f"{sum(short)} videos are shorter than {least} frames and were left out"
        facts = replace(facts, notes=(*facts.notes, note))
    return Federation(holdings, held_out, federation.test, facts)


def load_init(model: nn.Module, path: str | None) -> None:
    """Of a saved model the backbone alone: what its head was for need not be what this one is
    for.
    """
    if path:
        assert isinstance(model, SplitNet)
        load_backbone(model, path)


def skip(e: DataError) -> None:
    """Of a file that looked sound when it was opened: it is named, and all goes on without it. The
    federation's facts were written down before and do not count it."""
    warnings.warn(f"skipped: {e}", stacklevel=3)


# -- cutting ---------------------------------------------------------------------------------------


def cut(frames: Frames, numbers: Sequence[int], size: int, rng: Generator | None) -> Tensor:
    """These frames as (3, T, size, size) in [0, 1]: with a generator a random square of one of
    three sizes, mirrored or not; else the middle."""
    pixels = frames.read(min(numbers), max(numbers) + 1)
    return crop(pixels[[n - min(numbers) for n in numbers]], size, rng)


def crop(pixels: Tensor, size: int, rng: Generator | None) -> Tensor:
    """One square for all frames of (T, 3, H, W)."""
    h, w = pixels.shape[-2:]
    if rng is None:
        side, place, mirror = round(min(h, w) * ZOOMS[1]), (0.5, 0.5), False
    else:
        draw = torch.rand(4, generator=rng).tolist()
        side, place, mirror = (
            round(min(h, w) * ZOOMS[int(3 * draw[0])]),
            (draw[1], draw[2]),
            draw[3] < 0.5,
        )
    top, left = round(place[0] * (h - side)), round(place[1] * (w - side))
    square = pixels[..., top : top + side, left : left + side].float() / 255
    if side != size:
        square = F.interpolate(
            square, size=(size, size), mode="bilinear", align_corners=False, antialias=side > size
        )
    square = square.flip(-1) if mirror else square
    return square.transpose(0, 1).contiguous()


def starts(length: int, frames: int, clips: int, stride: int = 1) -> list[int]:
    """Where `clips` clips begin, their middles at even distances; in a short video they overlap,
    and lie on one another at worst.
    """
    room = length - (frames - 1) * stride - 1
    return [round(k * room / max(1, clips - 1)) if clips > 1 else room // 2 for k in range(clips)]


@dataclass
class VideoSSL(LearningTask):
    """Abstract. backbone: r3d18, r2plus1d18, r3d10, r3d10s or module:Class. frames, size: of a
    clip. clips: per video in retrieval. majority: also report the vote among the nearest. init: a
    saved model whose backbone to start from."""

    backbone: str = "r3d18"
    frames: int = 16
    size: int = 112
    clips: int = 10
    majority: bool = False
    init: str | None = None
    evaluation_batch: Count = 64

    last_stride = 2

    def __post_init__(self) -> None:
        for name in ("frames", "size", "clips"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name} is {getattr(self, name)}: at least 1 is needed")

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
        body = backbone(self.backbone, self.last_stride)
        return SplitNet(body, self.head(map_shape(body, self.frames, self.size)))

    def load_init(self, model: nn.Module) -> None:
        load_init(model, self.init)

    def admit(self, federation: Federation) -> Federation:
        return admit(federation, self, self.least)

    def needs_head(self, data: Any) -> bool:
        return not isinstance(data, Search)

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        """Retrieval where there is something to search; the pretext loss on a client's own held-out
        videos.
        """
        if isinstance(data, Search):
            gallery, queries = (
                embed(result, s, self.frames, self.size, self.clips, self.evaluation_batch)
                for s in (data.gallery, data.queries)
            )
            return scores(queries, data.queries, gallery, data.gallery, self.majority)
        place = next(result.parameters()).device
        losses, total = 0.0, 0
        with torch.no_grad():
            for batch in in_batches(data, self.evaluation_batch, place):
                losses += float(self.loss(self.forward(result, batch), batch)) * len(batch["x"])
                total += len(batch["x"])
        return {"pretext_loss": losses / max(1, total)}

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        out = [self._examples(federation)]
        if isinstance(federation.test, Search) and len(federation.test):
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

    def _sheet(self, result: Any, search: Search) -> Picture:
        picks = (
            torch.linspace(0, len(search.queries) - 1, min(SHOWN, len(search.queries)))
            .long()
            .tolist()
        )
        some = search.queries.take(picks)
        gallery, queries = (
            embed(result, s, self.frames, self.size, min(2, self.clips), self.evaluation_batch)
            for s in (search.gallery, some)
        )
        found, alike = nearest(queries, gallery, NEAR)
        return contact_sheet(some, search.gallery, found, alike, search.classes)

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Find, for every video of a file or folder, the most similar ones: see
        `fedlens.tasks.search`. Options: gallery, k, clips.
        """
        from fedlens.tasks.search import search_folder

        check_options(self, options, "gallery", "k", "clips")
        net = self.model()
        assert isinstance(net, SplitNet)
        load_backbone(net, str(folder / "model.safetensors"))
        return search_folder(
            net.eval(),
            self.frames,
            self.size,
            source,
            target,
            weights=folder / "model.safetensors",
            clips=self.clips,
            options=options,
        )


# -- retrieval -------------------------------------------------------------------------------------


def clip_batches(
    videos: VideoSet, frames: int, size: int, clips: int, stride: int, batch: int
) -> Any:
    """(numbers of the videos, clips (B, 3, T, size, size)), `clips` of each video; one that is too
    short or broken gives none.
    """
    numbers: list[int] = []
    held: list[Tensor] = []
    for i, film in enumerate(videos.clips):
        if len(film) < (frames - 1) * stride + 1:
            continue
        first = starts(len(film), frames, clips, stride)
        try:
            pixels = film.read(first[0], first[-1] + (frames - 1) * stride + 1)
        except DataError as e:
            skip(e)
            continue
        whole = crop(pixels, size, None)
        for s in first:
            low = s - first[0]
            held.append(whole[:, low : low + (frames - 1) * stride + 1 : stride])
            numbers.append(i)
        while len(held) >= batch:
            yield numbers[:batch], torch.stack(held[:batch])
            numbers, held = numbers[batch:], held[batch:]
    if held:
        yield numbers, torch.stack(held)


def pooled(maps: Tensor) -> Tensor:
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
            features = pooled(net.maps(x.to(place)).float()).cpu()
            if total is None:
                total = torch.zeros(len(videos), features.shape[1])
            total.index_add_(0, torch.tensor(numbers), features / clips)
            seen.update(numbers)
    if total is None:
        raise DataError(f"no video has {frames} frames of a clip that can be decoded")
    return total, sorted(seen)


def scores(
    queries: Tensor,
    asked: VideoSet,
    gallery: Tensor,
    held: VideoSet,
    majority: bool = False,
    same: bool = False,
) -> dict[str, float]:
    y, labels = torch.tensor(asked.labels), torch.tensor(held.labels)
    found, _ = nearest(queries, gallery, max(KS), same)
    return recall(found, y, labels) | (vote(found, y, labels) if majority else {})


def middle(frames: Frames) -> Tensor:
    """The frame in the middle; black where it cannot be decoded."""
    try:
        pixels = frames.read(len(frames) // 2, len(frames) // 2 + 1)[0].float() / 255
    except DataError:
        pixels = torch.zeros(3, *frames.size)
    return larger(pixels)


def larger(image: Tensor, least: int = 96) -> Tensor:
    """Small pictures as blocks, so that one sees what the network saw."""
    by = max(1, -(-least // image.shape[-2]))
    return image.repeat_interleave(by, -1).repeat_interleave(by, -2)


def contact_sheet(
    asked: VideoSet, held: VideoSet, found: Tensor, alike: Tensor, classes: Sequence[str]
) -> Picture:
    """A row for every query: its middle frame, then those of the videos found, best first."""

    def name(label: int) -> str:
        return str(classes[label]) if 0 <= label < len(classes) else ""

    images, labels, right = [], [], 0
    for q, film in enumerate(asked.clips):
        images.append(middle(film))
        labels.append(f"query: {name(asked.labels[q]) or film.name}")
        for g, score in zip(found[q].tolist(), alike[q].tolist(), strict=True):
            hit = held.labels[g] == asked.labels[q] and bool(classes)
            right += hit
            images.append(middle(held.clips[g]))
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

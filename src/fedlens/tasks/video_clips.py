"""Clips cut from videos, as the video tasks see them: examples for training, even ones for testing,
a frame to be shown.

Videos that are too short are left out and counted, never looped: a loop would destroy the order or
the speed that is to be recognised.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import Batch, generator
from fedlens.core.federation import Federation
from fedlens.core.picture import magnify
from fedlens.data.source import DataError
from fedlens.data.video.frames import Frames
from fedlens.data.video.video_set import VideoSet

# short sides of 112, 128 and 144 for a crop of 112: the share of the frame that a crop sees
ZOOMS = (
    1.0,
    7 / 8,
    7 / 9,
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


def skip(e: DataError) -> None:
    """Of a file that looked sound when it was opened: it is named, and all goes on without it. The
    federation's facts were written down before and do not count it."""
    warnings.warn(f"skipped: {e}", stacklevel=3)


def cut_clip(frames: Frames, numbers: Sequence[int], size: int, rng: Generator | None) -> Tensor:
    """These frames as (3, T, size, size) in [0, 1]: with a generator a random square of one of
    three sizes, mirrored or not; else the middle."""
    pixels = frames.read(min(numbers), max(numbers) + 1)
    return crop_square(pixels[[n - min(numbers) for n in numbers]], size, rng)


def crop_square(pixels: Tensor, size: int, rng: Generator | None) -> Tensor:
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


def clip_starts(length: int, frames: int, clips: int, stride: int = 1) -> list[int]:
    """Where `clips` clips begin, their middles at even distances; in a short video they overlap,
    and lie on one another at worst.
    """
    room = length - (frames - 1) * stride - 1
    return [round(k * room / max(1, clips - 1)) if clips > 1 else room // 2 for k in range(clips)]


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
        first = clip_starts(len(film), frames, clips, stride)
        try:
            pixels = film.read(first[0], first[-1] + (frames - 1) * stride + 1)
        except DataError as e:
            skip(e)
            continue
        whole = crop_square(pixels, size, None)
        for s in first:
            low = s - first[0]
            held.append(whole[:, low : low + (frames - 1) * stride + 1 : stride])
            numbers.append(i)
        while len(held) >= batch:
            yield numbers[:batch], torch.stack(held[:batch])
            numbers, held = numbers[batch:], held[batch:]
    if held:
        yield numbers, torch.stack(held)


def middle_frame(frames: Frames) -> Tensor:
    """The frame in the middle; black where it cannot be decoded."""
    try:
        pixels = frames.read(len(frames) // 2, len(frames) // 2 + 1)[0].float() / 255
    except DataError:
        pixels = torch.zeros(3, *frames.size)
    return larger(pixels)


def larger(image: Tensor, least: int = 96) -> Tensor:
    """Small pictures as blocks, so that one sees what the network saw."""
    by = max(1, -(-least // image.shape[-2]))
    return magnify(image, by)

"""Who holds which windows of which clips.

A client's example is a window of `frames` frames of one clip, from which each epoch cuts a crop at
random, flips and turns it.

split "pooled" deals windows' clips out at random (the paper's less heterogeneous case); "groups"
gives each client one group: a class of a label file, a folder, or else a clip of its own (more
heterogeneous). `regions` cuts every frame into a grid whose cells are dealt out separately, for
when there are fewer clips than clients; with "groups" the cells of a clip stay together.

`native` gives clients cameras of different resolution: client i films with 1 / native[i mod n] of
the pixels along each side, and its crops shrink alike, so that all clients see as much of a scene.
(The paper's stated future work; MultiResolution makes use of it.) `degradation` gives them cameras
that are bad in different ways, likewise: degradations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator

from fedlens.core.client import Data, generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.data.source import DataError
from fedlens.data.video.degradations import DegradationKind, degradation
from fedlens.data.video.frames import Box, Frames
from fedlens.data.video.windows import CropArea, ShrunkFrames, WholeClips, Windows


@dataclass(frozen=True)
class Cut:
    """How clips become examples; shared by `Clips` and `MovingTextures`."""

    split: Literal["pooled", "groups"]
    frames: int
    scale: int
    crop: int
    regions: int
    stride: int
    repeat: int
    held_out: float
    native: Sequence[int] = (1,)
    degradation: Sequence[DegradationKind] = ("bi",)

    def __post_init__(self) -> None:
        if self.crop % self.scale:
            raise DataError(
                f"crops of {self.crop} pixels are not divisible by the scale {self.scale}"
            )
        if bad := [by for by in self.native if self.crop % (by * self.scale)]:
            raise DataError(
                f"data.native is {bad[0]}: crops of {self.crop} must be divisible by it and by the"
                f" scale {self.scale}"
            )
        if not self.degradation:
            raise DataError('data.degradation is empty: ["bi"] shrinks as the benchmarks do')
        if not self.native:
            raise DataError("data.native is empty: (1,) gives every client the full resolution")

    def federation(
        self,
        clips: Sequence[Frames],
        groups: Sequence[str],
        test: WholeClips | None,
        clients: int,
        seed: int,
    ) -> Federation:
        cut = [
            pieces_of(i, c, self.frames, self.scale, self.crop, self.regions, self.stride)
            for i, c in enumerate(clips)
        ]
        units = [unit for clip in cut for unit in clip]
        names = [groups[i] for i, clip in enumerate(cut) for _ in clip]
        rng = generator(seed, 0xC11)
        shares = (
            deal_at_random(units, clients, rng)
            if self.split == "pooled"
            else by_group(units, names, clients)
        )
        holdings, held = [], []
        smaller = {
            by: clips if by == 1 else [ShrunkFrames(c, by) for c in clips] for by in self.native
        }
        sides = [self.native[i % len(self.native)] for i in range(clients)]
        kinds = self.degradation
        cameras = [degradation(kinds[i % len(kinds)], seed, i) for i in range(clients)]
        for by, share, camera in zip(sides, shares, cameras, strict=True):
            own, crop = smaller[by], self.crop // by
            share = [CropArea(p.clip, p.start, _within(p.box, by, self.scale)) for p in share]
            kept = round(len(share) * self.held_out)
            order = (
                torch.randperm(len(share), generator=rng).tolist() if kept else range(len(share))
            )
            mine = [share[k] for k in sorted(order[kept:])]
            rest = [share[k] for k in sorted(order[:kept])]
            size = (self.frames, self.scale, crop)
            holdings.append(Windows(own, mine, *size, self.repeat, camera))
            held.append(Windows(own, rest, *size, degradation=camera))
        details: dict[str, list[Any]] = {
            "clips": [sorted({clips[p.clip].name for p in share}) for share in shares],
            "groups": [sorted({groups[p.clip] for p in share}) for share in shares],
            "windows": [len(share) for share in shares],
        }
        if set(kinds) != {"bi"}:
            details["cameras"] = [str(camera) for camera in cameras]
        facts = Facts(details=details)
        if uneven := [c.name for c in clips if any(n % self.scale for n in c.size)]:
            ending = "the last rows and columns beyond a multiple of it are not used"
            facts = facts.noting(
                f"the sides of {len(uneven)} clips ({uneven[0]}, ...) cannot be divided by the"
                f" scale {self.scale}: {ending}"
            )
        if len(smaller) > 1:
            low = [self.crop // by // self.scale for by in sides]
            facts = replace(facts, resolutions=tuple((side, side) for side in low))
            test = self._at_every_resolution(test)
        out: Sequence[Data | None] = held if self.held_out else ()
        return Federation(holdings, out, test, facts)

    def _at_every_resolution(self, test: WholeClips | None) -> WholeClips | None:
        """The test clips as the smaller cameras would have filmed them, as sets of their own."""
        if test is None:
            return None
        cameras = {
            f"{'half' if by == 2 else f'1_{by}'}_size": WholeClips(
                [ShrunkFrames(c, by) for c in test.clips], self.scale, None, test.degradation
            )
            for by in sorted({*self.native} - {1})
        }
        return replace(test, also={**cameras, **test.also})


def pieces_of(
    clip: int, frames: Frames, window: int, scale: int, crop: int, regions: int, stride: int
) -> list[list[CropArea]]:
    """The windows of a clip, one list per region of its grid."""
    h, w = (n - n % scale for n in frames.size)
    if len(frames) < window:
        raise DataError(
            f"clip {frames.name} has {len(frames)} frames, fewer than the window of {window}: set"
            f" data.frames={len(frames)}"
        )
    ch, cw = (n // regions // scale * scale for n in (h, w))
    if ch < crop or cw < crop:
        part = "" if regions == 1 else f", {cw}x{ch} in each of its {regions}x{regions} regions"
        raise DataError(
            f"clip {frames.name} has {w}x{h} usable pixels{part}, too few for crops of {crop}: set"
            " data.crop lower"
        )
    boxes = [(r * ch, c * cw, ch, cw) for r in range(regions) for c in range(regions)]
    starts = range(0, len(frames) - window + 1, stride)
    return [[CropArea(clip, s, box) for s in starts] for box in boxes]


def deal_at_random(
    units: Sequence[list[CropArea]], clients: int, rng: Generator
) -> list[list[CropArea]]:
    """At random, as evenly as it goes."""
    if len(units) < clients:
        raise DataError(
            f"{len(units)} pieces of video cannot be dealt to {clients} clients: raise data.regions"
            " or lower federation.clients"
        )
    order = torch.randperm(len(units), generator=rng).tolist()
    return [[p for k in order[i::clients] for p in units[k]] for i in range(clients)]


def by_group(
    units: Sequence[list[CropArea]], groups: Sequence[str], clients: int
) -> list[list[CropArea]]:
    """One group per client; more groups than clients go round."""
    names = list(dict.fromkeys(groups))
    if len(names) < clients:
        raise DataError(
            f"there are {len(names)} groups of clips for {clients} clients: lower"
            " federation.clients or set data.split=pooled"
        )
    owner = {g: k % clients for k, g in enumerate(names)}
    out: list[list[CropArea]] = [[] for _ in range(clients)]
    for unit, group in zip(units, groups, strict=True):
        out[owner[group]] += unit
    return out


def _within(box: Box, by: int, scale: int) -> Box:
    """The same part of a frame that has 1 / by of the pixels along each side, on its low-resolution
    grid.
    """
    top, left, height, width = (n // by // scale * scale for n in box)
    return top, left, height, width

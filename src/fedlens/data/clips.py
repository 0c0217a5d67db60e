"""Clips for super-resolution: frame folders (REDS, Vid4, Vimeo-90K, any) and video files, or a generator of moving textures.

A client's example is a window of `frames` frames of one clip, from which each epoch cuts a crop at random, flips and turns it. The low
resolution is made as in the benchmarks (`degrade`), exactly as if the whole frame had been shrunk: the crop is read with a margin.

split "pooled" deals windows' clips out at random (the paper's less heterogeneous case); "groups" gives each client one group: a class of a
label file, a folder, or else a clip of its own (more heterogeneous). `regions` cuts every frame into a grid whose cells are dealt out
separately, for when there are fewer clips than clients; with "groups" the cells of a clip stay together.

`native` gives clients cameras of different resolution: client i films with 1 / native[i mod n] of the pixels along each side, and its
crops shrink alike, so that all clients see as much of a scene. (The paper's stated future work; MultiResolution makes use of it.)

A clip that cannot be opened is refused, and nothing starts. Damage inside a video's packets is found out only when they are decoded, in
training: the client that holds it is then lost in that round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.client import Batch, Data, generator
from fedlens.data.degrade import REACH, cut_to, degrade, shrink
from fedlens.data.source import DataError, Source
from fedlens.data.video import ArrayFrames, Box, Cache, Frames, find_clips, open_all
from fedlens.federation import Federation

REDS4 = ("000", "011", "015", "020")


@dataclass(frozen=True)
class Piece:
    """Where crops may be taken: a window of a clip, and a part of its frames."""

    clip: int
    start: int
    box: Box


@dataclass(frozen=True)
class Windows:
    """What a client owns. With a generator: random crops, flips and quarter turns. Without: the middle of the box, as it is."""

    clips: Sequence[Frames]
    pieces: Sequence[Piece]
    frames: int
    scale: int
    crop: int
    repeat: int = 1

    def __len__(self) -> int:
        return len(self.pieces) * self.repeat

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        pairs = [self.example(self.pieces[int(i) % len(self.pieces)], rng) for i in index]
        return {"x": torch.stack([x for x, _ in pairs]), "y": torch.stack([y for _, y in pairs])}

    def example(self, piece: Piece, rng: Generator | None) -> tuple[Tensor, Tensor]:
        top, left, height, width = piece.box
        place = torch.rand(2, generator=rng) if rng is not None else torch.tensor([0.5, 0.5])
        steps = [(room - self.crop) // self.scale + 1 for room in (height, width)]
        y0, x0 = (int(p * n) * self.scale for p, n in zip(place.tolist(), steps, strict=True))
        x, y = cut_pair(self.clips[piece.clip], piece.start, self.frames, (top + y0, left + x0, self.crop, self.crop), self.scale)
        if rng is not None:
            x, y = turned(x, y, int(torch.randint(8, (), generator=rng)))
        return x, y


def cut_pair(clip: Frames, start: int, count: int, box: Box, scale: int) -> tuple[Tensor, Tensor]:
    """Low and high resolution of a box whose corners lie on the low-resolution grid; equal to cropping the whole degraded frame."""
    top, left, height, width = box
    full = [n - n % scale for n in clip.size]
    margin = REACH * scale
    up, before = min(top, margin), min(left, margin)
    down, after = min(full[0] - top - height, margin), min(full[1] - left - width, margin)
    wide = clip.crop(start, start + count, (top - up, left - before, height + up + down, width + before + after)).float() / 255
    small = (shrink(wide, scale).clamp(0, 1) * 255).round() / 255
    rows, columns = slice(up // scale, up // scale + height // scale), slice(before // scale, before // scale + width // scale)
    return small[..., rows, columns].contiguous(), wide[..., up : up + height, before : before + width].contiguous()


def turned(x: Tensor, y: Tensor, how: int) -> tuple[Tensor, Tensor]:
    """One of the eight symmetries of the square, the same for both."""

    def one(t: Tensor) -> Tensor:
        t = t.flip(-1) if how & 1 else t
        t = t.flip(-2) if how & 2 else t
        return (t.transpose(-1, -2) if how & 4 else t).contiguous()

    return one(x), one(y)


@dataclass(frozen=True)
class WholeClips:
    """What the server tests on: one clip at a time, whole. `low` are given low-resolution clips; otherwise they are made."""

    clips: Sequence[Frames]
    scale: int
    low: Sequence[Frames] | None = None

    def __len__(self) -> int:
        return len(self.clips)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        pairs = [self.pair(int(i)) for i in index]
        if len({y.shape for _, y in pairs}) > 1:
            raise DataError("test clips of different sizes have to be read one at a time")
        return {"x": torch.stack([x for x, _ in pairs]), "y": torch.stack([y for _, y in pairs])}

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        y = cut_to(self.clips[i].read(0, len(self.clips[i])).float() / 255, self.scale)
        x = degrade(y, self.scale) if self.low is None else self.low[i].read(0, len(self.clips[i])).float() / 255
        return x, y

    def name(self, i: int) -> str:
        return self.clips[i].name

    def subset(self, index: Sequence[int]) -> WholeClips:
        return WholeClips([self.clips[i] for i in index], self.scale, None if self.low is None else [self.low[i] for i in index])


# -- who holds what -----------------------------------------------------------------------------------------------------------------


def pieces_of(clip: int, frames: Frames, window: int, scale: int, crop: int, regions: int, stride: int) -> list[list[Piece]]:
    """The windows of a clip, one list per region of its grid."""
    h, w = (n - n % scale for n in frames.size)
    if len(frames) < window:
        raise DataError(f"clip {frames.name} has {len(frames)} frames, fewer than the window of {window}: set data.frames={len(frames)}")
    ch, cw = (n // regions // scale * scale for n in (h, w))
    if ch < crop or cw < crop:
        part = "" if regions == 1 else f", {cw}x{ch} in each of its {regions}x{regions} regions"
        raise DataError(f"clip {frames.name} has {w}x{h} usable pixels{part}, too few for crops of {crop}: set data.crop lower")
    boxes = [(r * ch, c * cw, ch, cw) for r in range(regions) for c in range(regions)]
    starts = range(0, len(frames) - window + 1, stride)
    return [[Piece(clip, s, box) for s in starts] for box in boxes]


def deal(units: Sequence[list[Piece]], clients: int, rng: Generator) -> list[list[Piece]]:
    """At random, as evenly as it goes."""
    if len(units) < clients:
        raise DataError(
            f"{len(units)} pieces of video cannot be dealt to {clients} clients: raise data.regions or lower federation.clients"
        )
    order = torch.randperm(len(units), generator=rng).tolist()
    return [[p for k in order[i::clients] for p in units[k]] for i in range(clients)]


def by_group(units: Sequence[list[Piece]], groups: Sequence[str], clients: int) -> list[list[Piece]]:
    """One group per client; more groups than clients go round."""
    names = list(dict.fromkeys(groups))
    if len(names) < clients:
        raise DataError(f"there are {len(names)} groups of clips for {clients} clients: lower federation.clients or set data.split=pooled")
    owner = {g: k % clients for k, g in enumerate(names)}
    out: list[list[Piece]] = [[] for _ in range(clients)]
    for unit, group in zip(units, groups, strict=True):
        out[owner[group]] += unit
    return out


@dataclass(frozen=True)
class Cut:
    """How clips become examples; shared by the sources below."""

    split: Literal["pooled", "groups"]
    frames: int
    scale: int
    crop: int
    regions: int
    stride: int
    repeat: int
    held_out: float
    native: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        if self.scale not in (1, 2, 3, 4):
            raise DataError(f"data.scale is {self.scale}: 2, 3 and 4 are known")
        if self.crop % self.scale:
            raise DataError(f"crops of {self.crop} pixels are not divisible by the scale {self.scale}")
        for name in ("frames", "crop", "regions", "stride", "repeat"):
            if getattr(self, name) < 1:
                raise DataError(f"data.{name} is {getattr(self, name)}: at least 1 is needed")
        if not 0 <= self.held_out < 1:
            raise DataError(f"data.held_out is {self.held_out}: it is a share below 1")
        if bad := [by for by in self.native if by < 1 or self.crop % (by * self.scale)]:
            raise DataError(f"data.native is {bad[0]}: crops of {self.crop} must be divisible by it and by the scale {self.scale}")
        if not self.native:
            raise DataError("data.native is empty: (1,) gives every client the full resolution")

    def federation(self, clips: Sequence[Frames], groups: Sequence[str], test: Any, clients: int, seed: int) -> Federation:
        cut = [pieces_of(i, c, self.frames, self.scale, self.crop, self.regions, self.stride) for i, c in enumerate(clips)]
        units = [unit for clip in cut for unit in clip]
        names = [groups[i] for i, clip in enumerate(cut) for _ in clip]
        rng = generator(seed, 0xC11)
        shares = deal(units, clients, rng) if self.split == "pooled" else by_group(units, names, clients)
        holdings, held = [], []
        smaller = {by: clips if by == 1 else [Smaller(c, by) for c in clips] for by in self.native}
        sides = [self.native[i % len(self.native)] for i in range(clients)]
        for by, share in zip(sides, shares, strict=True):
            own, crop = smaller[by], self.crop // by
            share = [Piece(p.clip, p.start, _within(p.box, by, self.scale)) for p in share]
            kept = round(len(share) * self.held_out)
            order = torch.randperm(len(share), generator=rng).tolist() if kept else range(len(share))
            mine = [share[k] for k in sorted(order[kept:])]
            holdings.append(Windows(own, mine, self.frames, self.scale, crop, self.repeat))
            held.append(Windows(own, [share[k] for k in sorted(order[:kept])], self.frames, self.scale, crop))
        facts: dict[str, Any] = {
            "clips": [sorted({clips[p.clip].name for p in share}) for share in shares],
            "groups": [sorted({groups[p.clip] for p in share}) for share in shares],
            "windows": [len(share) for share in shares],
        }
        if uneven := [c.name for c in clips if any(n % self.scale for n in c.size)]:
            rest = "the last rows and columns beyond a multiple of it are not used"
            facts["notes"] = [f"the sides of {len(uneven)} clips ({uneven[0]}, ...) cannot be divided by the scale {self.scale}: {rest}"]
        if len(smaller) > 1:
            facts["resolutions"] = [f"{self.crop // by // self.scale}x{self.crop // by // self.scale}" for by in sides]
        out: Sequence[Data | None] = held if self.held_out else ()
        return Federation(holdings, out, test, facts)


def _within(box: Box, by: int, scale: int) -> Box:
    """The same part of a frame that has 1 / by of the pixels along each side, on its low-resolution grid."""
    top, left, height, width = (n // by // scale * scale for n in box)
    return top, left, height, width


class Smaller(Frames):
    """A clip as a camera with 1 / by of the pixels along each side would have filmed it."""

    def __init__(self, frames: Frames, by: int) -> None:
        self.frames, self.by, self.name, self.rate, self.block = frames, by, frames.name, frames.rate, frames.block
        self.size = (frames.size[0] // by, frames.size[1] // by)

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, low: int, high: int) -> Tensor:
        return self.crop(low, high, (0, 0, *self.size))

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        top, left, height, width = (n * self.by for n in box)
        return (cut_pair(self.frames, low, high - low, (top, left, height, width), self.by)[0] * 255).round().byte()


@dataclass
class Clips(Source):
    """folder: where the training clips lie, as folders of pictures or video files. test: the same for the server's test clips, or "none";
    test_low: their low-resolution versions, if they are given. split, regions: see above. labels: a JSON file {clip name or number: group}.
    list_file: a text file that names the clips to use, one a line. clips: how many at most. leave_out: clips kept out of training; "reds4"
    takes the four of REDS4, "auto" does so where the folder is REDS; they are the test clips unless `test` says otherwise.
    frames, crop, scale: window, high-resolution crop, factor. stride: between windows. repeat: crops per window and epoch. held_out: share
    of each client's windows for its own evaluation. native: see above. test_frames: how many frames of a test clip. cache_mb, cache: memory
    for decoded frames, or a folder for them."""

    folder: str
    test: str | None = None
    test_low: str | None = None
    split: Literal["pooled", "groups"] = "pooled"
    scale: int = 4
    frames: int = 6
    crop: int = 256
    regions: int = 1
    stride: int = 1
    repeat: int = 1
    held_out: float = 0.0
    labels: str | None = None
    list_file: str | None = None
    clips: int | None = None
    leave_out: str = "auto"
    test_frames: int | None = None
    cache_mb: int = 1024
    cache: str | None = None
    native: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        self.test = None if self.test == "none" else self.test
        self.cut = Cut(self.split, self.frames, self.scale, self.crop, self.regions, self.stride, self.repeat, self.held_out, self.native)

    def federation(self, clients: int, seed: int) -> Federation:
        cache = Cache(self.cache_mb << 20, Path(self.cache) if self.cache else None)
        root = located(self.folder)
        paths = self._listed(root) if self.list_file else find_clips(root)
        out = left_out(self.leave_out, root, paths)
        kept = {k: p for k, p in enumerate(paths) if p.name not in out and p.stem not in out}
        if not kept:
            raise DataError(f"nothing in {root} is left to train on")
        train = dict(list(kept.items())[: self.clips])
        clips = open_all(list(train.values()), cache)
        test = self._test(cache, [p for k, p in enumerate(paths) if k not in kept])
        return self.cut.federation(clips, self._groups(train, root), test, clients, seed)

    def _listed(self, root: Path) -> list[Path]:
        text = located(str(self.list_file)).read_text().split("\n")
        paths = [root / line.split()[0] for line in text if line.strip()]
        if missing := [p for p in paths if not p.exists()]:
            raise DataError(f"{self.list_file} names {missing[0]}, which is not there ({len(missing)} are missing)")
        return paths

    def _groups(self, numbered: Mapping[int, Path], root: Path) -> list[str]:
        """Numbers are those of all clips that were found or listed, also where some are left out."""
        paths = list(numbered.values())
        if self.labels:
            table = read_labels(located(self.labels))
            found = [table.get(p.name, table.get(p.stem, table.get(str(k)))) for k, p in numbered.items()]
            if None in found:
                raise DataError(f"{self.labels} has no label for clip {paths[found.index(None)].name}")
            return [str(g) for g in found]
        nested = [p.parent.name for p in paths if p.parent != root]
        return nested if len(nested) == len(paths) and len(set(nested)) > 1 else [p.name for p in paths]

    def _test(self, cache: Cache, own: Sequence[Path]) -> WholeClips | None:
        paths = find_clips(located(self.test)) if self.test else list(own)
        if not paths:
            return None
        clips = [Head(c, self.test_frames) for c in open_all(paths, cache)]
        if not self.test_low:
            return WholeClips(clips, self.scale)
        low = [Head(c, self.test_frames) for c in open_all(find_clips(located(self.test_low)), cache)]
        check_pairs(clips, low, self.scale)
        return WholeClips(clips, self.scale, low)


class Head(Frames):
    """The first frames of a clip."""

    def __init__(self, frames: Frames, count: int | None) -> None:
        self.frames, self.name, self.size, self.rate = frames, frames.name, frames.size, frames.rate
        self.count = len(frames) if count is None else min(count, len(frames))

    def __len__(self) -> int:
        return self.count

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.frames.read(low, high)


def check_pairs(clips: Sequence[Frames], low: Sequence[Frames], scale: int) -> None:
    if len(clips) != len(low):
        raise DataError(f"there are {len(clips)} high-resolution and {len(low)} low-resolution clips")
    for a, b in zip(clips, low, strict=True):
        if len(a) != len(b):
            raise DataError(f"clip {a.name} has {len(a)} frames in high and {len(b)} in low resolution")
        want = (a.size[0] // scale, a.size[1] // scale)
        if b.size != want:
            raise DataError(
                f"clip {a.name}: low-resolution frames have {b.size[1]}x{b.size[0]} pixels, {want[1]}x{want[0]} were expected at x{scale}"
            )


def read_labels(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text())
    except ValueError as e:
        raise DataError(f"{file} is not JSON: {e}") from None
    if not isinstance(table, dict):
        raise DataError(f"{file} is not an object {{clip name or number: group}}")
    return table


def left_out(how: str, root: Path, paths: Sequence[Path]) -> set[str]:
    names = {p.name for p in paths}
    if how == "auto":
        return set(REDS4) if "reds" in str(root).lower() and set(REDS4) <= names else set()
    if how in ("", "none"):
        return set()
    wanted = set(REDS4) if how.lower() == "reds4" else {n.strip() for n in how.split(",")}
    if missing := sorted(wanted - names - {p.stem for p in paths}):
        raise DataError(f"data.leave_out names {missing[0]}, which is not among the clips")
    return wanted


def located(path: str) -> Path:
    """`~` and, for what the data pack holds, `$FEDLENS_DATA` are filled in."""
    import os

    full = Path(os.path.expandvars(path)).expanduser()
    if "$" in str(full):
        raise DataError(f"{path}: the environment variable in it is not set")
    if not full.exists():
        raise DataError(f"there is nothing at {full}")
    return full


# -- without data on disk ------------------------------------------------------------------------------------------------------------


@dataclass
class MovingTextures(Source):
    """Made-up scenes: gratings, checks and hard-edged shapes on noise, seen by a moving camera. A group is a family of scenes: its own
    spectrum, colours and speed. groups: how many families. clips: scenes in all, each of `length` frames. The rest as in `Clips`."""

    split: Literal["pooled", "groups"] = "pooled"
    scale: int = 4
    frames: int = 5
    crop: int = 64
    clips: int = 12
    groups: int = 12
    length: int = 7
    height: int = 128
    width: int = 128
    regions: int = 1
    stride: int = 1
    repeat: int = 1
    held_out: float = 0.0
    test_clips: int = 2
    native: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        self.cut = Cut(self.split, self.frames, self.scale, self.crop, self.regions, self.stride, self.repeat, self.held_out, self.native)

    def federation(self, clients: int, seed: int) -> Federation:
        families = [k % self.groups for k in range(self.clips)]
        clips = [self._scene(k, family, seed) for k, family in enumerate(families)]
        test = [self._scene(self.clips + k, self.groups + k, seed) for k in range(self.test_clips)]
        return self.cut.federation(clips, [f"family {f}" for f in families], WholeClips(test, self.scale), clients, seed)

    def _scene(self, number: int, family: int, seed: int) -> Frames:
        array = moving_texture(self.length, self.height, self.width, generator(seed, 0x5CE, family), generator(seed, 0x5CF, number))
        return ArrayFrames(array, f"scene{number:02d}")


def moving_texture(length: int, height: int, width: int, family: Generator, own: Generator) -> Tensor:
    """uint8 (length, 3, height, width)."""

    def between(low: float, high: float, rng: Generator, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng)

    period, speed, contrast = (float(between(a, b, family)) for a, b in ((4, 16), (0.3, 2.5), (0.3, 0.9)))
    tint = between(0.3, 1, family, 2, 3)
    h, w = height + 64, width + 64
    rows, columns = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    canvas = F.interpolate(torch.rand(1, 3, h // 8, w // 8, generator=own), size=(h, w), mode="bicubic", align_corners=False)[0] * 0.5 + 0.2
    for k in range(10):
        cy, cx, radius = between(0, h, own), between(0, w, own), between(8, 40, own)
        turn = float(between(0, 3.14, own))
        u = (rows - cy) * float(torch.tensor(turn).cos()) + (columns - cx) * float(torch.tensor(turn).sin())
        v = (columns - cx) * float(torch.tensor(turn).cos()) - (rows - cy) * float(torch.tensor(turn).sin())
        inside = (u.square() + v.square() < radius.square()) if k % 2 else torch.maximum(u.abs(), v.abs()) < radius
        wave = torch.sin(u * 6.283 / period) if k % 3 else torch.sign(torch.sin(u * 3.14 / period) * torch.sin(v * 3.14 / period))
        paint = tint[k % 2].view(3, 1, 1) * (0.5 + 0.5 * contrast * wave)
        canvas = torch.where(inside, paint, canvas)
    heading = between(-1, 1, own, 2)
    heading = speed * heading / heading.norm().clamp_min(1e-3)
    out = []
    for t in range(length):
        dy, dx = (32 + float(heading[0]) * (t - length / 2), 32 + float(heading[1]) * (t - length / 2))
        grid = torch.stack([(columns[:height, :width] + dx) * 2 / (w - 1) - 1, (rows[:height, :width] + dy) * 2 / (h - 1) - 1], -1)
        out.append(F.grid_sample(canvas[None], grid[None], mode="bicubic", padding_mode="reflection", align_corners=True)[0])
    return (torch.stack(out).clamp(0, 1) * 255).round().byte()

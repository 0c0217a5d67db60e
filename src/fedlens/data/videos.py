"""Labelled videos: class folders, lists, the official splits of UCF-101, HMDB-51 and Kinetics, or a generator of moving shapes.

A `VideoSet` is what a client owns: frames by number, a label, the film it was cut from. What a task makes of it (a clip and its class, a
shuffled triple) is the task's business: see `Task.admit`. Labels are for evaluation and for splits; pretext tasks never see them.

Layouts. folders: root/<class>/*, or root/train/<class> and root/test/<class>. table: a CSV (path, class or label, and where there are:
split, source) or a JSON list of the same; paths are relative to the table or to root, and `name` with a 1-based `label` (the lists of
FedVSSL) will do. ucf101: trainlist0N.txt, testlist0N.txt and classInd.txt in `listing`. hmdb51: <class>_test_splitN.txt in `listing`, 1
is train, 2 is test. kinetics: a CSV label,youtube_id,time_start,time_end,split; the file is <class>/<id>_<start>_<end>.mp4, six digits
each.

What cannot be opened, or has no frame that can be decoded, is skipped, counted and named in the facts ("skipped"). A file whose first frame
is sound and whose packets are all there may still be damaged inside: only decoding all of it would tell, so it is found out in training,
where it is a warning (`skip` in tasks/video_ssl.py) and no fact.

The public non-IID split of FedVSSL lets windows of eight classes slide by one, so that a video lies with up to four clients; the paper says
that shards are disjoint, and these are.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from fedlens.client import generator
from fedlens.data.labelled import class_folders, find, stratified
from fedlens.data.partition import split
from fedlens.data.source import DataError, Source
from fedlens.data.video import PICTURES, VIDEOS, ArrayFrames, Cache, Cached, FileFrames, FolderFrames, Frames, key_of
from fedlens.federation import Federation

Layout = Literal["auto", "folders", "table", "ucf101", "hmdb51", "kinetics"]
OPEN = 8  # files that stay open in a process: a client's next block is often of the same film
TESTS = ("test", "val", "valid", "validation", "testing")


@dataclass(frozen=True)
class VideoSet:
    """Videos by number. `sources` name the films they were cut from."""

    clips: Sequence[Frames]
    labels: Sequence[int]
    sources: Sequence[str]

    def __len__(self) -> int:
        return len(self.clips)

    def take(self, index: Iterable[int]) -> VideoSet:
        chosen = [int(i) for i in index]
        return VideoSet([self.clips[i] for i in chosen], [self.labels[i] for i in chosen], [self.sources[i] for i in chosen])

    def at_least(self, frames: int) -> VideoSet:
        """Those that are long enough."""
        return self.take(i for i, clip in enumerate(self.clips) if len(clip) >= frames)


@dataclass(frozen=True)
class Search:
    """What retrieval is tested on: who among `gallery` is most like each of `queries`?"""

    gallery: VideoSet
    queries: VideoSet
    classes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.queries)


# -- files -------------------------------------------------------------------------------------------------------------------------------


class Opened:
    """The files that are open in this process, a few at a time: thousands of videos are one source, but not thousands of descriptors."""

    def __init__(self, side: int | None) -> None:
        self.side = side
        self.files: OrderedDict[Path, Frames] = OrderedDict()

    def get(self, path: Path, size: tuple[int, int] | None = None) -> Frames:
        if path in self.files:
            self.files.move_to_end(path)
            return self.files[path]
        # The workers share the cores already: a decoder with threads of its own would only be in their way.
        found = FolderFrames(path, size) if path.is_dir() else FileFrames(path, self.side, threads="NONE")
        self.files[path] = found
        while len(self.files) > OPEN:
            old = self.files.popitem(last=False)[1]
            if isinstance(old, FileFrames):
                old.close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"side": self.side, "files": OrderedDict()}


class VideoFile(Frames):
    """A video of which only length and size are known until it is read."""

    block = 64  # a short clip is read whole: the next epoch will want its other frames

    def __init__(self, path: Path, opened: Opened) -> None:
        self.path, self.opened, self.name = path, opened, path.stem
        found = opened.get(path)
        found.read(0, 1)  # a header may promise what no decoder finds
        self.count, self.size, self.rate = len(found), found.size, found.rate

    def __len__(self) -> int:
        return self.count

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.opened.get(self.path, self.size).read(low, high)


@dataclass(frozen=True)
class Entry:
    """A line of a list: part is "train", "test" or "" where nobody says."""

    path: Path
    label: str
    part: str = ""
    source: str = ""


def in_folders(root: Path) -> list[Entry]:
    parts = {"train": root / "train", "test": next((root / t for t in TESTS if (root / t).is_dir()), root / "test")}
    if not parts["train"].is_dir():
        return [Entry(p, c.name, "", source_of(p)) for c in class_folders(root) for p in videos_in(c)]
    return [
        Entry(p, c.name, part, source_of(p)) for part, where in parts.items() if where.is_dir() for c in class_folders(where)
        for p in videos_in(c)
    ]  # fmt: skip


def videos_in(folder: Path) -> list[Path]:
    """Files, and folders that hold pictures."""
    inside = sorted(folder.iterdir())
    return [p for p in inside if p.suffix.lower() in VIDEOS or (p.is_dir() and any(f.suffix.lower() in PICTURES for f in p.iterdir()))]


def source_of(path: Path) -> str:
    """The film a clip was cut from, by the habits of UCF-101 (v_Name_g01_c02) and HMDB-51 (Film_class_f_cm_np1_ba_med_3); else itself."""
    if found := re.match(r"(v_.+_g\d+)_c\d+$", path.stem):
        return found[1]
    if found := re.match(r"(.+?)_[a-z_]+_[fhlu]_(?:cm|nm)_np\d+_[a-z]+_[a-z]+_\d+$", path.stem):
        return found[1]
    return path.stem


def from_table(file: Path, root: Path) -> list[Entry]:
    if file.suffix.lower() == ".json":
        try:
            rows: list[dict[str, Any]] = json.loads(file.read_text())
        except ValueError as e:
            raise DataError(f"{file} is not JSON: {e}") from None
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise DataError(f"{file} is not a list of objects with path and label")
    else:
        with file.open(newline="") as f:
            rows = list(csv.DictReader(f))
    if not rows:
        raise DataError(f"{file} has no rows")
    place = next((k for k in ("path", "name", "file", "video") if k in rows[0]), None)
    label = next((k for k in ("class", "label", "action") if k in rows[0]), None)
    if place is None or label is None:
        raise DataError(f"{file} needs the columns path and class (or label); it has {', '.join(rows[0])}")
    return [_row(r, place, label, file, root) for r in rows]


def _row(row: dict[str, Any], place: str, label: str, file: Path, root: Path) -> Entry:
    name = str(row[place])
    path = next((base / name for base in (file.parent, root) if (base / name).exists()), file.parent / name)
    if not path.suffix:  # FedVSSL's lists leave the ending out
        path = next((p for base in (file.parent, root) for e in VIDEOS if (p := base / f"{name}{e}").exists()), path)
    part = str(row.get("split", "")).lower()
    return Entry(path, str(row[label]), "test" if part in TESTS else part and "train", str(row.get("source") or source_of(path)))


def from_ucf101(lists: Path, root: Path, number: int) -> list[Entry]:
    out = []
    for part in ("train", "test"):
        file = lists / f"{part}list{number:02d}.txt"
        if not file.is_file():
            raise DataError(f"there is no {file.name} in {lists}: it holds UCF-101's official split")
        for line in file.read_text().splitlines():
            if line.strip():
                path = root / line.split()[0]
                out.append(Entry(path, path.parent.name, part, source_of(path)))
    known = lists / "classInd.txt"
    if known.is_file():
        names = {line.split()[1] for line in known.read_text().splitlines() if line.strip()}
        if odd := sorted({e.label for e in out} - names):
            raise DataError(f"{odd[0]} is in the split but not in {known.name}: the class lists do not match")
    return out


def from_hmdb51(lists: Path, root: Path, number: int) -> list[Entry]:
    files = sorted(lists.glob(f"*_test_split{number}.txt"))
    if not files:
        raise DataError(f"there is no <class>_test_split{number}.txt in {lists}: they hold HMDB-51's official split")
    out = []
    for file in files:
        label = file.name.removesuffix(f"_test_split{number}.txt")
        for line in file.read_text().splitlines():
            name, _, use = line.strip().rpartition(" ")
            if name and use in ("1", "2"):  # 0 is in neither
                path = root / label / name.strip()
                out.append(Entry(path, label, "train" if use == "1" else "test", source_of(path)))
    return out


def from_kinetics(file: Path, root: Path) -> list[Entry]:
    with file.open(newline="") as f:
        rows = list(csv.DictReader(f))
    needed = ("label", "youtube_id", "time_start", "time_end")
    if not rows or any(c not in rows[0] for c in needed):
        raise DataError(f"{file} is not a Kinetics list: it needs the columns {', '.join(needed)}")
    out = []
    for r in rows:
        name = f"{r['youtube_id']}_{int(float(r['time_start'])):06d}_{int(float(r['time_end'])):06d}"
        folders = [root / r["label"], root / r["label"].replace(" ", "_"), root / str(r.get("split", "")) / r["label"], root]
        path = next((p for d in folders for e in (".mp4", ".avi", ".mkv", ".webm") if (p := d / f"{name}{e}").exists()), None)
        part = "test" if str(r.get("split", "")).lower() in TESTS else "train"
        out.append(Entry(path or folders[0] / f"{name}.mp4", r["label"], part, r["youtube_id"]))
    return out


def class_names(entries: Sequence[Entry], listed: Sequence[str]) -> list[str]:
    """In the order of the class list where there is one; both must name the same."""
    found = {e.label for e in entries}
    if not listed:
        return sorted(found, key=lambda s: (0, int(s), "") if s.isdigit() else (1, 0, s))
    if odd := sorted(found - set(listed)):
        raise DataError(f"class {odd[0]!r} is in the data but not in the class list ({len(odd)} such): the class lists do not match")
    if odd := [c for c in listed if c not in found]:
        raise DataError(f"class {odd[0]!r} is in the class list but has no video ({len(odd)} such): the class lists do not match")
    return list(listed)


# -- who holds what -----------------------------------------------------------------------------------------------------------------------


def divide(
    train: VideoSet, test: VideoSet | None, classes: Sequence[str], clients: int, seed: int, *, rule: str, per_client: int, holdout: float,
    skipped: Sequence[str] = (),
) -> Federation:  # fmt: skip
    known = {"iid": "iid", "classes": "classes", "sources": "natural"}
    if rule not in known:
        raise DataError(f"data.partition is iid, classes or sources, not {rule!r}")
    labels = np.asarray(train.labels)
    names, groups = np.unique(np.asarray(train.sources), return_inverse=True)
    how: Any = known[rule]
    parts, notes = split(how, labels, clients, seed, per_client=per_client, groups=groups if rule == "sources" else None, least=1)
    counts = [np.bincount(labels[p], minlength=len(classes)).tolist() for p in parts]
    facts = {"labels": counts, "classes": list(classes), "skipped": list(skipped), "notes": notes, "sources": len(names)}
    holdings, held = [], []
    for client, part in enumerate(parts):
        own = train.take(part)
        stay, cut = stratified(torch.tensor(own.labels), holdout, np.random.default_rng([seed, 4, client])) if holdout else ([], [])
        holdings.append(own.take(stay) if holdout else own)
        held.append(own.take(cut))
    out: Any = held if holdout else ()
    return Federation(holdings, out, Search(train, test, classes) if test is not None and len(test) else None, facts)


def located(path: str, what: str) -> Path:
    """As `find`, with environment variables filled in."""
    full = os.path.expandvars(path)
    if "$" in full:
        raise DataError(f"{path}: the environment variable in it is not set")
    return find(full, what)


def check(holdout: float, test_share: float) -> None:
    if not 0 <= holdout < 1 or not 0 <= test_share < 1:
        raise DataError(f"data.holdout and data.test_share are shares from 0 to below 1, not {holdout} and {test_share}")


@dataclass
class Videos(Source):
    """root: where the videos lie. listing: a CSV or JSON table, or the folder of UCF-101's or HMDB-51's split files; labels.csv in root is
    found by itself. layout: see above. split: number of the official split. classes: a text file with the class names, one a line.
    partition: "iid", "classes" (classes_per_client each) or "sources" (the clips of a film stay together). side: frames are kept with this
    short side. test_share: cut off for testing where nothing says what is for testing, whole films at a time. holdout: share of every
    client's videos for its own evaluation. limit: use only so many training videos. cache_mb, cache: memory for decoded frames in every
    process, or a folder for them."""

    root: str = ""
    listing: str = ""
    layout: Literal["auto", "folders", "table", "ucf101", "hmdb51", "kinetics"] = "auto"
    split: int = 1
    classes: str = ""
    partition: Literal["iid", "classes", "sources"] = "iid"
    classes_per_client: int = 8
    side: int | None = 128
    test_share: float = 0.3
    holdout: float = 0.0
    limit: int | None = None
    cache_mb: int = 1024
    cache: str | None = None

    def federation(self, clients: int, seed: int) -> Federation:
        check(self.holdout, self.test_share)
        root = located(self.root, "video folder")
        entries = self.entries(root)
        listed = located(self.classes, "class list").read_text().split("\n") if self.classes else []
        names = class_names(entries, [c.strip() for c in listed if c.strip()])
        parts = by_part(entries, self.test_share, seed)
        if self.limit is not None and self.limit < len(parts["train"]):
            y = torch.tensor([names.index(e.label) for e in parts["train"]])
            chosen = stratified(y, self.limit / len(y), np.random.default_rng([seed, 2]))[1]
            parts["train"] = [parts["train"][i] for i in chosen]
        cache, opened = Cache(self.cache_mb << 20, Path(self.cache) if self.cache else None), Opened(self.side)
        skipped: list[str] = []
        train, test = (scan(parts[p], names, cache, opened, skipped) for p in ("train", "test"))
        if not len(train):
            raise DataError(f"no readable video in {root} ({len(skipped)} skipped{', first: ' + skipped[0] if skipped else ''})")
        return divide(train, test, names, clients, seed, rule=self.partition, per_client=self.classes_per_client, holdout=self.holdout,
                      skipped=skipped)  # fmt: skip

    def entries(self, root: Path) -> list[Entry]:
        """The list, as it stands: whether the files can be read is another matter."""
        where = located(self.listing, "list of videos") if self.listing else root / "labels.csv"
        layout = self.layout
        if layout == "auto":
            layout = "table" if where.is_file() else "folders"
        if layout in ("ucf101", "hmdb51", "kinetics", "table") and not where.exists():
            raise DataError(f"layout {layout} needs data.listing: the table or the folder of split files")
        read: dict[str, Callable[[], list[Entry]]] = {
            "folders": lambda: in_folders(root),
            "table": lambda: from_table(where, root),
            "ucf101": lambda: from_ucf101(where, root, self.split),
            "hmdb51": lambda: from_hmdb51(where, root, self.split),
            "kinetics": lambda: from_kinetics(where, root),
        }
        found = read[layout]()
        if not found:
            raise DataError(f"{root} holds no videos in class folders, and there is no labels.csv")
        return found


def by_part(entries: Sequence[Entry], test_share: float, seed: int) -> dict[str, list[Entry]]:
    """Train and test as the list says. Where it does not, films are drawn until the share is full: none is on both sides."""
    if any(e.part for e in entries) or not test_share:
        return {p: [e for e in entries if (e.part or "train") == p] for p in ("train", "test")}
    films = sorted({(e.label, e.source) for e in entries})
    order = torch.randperm(len(films), generator=generator(seed, 0x7E57)).tolist()
    tested: set[tuple[str, str]] = set()
    wanted = {c: math.floor(test_share * sum(e.label == c for e in entries)) for c in {e.label for e in entries}}
    held = {film: sum((e.label, e.source) == film for e in entries) for film in films}
    for k in order:
        film = films[k]
        if held[film] <= wanted[film[0]]:
            tested.add(film)
            wanted[film[0]] -= held[film]
    return {p: [e for e in entries if ((e.label, e.source) in tested) == (p == "test")] for p in ("train", "test")}


def scan(entries: Sequence[Entry], names: Sequence[str], cache: Cache, opened: Opened, skipped: list[str]) -> VideoSet:
    """Look into every file once. What cannot be read goes to `skipped` with the reason, and the rest goes on."""
    place = {c: k for k, c in enumerate(names)}
    kept: list[tuple[Frames, Entry]] = []
    for entry in entries:
        try:
            if not entry.path.exists():
                raise DataError("there is no such file")
            frames = VideoFile(entry.path, opened)
        except (DataError, OSError, ValueError) as e:
            why = str(e).splitlines()[0].removeprefix(f"{entry.path} ")
            skipped.append(f"{entry.path.name}: {why}")
            continue
        kept.append((Cached(frames, cache, key_of(entry.path, opened.side)), entry))
    return VideoSet([f for f, _ in kept], [place[e.label] for _, e in kept], [e.source for _, e in kept])


# -- without data on disk -----------------------------------------------------------------------------------------------------------------

ACTIONS = ("right", "left", "down", "up", "circle", "circle back", "grow", "shrink")


@dataclass
class MovingShapes(Source):
    """A shape on a textured ground does one of eight things: it moves right, left, down, up, in a circle one way or the other, grows or
    shrinks. Colour, form, place, speed and ground say nothing about it. videos, tests: how many. length: frames of each. side: pixels.
    partition, classes_per_client, holdout: as in `Videos`."""

    videos: int = 160
    tests: int = 64
    length: int = 32
    side: int = 40
    actions: int = 8
    partition: Literal["iid", "classes", "sources"] = "iid"
    classes_per_client: int = 4
    holdout: float = 0.0

    def federation(self, clients: int, seed: int) -> Federation:
        check(self.holdout, 0.0)
        if not 2 <= self.actions <= len(ACTIONS):
            raise DataError(f"data.actions is {self.actions}: 2 to {len(ACTIONS)} are known")
        train, test = (self._some(n, seed, k) for k, n in enumerate((self.videos, self.tests)))
        names = ACTIONS[: self.actions]
        return divide(train, test, names, clients, seed, rule=self.partition, per_client=self.classes_per_client, holdout=self.holdout)

    def _some(self, count: int, seed: int, part: int) -> VideoSet:
        labels = [k % self.actions for k in range(count)]
        clips = [
            ArrayFrames(moving_shape(y, self.length, self.side, generator(seed, 0x5AE, part, k)), f"{ACTIONS[y]} {k}")
            for k, y in enumerate(labels)
        ]
        return VideoSet(clips, labels, [f"scene {k // 2}" for k in range(count)])


def moving_shape(action: int, length: int, side: int, rng: Generator) -> Tensor:
    """uint8 (length, 3, side, side)."""

    def some(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=rng))

    ground = torch.rand(1, 3, 5, 5, generator=rng) * 0.6
    canvas = torch.nn.functional.interpolate(ground, size=(side, side), mode="bicubic", align_corners=False)[0].clamp(0, 1)
    colour = torch.rand(3, 1, 1, generator=rng) * 0.6 + 0.4
    t = torch.linspace(-0.5, 0.5, length)
    travel, radius, phase = some(0.45, 0.65) * side, some(0.09, 0.15) * side, some(0, 2 * math.pi)
    x, y = torch.full_like(t, some(0.4, 0.6) * side), torch.full_like(t, some(0.4, 0.6) * side)
    r = torch.full_like(t, radius)
    if action < 4:
        way = travel * t * (1 if action in (0, 2) else -1)
        x, y = (x + way, y) if action < 2 else (x, y + way)
    elif action < 6:
        angle = phase + 2 * math.pi * some(0.8, 1.2) * t * (1 if action == 4 else -1)
        x, y = x + 0.28 * side * angle.cos(), y + 0.28 * side * angle.sin()
    else:
        r = radius * (1.1 * t * (1 if action == 6 else -1)).exp() * 1.3
    rows, columns = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    u, v = (columns - x[:, None, None]).abs(), (rows - y[:, None, None]).abs()
    form = int(torch.randint(3, (), generator=rng))
    distance = (u.square() + v.square()).sqrt() if form == 0 else torch.maximum(u, v) if form == 1 else (u + v) / 1.3
    inside = (r[:, None, None] - distance + 0.5).clamp(0, 1)[:, None]
    frames = canvas * (1 - inside) + colour * inside
    return (frames.clamp(0, 1) * 255).round().byte()

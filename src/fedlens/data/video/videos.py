"""Labelled videos on disk, of which a few are open at a time. Which there are: `lists`. Who holds
them: `video_set`.

What cannot be opened, or has no frame that can be decoded, is skipped, counted and named in the
facts ("skipped"). A file whose first frame is sound and whose packets are all there may still be
damaged inside: only decoding all of it would tell, so it is found out in training, where it is a
warning (`skip` in tasks/video_clips.py) and no fact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural
from fedlens.data.images.labelled import stratified
from fedlens.data.paths import locate
from fedlens.data.source import DataError, Source
from fedlens.data.video.files import FileFrames
from fedlens.data.video.frame_cache import Cache, Cached, key_of
from fedlens.data.video.frames import FolderFrames, Frames
from fedlens.data.video.lists import (
    Entry,
    by_part,
    class_names,
    from_hmdb51,
    from_kinetics,
    from_table,
    from_ucf101,
    in_folders,
)
from fedlens.data.video.video_set import Grouping, VideoSet, divide

MOST_OPEN = 8  # files that stay open in a process: a client's next block is often of the same film


class OpenFiles:
    """The files that are open in this process, a few at a time: thousands of videos are one source,
    but not thousands of descriptors.
    """

    def __init__(self, side: int | None) -> None:
        self.side = side
        self.files: OrderedDict[Path, Frames] = OrderedDict()

    def get(self, path: Path, size: tuple[int, int] | None = None) -> Frames:
        if path in self.files:
            self.files.move_to_end(path)
            return self.files[path]
        # The workers share the cores already: a decoder with threads of its own would only be in
        # their way.
        found = (
            FolderFrames(path, size)
            if path.is_dir()
            else FileFrames(path, self.side, threads="NONE")
        )
        self.files[path] = found
        while len(self.files) > MOST_OPEN:
            old = self.files.popitem(last=False)[1]
            if isinstance(old, FileFrames):
                old.close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"side": self.side, "files": OrderedDict()}


class VideoFile(Frames):
    """A video of which only length and size are known until it is read."""

    block = 64  # a short clip is read whole: the next epoch will want its other frames

    def __init__(self, path: Path, opened: OpenFiles) -> None:
        self.path, self.opened, self.name = path, opened, path.stem
        found = opened.get(path)
        found.read(0, 1)  # a header may promise what no decoder finds
        self.count, self.size, self.rate = len(found), found.size, found.rate

    def __len__(self) -> int:
        return self.count

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.opened.get(self.path, self.size).read(low, high)


def scan(
    entries: Sequence[Entry],
    names: Sequence[str],
    cache: Cache,
    opened: OpenFiles,
    skipped: list[str],
) -> VideoSet:
    """Look into every file once. What cannot be read goes to `skipped` with the reason, and the
    rest goes on.
    """
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
    return VideoSet(
        [f for f, _ in kept], [place[e.label] for _, e in kept], [e.source for _, e in kept]
    )


@dataclass
class Videos(Source):
    """
    Args:
        root: where the videos lie.
        listing: a CSV or JSON table, or the folder of UCF-101's or HMDB-51's split files;
            labels.csv in root is found by itself.
        layout: how they lie, see `data/video/lists.py`; "auto" looks.
        split: number of the official split.
        classes: a text file with the class names, one a line.
        partition: "iid", "classes" or "sources" (the clips of a film stay together).
        classes_per_client: of the rule "classes".
        side: frames are kept with this short side.
        test_share: cut off for testing where nothing says what is for testing, whole films at a
            time.
        holdout: share of every client's videos for its own evaluation.
        limit: use only so many training videos.
        cache_mb: memory for decoded frames, in every process.
        cache: a folder for decoded frames instead.
    """

    root: str = ""
    listing: str = ""
    layout: Literal["auto", "folders", "table", "ucf101", "hmdb51", "kinetics"] = "auto"
    split: Count = 1
    classes: str = ""
    partition: Grouping = "iid"
    classes_per_client: Count = 8
    side: Count | None = 128
    test_share: Fraction = 0.3
    holdout: Fraction = 0.0
    limit: Count | None = None
    cache_mb: Natural = 1024
    cache: str | None = None

    def federation(self, clients: int, seed: int) -> Federation:
        root = locate(self.root, "video folder", "data.root")
        entries = self.entries(root)
        names = class_names(entries, self._listed_classes())
        parts = by_part(entries, self.test_share, seed)
        if self.limit is not None and self.limit < len(parts["train"]):
            y = torch.tensor([names.index(e.label) for e in parts["train"]])
            chosen = stratified(y, self.limit / len(y), np.random.default_rng([seed, 2]))[1]
            parts["train"] = [parts["train"][i] for i in chosen]
        cache, opened = (
            Cache(self.cache_mb << 20, Path(self.cache) if self.cache else None),
            OpenFiles(self.side),
        )
        skipped: list[str] = []
        train, test = (scan(parts[p], names, cache, opened, skipped) for p in ("train", "test"))
        if not len(train):
            raise DataError(
                f"no readable video in {root} ({len(skipped)}"
                f" skipped{', first: ' + skipped[0] if skipped else ''})"
            )
        return divide(
            train,
            test,
            names,
            clients,
            seed,
            rule=self.partition,
            per_client=self.classes_per_client,
            holdout=self.holdout,
            skipped=skipped,
        )

    def entries(self, root: Path) -> list[Entry]:
        """The list, as it stands: whether the files can be read is another matter."""
        where = root / "labels.csv"
        if self.listing:
            where = locate(self.listing, "list of videos", "data.listing")
        layout = self.layout
        if layout == "auto":
            layout = "table" if where.is_file() else "folders"
        if layout in ("ucf101", "hmdb51", "kinetics", "table") and not where.exists():
            raise DataError(
                f"layout {layout} needs data.listing: the table or the folder of split files"
            )
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

    def _listed_classes(self) -> list[str]:
        if not self.classes:
            return []
        lines = locate(self.classes, "class list", "data.classes").read_text().split("\n")
        return [line.strip() for line in lines if line.strip()]

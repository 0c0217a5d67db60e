"""Clips for super-resolution: frame folders (REDS, Vid4, Vimeo-90K, any) and video files. How they
are dealt out: `cut`.

A clip that cannot be opened is refused, and nothing starts. Damage inside a video's packets is
found out only when they are decoded, in training: the client that holds it is then lost in that
round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural
from fedlens.data.paths import clips_below, locate
from fedlens.data.source import DataError, Source
from fedlens.data.video.cut import Cut
from fedlens.data.video.degradations import TESTER, Degradation, DegradationKind, degradation
from fedlens.data.video.frame_cache import Cache, open_all
from fedlens.data.video.frames import Frames, Stretch
from fedlens.data.video.windows import WholeClips

REDS4 = ("000", "011", "015", "020")


@dataclass
class Clips(Source):
    """
    Args:
        folder: where the training clips lie.
        test: the same for the server's test clips, or "none".
        test_low: their low-resolution versions, where they are given.
        test_also: a second test set, whose figures bear its name, or "left_out".
        split: "pooled" deals clips out at random, "groups" gives each client one group.
        scale: factor between low and high resolution; 1 keeps the size.
        frames: of a window, which is one example.
        crop: side of the high-resolution crop, in pixels.
        regions: cut every frame into a grid of regions x regions cells, each dealt out by itself.
        stride: frames between the starts of two windows.
        repeat: crops for each window and epoch.
        held_out: share of each client's windows for its own evaluation.
        labels: a JSON file {clip name or number: group}.
        list_file: a text file that names the clips to use, one a line.
        clips: how many at most.
        leave_out: clips kept out of training; "reds4" takes the four of REDS4, "auto" does so where
            the folder is REDS. They are the test clips unless `test` says otherwise.
        test_frames: how many frames of a test clip.
        cache_mb: memory for decoded frames.
        cache: a folder for decoded frames instead.
        native: client i films with 1 / native[i mod n] of the pixels along each side.
        degradation: how low resolution is made, for client i the i mod n-th
            (`data/video/degradations.py`).
        test_degradation: the same for the test clips.
    """

    folder: str
    test: str | None = None
    test_low: str | None = None
    test_also: str | None = None
    split: Literal["pooled", "groups"] = "pooled"
    scale: Literal[1, 2, 3, 4] = 4
    frames: Count = 6
    crop: Count = 256
    regions: Count = 1
    stride: Count = 1
    repeat: Count = 1
    held_out: Fraction = 0.0
    labels: str | None = None
    list_file: str | None = None
    clips: Count | None = None
    leave_out: str = "auto"
    test_frames: Count | None = None
    cache_mb: Natural = 1024
    cache: str | None = None
    native: tuple[Count, ...] = (1,)
    degradation: tuple[DegradationKind, ...] = ("bi",)
    test_degradation: DegradationKind = "bi"

    def __post_init__(self) -> None:
        # a variant of a recipe takes back so what its base names
        for name in ("test", "test_also", "labels", "list_file"):
            if getattr(self, name) == "none":
                setattr(self, name, None)
        self.cut = Cut(
            self.split,
            self.frames,
            self.scale,
            self.crop,
            self.regions,
            self.stride,
            self.repeat,
            self.held_out,
            self.native,
            self.degradation,
        )

    def federation(self, clients: int, seed: int) -> Federation:
        cache = Cache(self.cache_mb << 20, Path(self.cache) if self.cache else None)
        root = locate(self.folder, "folder of clips", "data.folder")
        paths = self._listed(root) if self.list_file else clips_below(root)
        out = left_out(self.leave_out, root, paths)
        kept = {k: p for k, p in enumerate(paths) if p.name not in out and p.stem not in out}
        if not kept:
            raise DataError(f"nothing in {root} is left to train on")
        train = dict(list(kept.items())[: self.clips])
        clips = open_all(list(train.values()), cache)
        test = self._test(cache, [p for k, p in enumerate(paths) if k not in kept], seed)
        return self.cut.federation(clips, self._groups(train, root), test, clients, seed)

    def _listed(self, root: Path) -> list[Path]:
        text = (
            locate(str(self.list_file), "list of clips", "data.list_file").read_text().split("\n")
        )
        paths = [root / line.split()[0] for line in text if line.strip()]
        if missing := [p for p in paths if not p.exists()]:
            raise DataError(
                f"{self.list_file} names {missing[0]}, which is not there ({len(missing)} are"
                " missing)"
            )
        return paths

    def _groups(self, numbered: Mapping[int, Path], root: Path) -> list[str]:
        """Numbers are those of all clips that were found or listed, also where some are left
        out.
        """
        paths = list(numbered.values())
        if self.labels:
            table = read_labels(locate(self.labels, "table of labels", "data.labels"))
            found = [
                table.get(p.name, table.get(p.stem, table.get(str(k)))) for k, p in numbered.items()
            ]
            if None in found:
                raise DataError(
                    f"{self.labels} has no label for clip {paths[found.index(None)].name}"
                )
            return [str(g) for g in found]
        nested = [p.parent.name for p in paths if p.parent != root]
        return (
            nested
            if len(nested) == len(paths) and len(set(nested)) > 1
            else [p.name for p in paths]
        )

    def _test(self, cache: Cache, own: Sequence[Path], seed: int) -> WholeClips | None:
        how = degradation(self.test_degradation, seed, TESTER)
        paths = list(own)
        if self.test:
            paths = clips_below(locate(self.test, "folder of test clips", "data.test"))
        if not paths:
            return None
        clips = [Stretch(c, self.test_frames) for c in open_all(paths, cache)]
        low = None
        if self.test_low:
            small = locate(self.test_low, "folder of low-resolution clips", "data.test_low")
            low = [Stretch(c, self.test_frames) for c in open_all(clips_below(small), cache)]
            check_pairs(clips, low, self.scale)
        return WholeClips(clips, self.scale, low, how, self._also(cache, own, how))

    def _also(self, cache: Cache, own: Sequence[Path], how: Degradation) -> dict[str, WholeClips]:
        """A second set of test clips, under its name."""
        if not self.test_also:
            return {}
        if self.test_also == "left_out":
            if not own:
                raise DataError(
                    "data.test_also is left_out, but no clips are left out: data.leave_out names"
                    " them"
                )
            paths = list(own)
            name = "reds4" if {p.name for p in own} == set(REDS4) else "left_out"
        else:
            place = locate(self.test_also, "folder of more test clips", "data.test_also")
            paths, name = clips_below(place), place.name.lower()
        clips = [Stretch(c, self.test_frames) for c in open_all(paths, cache)]
        return {name: WholeClips(clips, self.scale, degradation=how)}


def check_pairs(clips: Sequence[Frames], low: Sequence[Frames], scale: int) -> None:
    if len(clips) != len(low):
        raise DataError(
            f"there are {len(clips)} high-resolution and {len(low)} low-resolution clips"
        )
    for a, b in zip(clips, low, strict=True):
        if len(a) != len(b):
            raise DataError(
                f"clip {a.name} has {len(a)} frames in high and {len(b)} in low resolution"
            )
        want = (a.size[0] // scale, a.size[1] // scale)
        if b.size != want:
            raise DataError(
                f"clip {a.name}: low-resolution frames have {b.size[1]}x{b.size[0]} pixels,"
                f" {want[1]}x{want[0]} were expected at x{scale}"
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

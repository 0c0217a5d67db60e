"""Which videos there are: class folders, lists, the official splits of UCF-101, HMDB-51 and
Kinetics.

Layouts. folders: root/<class>/*, or root/train/<class> and root/test/<class>. table: a CSV (path,
class or label, and where there are: split, source) or a JSON list of the same; paths are relative
to the table or to root, and `name` with a 1-based `label` (the lists of FedVSSL) will do. ucf101:
trainlist0N.txt, testlist0N.txt and classInd.txt in `listing`. hmdb51: <class>_test_splitN.txt in
`listing`, 1 is train, 2 is test. kinetics: a CSV label,youtube_id,time_start,time_end,split; the
file is <class>/<id>_<start>_<end>.mp4, six digits each.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.core.client import generator
from fedlens.data.images.labelled import label_order
from fedlens.data.paths import TEST_PARTS, class_folders, clips_in
from fedlens.data.source import DataError
from fedlens.data.suffixes import VIDEO_SUFFIXES


@dataclass(frozen=True)
class Entry:
    """A line of a list: part is "train", "test" or "" where nobody says."""

    path: Path
    label: str
    part: str = ""
    source: str = ""


def in_folders(root: Path) -> list[Entry]:
    parts = {
        "train": root / "train",
        "test": next((root / t for t in TEST_PARTS if (root / t).is_dir()), root / "test"),
    }
    if not parts["train"].is_dir():
        return [
            Entry(p, c.name, "", source_of(p)) for c in class_folders(root) for p in clips_in(c)
        ]
    return [
        Entry(p, c.name, part, source_of(p))
        for part, where in parts.items()
        if where.is_dir()
        for c in class_folders(where)
        for p in clips_in(c)
    ]


def source_of(path: Path) -> str:
    """The film a clip was cut from, by the habits of UCF-101 (v_Name_g01_c02) and HMDB-51
    (Film_class_f_cm_np1_ba_med_3); else itself.
    """
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
        raise DataError(
            f"{file} needs the columns path and class (or label); it has {', '.join(rows[0])}"
        )
    return [_row(r, place, label, file, root) for r in rows]


def _row(row: dict[str, Any], place: str, label: str, file: Path, root: Path) -> Entry:
    name = str(row[place])
    path = next(
        (base / name for base in (file.parent, root) if (base / name).exists()), file.parent / name
    )
    if not path.suffix:  # FedVSSL's lists leave the ending out
        path = next(
            (
                p
                for base in (file.parent, root)
                for e in VIDEO_SUFFIXES
                if (p := base / f"{name}{e}").exists()
            ),
            path,
        )
    part = str(row.get("split", "")).lower()
    return Entry(
        path,
        str(row[label]),
        "test" if part in TEST_PARTS else part and "train",
        str(row.get("source") or source_of(path)),
    )


def from_ucf101(lists: Path, root: Path, number: int) -> list[Entry]:
    out = []
    for part in ("train", "test"):
        file = lists / f"{part}list{number:02d}.txt"
        if not file.is_file():
            raise DataError(
                f"there is no {file.name} in {lists}: it holds UCF-101's official split"
            )
        for line in file.read_text().splitlines():
            if line.strip():
                path = root / line.split()[0]
                out.append(Entry(path, path.parent.name, part, source_of(path)))
    known = lists / "classInd.txt"
    if known.is_file():
        names = {line.split()[1] for line in known.read_text().splitlines() if line.strip()}
        if odd := sorted({e.label for e in out} - names):
            raise DataError(
                f"{odd[0]} is in the split but not in {known.name}: the class lists do not match"
            )
    return out


def from_hmdb51(lists: Path, root: Path, number: int) -> list[Entry]:
    files = sorted(lists.glob(f"*_test_split{number}.txt"))
    if not files:
        raise DataError(
            f"there is no <class>_test_split{number}.txt in {lists}: they hold HMDB-51's official"
            " split"
        )
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
        name = (
            f"{r['youtube_id']}_{int(float(r['time_start'])):06d}_{int(float(r['time_end'])):06d}"
        )
        folders = [
            root / r["label"],
            root / r["label"].replace(" ", "_"),
            root / str(r.get("split", "")) / r["label"],
            root,
        ]
        path = next(
            (p for d in folders for e in VIDEO_SUFFIXES if (p := d / f"{name}{e}").exists()),
            None,
        )
        part = "test" if str(r.get("split", "")).lower() in TEST_PARTS else "train"
        out.append(Entry(path or folders[0] / f"{name}.mp4", r["label"], part, r["youtube_id"]))
    return out


def class_names(entries: Sequence[Entry], listed: Sequence[str]) -> list[str]:
    """In the order of the class list where there is one; both must name the same."""
    found = {e.label for e in entries}
    if not listed:
        return sorted(found, key=label_order)
    if odd := sorted(found - set(listed)):
        raise DataError(
            f"class {odd[0]!r} is in the data but not in the class list ({len(odd)} such): the"
            " class lists do not match"
        )
    if odd := [c for c in listed if c not in found]:
        raise DataError(
            f"class {odd[0]!r} is in the class list but has no video ({len(odd)} such): the class"
            " lists do not match"
        )
    return list(listed)


def by_part(entries: Sequence[Entry], test_share: float, seed: int) -> dict[str, list[Entry]]:
    """Train and test as the list says. Where it does not, films are drawn until the share is full:
    none is on both sides.
    """
    if any(e.part for e in entries) or not test_share:
        return {p: [e for e in entries if (e.part or "train") == p] for p in ("train", "test")}
    films = sorted({(e.label, e.source) for e in entries})
    order = torch.randperm(len(films), generator=generator(seed, 0x7E57)).tolist()
    tested: set[tuple[str, str]] = set()
    wanted = {
        c: math.floor(test_share * sum(e.label == c for e in entries))
        for c in {e.label for e in entries}
    }
    held = {film: sum((e.label, e.source) == film for e in entries) for film in films}
    for k in order:
        film = films[k]
        if held[film] <= wanted[film[0]]:
            tested.add(film)
            wanted[film[0]] -= held[film]
    return {
        p: [e for e in entries if ((e.label, e.source) in tested) == (p == "test")]
        for p in ("train", "test")
    }

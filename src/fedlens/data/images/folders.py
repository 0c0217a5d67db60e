"""A user's own labelled images: class folders, Tiny-ImageNet, a CSV of paths and labels,
MedMNIST-style .npz, HuggingFace folders.

What cannot be read is skipped, counted and named in `Federation.facts["skipped"]`.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from torch.nn import functional as F

from fedlens.core.limits import Count
from fedlens.data.images.labelled import (
    Collection,
    Labelled,
    LabelledSource,
    Reader,
    label_order,
    listing,
    reason,
)
from fedlens.data.images.reading import converted
from fedlens.data.paths import TEST_PARTS, class_folders, locate
from fedlens.data.source import DataError


@dataclass
class ImageFolder(LabelledSource):
    """Class folders: root/<class>/*.jpg, or root/train/<class>/... and root/test/<class>/...
    (EuroSAT and the like).

    Args:
        root: the folder.
        size: bring all to size x size.
        gray: one channel.
        names: the classes in their order, where the folders here are not all of them, as at a site
            of its own.
        training: the folder beside test/ that is trained on, where it is not train/.
    """

    root: str = ""
    size: Count | None = None
    gray: bool = False
    names: tuple[str, ...] = ()
    training: str = "train"

    def read(self, seed: int) -> Collection:
        root = locate(self.root, "image folder", "data.root")
        if not root.is_dir():
            raise DataError(f"{root} is a file, not a folder of class folders")
        if self.training != "train" and not (root / self.training).is_dir():
            raise DataError(f"there is no folder {self.training} in {root}")
        train = root / self.training if (root / self.training).is_dir() else root
        names = ordered([p.name for p in class_folders(train)], self.names, train)
        if len(names) < 2:
            raise DataError(f"{train} holds {len(names)} class folders: at least two are needed")
        reader = Reader(self.size, "L" if self.gray else "RGB")
        test = next((root / t for t in TEST_PARTS if train != root and (root / t).is_dir()), None)
        tested = reader.read(listing(test, names)) if test else None
        return Collection(reader.read(listing(train, names)), tested, names, reader.skipped)


def ordered(found: list[str], names: Sequence[str], where: Path) -> list[str]:
    """The classes in their order: those that were found, or those that were named, among which the
    found ones must be.
    """
    if strange := [n for n in found if names and n not in names]:
        raise DataError(
            f"{where} has the class {strange[0]!r}, which is not among the names {', '.join(names)}"
        )
    if names and not found:
        raise DataError(f"{where} holds none of the classes {', '.join(names)}")
    return list(names) or found


@dataclass
class TinyImageNet(LabelledSource):
    """The official layout: wnids.txt, train/<wnid>/images, val/images with val_annotations.txt;
    words.txt gives readable names.

    Args:
        root: the folder.
        size: 64 as it is, 32 for small networks.
    """

    root: str = "tiny-imagenet-20"
    size: Count = 64

    def read(self, seed: int) -> Collection:
        root = locate(self.root, "Tiny-ImageNet", "data.root")
        try:
            wnids = (root / "wnids.txt").read_text().split()
            notes = [
                line.split("\t")
                for line in (root / "val" / "val_annotations.txt").read_text().splitlines()
            ]
        except OSError as e:
            raise DataError(
                f"{root} is not Tiny-ImageNet: {Path(str(e.filename)).name} is missing"
            ) from None
        wnids = [w for w in wnids if (root / "train" / w).is_dir()]
        place = {w: k for k, w in enumerate(wnids)}
        reader = Reader(self.size)
        train = reader.read(listing(root / "train", wnids))
        test = reader.read(
            [(root / "val" / "images" / row[0], place[row[1]]) for row in notes if row[1] in place]
        )
        return Collection(train, test, self._words(root, wnids), reader.skipped)

    @staticmethod
    def _words(root: Path, wnids: list[str]) -> list[str]:
        file = root / "words.txt"
        known = (
            dict(line.split("\t", 1) for line in file.read_text().splitlines() if "\t" in line)
            if file.is_file()
            else {}
        )
        return [known.get(w, w).split(",")[0] for w in wnids]


@dataclass
class Csv(LabelledSource):
    """A table of files and labels.

    Args:
        file: the table.
        path: name of the column with the image files; they are relative to the table.
        label: name of the column with the classes.
        split: name of the column that says train or test.
        group: name of the column with the writer, camera or hospital, for partition="natural" or
            "one_group".
        size: bring all to size x size.
        gray: one channel.
        names: the classes in their order, where this table does not have all of them.
    """

    file: str = ""
    path: str = "path"
    label: str = "label"
    split: str = "split"
    group: str = "group"
    size: Count | None = None
    gray: bool = False
    names: tuple[str, ...] = ()

    def read(self, seed: int) -> Collection:
        table = locate(self.file, "table", "data.file")
        rows = self._rows(table)
        found = sorted({r[self.label] for r in rows}, key=label_order)
        names = ordered(found, self.names, table)
        place = {n: k for k, n in enumerate(names)}
        reader = Reader(self.size, "L" if self.gray else "RGB")
        tests = [r for r in rows if r.get(self.split, "").lower() in TEST_PARTS]
        trains = [r for r in rows if r.get(self.split, "").lower() not in TEST_PARTS]

        def take(part: list[dict[str, str]]) -> Labelled:
            groups = [r[self.group] for r in part] if self.group in rows[0] else None
            return reader.read(
                [(table.parent / r[self.path], place[r[self.label]]) for r in part], groups
            )

        return Collection(take(trains), take(tests) if tests else None, names, reader.skipped)

    def _rows(self, table: Path) -> list[dict[str, str]]:
        """Every row with a path and a label; what else is missing in it is empty."""
        rows = []
        text = _text(table)
        heading = text.partition("\n")[0]
        separator = max(",;\t", key=heading.count)  # a spreadsheet's, by its user's language
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="", delimiter=separator)
        for row in reader:
            for column in (self.path, self.label):
                if column not in row:
                    raise DataError(
                        f"{table} has no column {column!r}; it has"
                        f" {', '.join(reader.fieldnames or ())}"
                    )
                if not row[column].strip():
                    raise DataError(f"{table}, line {reader.line_num}: there is no {column}")
            rows.append(row)
        if not rows:
            raise DataError(f"{table} has no rows")
        return rows


def _text(table: Path) -> str:
    """Of a table, without the mark that spreadsheets put in front."""
    content = table.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise DataError(f"{table}, line {line}: this is not UTF-8; save the table as that") from e


@dataclass
class Npz(LabelledSource):
    """MedMNIST's arrays: train_images, train_labels, test_images, test_labels, and the same for
    val.

    Args:
        file: the .npz file.
        size: bring all to size x size.
        channels: 3 repeats a gray channel.
        use_val: train on the validation part too.
    """

    file: str = ""
    size: Count | None = None
    channels: int | None = None
    use_val: bool = True

    def read(self, seed: int) -> Collection:
        file = locate(self.file, ".npz file", "data.file")
        if not is_zipfile(file):
            raise DataError(
                f"{file} cannot be read as .npz: it is cut off, or another kind of file"
            )
        try:
            with np.load(file, allow_pickle=False) as found:
                arrays = {k: found[k] for k in found.files}
        except (OSError, EOFError, BadZipFile, zlib.error) as e:
            raise DataError(f"{file} cannot be read as .npz: {e}") from None
        except ValueError:
            # numpy's own advice is to allow pickles, but one that needs them could run anything
            raise DataError(
                f"{file} cannot be read as .npz: it holds Python objects, not arrays of numbers"
            ) from None
        if missing := {"train_images", "train_labels"} - arrays.keys():
            raise DataError(
                f"{file} has no array {min(missing)!r}; it has {', '.join(sorted(arrays))}"
            )
        train = [
            self._part(file, arrays, p)
            for p in ("train", "val")
            if f"{p}_images" in arrays and (p == "train" or self.use_val)
        ]
        whole = Labelled(torch.cat([t.images for t in train]), torch.cat([t.labels for t in train]))
        test = self._part(file, arrays, "test") if "test_images" in arrays else None
        top = max(int(p.labels.max()) for p in (whole, test) if p is not None)
        return Collection(whole, test, [str(k) for k in range(top + 1)])

    def _part(self, file: Path, arrays: dict[str, Any], part: str) -> Labelled:
        if f"{part}_labels" not in arrays:
            raise DataError(f"{file} has {part}_images, but no {part}_labels")
        pixels, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if labels.ndim != 1 or len(labels) != len(pixels):
            raise DataError(
                f"{file}: {part}_labels must hold one class per image, and has the shape"
                f" {labels.shape} for {len(pixels)} images"
            )
        if not len(labels):
            raise DataError(f"{file}: {part}_images is empty")
        bad = next((k for k, v in enumerate(labels.tolist()) if not _is_class(v)), None)
        if bad is not None:
            raise DataError(f"{file}: {part}_labels[{bad}] is {labels[bad]}, not a class number")
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
            raise DataError(
                f"{file}: {part}_images must be uint8 of shape (N, H, W) or (N, H, W, C), not"
                f" {pixels.dtype} {pixels.shape}"
            )
        x = (
            torch.from_numpy(pixels if pixels.ndim == 4 else pixels[..., None])
            .permute(0, 3, 1, 2)
            .contiguous()
        )
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = (
                F.interpolate(
                    x.float(), size=(self.size, self.size), mode="bilinear", antialias=True
                )
                .round()
                .byte()
            )
        if self.channels == 3 and x.shape[1] == 1:
            x = x.repeat(1, 3, 1, 1)
        return Labelled(x, torch.from_numpy(labels.astype(np.int64)))


def _is_class(label: Any) -> bool:
    return isinstance(label, int | float) and label >= 0 and label % 1 == 0


@dataclass
class HuggingFace(LabelledSource):
    """A folder written by datasets' `save_to_disk`, or one that its `load_dataset` understands.

    Args:
        root: the folder.
        image: name of the column with the images.
        label: name of the column with the classes.
        size: bring all to size x size.
        gray: one channel.
    """

    root: str = ""
    image: str = "image"
    label: str = "label"
    size: Count | None = None
    gray: bool = False

    def read(self, seed: int) -> Collection:
        root = locate(self.root, "HuggingFace dataset", "data.root")
        try:
            import datasets
        except ImportError:
            raise DataError(
                "reading a HuggingFace folder needs the package datasets: pip install"
                ' "fedlens[hub]"'
            ) from None
        saved = any(
            (root / n).is_file() for n in ("dataset_dict.json", "dataset_info.json", "state.json")
        )
        datasets.disable_progress_bars()  # they speak of downloading what lies here
        try:
            found: Any = (
                datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(str(root))
            )
        except Exception as e:  # of many packages, each with errors of its own
            why = " ".join(str(e).split())[:200]
            raise DataError(f"{root} cannot be read as a HuggingFace data set: {why}") from e
        parts = dict(found) if hasattr(found, "keys") else {"train": found}
        first = parts.get("train", next(iter(parts.values())))
        for column in (self.image, self.label):
            if column not in first.features:
                raise DataError(
                    f"{root} has no column {column!r}; it has {', '.join(first.features)}"
                )
        others = {n: part for n, part in parts.items() if part is not first}
        test = next((others[t] for t in TEST_PARTS if t in others), None)
        names, place = self._classes(first, test)
        skipped: list[str] = []
        return Collection(
            self._part(root, first, place, skipped),
            self._part(root, test, place, skipped) if test is not None else None,
            names,
            skipped,
        )

    def _classes(self, train: Any, test: Any) -> tuple[list[str], dict[Any, int]]:
        """Names of the classes, and the class of each label as it stands in the rows."""
        if named := getattr(train.features[self.label], "names", None):
            return list(named), {k: k for k in range(len(named))}
        labels = {v for part in (train, test) if part is not None for v in part[self.label]}
        known = sorted((v for v in labels if v is not None), key=lambda v: label_order(str(v)))
        return [str(v) for v in known], {v: k for k, v in enumerate(known)}

    def _part(self, root: Path, part: Any, place: dict[Any, int], skipped: list[str]) -> Labelled:
        images, labels = [], []
        for k in range(len(part)):
            try:
                row = part[k]
                if row[self.image] is None:
                    raise ValueError("there is no image")
                picture = converted(row[self.image], "L" if self.gray else "RGB")
            except (OSError, ValueError, SyntaxError, AttributeError) as e:
                skipped.append(f"row {k}: {reason(e)}")
                continue
            if row[self.label] not in place:
                raise DataError(f"{root}, row {k}: the label {row[self.label]!r} is no class")
            picture = picture.resize((self.size, self.size)) if self.size else picture
            pixels = np.array(picture)
            images.append(
                torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
            )
            labels.append(place[row[self.label]])
        if not images or len({i.shape for i in images}) > 1:
            raise DataError(
                f"{root} has no readable image ({skipped[0] if skipped else 'nor any row'})"
                if not images
                else f"the images of {root} differ in size: set size=N to bring all to one size"
            )
        return Labelled(torch.stack(images), torch.tensor(labels))


__all__ = ["Csv", "HuggingFace", "ImageFolder", "Npz", "TinyImageNet"]

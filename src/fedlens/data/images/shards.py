"""Labelled images in tar shards, as webdataset writes them: the files of one example lie one after
the other and share their name up to the first dot (`0001.jpg`, `0001.cls`).
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fedlens.core.limits import Count
from fedlens.data.images.folders import ordered
from fedlens.data.images.labelled import Collection, Labelled, LabelledSource, Reader, label_order
from fedlens.data.paths import TEST_PARTS, locate, natural_order, walk
from fedlens.data.source import DataError
from fedlens.data.suffixes import IMAGE_SUFFIXES

LABEL_SUFFIXES = (".cls", ".txt", ".json")
LABEL_KEYS = ("label", "cls", "class")  # in a .json


class ShardImage(io.BytesIO):
    """An image of a shard, in memory, with a name that finds it again."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True)
class Example:
    image: ShardImage
    label: str
    shard: str


@dataclass
class WebDataset(LabelledSource):
    """Tar shards (.tar, .tar.gz, .tgz). Those in test/ or val/, or whose name begins so, are for
    testing. An example is an image and its class, a number or a name in .cls or .txt, or under
    "label", "cls" or "class" in .json. A shard is a group, for partition="natural".

    Args:
        root: a folder of shards, or one shard.
        size: bring all to size x size.
        gray: one channel.
        names: the classes in their order, where these shards do not have all of them.
    """

    root: str = ""
    size: Count | None = None
    gray: bool = False
    names: tuple[str, ...] = ()

    def read(self, seed: int) -> Collection:
        root = locate(self.root, "folder of shards", "data.root")
        shards = shards_at(root)
        parts = {
            test: [e for s in shards if is_test(s, root) is test for e in examples_of(s, root)]
            for test in (False, True)
        }
        if not parts[False]:
            raise DataError(f"{root} has no examples to train on in {len(shards)} shards")
        found = sorted({e.label for part in parts.values() for e in part}, key=label_order)
        names = ordered(found, self.names, root)
        reader = Reader(self.size, "L" if self.gray else "RGB")
        place = {n: k for k, n in enumerate(names)}

        def take(part: Sequence[Example]) -> Labelled:
            groups = [e.shard for e in part]
            return reader.read([(e.image, place[e.label]) for e in part], groups)

        test = take(parts[True]) if parts[True] else None
        return Collection(take(parts[False]), test, names, reader.skipped)


def shards_at(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = [f for _, _, files in walk(root) for f in files if is_shard(f)]
    if not found:
        raise DataError(f"{root} holds no shards: files that end in .tar, .tar.gz or .tgz")
    return sorted(found, key=natural_order)


def is_shard(file: Path) -> bool:
    return file.name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def is_test(shard: Path, root: Path) -> bool:
    place = shard.relative_to(root) if shard != root else Path(shard.name)
    words = [part.lower() for part in place.parts]
    return any(w in TEST_PARTS for w in words[:-1]) or words[-1].startswith(TEST_PARTS)


def examples_of(shard: Path, root: Path) -> Iterator[Example]:
    """In their order; whatever else an example has is passed over."""
    where = str(shard.relative_to(root)) if shard != root else shard.name
    key, files = "", dict[str, bytes]()
    for name, content in members_of(shard):
        first, _, suffix = PurePosixPath(name).name.partition(".")
        own = str(PurePosixPath(name).with_name(first))
        if own != key:
            if files:
                yield as_example(shard, where, key, files)
            key, files = own, {}
        files[f".{suffix.lower()}"] = content
    if files:
        yield as_example(shard, where, key, files)


def members_of(shard: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every plain file. Nothing is unpacked to disk."""
    last = "its beginning"
    try:
        with tarfile.open(shard) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and PurePosixPath(member.name).name[:1] not in ("", "."):
                    yield member.name, content.read()
                last = member.name
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise DataError(f"{shard} cannot be read as a tar file after {last}: {e}") from e


def as_example(shard: Path, where: str, key: str, files: dict[str, bytes]) -> Example:
    suffix = next((s for s in files if s.endswith(IMAGE_SUFFIXES)), None)
    if suffix is None:
        raise DataError(f"{shard}, entry {key}: no image among {', '.join(key + s for s in files)}")
    image = ShardImage(files[suffix], f"{where}/{key}{suffix}")
    return Example(image, label_of(shard, key, files), where)


def label_of(shard: Path, key: str, files: dict[str, bytes]) -> str:
    suffix = next((s for s in LABEL_SUFFIXES if s in files), None)
    if suffix is None:
        raise DataError(
            f"{shard}, entry {key}: no label; one of {', '.join(key + s for s in LABEL_SUFFIXES)}"
            " is needed"
        )
    entry = f"{shard}, entry {key}{suffix}"
    try:
        text = files[suffix].decode()
        found = text.strip() if suffix != ".json" else label_in(json.loads(text))
    except ValueError as e:
        raise DataError(f"{entry} cannot be read: {e}") from e
    if not found or len(found) > 200 or "\n" in found:
        raise DataError(f"{entry} is not the number or name of a class")
    return found


def label_in(table: Any) -> str:
    key = next((k for k in LABEL_KEYS if isinstance(table, dict) and k in table), None)
    if key is None:
        raise ValueError(f"it has none of {', '.join(LABEL_KEYS)}")
    return str(table[key])

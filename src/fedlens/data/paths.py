"""Paths: what the user named becomes a place on disk, and files are found below it.

The only module that knows in which order files come. Nothing is looked for elsewhere than where the
user said, or in FEDLENS_DATA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlens.core.files import data_folder, find_named
from fedlens.data.source import DataError
from fedlens.data.suffixes import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# how folders and tables call the part that is for testing
TEST_PARTS = ("test", "val", "valid", "validation", "testing")

# -- what the user named ---------------------------------------------------------------------------


def locate(name: str, what: str, key: str) -> Path:
    """As `find_named`, or a DataError that says what to set. what: is looked for ("video folder").
    key: of the recipe, in which it was named ("data.root").
    """
    if not name:
        raise DataError(f"say where the {what} is: set {key}")
    found = find_named(name)
    if found is not None:
        return found
    expanded = os.path.expandvars(name)
    if "$" in expanded:
        raise DataError(f"{key} is {name}: the environment variable in it is not set")
    given, folder = Path(expanded).expanduser(), data_folder()
    if given.is_absolute():
        raise DataError(f"there is no {what} at {given}: set {key}")
    if folder:
        raise DataError(
            f"there is no {what} at {given}, nor at {folder / given} (FEDLENS_DATA): set {key}"
        )
    raise DataError(
        f"there is no {what} at {given}: set {key}, or the environment variable FEDLENS_DATA to the"
        " folder that holds it"
    )


# -- files -----------------------------------------------------------------------------------------


def is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def natural_order(path: Path) -> list[Any]:
    """frame9 comes before frame10, in folders and files alike."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for piece in path.parts
        for part in re.split(r"(\d+)", piece)
        if part
    ]


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[Path]]]:
    """Every folder from here on with the names of its folders (delete some, and they are not
    entered) and its files. Links are followed."""
    for name, children, files in os.walk(root, followlinks=True):
        children.sort()
        folder = Path(name)
        yield folder, children, [folder / f for f in sorted(files)]


def class_folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def images_below(folder: Path) -> list[Path]:
    """In plain order of their paths: a set has no order, so any will do that is always the same."""
    return sorted(f for _, _, files in walk(folder) for f in files if is_image(f))


def images_at(source: Path) -> list[Path]:
    """A file that was named, whatever its suffix, or all images below a folder."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"there is no image at {source}")
    found = images_below(source)
    if not found:
        raise DataError(f"there are no images in {source} ({', '.join(IMAGE_SUFFIXES)})")
    return found


def frame_files(folder: Path) -> list[Path]:
    """The images that lie in a folder itself, in natural order: they are a clip."""
    return sorted((f for f in folder.iterdir() if is_image(f)), key=natural_order)


def clips_in(folder: Path) -> list[Path]:
    """The video files and folders of frames that lie in a folder itself."""
    return [p for p in sorted(folder.iterdir()) if is_video(p) or _holds_frames(p)]


def _holds_frames(path: Path) -> bool:
    return path.is_dir() and any(is_image(f) for f in path.iterdir())


def clips_below(root: Path) -> list[Path]:
    """Every video file, and every folder that holds images itself; in natural order."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    found: list[Path] = []
    for folder, children, files in walk(root):
        if any(is_image(f) for f in files):
            found.append(folder)
            children.clear()
        found += [f for f in files if is_video(f)]
    if not found:
        raise DataError(f"{root} holds neither video files nor folders of images")
    return sorted(found, key=natural_order)


def clips_at(source: Path) -> list[Path]:
    """A file that was named, or all clips below a folder."""
    return [source] if source.is_file() else clips_below(source)

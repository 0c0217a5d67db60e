"""A trained classifier on a user's images: a table of labels."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlens.core.weights import load_weights, result_file
from fedlens.data.images.labelled import load_image
from fedlens.data.paths import images_at

if TYPE_CHECKING:
    from fedlens.tasks.classification import Classification


def label_images(task: Classification, place: Path, source: Path, target: Path) -> str:
    """place: a run's folder, or a file of weights. target: a CSV with one row per image: file,
    label, confidence."""
    model = load_weights(task.model(), result_file(place)).eval()
    names, rows = task.class_names(classes_of_run(place)), []
    images, unread = read_images(source, task.size, "L" if task.channels == 1 else "RGB")
    for name, image in images:
        with torch.no_grad():
            rows.append(label_row(name, model(image[None])[0], names))
    return write_labels(target, rows, unread)


def read_images(
    source: Path, size: int | None, mode: str
) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Every image of a file or folder that can be read, in [0, 1], with its name below the folder;
    and the names of the others.
    """
    read: list[tuple[str, Tensor]] = []
    unread: list[str] = []
    for path in images_at(source):
        name = path.name if source.is_file() else path.relative_to(source).as_posix()
        try:
            read.append((name, load_image(path, size, mode).float() / 255))
        except (OSError, ValueError, SyntaxError) as e:
            unread.append(f"{path.name}: {e}")
    if not read:
        raise ValueError(f"none of the {len(unread)} images at {source} can be read ({unread[0]})")
    return read, unread


def label_row(name: str, scores: Tensor, names: Sequence[str]) -> tuple[str, str, str]:
    share, label = scores.softmax(0).max(0)
    return name, names[int(label)], f"{float(share):.4f}"


def write_labels(target: Path, rows: Sequence[tuple[str, str, str]], unread: Sequence[str]) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as f:
        csv.writer(f).writerows([("file", "label", "confidence"), *rows])
    return f"{len(rows)} images classified{how_many_unread(unread)}; labels are in {target}"


def how_many_unread(unread: Sequence[str]) -> str:
    return f", {len(unread)} could not be read ({unread[0].split(':')[0]})" if unread else ""


def classes_of_run(folder: Path) -> Sequence[str] | None:
    """The class names that a run left in its folder."""
    try:
        found: Sequence[str] = json.loads((folder / "federation.json").read_text())["facts"][
            "classes"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found

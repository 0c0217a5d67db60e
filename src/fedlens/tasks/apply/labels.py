"""A trained classifier on a user's images: a table of labels."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedlens.core.weights import load_weights
from fedlens.data.images.labelled import load_image
from fedlens.data.paths import images_at

if TYPE_CHECKING:
    from fedlens.tasks.classification import Classification


def label_images(task: Classification, folder: Path, source: Path, target: Path) -> str:
    """folder: of the run. target: a CSV with one row per image: file, label, confidence."""
    files = images_at(source)
    model = load_weights(task.model(), folder / "model.safetensors").eval()
    names, rows, unread = task.class_names(classes_of_run(folder)), [], []
    mode = "L" if task.channels == 1 else "RGB"
    for path in files:
        try:
            image = load_image(path, task.size, mode).float()[None] / 255
        except (OSError, ValueError, SyntaxError) as e:
            unread.append((path.name, str(e)))
            continue
        with torch.no_grad():
            share, label = model(image).softmax(1)[0].max(0)
        name = path.name if source.is_file() else path.relative_to(source).as_posix()
        rows.append((name, names[int(label)], f"{float(share):.4f}"))
    if not rows:
        raise ValueError(
            f"none of the {len(files)} images at {source} can be read ({': '.join(unread[0])})"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as f:
        csv.writer(f).writerows([("file", "label", "confidence"), *rows])
    left = f", {len(unread)} could not be read ({unread[0][0]})" if unread else ""
    return f"{len(rows)} images classified{left}; labels are in {target}"


def classes_of_run(folder: Path) -> Sequence[str] | None:
    """The class names that a run left in its folder."""
    try:
        found: Sequence[str] = json.loads((folder / "federation.json").read_text())["facts"][
            "classes"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found

"""A network of one's own on a user's images: a table of labels where it gives scores of classes, an
image for each where it gives images. Pixels go in as [0, 1].
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlens.core.weights import load_weights, result_file
from fedlens.tasks.apply.labels import (
    classes_of_run,
    how_many_unread,
    label_row,
    read_images,
    write_labels,
)
from fedlens.tasks.pose_drawing import save_png

if TYPE_CHECKING:
    from fedlens.tasks.custom import Custom


def send_images(
    task: Custom,
    place: Path,
    source: Path,
    target: Path,
    size: int | None = None,
    gray: bool | None = None,
) -> str:
    """place: a run's folder, or a file of weights. size, gray: as in training, unless said."""
    model = load_weights(task.model(), result_file(place)).eval()
    shape = shape_of_run(place)
    if size is None and len(shape) == 3 and shape[1] == shape[2]:
        size = shape[1]
    if gray is None:
        gray = shape[:1] == (1,)
    images, unread = read_images(source, size, "L" if gray else "RGB")
    rows: list[tuple[str, str, str]] = []
    for name, image in images:
        with torch.no_grad():
            made = task.forward(model, {"x": image[None]}).prediction
        if not isinstance(made, Tensor) or made.shape[:1] != (1,):
            raise ValueError(f"the network's outcome for {name} is neither scores nor an image")
        if made.dim() == 2 and made.shape[1] > 1:
            names = task.class_names(classes_of_run(place) or (), made.shape[1])
            rows.append(label_row(name, made[0], names))
        elif made.dim() == 4 and made.shape[1] in (1, 3):
            file = target / PurePosixPath(name).with_suffix(".png")
            file.parent.mkdir(parents=True, exist_ok=True)
            save_png(made[0].float().clamp(0, 1).expand(3, -1, -1), file)
        else:
            raise ValueError(
                f"the network's outcome has the shape {tuple(made.shape[1:])}: scores of classes or"
                " an image are needed to write something"
            )
    if rows:
        return write_labels(target, rows, unread)
    return f"{len(images)} images went through the network{how_many_unread(unread)}: see {target}"


def shape_of_run(place: Path) -> tuple[int, ...]:
    """Of one example, as a run's data had it."""
    try:
        facts = json.loads((place / "federation.json").read_text())["facts"]
        return tuple(int(n) for n in facts["shape"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()

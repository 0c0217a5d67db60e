"""A trained segmentation on a user's images: masks, and pictures with the classes painted over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from fedlens.core.weights import load_weights, result_file
from fedlens.data.pose.people import ImageSize
from fedlens.tasks.apply.labels import how_many_unread, read_images
from fedlens.tasks.pose_drawing import save_png

if TYPE_CHECKING:
    from fedlens.tasks.segmentation import Segmentation


def segment_images(
    task: Segmentation, place: Path, source: Path, target: Path, options: Mapping[str, Any]
) -> str:
    """place: a run's folder, or a file of weights. target: a folder."""
    from PIL import Image

    from fedlens.tasks.segmentation import painted

    model = load_weights(task.model(), result_file(place)).eval()
    wanted = looking_size(task, options)
    images, unread = read_images(source, None, "L" if task.channels == 1 else "RGB")
    if target.is_file():
        raise ValueError(f"{target} is a file: masks go into a folder")
    for name, image in images:
        own = (image.shape[-2], image.shape[-1])
        size = wanted or tuple(max(8, s // task.multiple * task.multiple) for s in own)
        seen = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)
        with torch.no_grad():
            scores = F.interpolate(model(seen), size=own, mode="bilinear")
        found = scores.argmax(1)[0]
        mask = (target / name).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(found.byte().numpy().astype(np.uint8)).save(mask)
        save_png(painted(image, found, own, least=1), mask.with_name(f"{mask.stem}-painted.png"))
    return f"{len(images)} images segmented{how_many_unread(unread)}; masks are in {target}"


def looking_size(task: Segmentation, options: Mapping[str, Any]) -> ImageSize | None:
    """What is asked for, else the highest resolution that was evaluated, else the image's own."""
    from fedlens.tasks.apply.keypoints import parse_size

    if "size" in options:
        size = parse_size(options["size"])
        task.check_size(size)
        return size
    return max(task.sizes) if task.sizes else None

"""Drawing joints and heat maps over a picture of a person."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlens.data.images.reading import IMAGENET_MEAN, IMAGENET_STD
from fedlens.data.pose.people import ImageSize
from fedlens.data.pose.skeletons import Skeleton


def as_image(x: Tensor) -> Tensor:
    """Undo the normalisation."""
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    return (x.cpu() * std[:, None, None] + mean[:, None, None]).clamp(0, 1)


def enlarge_nearest(image: Tensor, size: ImageSize, least: int = 256) -> Tensor:
    """Blocks stay blocks, so that one sees what the network saw."""
    factor = max(1, -(-least // size[0]))
    return F.interpolate(image[None], size=(size[0] * factor, size[1] * factor), mode="nearest")[0]


def draw_joints(image: Tensor, joints: Tensor, skeleton: Skeleton) -> Tensor:
    """Bones and joints over a picture: left reddish, right bluish, the middle yellow."""
    from PIL import Image, ImageDraw

    canvas = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(canvas)
    thick = max(1, image.shape[1] // 100)
    points = joints.tolist()
    colours = {"l": (235, 80, 70), "r": (70, 120, 240)}

    def colour(k: int) -> tuple[int, int, int]:
        name = skeleton.joints[k]
        return (
            colours["l"]
            if name.startswith("left")
            else colours["r"]
            if name.startswith("right")
            else (240, 220, 80)
        )

    there = [min(p) > -1 for p in points]
    for a, b in skeleton.bones:
        if there[a] and there[b]:
            pen.line([*points[a], *points[b]], fill=colour(a), width=thick)
    for k, (x, y) in enumerate(points):
        if there[k]:
            pen.ellipse(
                [x - 1.5 * thick, y - 1.5 * thick, x + 1.5 * thick, y + 1.5 * thick], fill=colour(k)
            )
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255


def draw_box(image: Tensor, box: tuple[float, float, float, float], label: str) -> Tensor:
    """A frame (left, top, width, height) with a few letters in its corner."""
    from PIL import Image, ImageDraw

    canvas = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(canvas)
    left, top, width, height = box
    pen.rectangle([left, top, left + width - 1, top + height - 1], outline=(120, 220, 120))
    pen.text((left + 2, top + 1), label, fill=(120, 220, 120))
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255


def draw_heat(image: Tensor, maps: Tensor) -> Tensor:
    """The maximum over the joints, from black through red to yellow, over a darkened picture."""
    heat = F.interpolate(
        maps.amax(0)[None, None], size=image.shape[-2:], mode="bilinear", align_corners=False
    )[0, 0].clamp_min(0)
    heat = heat / heat.max().clamp_min(1e-6)
    colour = torch.stack(
        [(2 * heat).clamp(0, 1), (2 * heat - 1).clamp(0, 1), torch.zeros_like(heat)]
    )
    return (0.35 * image * (1 - heat) + colour).clamp(0, 1)


def save_png(image: Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()).save(path)

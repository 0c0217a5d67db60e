"""Pictures: what a task has to show. Plain data, so that a run folder keeps them and the report
needs no task to draw them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.core.client import Data
from fedlens.core.files import write_atomically

PictureKind = Literal["image", "compare", "strip", "sheet", "map"]

TILE_IMAGES = 8  # images of each kind on a tile, in two rows


@dataclass(frozen=True)
class Picture:
    """image: one or more, each on its own. compare: same size, shown under a slider, the reference
    last. strip: frames of a video. sheet: a grid with a label under each. map: one channel, drawn
    with a colour scale (residuals, heat maps).
    Pixels are (C, H, W) in [0, 1]; a map's may be any range. `facts` are numbers for the caption,
    by label. one_scale: a colour means the same in all maps of this picture."""

    caption: str
    images: Sequence[Tensor]
    labels: Sequence[str] = ()
    kind: PictureKind = "image"
    facts: Mapping[str, Any] = field(default_factory=dict)
    one_scale: bool = False

    def ranges(self) -> list[tuple[float, float]]:
        """What the ends of each map's colour scale mean."""
        own = [(float(x.min()), float(x.max())) for x in self.images]
        return (
            [(min(low for low, _ in own), max(high for _, high in own))] * len(own)
            if self.one_scale
            else own
        )


def save_pictures(pictures: Sequence[Picture], folder: Path) -> None:
    """PNG files and `index.json`; the index is written last, so that a reader never sees it without
    its files.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for k, picture in enumerate(pictures):
        files = []
        ranges = picture.ranges() if picture.kind == "map" else [None] * len(picture.images)
        for j, (pixels, ends) in enumerate(zip(picture.images, ranges, strict=True)):
            name = f"{k:02d}-{j:02d}.png"
            Image.fromarray(to_uint8(pixels, ends)).save(folder / name)
            files.append(name)
        entry: dict[str, Any] = {
            "caption": picture.caption,
            "kind": picture.kind,
            "files": files,
            "labels": list(picture.labels),
            "facts": dict(picture.facts),
        }
        if picture.kind == "map":
            # the files are stretched to 0..255: a colour bar needs to know from what
            entry["ranges"] = ranges
        index.append(entry)
    write_atomically(folder / "index.json", json.dumps(index, indent=1), sync=False)


def add_picture(picture: Picture, folder: Path, name: str) -> None:
    """One more picture beside those that are there, in place of an earlier one of that name."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    index: list[dict[str, Any]] = (
        json.loads((folder / "index.json").read_text()) if (folder / "index.json").is_file() else []
    )
    files = [f"{name}-{j:02d}.png" for j in range(len(picture.images))]
    for file, pixels in zip(files, picture.images, strict=True):
        Image.fromarray(to_uint8(pixels)).save(folder / file)
    entry = {
        "caption": picture.caption,
        "kind": picture.kind,
        "files": files,
        "labels": list(picture.labels),
        "facts": dict(picture.facts),
    }
    kept = [e for e in index if not any(str(f).startswith(f"{name}-") for f in e.get("files", ()))]
    write_atomically(folder / "index.json", json.dumps([*kept, entry], indent=1), sync=False)


def magnify(image: Tensor, by: int) -> Tensor:
    """Every pixel of (..., H, W) a square of by x by: larger, and nothing is made up."""
    return image.repeat_interleave(by, -2).repeat_interleave(by, -1)


def to_uint8(pixels: Tensor, ends: tuple[float, float] | None = None) -> np.ndarray[Any, Any]:
    """As it is, or stretched so that `ends` become black and white."""
    x = pixels.detach().float().cpu()
    x = x[None] if x.dim() == 2 else x
    if ends:
        x = (x - ends[0]) / max(ends[1] - ends[0], 1e-12)
    array = (x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return array[..., 0] if array.shape[2] == 1 else array


def first_of_each_class(data: Data, labels: Sequence[int], n: int) -> dict[int, Tensor]:
    """The first n images of each class."""
    found: dict[int, list[Tensor]] = {label: [] for label in labels}
    for index in torch.arange(len(data)).split(500):
        batch = data.batch(index)
        for label, kept in found.items():
            kept += list(batch["x"][batch["y"] == label][: n - len(kept)])
    return {label: torch.stack(kept) for label, kept in found.items() if kept}


def real_above_made(real: Tensor, made: Tensor) -> Tensor:
    """One picture of both: two rows of real images, two of generated ones."""
    top, bottom = _two_rows(real), _two_rows(made)
    return torch.cat(
        [top, torch.ones(top.shape[0], max(2, real.shape[2] // 8), top.shape[2]), bottom], 1
    )


def _two_rows(images: Tensor) -> Tensor:
    blank = torch.ones_like(images[0])
    some = [images[k] if k < len(images) else blank for k in range(TILE_IMAGES)]
    half = TILE_IMAGES // 2
    return torch.cat([torch.cat(some[:half], 2), torch.cat(some[half:], 2)], 1)

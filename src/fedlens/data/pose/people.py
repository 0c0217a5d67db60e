"""People: images with joints, cropped around one person at the resolution of whoever holds them.

A client's camera has a native resolution. So a person is first recorded: the box around it, with a
margin for augmentation, is cut out of the image and reduced (with antialiasing) until the box
itself has the native size. Whatever comes later, rotation, scaling, flipping, works on those pixels
and on nothing finer.

A batch holds x (N, 3, H, W), ImageNet-normalised; y (N, J, 3), joints as (x, y, weight) in pixels
of x; warp (N, 2, 3) from pixels of x to pixels of the image; truth (N, J, 3), joints in the image;
reference (N), the length PCK divides by; area (N); image and person (N), numbers. Coordinates count
pixel centres from 0.

Augmentation as in public ViTPose code: flip 0.5; scale clip(N(1, 0.5), 0.5, 1.5); rotation
clip(N(0, 40), +-80) degrees with probability 0.6. Deviation: crops align pixel centres, UDP's warp
aligns corner pixels; there and back is exact either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import Batch
from fedlens.data.images.reading import IMAGENET_MEAN, IMAGENET_STD, converted, opened
from fedlens.data.pose.skeletons import Skeleton
from fedlens.data.source import DataError

ImageSize = tuple[int, int]
How = Literal["bilinear", "area", "bicubic"]


@dataclass(frozen=True)
class Person:
    """One annotated or detected person. All lengths are in pixels of the image.

    Args:
        image: a file, or pixels (H, W, 3) uint8.
        joints: (J, 3) as x, y, visible.
        centre: of what is cropped.
        box: width and height of what is cropped.
        reference: the length that PCK divides by.
        area: for the similarity of COCO.
        image_id: number of the image.
        upright: turn the file as its EXIF says. Not for published sets: COCO's, MPII's and LSP's
            annotations count pixels as they are stored, so a turned picture would no longer fit its
            joints.
        score: of a detected box.
    """

    image: Path | NDArray[Any]
    joints: NDArray[Any]
    centre: tuple[float, float]
    box: tuple[float, float]
    reference: float
    area: float = 0.0
    image_id: int = 0
    upright: bool = False
    score: float = 1.0


@dataclass(frozen=True)
class PoseAugmentation:
    flip: float = 0.5
    scale: float = 0.5
    rotation: float = 40.0
    rotate_often: float = 0.6


@dataclass(frozen=True)
class People:
    """People as a client's data: batches of crops with their joints.

    Args:
        people: who is in it.
        skeleton: names, partners and sigmas of the joints.
        size: (height, width) of x.
        augment: of training batches.
        capture: the resolution the camera has, if images are interpolated from it to `size` before
            use.
        how: that interpolation.
        budget: bytes of recorded pixels kept in memory; beyond that images are read again.
        annotated: where the boxes of `people` are a detector's, those whom answers are compared
            with.
    """

    people: Sequence[Person]
    skeleton: Skeleton
    size: ImageSize
    augment: PoseAugmentation = PoseAugmentation()
    capture: ImageSize | None = None
    how: How = "bilinear"
    budget: int = 1 << 30
    annotated: Sequence[Person] = ()
    _kept: dict[int, tuple[NDArray[Any], NDArray[Any]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _views: dict[Any, People] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.people)

    def at(
        self, size: ImageSize, capture: ImageSize | None = None, how: How = "bilinear"
    ) -> People:
        """The same people seen at another resolution, or captured at one and interpolated to
        another.
        """
        if (size, capture, how) == (self.size, self.capture, self.how):
            return self
        key = (size, capture, how)
        if key not in self._views:
            # kept, because a test set is looked at from the same resolutions again and again
            self._views[key] = replace(
                self, size=size, capture=capture, how=how, _kept={}, _views={}
            )
        return self._views[key]

    def subset(self, index: Sequence[int]) -> People:
        return replace(self, people=[self.people[int(i)] for i in index], _kept={}, _views={})

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        chosen = [int(i) for i in index]
        recorded = [self._record(k) for k in chosen]
        canvas = torch.from_numpy(np.stack([pixels for pixels, _ in recorded])).permute(0, 3, 1, 2)
        to_image = torch.from_numpy(np.stack([m for _, m in recorded]))
        boxes = torch.tensor([self.people[k].box for k in chosen], dtype=torch.float64)
        to_canvas = self._view(boxes, rng)
        x = self._look(canvas, to_canvas, still=rng is None)
        warp = to_image @ to_canvas  # 3x3, pixels of x -> canvas -> image
        truth = torch.from_numpy(np.stack([self.people[k].joints for k in chosen])).float()
        if self.capture is not None:
            x = F.interpolate(
                x,
                size=self.size,
                mode=self.how,
                **({} if self.how == "area" else {"align_corners": False}),
            )
            warp = warp @ _resized(self.size, self.capture)
        mirrored = torch.linalg.det(warp[:, :2, :2]) < 0
        y = transform_joints(torch.linalg.inv(warp)[:, :2], truth.double())
        y = torch.where(mirrored[:, None, None], y[:, self.skeleton.mirror], y)
        mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
        std = torch.tensor(IMAGENET_STD)[:, None, None]
        return {
            "x": (x - mean) / std,
            "y": y.float(),
            "warp": warp[:, :2].float(),
            "truth": truth,
            "reference": torch.tensor([self.people[k].reference for k in chosen]),
            "area": torch.tensor([self.people[k].area for k in chosen]),
            "image": torch.tensor([self.people[k].image_id for k in chosen]),
            "score": torch.tensor([self.people[k].score for k in chosen]),
            "person": torch.tensor(chosen),
        }

    # -- recording ---------------------------------------------------------------------------------

    @property
    def _native(self) -> ImageSize:
        return self.capture or self.size

    @property
    def _margin(self) -> ImageSize:
        """Whole pixels, so that the plain view is a cut and not a resampling."""
        return self._native[0] // 4, self._native[1] // 4

    def _record(self, k: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Pixels of the box with its margin, and the map (3x3) from them to the image."""
        if k in self._kept:
            return self._kept[k]
        (h, w), (mh, mw), person = self._native, self._margin, self.people[k]
        bw, bh = person.box[0] * (w + 2 * mw) / w, person.box[1] * (h + 2 * mh) / h
        left, top = round(person.centre[0] + 0.5 - bw / 2), round(person.centre[1] + 0.5 - bh / 2)
        right, bottom = max(left + 1, round(left + bw)), max(top + 1, round(top + bh))
        pixels = (
            open_image(person.image, person.upright)
            .crop((left, top, right, bottom))
            .resize((w + 2 * mw, h + 2 * mh), 2)
        )
        sx, sy = (right - left) / (w + 2 * mw), (bottom - top) / (h + 2 * mh)
        to_image = np.array([[sx, 0, sx / 2 - 0.5 + left], [0, sy, sy / 2 - 0.5 + top], [0, 0, 1]])
        kept = np.asarray(pixels), to_image
        if len(self) * kept[0].nbytes <= self.budget:
            self._kept[k] = kept
        return kept

    def _view(self, boxes: Tensor, rng: Generator | None) -> Tensor:
        """(N, 3, 3) from pixels of the crop to pixels of the canvas: turned, scaled and mirrored
        about the middle when training. A rotation happens in the image; where the box is stretched
        to the crop's shape, it is not one in the crop."""
        n, (h, w), (mh, mw) = len(boxes), self._native, self._margin
        a = torch.eye(2, dtype=torch.float64).expand(n, 2, 2).clone()
        if rng is not None:
            draw = torch.randn(n, 2, generator=rng, dtype=torch.float64)
            chance = torch.rand(n, 2, generator=rng, dtype=torch.float64)
            f = self.augment
            scale = (1 + f.scale * draw[:, 0]).clamp(1 - f.scale, 1 + f.scale)
            angle = (f.rotation * draw[:, 1]).clamp(-2 * f.rotation, 2 * f.rotation) * (
                chance[:, 0] < f.rotate_often
            )
            c, s = torch.cos(angle * math.pi / 180), torch.sin(angle * math.pi / 180)
            turn = torch.stack([c, -s, s, c], 1).view(n, 2, 2) * scale[:, None, None]
            turn[:, :, 0] *= torch.where(chance[:, 1] < f.flip, -1.0, 1.0)[:, None]
            stretch = boxes / torch.tensor([w, h])
            a = turn * stretch[:, None, :] / stretch[:, :, None]
        middle = torch.tensor([(w - 1) / 2, (h - 1) / 2], dtype=torch.float64)
        shift = middle + torch.tensor([mw, mh]) - a @ middle
        last = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(n, 1, 3)
        return torch.cat([torch.cat([a, shift[:, :, None]], 2), last], 1)

    def _look(self, canvas: Tensor, to_canvas: Tensor, still: bool) -> Tensor:
        (h, w), (mh, mw) = self._native, self._margin
        if still:
            return canvas[:, :, mh : mh + h, mw : mw + w].float() / 255
        rows, columns = torch.meshgrid(
            torch.arange(h, dtype=torch.float64),
            torch.arange(w, dtype=torch.float64),
            indexing="ij",
        )
        here = torch.stack([columns, rows, torch.ones_like(rows)]).reshape(3, -1)
        there = (to_canvas[:, :2] @ here).reshape(-1, 2, h, w).permute(0, 2, 3, 1)
        whole = torch.tensor([canvas.shape[3], canvas.shape[2]])
        grid = ((2 * there + 1) / whole - 1).float()
        return F.grid_sample(
            canvas.float() / 255, grid, mode="bilinear", padding_mode="zeros", align_corners=False
        )


def open_image(image: Path | NDArray[Any], upright: bool = False) -> Any:
    from PIL import Image

    if not isinstance(image, Path):
        return Image.fromarray(image)
    try:
        with opened(image) as file:
            return converted(file, "RGB", upright)
    except FileNotFoundError as e:
        raise DataError(f"no image at {image}") from e
    except (OSError, ValueError) as e:
        raise DataError(f"{image} is not an image that can be read") from e


def transform_joints(warp: Tensor, joints: Tensor) -> Tensor:
    """(N, 2, 3) applied to the first two of (N, J, 2 or more); the rest is kept."""
    points = torch.einsum("nij,nkj->nki", warp[:, :, :2], joints[..., :2]) + warp[:, None, :, 2]
    return torch.cat([points, joints[..., 2:]], -1)


def _resized(size: ImageSize, capture: ImageSize) -> Tensor:
    """Pixels of the interpolated image -> pixels of the captured one, pixel centres kept."""
    ry, rx = capture[0] / size[0], capture[1] / size[1]
    return torch.tensor(
        [[rx, 0, rx / 2 - 0.5], [0, ry, ry / 2 - 0.5], [0, 0, 1]], dtype=torch.float64
    )


def fit_box(box: tuple[float, float], size: ImageSize, pad: float = 1.25) -> tuple[float, float]:
    """A box (width, height) widened to the shape of an input of `size`, then padded."""
    width, height = max(box[0], 1.0), max(box[1], 1.0)
    aspect = size[1] / size[0]
    if width > aspect * height:
        height = width / aspect
    else:
        width = height * aspect
    return width * pad, height * pad


def joints_box(joints: NDArray[Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Centre and (width, height) of the visible joints."""
    seen = joints[joints[:, 2] > 0, :2]
    low, high = seen.min(0), seen.max(0)
    return (float(low[0] + high[0]) / 2, float(low[1] + high[1]) / 2), (
        float(high[0] - low[0]),
        float(high[1] - low[1]),
    )

"""Images with a class for every pixel, seen by cameras of different resolution: a user's folder of
images and masks, or drawn figures where nobody has one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import Batch, generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Natural, Share
from fedlens.data.images.reading import converted, opened
from fedlens.data.paths import TEST_PARTS, images_below, locate
from fedlens.data.pose.people import ImageSize
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.data.source import DataError, Source

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IGNORED = 255  # the class of a pixel of which nobody says what it shows


@dataclass(frozen=True)
class Masked:
    """Images and where they show what. A batch has `x` in [0, 1] and `y`, classes.

    Args:
        images: (N, C, H, W), bytes, as they were taken.
        masks: (N, H, W), bytes: the classes.
        size: (height, width) at which they are seen.
        flip: the share of training images that are mirrored.
    """

    images: Tensor
    masks: Tensor
    size: ImageSize
    flip: float = 0.0

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        images, masks = self._seen
        x, y = images[index].float() / 255, masks[index].long()
        if rng is not None and self.flip:
            mirrored = torch.rand(len(x), generator=rng) < self.flip
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
            y = torch.where(mirrored[:, None, None], y.flip(-1), y)
        return {"x": x, "y": y}

    def subset(self, index: Sequence[int] | Tensor) -> Masked:
        chosen = torch.as_tensor(index, dtype=torch.long)
        return replace(self, images=self.images[chosen], masks=self.masks[chosen])

    def at(self, size: ImageSize) -> Masked:
        """The same images, seen by a camera of another resolution."""
        return replace(self, size=size)

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        if self.size == tuple(self.images.shape[-2:]):
            return self.images, self.masks
        parts = [
            (at_size(i.float()[None], self.size)[0].round().clamp(0, 255).byte(), m)
            for i, m in zip(self.images, masks_at_size(self.masks, self.size), strict=True)
        ]
        return torch.stack([i for i, _ in parts]), torch.stack([m for _, m in parts])


def at_size(maps: Tensor, size: ImageSize) -> Tensor:
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=False, antialias=True)


def masks_at_size(masks: Tensor, size: ImageSize) -> list[Tensor]:
    """A pixel shows what most of it shows."""
    out = []
    for mask in masks:
        levels = mask.unique()
        shares = at_size(torch.stack([(mask == v).float() for v in levels])[None], size)[0]
        out.append(levels[shares.argmax(0)])
    return out


@dataclass
class MaskSource(Source):
    """
    Args:
        sizes: (height, width) native to client 0, 1, ...; repeated if there are more clients.
        canvas: (height, width) at which images are kept; every resolution is made from that.
        flip: the share of training images that are mirrored.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    canvas: tuple[int, int] = (128, 128)
    flip: Share = 0.5

    @abstractmethod
    def read(self, notes: list[str], skipped: list[str]) -> tuple[Masked, Masked | None]:
        """Training and test images. What had to be guessed goes into `notes`, what could not be
        read into `skipped`."""

    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Their names, known after reading; the first is the background."""

    def federation(self, clients: int, seed: int) -> Federation:
        if not self.sizes or any(min(s) < 8 for s in (*self.sizes, self.canvas)):
            raise DataError("sizes must name at least one resolution, and none below 8 pixels")
        notes: list[str] = []
        skipped: list[str] = []
        train, test = self.read(notes, skipped)
        share = len(train) // clients
        if not share:
            raise DataError(f"{clients} clients need more than the {len(train)} images there are")
        order = torch.randperm(len(train), generator=generator(seed, 0x3A5C)).tolist()
        own = [self.sizes[k % len(self.sizes)] for k in range(clients)]
        parts = [
            train.subset(order[k * share : (k + 1) * share]).at(size) for k, size in enumerate(own)
        ]
        facts = Facts(
            classes=self.classes(),
            resolutions=tuple(own),
            skipped=tuple(skipped),
            notes=tuple(notes),
        )
        return Federation(parts, (), None if test is None else test.at(max(own)), facts)


@dataclass
class FigureMasks(MaskSource):
    """Stick figures on textured ground and where they are: segmentation without data on disk.

    Args:
        canvas: (height, width) at which figures are drawn.
        sizes: (height, width) native to client 0, 1, ...
        figures: drawn for training.
        tests: drawn for testing.
    """

    canvas: tuple[int, int] = (160, 120)
    sizes: tuple[tuple[int, int], ...] = ((64, 48),)
    figures: Count = 120
    tests: Natural = 60

    def read(self, notes: list[str], skipped: list[str]) -> tuple[Masked, Masked | None]:
        tests = self.drawn(10**6, self.tests) if self.tests else None
        return self.drawn(0, self.figures), tests

    def classes(self) -> tuple[str, ...]:
        return ("ground", "figure")

    def drawn(self, first: int, count: int) -> Masked:
        """Figures number first, first + 1, ...; a number is always the same figure."""
        from PIL import Image, ImageDraw

        source, images, masks = StickFigures(canvas=self.canvas), [], []
        thick = source.thickness
        for number in range(first, first + count):
            person = source.draw(number)
            mask = Image.new("L", self.canvas[::-1])
            pen = ImageDraw.Draw(mask)
            for a, b in SKELETONS["lsp"].bones:
                ends = [*person.joints[a, :2], *person.joints[b, :2]]
                pen.line(ends, fill=1, width=thick)
            x, y = person.joints[13, :2]
            pen.ellipse([x - thick, y - thick, x + thick, y + thick], fill=1)
            images.append(np.asarray(person.image))
            masks.append(np.asarray(mask))
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        return Masked(pixels, torch.from_numpy(np.stack(masks)), self.canvas, self.flip)


@dataclass
class MaskFolder(MaskSource):
    """root/images/... and root/masks/... with the same names, or both below root/train and
    root/test. A mask's levels are classes (PNG with grey levels or a palette); 255 is a pixel of
    which nobody says what it shows, or, where there are no other levels than 0 and 255, class 1.

    Args:
        root: the folder.
        names: the classes in their order, the background first; numbered if nobody names them.
        test: the share of the images that is tested on where there is no folder for it.
    """

    root: str = ""
    names: tuple[str, ...] = ()
    test: Share = 0.2

    def read(self, notes: list[str], skipped: list[str]) -> tuple[Masked, Masked | None]:
        root = locate(self.root, "folder of images and masks", "data.root")
        inside = root / "train" if (root / "train" / "images").is_dir() else root
        found = self._folder(inside, skipped)
        other = next((root / t for t in TEST_PARTS if (root / t / "images").is_dir()), None)
        if other:
            train, test = found, self._folder(other, skipped)
        else:
            order = torch.randperm(len(found), generator=generator(0, 0x7E57)).tolist()
            cut = round(self.test * len(found))
            train, test = found.subset(sorted(order[cut:])), found.subset(sorted(order[:cut]))
        train, test = self._levels(train, test, notes)
        return train, test if len(test) else None

    def classes(self) -> tuple[str, ...]:
        return self._names

    def _levels(self, train: Masked, test: Masked, notes: list[str]) -> tuple[Masked, Masked]:
        """Masks of nothing but 0 and 255 mean class 1 by 255."""
        there = {int(v) for part in (train, test) for v in part.masks.unique()}
        if there <= {0, IGNORED} and IGNORED in there:
            notes.append("masks have the levels 0 and 255 only: 255 is taken for class 1")
            train, test = (replace(p, masks=p.masks.clamp(max=1)) for p in (train, test))
            there = {0, 1}
        count = max(there - {IGNORED}, default=0) + 1
        if self.names and count > len(self.names):
            raise DataError(
                f"the masks below {self.root} have the level {count - 1}, but data.names has"
                f" {len(self.names)} classes, 0 to {len(self.names) - 1}"
            )
        self._names = self.names or tuple(str(k) for k in range(max(2, count)))
        return train, test

    def _folder(self, folder: Path, skipped: list[str]) -> Masked:
        for part in ("images", "masks"):
            if not (folder / part).is_dir():
                raise DataError(f"there is no folder {part} in {folder}")
        masks = {p.relative_to(folder / "masks").with_suffix(""): p for p in
                 images_below(folder / "masks")}  # fmt: skip
        images, classes = [], []
        for path in images_below(folder / "images"):
            name = path.relative_to(folder / "images")
            mask = masks.get(name.with_suffix(""))
            if mask is None:
                skipped.append(f"images/{name}: it has no mask")
                continue
            try:
                pair = self._pair(path, mask)
            except (OSError, ValueError) as e:
                skipped.append(f"images/{name}: {e}")
                continue
            images.append(pair[0])
            classes.append(pair[1])
        if not images:
            why = f" ({skipped[0]})" if skipped else ""
            raise DataError(f"{folder} has no image with a mask that can be read{why}")
        return Masked(torch.stack(images), torch.stack(classes), self.canvas, self.flip)

    def _pair(self, image: Path, mask: Path) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with opened(image) as picture, opened(mask) as levels:
            pixels, classes = converted(picture, "RGB"), as_levels(levels, mask)
            if pixels.size != classes.size:
                raise ValueError(f"its size is {pixels.size}, that of its mask {classes.size}")
            wanted = self.canvas[::-1]
            x = np.array(pixels.resize(wanted, Image.Resampling.BILINEAR))
            y = np.array(classes.resize(wanted, Image.Resampling.NEAREST))
        return torch.from_numpy(x).permute(2, 0, 1).contiguous(), torch.from_numpy(y)


def as_levels(mask: Picture, path: Path) -> Picture:
    """Levels or palette entries as bytes; colours are no classes."""
    if mask.mode == "1":
        return mask.convert("L")
    if mask.mode not in ("L", "P"):
        raise ValueError(
            f"masks/{path.name} has the mode {mask.mode}: a mask has grey levels or a palette"
        )
    from PIL import Image

    return Image.fromarray(np.asarray(mask))


__all__ = ["FigureMasks", "MaskFolder", "Masked"]

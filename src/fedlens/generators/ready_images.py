"""Images that are already there, a folder for each class: made by another program, or real public
ones (the reference that tells what a generator could gain at best)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Generator, Tensor

from fedlens.core.limits import Count
from fedlens.data.images.labelled import Reader
from fedlens.data.paths import images_below
from fedlens.data.source import DataError
from fedlens.generators.gaussians import folders_of
from fedlens.generators.generator import ImageGenerator, check_label, describe_shape, file_stamps


@dataclass
class ReadyImages(ImageGenerator):
    """Public images, handed out as they are. Nothing is taken twice before everything was taken
    once.

    Args:
        root: a folder for each class.
        size: bring all to size x size.
        gray: one channel.
    """

    root: str = ""
    size: Count | None = None
    gray: bool = False
    _folders: tuple[Path, ...] = field(default=(), repr=False)

    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        folders = folders_of(self.root, classes, "ReadyImages")
        size = self.size or (shape[1] if len(shape) == 3 and shape[1] == shape[2] else None)
        bound = replace(
            self, _folders=folders, size=size, gray=self.gray or (len(shape) == 3 and shape[0] == 1)
        )
        if (
            size
            and len(shape) == 3
            and (own := (1 if bound.gray else 3, size, size)) != tuple(shape)
        ):
            raise DataError(
                f"ReadyImages gives images of {describe_shape(own)}, but the clients' are"
                f" {describe_shape(shape)}"
            )
        return bound

    def generate(self, label: int, n: int, rng: Generator) -> Tensor:
        folders = self._folders or folders_of(self.root, (), "ReadyImages")
        check_label(label, len(folders), "ReadyImages")
        files = images_below(folders[label])
        rounds = -(-n // len(files))
        order = torch.cat([torch.randperm(len(files), generator=rng) for _ in range(rounds)])[:n]
        reader = Reader(self.size, "L" if self.gray else "RGB")
        images = reader.read([(files[k], label) for k in order.tolist()]).images
        if reader.skipped:
            raise DataError(f"ReadyImages ({self.root}) cannot read {reader.skipped[0]}")
        return images

    def sources(self) -> Iterable[str]:
        return [
            line
            for folder in self._folders or folders_of(self.root, (), "ReadyImages")
            for line in file_stamps(images_below(folder))
        ]

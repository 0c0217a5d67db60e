"""A Gaussian per class in the space of its principal components: seconds to fit, no network, and a
baseline that is hard to beat.

x = mean_c + sum_k s_ck z_k v_ck with z ~ N(0, I), where v_ck, s_ck are directions and standard
deviations of the class's public images. What is left out by `components` is not replaced by noise.
Samples look like blurred class averages; a small network learns a good deal from them all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from fedlens.core.limits import Count
from fedlens.data.images.labelled import Reader
from fedlens.data.paths import class_folders, images_below, locate
from fedlens.data.source import DataError
from fedlens.generators.generator import (
    ImageGenerator,
    check_label,
    describe_shape,
    file_stamps,
    match_classes,
)


@dataclass
class Gaussians(ImageGenerator):
    """
    Args:
        root: public images, a folder for each class.
        size: of the images made.
        components: directions per class.
        gray: one channel.
    """

    root: str = ""
    size: Count | None = None
    components: Count = 64
    gray: bool = False
    _folders: tuple[Path, ...] = field(default=(), repr=False)
    _fits: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        folders = folders_of(self.root, classes, "Gaussians")
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
                f"Gaussians makes images of {describe_shape(own)}, but the clients' are"
                f" {describe_shape(shape)}"
            )
        return bound

    def generate(self, label: int, n: int, rng: Generator) -> Tensor:
        folders = self._folders or folders_of(self.root, (), "Gaussians")
        check_label(label, len(folders), "Gaussians")
        if label not in self._fits:
            images = (
                Reader(self.size, "L" if self.gray else "RGB")
                .read([(p, label) for p in images_below(folders[label])])
                .images
            )
            self._fits[label] = fit_gaussian(images.float() / 255, self.components)
        return draw_gaussian(*self._fits[label], n, rng)

    def sources(self) -> Iterable[str]:
        return [
            line
            for folder in self._folders or folders_of(self.root, (), "Gaussians")
            for line in file_stamps(images_below(folder))
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fits": {}}


def fit_gaussian(images: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Mean, and directions scaled by their standard deviations (components, C, H, W)."""
    mean = images.mean(0)
    centred = (images - mean).flatten(1)
    if len(images) < 2:
        return mean, torch.zeros(1, *mean.shape)
    _, s, v = torch.linalg.svd(centred, full_matrices=False)
    k = min(components, len(images) - 1)
    scaled = v[:k] * (s[:k] / (len(images) - 1) ** 0.5)[:, None]
    return mean, scaled.view(k, *mean.shape)


def draw_gaussian(mean: Tensor, directions: Tensor, n: int, rng: Generator) -> Tensor:
    z = torch.randn(n, len(directions), generator=rng)
    return (mean + torch.einsum("nk,kchw->nchw", z, directions)).clamp(0, 1)


def folders_of(root: str, classes: Sequence[str], what: str) -> tuple[Path, ...]:
    """The class folders in the order of the classes; all of them, by name, where no classes are
    given.
    """
    there = class_folders(locate(root, f"folder of images for {what}", "generator.root"))
    if not there:
        raise DataError(f"{what} found no class folders in {root}")
    chosen = (
        tuple(there[k] for k in match_classes(classes, [p.name for p in there], f"{what} ({root})"))
        if classes
        else tuple(there)
    )
    if empty := [p.name for p in chosen if not images_below(p)]:
        raise DataError(f"{what} ({root}) has no image for class {empty[0]!r}")
    return chosen

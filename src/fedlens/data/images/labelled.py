"""Labelled images and how they become a federation: what every classification dataset shares.

A dataset says how it is read (`read`); partition, held-out part, limits, augmentation and feature
skew are the same everywhere. Images stay uint8 until a batch is drawn. `Federation.facts`: "labels"
(clients x classes counts), "classes" (names), "skipped" (files that could not be read), "notes"
(what the split had to do to leave nobody empty), "shape" (of one image) and, with feature skew,
"look" (of each client's images).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural, NotNegative, Positive, ProperShare
from fedlens.data.images.reading import converted, opened
from fedlens.data.images.tensors import Tensors
from fedlens.data.partition import Rule, split_by_rule, strengths
from fedlens.data.paths import images_below
from fedlens.data.source import DataError, Source

Skew = Literal["none", "noise", "blur", "resolution"]


@dataclass(frozen=True)
class Labelled:
    """uint8 images (N, C, H, W), their labels, and where known the group (writer, camera, hospital)
    each belongs to.
    """

    images: Tensor
    labels: Tensor
    groups: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Any) -> Labelled:
        chosen = torch.as_tensor(np.asarray(index), dtype=torch.long)
        groups = None if self.groups is None else [self.groups[int(i)] for i in chosen]
        return Labelled(self.images[chosen], self.labels[chosen], groups)


@dataclass(frozen=True)
class Collection:
    """A dataset as it was read. Without a test part, one is cut off."""

    train: Labelled
    test: Labelled | None
    classes: Sequence[str]
    skipped: Sequence[str] = ()


@dataclass
class LabelledSource(Source):
    """Abstract: labelled images of any origin. These arguments are those of every image dataset.

    Args:
        partition: the rule that says who gets what: iid, dirichlet, shards, classes, one_group,
            natural or quantity.
        alpha: of "dirichlet" and "quantity"; smaller is less even.
        shards: for each client, of the rule "shards".
        classes_per_client: of the rule "classes".
        least: images that the smallest client has at least.
        holdout: share of every client's images kept for its own evaluation.
        limit: use only so many training images, in the classes' own proportions.
        test_limit: the same for test images.
        test_share: cut off for testing where the dataset has no test part.
        augment: reflect padding by 4, random crop and flip.
        noise: standard deviation of Gaussian noise on every training image, of pixels in [0, 1].
        skew: every client's images are noisier, blurrier or coarser than those of the client before
            it: "noise", "blur" or "resolution".
        strongest: the skew of the last client: a noise sigma of 255, a blur sigma in pixels, or how
            much images shrink.
    """

    partition: Rule = "iid"
    alpha: Positive = 0.5
    shards: Count = 2
    classes_per_client: Count = 2
    least: Natural = 10
    holdout: Fraction = 0.0
    limit: Count | None = None
    test_limit: Count | None = None
    test_share: ProperShare = 0.2
    augment: bool = False
    noise: NotNegative = 0.0
    skew: Skew = "none"
    strongest: NotNegative = 0.0

    @abstractmethod
    def read(self, seed: int) -> Collection: ...

    def federation(self, clients: int, seed: int) -> Federation:
        if self.skew != "none" and not self.strongest:
            raise DataError(
                f"skew={self.skew} needs a positive strongest: how much of it the last client has"
            )
        found = self.read(seed)
        train, test = found.train, found.test
        if test is None:
            rest, cut = stratified(train.labels, self.test_share, np.random.default_rng([seed, 1]))
            train, test = train.take(rest), train.take(cut)
        train = limited(train, self.limit, np.random.default_rng([seed, 2]))
        test = limited(test, self.test_limit, np.random.default_rng([seed, 3]))
        per = self.classes_per_client if self.partition == "classes" else self.shards
        parts, notes = split_by_rule(
            self.partition,
            train.labels.numpy(),
            clients,
            seed,
            alpha=self.alpha,
            per_client=per,
            groups=train.groups,
            least=self.least,
        )
        counts = [
            torch.bincount(train.labels[torch.from_numpy(p)], minlength=len(found.classes)).tolist()
            for p in parts
        ]
        pairs = [self._client(train.take(p), i, clients, seed) for i, p in enumerate(parts)]
        strongest = strengths(clients, self.strongest) if self.skew != "none" else ()
        facts = Facts(
            classes=tuple(found.classes),
            labels=tuple(map(tuple, counts)),
            shape=tuple(train.images.shape[1:]),
            look=tuple(f"{self.skew} {s:.3g}" for s in strongest),
            skipped=tuple(found.skipped),
            notes=tuple(notes),
        )
        return Federation(
            [a for a, _ in pairs],
            [b for _, b in pairs] if self.holdout else (),
            self._tensors(test, False),
            facts,
        )

    def _client(
        self, own: Labelled, client: int, clients: int, seed: int
    ) -> tuple[Tensors, Tensors | None]:
        """Train and held-out part. Both have the client's own look; a client with one image only
        keeps it for training.
        """
        if self.noise:
            own = Labelled(
                skew_images(own.images, "noise", 255 * self.noise, generator(seed, client, 0xA0)),
                own.labels,
                own.groups,
            )
        if self.skew != "none":
            strength = strengths(clients, self.strongest)[client]
            own = Labelled(
                skew_images(own.images, self.skew, strength, generator(seed, client, 0xDE)),
                own.labels,
                own.groups,
            )
        if not self.holdout:
            return self._tensors(own, self.augment), None
        rest, cut = stratified(own.labels, self.holdout, np.random.default_rng([seed, 4, client]))
        return self._tensors(own.take(rest), self.augment), self._tensors(own.take(cut), False)

    def _tensors(self, part: Labelled, augment: bool) -> Tensors:
        return Tensors({"x": part.images, "y": part.labels}, CropFlip() if augment else None)


@dataclass(frozen=True)
class CropFlip:
    """Reflect padding, a random crop back to the same size, a random mirror: whole batches at a
    time.
    """

    pad: int = 4

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        n, c, h, w = x.shape
        big = F.pad(x, (self.pad,) * 4, mode="reflect")
        top, left = torch.randint(2 * self.pad + 1, (2, n, 1), generator=rng)
        mirror = torch.rand(n, 1, generator=rng) < 0.5
        rows = top + torch.arange(h)
        columns = left + torch.where(mirror, torch.arange(w - 1, -1, -1), torch.arange(w))
        return big[
            torch.arange(n)[:, None, None, None],
            torch.arange(c)[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]


def stratified(
    labels: Tensor, share: float, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Indices that stay and indices that are cut off: about `share` of every class, at least one
    stays in all.
    """
    stay: list[int] = []
    cut: list[int] = []
    y, carry = labels.numpy(), 0.0
    for label in np.unique(y):
        index = rng.permutation(np.flatnonzero(y == label))
        carry += share * len(index)  # what rounding withheld from one class goes to the next
        k = min(int(carry + 0.5), len(index))
        carry -= k
        cut += index[:k].tolist()
        stay += index[k:].tolist()
    if not stay:
        stay, cut = cut[:1], cut[1:]
    return sorted(stay), sorted(cut)


def limited(part: Labelled, limit: int | None, rng: np.random.Generator) -> Labelled:
    if limit is None or limit >= len(part):
        return part
    _, chosen = stratified(part.labels, limit / len(part), rng)
    return part.take(chosen)


def skew_images(images: Tensor, kind: Skew, strength: float, rng: Generator) -> Tensor:
    """One client's camera. noise: sigma of 255. blur: Gaussian sigma in pixels. resolution: shrunk
    by 1 + strength and enlarged again.
    """
    if kind == "none" or strength <= 0 or not len(images):
        return images
    x = images.float()
    if kind == "noise":
        x = x + strength * torch.randn(x.shape, generator=rng)
    elif kind == "blur":
        from torchvision.transforms.functional import gaussian_blur

        reach = min(2 * int(3 * strength + 0.5) + 1, 2 * (min(x.shape[-2:]) // 2) - 1)
        x = gaussian_blur(x, [max(3, reach)] * 2, [strength] * 2)
    else:
        small = [max(1, round(side / (1 + strength))) for side in x.shape[-2:]]
        x = F.interpolate(
            F.interpolate(x, size=small, mode="area"),
            size=x.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
    return x.round().clamp(0, 255).byte()


# -- reading files ---------------------------------------------------------------------------------


def load_image(path: Path | IO[bytes], size: int | None, mode: str = "RGB") -> Tensor:
    """uint8 (C, H, W), shrunk or enlarged to size x size where asked."""
    from PIL import Image

    with opened(path) as image:
        picture = converted(image, mode)
        if size is not None and picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.array(picture)
    return (
        torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None])
        .permute(2, 0, 1)
        .contiguous()
    )


@dataclass
class Reader:
    """Reads many images, remembers which could not be read. All must end up the same size."""

    size: int | None = None
    mode: str = "RGB"
    skipped: list[str] = field(default_factory=list)

    def read(
        self, items: Iterable[tuple[Path | IO[bytes], int]], groups: Sequence[Any] | None = None
    ) -> Labelled:
        images: list[Tensor] = []
        labels: list[int] = []
        kept: list[Any] = []
        for k, (path, label) in enumerate(items):
            try:
                image = load_image(path, self.size, self.mode)
            except (
                OSError,
                ValueError,
                SyntaxError,
            ) as e:  # what PIL raises on broken files, by format
                self.skipped.append(f"{_place(path)}: {reason(e)}")
                continue
            if images and image.shape != images[0].shape:
                raise DataError(
                    f"{path} is {_size(image)}, others are {_size(images[0])}: set size=N to bring"
                    " all to one size"
                )
            images.append(image)
            labels.append(label)
            kept.append(groups[k] if groups is not None else None)
        if not images:
            raise DataError(
                f"no readable image ({len(self.skipped)} skipped, first:"
                f" {self.skipped[0] if self.skipped else 'none found'})"
            )
        return Labelled(
            torch.stack(images), torch.tensor(labels), kept if groups is not None else None
        )


def reason(error: Exception) -> str:
    """In a line. PIL names what it read from, which is an address in memory if that is no file."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r" <\S+ object at 0x\w+>", "", first)


def _place(file: Path | IO[bytes]) -> str:
    """A file's name with that of its folder: many classes have a 0001.jpg."""
    return str(Path(*file.parts[-2:])) if isinstance(file, Path) else file.name


def _size(image: Tensor) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"


def listing(root: Path, names: Sequence[str]) -> list[tuple[Path | IO[bytes], int]]:
    """Every image of the class folders `names`, and the number of its class."""
    return [(path, k) for k, name in enumerate(names) for path in images_below(root / name)]


def label_order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, before all other names."""
    return (0, int(label), "") if label.isdigit() else (1, 0, label)

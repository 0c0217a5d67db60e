"""Synthetic: labelled images made on the spot, for demos, tests and benchmarks without any file.

A class is a shape filled with a texture, so that neither alone tells it. Everything else is
nuisance: colours of figure and ground, place, size, rotation, phase of the texture, a second small
distracting figure, noise. A linear model gets almost nothing, a small network gets far with all
data, and clients that see few classes drift apart: methods for skewed data can differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Le
from torch import Generator, Tensor

from fedlens.core.client import generator
from fedlens.core.limits import Count, NotNegative, Several, Share
from fedlens.data.images.labelled import Collection, Labelled, LabelledSource
from fedlens.data.source import DataError

SHAPES = ("disc", "square", "triangle", "cross", "ring")
TEXTURES = ("stripes", "checks", "dots", "plain")
ClassCount = Annotated[Several, Le(len(SHAPES) * len(TEXTURES))]


@dataclass
class Synthetic(LabelledSource):
    """
    Args:
        classes: up to 20, alternating shape and texture.
        images: for training.
        test_images: for testing.
        size: in pixels.
        noise: sigma of the pixel noise, of 1.
        clutter: chance of a second small figure.
    """

    classes: ClassCount = 10
    images: Count = 4000
    test_images: Count = 1000
    size: Count = 32
    noise: NotNegative = 0.06
    clutter: Share = 0.3

    def read(self, seed: int) -> Collection:
        if self.images < self.classes or self.test_images < self.classes:
            raise DataError(
                "Synthetic needs at least one image per class for training and for testing"
            )
        return Collection(
            self._make(self.images, generator(seed, 0x571)),
            self._make(self.test_images, generator(seed, 0x7E57)),
            self.names,
        )

    @property
    def names(self) -> list[str]:
        return [f"{t} {s}" for t in TEXTURES for s in SHAPES][: self.classes]

    def _make(self, n: int, rng: Generator) -> Labelled:
        labels = torch.arange(n) % self.classes
        made = [self._draw(labels[low : low + 1024], rng) for low in range(0, n, 1024)]
        return Labelled(torch.cat(made), labels)

    def _draw(self, labels: Tensor, rng: Generator) -> Tensor:
        n, k = len(labels), len(SHAPES)
        colours = _colours(n, rng)
        mask = _figures(labels % k, labels // k, self.size, (0.6, 0.9), 0.2, rng)
        image = colours[0] + mask * (colours[1] - colours[0])
        other = (
            torch.randint(k, (n,), generator=rng),
            torch.randint(len(TEXTURES), (n,), generator=rng),
        )
        small = _figures(*other, self.size, (0.15, 0.3), 0.8, rng) * (
            torch.rand(n, 1, 1, 1, generator=rng) < self.clutter
        )
        image = image + small * (colours[2] - image)
        image = image + self.noise * torch.randn(image.shape, generator=rng)
        return (image.clamp(0, 1) * 255).round().byte()


def _colours(n: int, rng: Generator) -> Tensor:
    """Ground, figure, distractor: three colours, the figure lighter than the ground and at least
    0.5 away so that it can be seen.
    """
    colours = torch.rand(3, n, 3, 1, 1, generator=rng)
    colours[0] *= 0.6
    colours[1] = 0.4 + 0.6 * colours[1]
    gap = colours[1] - colours[0]
    length = gap.norm(dim=1, keepdim=True).clamp_min(1e-6)
    colours[1] = (colours[0] + gap * (0.5 / length).clamp_min(1)).clamp(0, 1)
    return colours


def _figures(
    shape: Tensor,
    texture: Tensor,
    size: int,
    radius: tuple[float, float],
    reach: float,
    rng: Generator,
) -> Tensor:
    """Soft masks (N, 1, size, size): a shape of random place, size and angle, times its texture."""
    n = len(shape)
    draw = torch.rand(6, n, 1, 1, generator=rng)
    line = torch.linspace(-1, 1, size)
    r = radius[0] + (radius[1] - radius[0]) * draw[0]
    x, y = (
        line[None, None, :] - reach * (2 * draw[1] - 1),
        line[None, :, None] - reach * (2 * draw[2] - 1),
    )
    angle = math.pi / 3 * (draw[3] - 0.5)
    u, v = (x * angle.cos() + y * angle.sin()) / r, (y * angle.cos() - x * angle.sin()) / r
    inside = torch.stack(_shapes(u, v)).gather(0, shape.view(1, n, 1, 1).expand(1, n, size, size))[
        0
    ]
    filled = torch.stack(_textures(u * r, v * r, 2 * math.pi * draw[4], 8 + 4 * draw[5]))
    filled = filled.gather(0, texture.view(1, n, 1, 1).expand(1, n, size, size))[0]
    return (torch.sigmoid(inside * r * size) * filled)[:, None]


def _shapes(u: Tensor, v: Tensor) -> list[Tensor]:
    """Signed distance-like functions, positive inside the unit figure, of about equal area; the
    order is that of SHAPES.
    """
    a, b, rho = u.abs(), v.abs(), (u * u + v * v).sqrt()
    triangle = torch.minimum(0.6 + v, 0.6 - 0.5 * v - 0.866 * a)
    cross = torch.maximum(torch.minimum(0.3 - a, 0.95 - b), torch.minimum(0.3 - b, 0.95 - a))
    return [0.8 - rho, 0.72 - torch.maximum(a, b), triangle, cross, 0.28 - (rho - 0.65).abs()]


def _textures(u: Tensor, v: Tensor, phase: Tensor, frequency: Tensor) -> list[Tensor]:
    """Weights in [0, 1]; the order is that of TEXTURES. The plain one has the others' mean
    brightness.
    """
    a, b = (frequency * u + phase).sin(), (frequency * v + phase).sin()
    stripes = torch.sigmoid(6 * a)
    checks = torch.sigmoid(6 * a * b * 2)
    dots = torch.sigmoid(6 * (a + b - 0.4))
    return [
        0.15 + 0.85 * stripes,
        0.15 + 0.85 * checks,
        0.15 + 0.85 * dots,
        torch.full_like(u, 0.6),
    ]

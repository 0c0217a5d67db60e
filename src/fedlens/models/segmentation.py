"""Small networks that give every pixel a class."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Segmenter = Literal["dilated", "unet"]
MULTIPLES = {"dilated": 1, "unet": 4}  # what the sides of an input must be multiples of


def _block(inputs: int, outputs: int, dilation: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


class Dilated(nn.Module):
    """Three dilated convolutions at full resolution: the fewest weights, and a narrow view."""

    def __init__(self, classes: int = 2, channels: int = 3, width: int = 8) -> None:
        super().__init__()
        layers = [*_block(channels, width), *_block(width, width, 2), *_block(width, width, 4)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, classes, 1)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


class UNet(nn.Module):
    """Two levels down and up again with skips (Ronneberger et al., 2015), for any sides that are
    multiples of 4."""

    def __init__(self, classes: int = 2, channels: int = 3, width: int = 8) -> None:
        super().__init__()
        self.fine = nn.Sequential(*_block(channels, width), *_block(width, width))
        self.middle = nn.Sequential(*_block(width, 2 * width), *_block(2 * width, 2 * width))
        self.coarse = nn.Sequential(*_block(2 * width, 4 * width), *_block(4 * width, 4 * width))
        self.up_middle = nn.Sequential(*_block(6 * width, 2 * width))
        self.up_fine = nn.Sequential(*_block(3 * width, width))
        self.head = nn.Conv2d(width, classes, 1)

    def features(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([middle, F.interpolate(coarse, scale_factor=2.0)], 1))
        found: Tensor = self.up_fine(torch.cat([fine, F.interpolate(middle, scale_factor=2.0)], 1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


def segmenter(name: Segmenter, classes: int, channels: int, width: int) -> nn.Module:
    made = {"dilated": Dilated, "unet": UNet}[name]
    return made(classes, channels, width)

"""Who is in a picture: a person detector from a file of weights.

`detector=PATH` is FastestDet's official file; `detector=torchvision:NAME:PATH` one of torchvision's
detectors (fasterrcnn_mobilenet_v3_large_320_fpn, ssdlite320_mobilenet_v3_large, ...) with its file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedlens.core.weights import load_weights
from fedlens.models.fastestdet import FastestDet

PersonBox = tuple[float, float, float, float]  # left, top, width, height
ScoredBox = tuple[PersonBox, float]
# takes uint8 (3, H, W), gives (n, 5): left, top, right, bottom in pixels, score
Find = Callable[[Tensor], Tensor]

TORCHVISION_PERSON = 1


class Detector:
    """what: as the option says it. least: the lowest score that counts; without it .65 for
    FastestDet, as in its own program, .5 for torchvision's."""

    def __init__(self, what: str, least: float | None = None) -> None:
        self.find: Find = _torchvision(what, least) if _is_torchvision(what) else _fast(what, least)

    def people(self, image: Tensor) -> list[ScoredBox]:
        """The best first, cut off at the picture's edges."""
        height, width = image.shape[-2:]
        found = []
        for left, top, right, bottom, score in self.find(image).tolist():
            left, right = max(0.0, left), min(float(width), right)
            top, bottom = max(0.0, top), min(float(height), bottom)
            if right - left >= 1 and bottom - top >= 1:
                found.append(((left, top, right - left, bottom - top), score))
        return found


def _is_torchvision(what: str) -> bool:
    return what.startswith("torchvision:")


def _fast(path: str, least: float | None) -> Find:
    net = FastestDet()
    load_weights(net, path)
    net.eval()
    return lambda image: net.find(image, least=0.65 if least is None else least)


def _torchvision(what: str, least: float | None) -> Find:
    from torchvision.models import detection

    _, name, path = (*what.split(":", 2), "", "")[:3]
    make: Any = getattr(detection, name, None)
    if not path or not callable(make):
        raise ValueError(
            f"detector={what}: torchvision:NAME:PATH is needed, with NAME of torchvision's"
            " detectors, such as ssdlite320_mobilenet_v3_large"
        )
    net = load_weights(make(weights=None, weights_backbone=None), path).eval()
    lowest = 0.5 if least is None else least

    def find(image: Tensor) -> Tensor:
        with torch.no_grad():
            found = net([image.float() / 255])[0]
        kept = (found["labels"] == TORCHVISION_PERSON) & (found["scores"] > lowest)
        return torch.cat([found["boxes"][kept], found["scores"][kept, None]], 1)

    return find

"""Deblurring: scenes restored from blurred views. Scores follow the paper: [0, 255], clamped,
unrounded; means over the scenes.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlens.core.federation import Federation
from fedlens.core.limits import Natural
from fedlens.core.message import Message
from fedlens.core.picture import Picture, magnify, to_uint8
from fedlens.core.task import Task
from fedlens.deblur.feddeblur import restored
from fedlens.deblur.observation import Observation, SceneFacts, without_rim
from fedlens.metrics.image import psnr, ssim


@dataclass
class Deblurring(Task):
    """
    Args:
        shown: how many scenes the report shows.
    """

    shown: Natural = 3

    def evaluate(
        self, result: Mapping[str, Tensor], data: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """`data` holds the sharp scenes, by name."""
        scores = [score(result[name], truth) for name, truth in data.items()]
        return (
            {metric: sum(s[metric] for s in scores) / len(scores) for metric in ("psnr", "ssim")}
            if scores
            else {}
        )

    def save(self, state: Message, folder: Path) -> None:
        """restored.png and the unrounded restored.npy; restored/NAME.* where there are several
        scenes.
        """
        from PIL import Image

        images = restored(state)
        for name, x in images.items():
            target = folder / "restored" if len(images) == 1 else folder / "restored" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            x = x.clamp(0, 255)
            Image.fromarray(to_uint8(x / 255)).save(target.with_name(target.name + ".png"))
            np.save(target.with_name(target.name + ".npy"), x.movedim(0, -1).squeeze(-1).numpy())

    def pictures(self, result: Mapping[str, Tensor], federation: Federation) -> Sequence[Picture]:
        name = next(iter(result))
        views: list[Observation] = [held[name] for held in federation.holdings]
        truth: Mapping[str, Tensor] = federation.test or {}
        facts = federation.facts
        assert isinstance(facts, SceneFacts)  # the algorithm was given them
        pad = facts.pad
        clients = [f"client {k}" for k in range(len(views))]
        pictures = []
        if facts.partial:
            title = (
                "Fields of view, one colour a client. They are not sent, but a curious server can"
                " guess them from where w and x differ."
            )
            pictures.append(Picture(title, [fields_of_view(views, pad, result[name])]))
        side = max(max(v.kernel.shape) for v in views)
        kernels = [
            enlarge_kernel(framed(v.kernel.float() / v.kernel.max().float(), side)) for v in views
        ]
        pictures.append(
            Picture(
                "Blur kernels. They are not sent, but without secure aggregation a curious server"
                " can work them out (fedlens audit).",
                kernels,
                clients,
                "sheet",
            )
        )
        title = (
            "Observations. They are not sent, but without secure aggregation a curious server can"
            " work them out from w (fedlens audit)."
        )
        pictures.append(
            Picture(title, [v.pixels.clamp(0, 255) / 255 for v in views], clients, "sheet")
        )
        for name in list(result)[: self.shown]:
            pictures += self._scene(
                name,
                result[name],
                [held[name] for held in federation.holdings],
                truth.get(name),
                pad,
            )
        return pictures

    def _scene(
        self, name: str, image: Tensor, views: Sequence[Observation], truth: Tensor | None, pad: int
    ) -> list[Picture]:
        image, seen = image.clamp(0, 255).float(), without_rim(mosaic(views), pad).clamp(0, 255)
        shown, labels, scores = [seen, image], ["mean of the observations", "restored"], {}
        if truth is not None:
            shown.append(truth)
            labels.append("truth")
            scores = {"observed": score(seen, truth), "restored": score(image, truth)}
        out = [
            Picture(
                f"{name}: before and after", [x / 255 for x in shown], labels, "compare", scores
            )
        ]
        if truth is not None:
            residual = (image - truth).abs().mean(0, keepdim=True)
            out.append(
                Picture(
                    f"{name}: what is left, |restored - truth| in grey levels",
                    [residual],
                    ["residual"],
                    "map",
                )
            )
        return out


def score(image: Tensor, truth: Tensor) -> dict[str, float]:
    image = image.clamp(0, 255)
    return {"psnr": psnr(image, truth), "ssim": ssim(image, truth)}


def mosaic(views: Sequence[Observation]) -> Tensor:
    """Every pixel the mean of those who saw it."""
    total = torch.stack([v.embed(v.pixels) for v in views]).sum(0)
    count = torch.stack([v.mask() for v in views]).sum(0)
    return total / count.clamp_min(1)


def fields_of_view(views: Sequence[Observation], pad: int, scene: Tensor) -> Tensor:
    """The scene in grey, washed out, each view tinted and framed in a hue of its own."""
    out = (
        (0.45 + 0.5 * scene.clamp(0, 255).float().mean(0, keepdim=True) / 255)
        .expand(3, -1, -1)
        .clone()
    )
    thick = max(1, min(out.shape[-2:]) // 100)
    frames = []
    for k, v in enumerate(views):
        mask = without_rim(v.mask(), pad)
        hue = torch.tensor(colorsys.hsv_to_rgb(k / len(views), 0.85, 0.85))[:, None, None]
        out = torch.where(mask > 0, 0.82 * out + 0.18 * hue, out)
        inner = -torch.nn.functional.max_pool2d(
            -torch.nn.functional.pad(mask, [thick] * 4)[None], 2 * thick + 1, 1
        )[0]
        frames.append(((mask - inner) > 0, hue))
    for frame, hue in frames:
        out = torch.where(frame, hue, out)
    return out


def framed(kernel: Tensor, side: int) -> Tensor:
    """The kernel in the middle of a black square, (1, side, side), so that kernels of different
    sizes can be compared.
    """
    rows, columns = kernel.shape
    out = torch.zeros(1, side, side)
    top, left = side // 2 - rows // 2, side // 2 - columns // 2
    out[0, top : top + rows, left : left + columns] = kernel
    return out


def enlarge_kernel(x: Tensor, least: int = 96) -> Tensor:
    factor = max(1, least // max(x.shape[-2:]))
    return magnify(x, factor)

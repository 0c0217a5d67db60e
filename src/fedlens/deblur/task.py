"""Deblurring: scenes restored from blurred views. Scores follow the paper: [0, 255], clamped,
unrounded; means over the scenes.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.core.federation import Federation
from fedlens.core.limits import Natural
from fedlens.core.message import Message
from fedlens.core.picture import Picture, magnify, to_uint8
from fedlens.core.task import Task
from fedlens.deblur.alone import BestView, best_view
from fedlens.deblur.feddeblur import restored
from fedlens.deblur.observation import Observation, SceneFacts, SharpScenes, without_rim
from fedlens.deblur.spectrum import circular_blur, forward
from fedlens.metrics.image import psnr, ssim


@dataclass
class Deblurring(Task):
    """
    Args:
        shown: how many scenes the report shows.
    """

    shown: Natural = 3
    _best: dict[str, tuple[Observation, BestView | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def evaluate(
        self, result: Mapping[str, Tensor], data: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """`data` holds the sharp scenes, by name."""
        scores = [score(result[name], truth) for name, truth in data.items()]
        return _mean_scores(scores) if scores else {}

    def references(self, start: Any, data: Any) -> dict[str, dict[str, float]]:
        """What the photos are worth without anybody's help: the best one as it is and deblurred
        alone, and the mean of all."""
        if not isinstance(data, SharpScenes) or not data.views:
            return {}
        rows: dict[str, list[dict[str, float]]] = {}
        for name, truth in data.items():
            views = [held[name] for held in data.views]
            seen = {"mean of the photos": without_rim(mosaic(views), data.pad)}
            if best := self._best_view(name, views, data.pad, data.noise):
                seen |= {"best photo": best.photo, "best photo alone": best.restored}
            for what, image in seen.items():
                rows.setdefault(what, []).append(score(image, truth))
        return {what: _mean_scores(found) for what, found in rows.items()}

    def _best_view(
        self, name: str, views: Sequence[Observation], pad: int, noise: float
    ) -> BestView | None:
        """Restored once: pictures are drawn again and again."""
        if name not in self._best or self._best[name][0] is not views[0]:
            self._best[name] = (views[0], best_view(views, pad, noise))
        return self._best[name][1]

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
        kernels = [kernel_picture(v, side) for v in views]
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
                facts,
            )
        return pictures

    def _scene(
        self,
        name: str,
        image: Tensor,
        views: Sequence[Observation],
        truth: Tensor | None,
        facts: SceneFacts,
    ) -> list[Picture]:
        image = image.clamp(0, 255).float()
        shown = {"mean of the observations": without_rim(mosaic(views), facts.pad).clamp(0, 255)}
        noise = 1.0 if facts.noise is None else facts.noise
        best = self._best_view(name, views, facts.pad, noise)
        if best is not None:
            shown["best photo"] = best.photo.clamp(0, 255)
            shown["best photo alone"] = best.restored.clamp(0, 255)
        shown["restored"] = image
        scores: dict[str, dict[str, float]] = {}
        if truth is not None:
            scores = {what: score(x, truth) for what, x in shown.items()}
            shown["truth"] = truth
        elif best is not None:
            scores = explained(views[best.client], shown, facts.pad)
        out = [
            Picture(
                f"{name}: before and after",
                [x / 255 for x in shown.values()],
                list(shown),
                "compare",
                scores,
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


def explained(
    view: Observation, images: Mapping[str, Tensor], pad: int
) -> dict[str, dict[str, float]]:
    """How far each image, seen through the best photo's blur, is from that photo: the root mean
    square in grey levels. Where there is no truth, this shows ghosts: whatever the scene is, it
    must explain the photo that it is aligned with down to the noise."""
    inner = max(view.kernel.shape)
    found = {}
    for what, x in images.items():
        photo = without_rim(view.embed(view.pixels), pad)
        gap = _seen_through(view, x, pad) - photo
        gap = gap[:, inner:-inner, inner:-inner]
        if gap.numel():
            found[what] = {"misfit": round(float(gap.square().mean().sqrt()), 2)}
    return found


def _seen_through(view: Observation, x: Tensor, pad: int) -> Tensor:
    """x through the view's blur; near the edge, where x ends, it means nothing."""
    if view.grid is None:
        return circular_blur(x, view.kernel)
    rim = torch.nn.functional.pad(x.double(), [pad] * 4)
    return without_rim(view.embed(view.blurred(forward(rim))), pad)


def _mean_scores(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {metric: sum(s[metric] for s in scores) / len(scores) for metric in ("psnr", "ssim")}


def score(image: Tensor, truth: Tensor) -> dict[str, float]:
    image = image.clamp(0, 255)
    return {"psnr": psnr(image, truth), "ssim": ssim(image, truth)}


def mosaic(views: Sequence[Observation]) -> Tensor:
    """Every pixel the mean of those who saw it, by how much it counts with each."""
    total = torch.stack([v.embed(v.pixels) * v.mask() for v in views]).sum(0)
    count = torch.stack([v.mask() for v in views]).sum(0)
    return torch.where(count > 0, total / count.clamp_min(1e-9), total)


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


def kernel_picture(view: Observation, side: int) -> Tensor:
    """Its kernel, or its grid of kernels as they lie, each as bright as can be."""
    if view.grid is None:
        return enlarge_kernel(framed(view.kernel.float() / view.kernel.max().float(), side))
    rows = [torch.cat([framed((k / k.max()).float(), side) for k in row], 2) for row in view.grid]
    return enlarge_kernel(torch.cat(rows, 1))


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

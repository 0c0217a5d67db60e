"""Video super-resolution: clips become `scale` times as large.

The loss is Charbonnier, mean sqrt(d^2 + 1e-9) (the un-squared epsilon of the public code). Any
network that maps (B, T, 3, h, w) to (B, T, 3, scale h, scale w) can be trained: "light",
"bidirectional", "recurrent", the name of one that `fedlens.models` exports, "module:Class" of one's
own, or from Python a class or function that builds it.

Clips larger than a tile are enlarged piece by piece: `tiles.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.core.client import Batch, Output
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Natural, Positive
from fedlens.core.picture import Picture, magnify
from fedlens.core.task import Adapt, LearningTask, check_options
from fedlens.core.weights import adopt_weights, read_weights
from fedlens.data.video.degrade import enlarge, resized
from fedlens.metrics.frames import Channel, frame_psnr, frame_ssim, temporal_gap
from fedlens.models.by_name import network_builder
from fedlens.models.clips import configurations
from fedlens.tasks.tiles import TILE, WINDOW, Tiles, TileSide, run_network

QualityMetric = Literal["psnr", "ssim", "psnr_y", "ssim_y", "temporal", "lpips", "vmaf"]
# under names that say that less is better
REPORTED_AS = {"lpips": "lpips_loss", "temporal": "temporal_loss"}


def charbonnier(prediction: Tensor, target: Tensor, eps: float = 1e-9) -> Tensor:
    """mean sqrt(d^2 + eps)"""
    return (prediction - target).square().add(eps).sqrt().mean()


class SuperResolution(LearningTask):
    """
    Args:
        model: the network, see above.
        scale: by how much; 1 restores and keeps the size.
        options: arguments of the network's constructor besides the scale.
        metrics: some of psnr, ssim (RGB), psnr_y, ssim_y (luma), temporal, lpips, vmaf.
        border: pixels at the edge that metrics leave out.
        eps: of the Charbonnier loss.
        lpips_weights: a folder with the weight files of LPIPS.
        tile: low-resolution pixels of a piece; 256 for tests and what memory allows for films, if
            not given.
        margin: low-resolution pixels of context around a piece.
        window: frames of a piece; 16 for tests and what memory allows for films, if not given.
        overlap: frames of context before and after a piece.
        init: weights to start from, such as an official checkpoint.
        pretrained: the same under another name; only one of the two can be given. The network
            "recurrent" also starts from the file of its trunk, RLFN.
    """

    shared = ("scale",)

    def __init__(
        self,
        model: Any = "light",
        scale: Literal[1, 2, 3, 4] = 4,
        options: dict[str, Any] | None = None,
        metrics: Sequence[QualityMetric] = ("psnr", "ssim"),
        border: Natural = 0,
        eps: Positive = 1e-9,
        lpips_weights: str | None = None,
        tile: TileSide | None = None,
        margin: Natural = 16,
        window: Count | None = None,
        overlap: Natural = 4,
        init: str | None = None,
        pretrained: str | None = None,
    ) -> None:
        if init and pretrained:
            raise ValueError("task.init and task.pretrained are both given: one file will do")
        self.init = init or pretrained
        self.tile, self.window = tile, window
        self.scale, self.metrics, self.border, self.eps, self.lpips_weights = (
            scale,
            tuple(metrics),
            border,
            eps,
            lpips_weights,
        )
        self.tiles = Tiles(scale, tile or TILE, margin, window or WINDOW, overlap)
        self.build = network_builder(model, scale, dict(options or {}))

    @classmethod
    def arguments_from_weights(
        cls, weights: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Which network a public checkpoint belongs to, and for which scale."""
        for name, found in configurations(weights):
            if found.official is not None and given.get("model", name) == name:
                return {"model": name, "scale": found.scale, "options": found.official}
        if "model" in given:
            return {}
        raise ValueError(
            "these weights are of no network that is known here (the first array is called"
            f" {next(iter(weights), 'nothing')}): say which one they are for, with model=NAME"
            " (fedlens list models) or model=module:Class"
        )

    def model(self) -> nn.Module:
        return self.build()

    def load_init(self, model: nn.Module) -> None:
        """All of a file, or of its trunk's file all that the trunk has."""
        translate = getattr(model, "translate", None)
        if not self.init or translate is None:
            return super().load_init(model)
        weights = read_weights(self.init)
        if translate(weights) is None:
            return super().load_init(model)
        adopt_weights(model, weights, self.init, ())

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        if adapt is not None:
            raise ValueError(
                f"{type(model).__name__} has no split into features and head, so nothing can stand"
                " between them"
            )
        return Output(run_network(model, batch["x"], self.scale))

    def loss(self, output: Output, batch: Batch) -> Tensor:
        if output.prediction.shape != batch["y"].shape:
            ours, theirs = tuple(output.prediction.shape), tuple(batch["y"].shape)
            raise ValueError(
                f"the network's clips are {ours}, the data's {theirs}: task.scale and data.scale"
                " must be the same"
            )
        return charbonnier(output.prediction, batch["y"], self.eps)

    def lower(self, batch: Batch, size: tuple[int, int]) -> Batch:
        return {**batch, "x": resized(batch["x"], size)}

    def distance(self, prediction: Tensor, target: Tensor) -> Tensor:
        return charbonnier(prediction, target, self.eps)

    # -- how well ----------------------------------------------------------------------------------

    def evaluate(self, result: nn.Module, data: Any) -> dict[str, float]:
        """Frames are averaged to clips, clips to the data set."""
        return self._scores(data, lambda clip: self.enlarge(result, clip)[0])

    def references(self, start: Any, data: Any) -> dict[str, dict[str, float]]:
        """Enlarged by interpolation; what keeps its size is held against what went in."""
        name = "bicubic" if self.scale > 1 else "input"
        found = self._scores(data, lambda clip: enlarge(clip[0], self.scale).clamp(0, 1))
        return {name: found} if found else {}

    def _scores(self, data: Any, make: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Of a second set of clips, under its name."""
        rows = []
        for i in range(len(data)):
            batch = data.batch(torch.tensor([i]))
            rows.append(self.compare(make(batch["x"]), batch["y"][0]))
        scores = {name: sum(r[name] for r in rows) / len(rows) for name in (rows or [{}])[0]}
        for name, more in getattr(data, "also", {}).items():
            scores |= {f"{name}_{metric}": v for metric, v in self._scores(more, make).items()}
        return scores

    def enlarge(self, model: nn.Module, clip: Tensor) -> Tensor:
        """A whole clip (1, T, 3, h, w), piece by piece where it is large; on the network's device,
        result on the clip's.
        """
        parts = self.tiles.run(model, lambda a, b: clip[0, a:b], clip.shape[1], levels=None)
        return torch.cat(list(parts))[None]

    def compare(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """The metrics of one clip (T, 3, H, W)."""
        b = self.border
        return {
            REPORTED_AS.get(m, m): self._measures[m](prediction, target, b) for m in self.metrics
        }

    @property
    def _measures(self) -> Mapping[str, Callable[[Tensor, Tensor, int], float]]:
        def framewise(
            f: Callable[..., Tensor], channel: Channel
        ) -> Callable[[Tensor, Tensor, int], float]:
            return lambda p, t, b: float(f(p, t, channel, b).mean())

        return {
            "psnr": framewise(frame_psnr, "rgb"),
            "ssim": framewise(frame_ssim, "rgb"),
            "psnr_y": framewise(frame_psnr, "y"),
            "ssim_y": framewise(frame_ssim, "y"),
            "temporal": lambda p, t, b: float(temporal_gap(p, t)),
            "lpips": lambda p, t, b: self._lpips(p, t),
            "vmaf": lambda p, t, b: self._vmaf(p, t),
        }

    def _lpips(self, prediction: Tensor, target: Tensor) -> float:
        from fedlens.metrics.perceptual import lpips

        return float(lpips(prediction, target, self.lpips_weights).mean())

    def _vmaf(self, prediction: Tensor, target: Tensor) -> float:
        from fedlens.metrics.video import vmaf

        return vmaf(prediction, target)

    # -- to be seen --------------------------------------------------------------------------------

    def pictures(self, result: nn.Module, federation: Federation) -> Sequence[Picture]:
        """Of up to three test clips: before and after under a slider, the part with most detail
        enlarged, the error, a few frames.
        """
        out: list[Picture] = []
        data: Any = federation.test
        for i in range(min(3, len(data) if data is not None else 0)):
            batch = data.batch(torch.tensor([i]))
            name = data.name(i) if hasattr(data, "name") else f"clip {i}"
            x, y = batch["x"][:, :8], batch["y"][0, :8]
            with torch.no_grad():
                ours = self.enlarge(result, x)[0]
            plain = enlarge(x[0], self.scale).clamp(0, 1)
            k = len(y) // 2
            facts = {
                "bicubic": f"{float(frame_psnr(plain[k], y[k])):.2f} dB",
                "ours": f"{float(frame_psnr(ours[k], y[k])):.2f} dB",
            }
            labels = ["bicubic", "ours", "reference"]
            out.append(
                Picture(f"{name}: frame {k}", [plain[k], ours[k], y[k]], labels, "compare", facts)
            )
            zoom = [
                v[..., window[0], window[1]]
                for window in [busiest(y[k])]
                for v in (plain[k], ours[k], y[k])
            ]
            out.append(
                Picture(
                    f"{name}: the part with most detail, four times as large",
                    [magnify(z, 4) for z in zoom],
                    labels,
                    "compare",
                )
            )
            errors = [(v[k] - y[k]).abs().mean(0, keepdim=True) for v in (plain, ours)]
            out.append(
                Picture(
                    f"{name}: where it is wrong", errors, ["bicubic", "ours"], "map", one_scale=True
                )
            )
            out.append(Picture(f"{name}: frames", list(ours), kind="strip"))
        return out

    # -- to be used --------------------------------------------------------------------------------

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Enlarge a video file, a picture, a folder of frames, or a folder of films. Sound is kept.
        Options: quality (of a video file: 0-51, less is better, default 16), device, threads, half
        (precision), tile, margin, window, overlap (as the task's), preview (seconds), noise (for a
        denoiser: levels of 255)."""
        from fedlens.tasks.apply.upscaling import OPTIONS, upscale_file

        check_options(self, options, *OPTIONS)
        return upscale_file(self, folder, source, target, options)


def busiest(picture: Tensor, size: int = 96) -> tuple[slice, slice]:
    """The square with the largest mean gradient."""
    h, w = picture.shape[-2:]
    size = min(size, h, w)
    steps = picture.mean(0).diff(dim=0)[:, :-1].abs() + picture.mean(0).diff(dim=1)[:-1].abs()
    pooled = nn.functional.avg_pool2d(
        steps[None, None], max(1, size - 1), stride=max(1, size // 4)
    )[0, 0]
    at = int(pooled.argmax())
    top, left = at // pooled.shape[1] * max(1, size // 4), at % pooled.shape[1] * max(1, size // 4)
    return slice(top, top + size), slice(left, left + size)

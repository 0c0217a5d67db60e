"""Pose: find the joints of a person. A network draws one heat map per joint; the peak is the joint
(`heatmaps.py`).

Loss: mean over batch, joints and pixels of the squared error; joints that are not visible or whose
Gaussian lies outside count zero. A map without a positive value has its joint nowhere: (-1, -1).
The flip test averages with the mirrored image's maps. RAF's text decodes by argmax, its code base
by dark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural, Positive
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.data.pose.people import (
    MEAN,
    SKELETONS,
    STD,
    Array,
    How,
    People,
    Size,
    Skeleton,
    read_image,
    transform,
)
from fedlens.metrics.pose import coco_ap, pck, pckh
from fedlens.models.vitpose import SIZES, SimpleBaseline, ViTPose
from fedlens.models.weights import load_weights
from fedlens.tasks.heatmaps import decode, draw_targets
from fedlens.tasks.photos import as_coco, find_people, overlay_names, read_photos


@dataclass
class Pose(LearningTask):
    """joints: the skeleton, which also decides the metric (mpii: PCKh, lsp: PCK@0.2, coco: AP).
    network: vit-nano, vit-tiny, vit-small, vitpose-s, vitpose-b or resnet-18 ... resnet-152. patch,
    positions, size, drop_path: see ViTPose. stages: see SimpleBaseline. sizes: resolutions (height,
    width) to evaluate at; the data's own if none. capture, how: test images have only this
    resolution and are interpolated to each of `sizes`, in each of these ways. embed: how many
    people to show in an embedding of the features. init: weights to start from, such as a public
    checkpoint."""

    joints: Literal["mpii", "lsp", "coco"] = "lsp"
    network: str = "vit-tiny"
    patch: Count = 4
    positions: Literal["conv", "absolute"] = "conv"
    size: tuple[int, int] = (64, 48)
    drop_path: Fraction = 0.0
    stages: Count = 4
    targets: Literal["udp", "msra"] = "udp"
    sigma: Positive = 2.0
    scaled_sigma: bool = True
    decode: Literal["argmax", "quarter", "dark"] = "dark"
    flip_test: bool = True
    sizes: tuple[tuple[int, int], ...] = ()
    capture: tuple[int, int] | None = None
    how: tuple[Literal["bilinear", "area", "bicubic"], ...] = ("bilinear",)
    test_batch: Count = 64
    embed: Natural = 0
    init: str | None = None

    def __post_init__(self) -> None:
        if self.network not in SIZES and not self.network.startswith("resnet-"):
            raise ValueError(
                f"no network {self.network!r}: there are {', '.join(SIZES)} and resnet-18, -34,"
                " -50, -101, -152"
            )
        self.multiple = self.patch if self.network in SIZES else 4 * 2 ** (self.stages - 1)
        for size in (*self.sizes, *([self.size] if self.network in SIZES else [])):
            self.check_size(size)

    def check_size(self, size: Size) -> None:
        if min(size) < self.multiple or any(side % self.multiple for side in size):
            raise ValueError(
                f"a resolution of {size[0]}x{size[1]} does not fit {self.network}, whose inputs are"
                f" multiples of {self.multiple}"
            )

    @property
    def skeleton(self) -> Skeleton:
        return SKELETONS[self.joints]

    def model(self) -> nn.Module:
        count = len(self.skeleton.joints)
        if self.network in SIZES:
            return ViTPose(
                self.network, count, self.patch, self.positions, self.size, self.drop_path
            )
        return SimpleBaseline(int(self.network.removeprefix("resnet-")), count, self.stages)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        maps: Tensor = output.prediction
        self._check(batch)
        target, weight = draw_targets(
            batch["y"],
            (batch["x"].shape[-2], batch["x"].shape[-1]),
            (maps.shape[-2], maps.shape[-1]),
            self.targets,
            self.sigma,
            self.scaled_sigma,
        )
        loss: Tensor = (weight[:, :, None, None] * (maps - target).square()).mean()
        return loss

    def _check(self, batch: Batch) -> None:
        if batch["y"].shape[1] != len(self.skeleton.joints):
            raise ValueError(
                f"the data has {batch['y'].shape[1]} joints, the skeleton {self.joints!r} has"
                f" {len(self.skeleton.joints)}: set task.joints"
            )

    # -- prediction --------------------------------------------------------------------------------

    @torch.no_grad()
    def heatmaps(self, model: nn.Module, x: Tensor) -> Tensor:
        maps: Tensor = model(x)
        if not self.flip_test:
            return maps
        mirrored: Tensor = model(x.flip(-1)).flip(-1)[:, self.skeleton.mirror]
        if (
            self.targets == "msra"
        ):  # strides count from the left edge, so a mirrored map is one pixel off
            mirrored = torch.cat([mirrored[..., :1], mirrored[..., :-1]], -1)
        return (maps + mirrored) / 2

    def locate(self, maps: Tensor, size: Size) -> tuple[Tensor, Tensor]:
        """Joints (N, J, 2) in pixels of an input of `size`, and the peaks' heights (N, J)."""
        points, peaks = decode(maps, self.decode)
        h, w = maps.shape[-2:]
        if self.targets == "udp":
            step = torch.tensor([(size[1] - 1) / (w - 1), (size[0] - 1) / (h - 1)])
        else:
            step = torch.tensor([size[1] / w, size[0] / h])
        nowhere = (peaks <= 0)[..., None]
        return torch.where(nowhere, -1.0, points * step.to(points)), peaks

    def find(self, model: nn.Module, people: People) -> dict[str, Array]:
        """Joints of all people in image pixels, with what is needed to judge them."""
        place = next(model.parameters()).device
        columns: dict[str, list[Tensor]] = {}
        for batch in in_batches(people, self.test_batch, place):
            self._check(batch)
            points, peaks = self.locate(self.heatmaps(model, batch["x"]), people.size)
            found = {"predicted": transform(batch["warp"], points), "peaks": peaks}
            for name, value in (
                *found.items(),
                *((k, batch[k]) for k in ("truth", "reference", "area", "image")),
            ):
                columns.setdefault(name, []).append(value.cpu())
        return {name: torch.cat(values).numpy() for name, values in columns.items()}

    def evaluate(self, result: Any, data: People) -> dict[str, float]:
        sizes = self.sizes or (data.size,)
        found: dict[str, dict[str, float]] = {}
        for size in sizes:
            for how in self.how:
                name = f"{size[0]}x{size[1]}" + (f"_{how}" if len(self.how) > 1 else "")
                found[name] = self.judge(self.find(result, data.at(size, self.capture, how)))
        headline = next(iter(next(iter(found.values()))))
        out = {headline: float(np.mean([f[headline] for f in found.values()]))}
        for name, metrics in found.items():
            out |= {f"{metric}_{name}": value for metric, value in metrics.items()}
        return out

    def judge(self, found: Mapping[str, Array]) -> dict[str, float]:
        truth, visible = found["truth"][..., :2], found["truth"][..., 2]
        if self.joints == "mpii":
            return pckh(found["predicted"], truth, visible, found["reference"])
        if self.joints == "coco":
            return coco_ap(
                found["predicted"],
                found["peaks"].mean(1),
                truth,
                visible,
                found["area"],
                found["image"],
            )
        return {"pck": pck(found["predicted"], truth, visible, found["reference"], 0.2)}

    # -- to look at --------------------------------------------------------------------------------

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        data = federation.test
        if data is None or not len(data):
            return ()
        sizes = self.sizes or tuple(sorted({p.size for p in federation.holdings}, reverse=True))
        out = []
        for k in range(min(3, len(data))):
            joints, heat, labels = [], [], []
            for size in sizes:
                view = data.at(size, self.capture, self.how[0])
                batch = view.batch(torch.tensor([k]))
                maps = self.heatmaps(result, batch["x"].to(next(result.parameters()).device)).cpu()
                points, _ = self.locate(maps, size)
                image = enlarge(as_image(batch["x"][0]), max(sizes))
                ratio = torch.tensor([image.shape[2] / size[1], image.shape[1] / size[0]])
                joints.append(draw_joints(image, (points[0] + 0.5) * ratio - 0.5, self.skeleton))
                heat.append(draw_heat(image, maps[0]))
                labels.append(f"{size[0]}x{size[1]}")
            out.append(Picture(f"Person {k}: joints at each resolution", joints, labels, "sheet"))
            out.append(
                Picture(
                    f"Person {k}: heat maps at each resolution (maximum over the joints)",
                    heat,
                    labels,
                    "sheet",
                )
            )
        return [*out, self.embedding(result, data, sizes)] if self.embed else out

    def embedding(self, model: Any, data: People, sizes: Sequence[Size]) -> Picture:
        """The last features of the same people at every resolution, averaged over the grid and laid
        out in the plane by t-SNE.
        """
        from fedlens.metrics.embedding import scatter, tsne

        count, place, rows = min(self.embed, len(data)), next(model.parameters()).device, []
        for size in sizes:
            view = data.at(size, self.capture, self.how[0])
            with torch.no_grad():
                for low in range(0, count, self.test_batch):
                    batch = view.batch(torch.arange(low, min(low + self.test_batch, count)))
                    rows.append(model.features(batch["x"].to(place)).mean((2, 3)).cpu())
        labels = [f"{h}x{w}" for h, w in sizes]
        groups = torch.arange(len(sizes)).repeat_interleave(count)
        return Picture(
            "Features by resolution (t-SNE)",
            [scatter(tsne(torch.cat(rows)), groups, labels)],
            ["; ".join(labels)],
        )

    # -- to use ------------------------------------------------------------------------------------

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Joints of every image of a file or folder: keypoints.json (as COCO) and drawn overlays.
        Options: size (HxW; default the highest evaluated), boxes (a COCO-style JSON list or
        annotation file; without it a person is taken to fill its image), capture (HxW: pretend the
        camera has only this) and how (bilinear, area, bicubic). Photos are turned as their EXIF
        says, and joints and boxes count the pixels of the upright photo."""
        check_options(self, options, "size", "boxes", "capture", "how")
        plan = _Plan(self, **options)
        photos, unread = read_photos(source)
        found = find_people(photos, plan.boxes)
        model = load_weights(self.model(), folder / "model.safetensors").eval()
        people = [f.person(photos, len(self.skeleton.joints), plan.size) for f in found]
        made = self.find(
            model, People(people, self.skeleton, plan.size, capture=plan.capture, how=plan.how)
        )
        target.mkdir(parents=True, exist_ok=True)
        written = as_coco(made["predicted"], made["peaks"], found, photos, self.skeleton)
        (target / "keypoints.json").write_text(json.dumps(written, indent=1))
        for number, (photo, name) in enumerate(zip(photos, overlay_names(photos), strict=True)):
            own = [made["predicted"][k] for k, f in enumerate(found) if f.photo == number]
            self._overlay(photo.file, own, target / name)
        left = f", {len(unread)} could not be read ({unread[0]})" if unread else ""
        return (
            f"{len(people)} people in {len(photos)} images{left}: {target / 'keypoints.json'} and"
            " one overlay each"
        )

    def _overlay(self, photo: Path, people: Sequence[Array], target: Path) -> None:
        image = (
            torch.from_numpy(np.asarray(read_image(photo, upright=True)).copy())
            .permute(2, 0, 1)
            .float()
            / 255
        )
        for joints in people:
            image = draw_joints(image, torch.from_numpy(joints), self.skeleton)
        target.parent.mkdir(parents=True, exist_ok=True)
        save_png(image, target)


# -- drawing ---------------------------------------------------------------------------------------


def as_image(x: Tensor) -> Tensor:
    """Undo the normalisation."""
    return (x.cpu() * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]).clamp(
        0, 1
    )


def enlarge(image: Tensor, size: Size, least: int = 256) -> Tensor:
    """Blocks stay blocks, so that one sees what the network saw."""
    factor = max(1, -(-least // size[0]))
    return F.interpolate(image[None], size=(size[0] * factor, size[1] * factor), mode="nearest")[0]


def draw_joints(image: Tensor, joints: Tensor, skeleton: Skeleton) -> Tensor:
    """Bones and joints over a picture: left reddish, right bluish, the middle yellow."""
    from PIL import Image, ImageDraw

    canvas = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(canvas)
    thick = max(1, image.shape[1] // 100)
    points = joints.tolist()
    colours = {"l": (235, 80, 70), "r": (70, 120, 240)}

    def colour(k: int) -> tuple[int, int, int]:
        name = skeleton.joints[k]
        return (
            colours["l"]
            if name.startswith("left")
            else colours["r"]
            if name.startswith("right")
            else (240, 220, 80)
        )

    there = [min(p) > -1 for p in points]
    for a, b in skeleton.bones:
        if there[a] and there[b]:
            pen.line([*points[a], *points[b]], fill=colour(a), width=thick)
    for k, (x, y) in enumerate(points):
        if there[k]:
            pen.ellipse(
                [x - 1.5 * thick, y - 1.5 * thick, x + 1.5 * thick, y + 1.5 * thick], fill=colour(k)
            )
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255


def draw_heat(image: Tensor, maps: Tensor) -> Tensor:
    """The maximum over the joints, from black through red to yellow, over a darkened picture."""
    heat = F.interpolate(
        maps.amax(0)[None, None], size=image.shape[-2:], mode="bilinear", align_corners=False
    )[0, 0].clamp_min(0)
    heat = heat / heat.max().clamp_min(1e-6)
    colour = torch.stack(
        [(2 * heat).clamp(0, 1), (2 * heat - 1).clamp(0, 1), torch.zeros_like(heat)]
    )
    return (0.35 * image * (1 - heat) + colour).clamp(0, 1)


def save_png(image: Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()).save(path)


# -- applying --------------------------------------------------------------------------------------


class _Plan:
    """The options of `apply`, read and checked."""

    def __init__(
        self,
        task: Pose,
        size: Any = None,
        boxes: Any = None,
        capture: Any = None,
        how: How = "bicubic",
    ) -> None:
        if how not in ("bilinear", "area", "bicubic"):
            raise ValueError(f"how is bilinear, area or bicubic, not {how!r}")
        self.size = parse_size(size) if size else max(task.sizes, default=task.size)
        task.check_size(self.size)
        self.capture, self.how = parse_size(capture) if capture else None, how
        self.boxes = Path(boxes) if boxes else None


def parse_size(text: Any) -> Size:
    """ "256x192" (height x width), or a pair."""
    try:
        parts = text.lower().split("x") if isinstance(text, str) else text
        height, width = (int(p) for p in parts)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"a resolution is written HEIGHTxWIDTH, for example 256x192, not {text!r}"
        ) from e
    if min(height, width) < 1:
        raise ValueError(f"a resolution has at least one pixel a side, not {text!r}")
    return height, width

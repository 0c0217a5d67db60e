"""Pose: find the joints of a person. A network draws one heat map per joint; the peak is the joint
(`heatmaps.py`).

Loss: mean over batch, joints and pixels of the squared error; joints that are not visible or whose
Gaussian lies outside count zero. A map without a positive value has its joint nowhere: (-1, -1).
The flip test averages with the mirrored image's maps. RAF's text decodes by argmax, its code base
by dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlens.core.client import Batch, Output
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural, Positive
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.data.pose.people import ImageSize, People, Person, transform_joints
from fedlens.data.pose.skeletons import SKELETONS, UNIFORM_SIGMA, PoseFacts, find_skeleton
from fedlens.metrics.pose import coco_ap, distinct, pck, pckh
from fedlens.models.by_name import is_own, load_own, make_own
from fedlens.models.classification import published_weights
from fedlens.models.light_pose import LightPose
from fedlens.models.norms import Norm, with_norm
from fedlens.models.vitpose import SIZES, SimpleBaseline, ViTPose, arguments_of
from fedlens.tasks.heatmaps import decode_heatmaps, draw_targets
from fedlens.tasks.pose_drawing import as_image, draw_heat, draw_joints, enlarge_nearest


@dataclass
class Pose(LearningTask):
    """
    Args:
        joints: the skeleton, which also decides the metric (mpii: PCKh, lsp: PCK@0.2 of the torso,
            coco: AP; one's own: AP, and PCK@0.2 of the box): a name, or a table with joints (their
            names), flips, bones and sigmas; where nobody gives one, the data's.
        network: vit-nano, vit-tiny, vit-small, vitpose-s, vitpose-b, resnet-18 ... resnet-152,
            timm:NAME (a convolutional backbone with a light head) or module:Class, a network of
            your own that makes a heat map for each joint and gets joints and size where its
            constructor has them.
        patch: side of a patch, in pixels (`ViTPose`).
        positions: "conv" takes any input size, "absolute" is made for `size` (`ViTPose`).
        size: (height, width) of the input.
        drop_path: stochastic depth (`ViTPose`).
        norm: batch or group normalisation.
        stages: of the backbone that are used (`SimpleBaseline`, `LightPose`).
        targets: how heat maps are drawn, "udp" or "msra" (`tasks/heatmaps.py`).
        sigma: of a joint's Gaussian, in pixels of a map of height 64.
        scaled_sigma: whether sigma grows with the map's height.
        decode: how a joint is found in a map, "argmax", "quarter" or "dark".
        flip_test: average with the mirrored image's maps.
        sizes: resolutions (height, width) to evaluate at; the data's own if none.
        capture: test images have only this resolution and are interpolated to each of `sizes`.
        how: ways of that interpolation; each is evaluated.
        test_batch: people at a time.
        embed: how many people to show in an embedding of the features.
        init: weights to start from, such as a public checkpoint.
        pretrained: the same for other joints or another purpose (a path, hub:OWNER/NAME): the
            head's last layer may differ, and official ViTPose, MAE and DeiT files start a network
            with positions="conv" too; package:NAME is a file that an installed package carries.
    """

    joints: Literal["mpii", "lsp", "coco"] | dict[str, Any] = "lsp"
    network: str = "vit-tiny"
    patch: Count = 4
    positions: Literal["conv", "absolute"] = "conv"
    size: tuple[int, int] = (64, 48)
    drop_path: Fraction = 0.0
    norm: Norm = "batch"
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
    pretrained: bool | str = False

    def __post_init__(self) -> None:
        self.skeleton = find_skeleton(self.joints)
        self.own_network = is_own(self.network)
        ours = self.network in SIZES or self.network.startswith(("resnet-", "timm:"))
        if not ours and not self.own_network:
            raise ValueError(
                f"no network {self.network!r}: there are {', '.join(SIZES)} and resnet-18, -34,"
                " -50, -101, -152, timm:NAME or module:Class"
            )
        if self.own_network:
            self.multiple = int(getattr(load_own(self.network), "multiple", 1))
            return
        self.multiple = self.patch if self.network in SIZES else 4 * 2 ** (self.stages - 1)
        for size in (*self.sizes, *([self.size] if self.network in SIZES else [])):
            self.check_size(size)

    def check_size(self, size: ImageSize) -> None:
        if min(size) < self.multiple or any(side % self.multiple for side in size):
            raise ValueError(
                f"a resolution of {size[0]}x{size[1]} does not fit {self.network}, whose inputs are"
                f" multiples of {self.multiple}"
            )

    @classmethod
    def arguments_from_facts(cls, facts: Facts) -> dict[str, Any]:
        """The data's joints."""
        if not isinstance(facts, PoseFacts) or not facts.skeleton:
            return {}
        name = facts.skeleton["name"]
        known = name in SKELETONS and SKELETONS[name].table() == dict(facts.skeleton)
        return {"joints": name if known else dict(facts.skeleton)}

    @classmethod
    def arguments_from_weights(
        cls, weights: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The skeleton by its number of joints, and what a ViTPose is made of."""
        last = weights.get("keypoint_head.final_layer.weight")
        arguments: dict[str, Any] = {}
        if last is not None:
            known = {len(s.joints): name for name, s in SKELETONS.items()}
            numbered = {"joints": [f"joint_{k + 1}" for k in range(len(last))]}
            arguments["joints"] = known.get(len(last), numbered)
        shown = arguments_of(weights)
        other = given.get("network", shown.get("network")) != shown.get("network")
        return arguments if other else arguments | shown

    def fits(self, facts: Facts) -> None:
        if not isinstance(facts, PoseFacts) or not facts.skeleton:
            return
        held, ours = len(facts.skeleton["joints"]), len(self.skeleton.joints)
        if held != ours:
            raise ValueError(
                f"the data has {held} joints ({facts.skeleton['name']}), the skeleton"
                f" {self.skeleton.name!r} has {ours}: leave task.joints out, or set it"
            )

    def model(self) -> nn.Module:
        count = len(self.skeleton.joints)
        if self.own_network:
            return make_own(self.network, joints=count, size=self.size)
        if self.network in SIZES:
            net: nn.Module = ViTPose(
                self.network, count, self.patch, self.positions, self.size, self.drop_path
            )
        elif self.network.startswith("timm:"):
            net = LightPose(self.network.removeprefix("timm:"), count, self.stages)
        else:
            depth = int(self.network.removeprefix("resnet-"))
            net = SimpleBaseline(depth, count, self.stages)
        return with_norm(net, self.norm)

    def published(self) -> dict[str, Tensor]:
        if not self.network.startswith("timm:"):
            return super().published()
        return published_weights(self.network, 3, max(self.size))

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
                f"the data has {batch['y'].shape[1]} joints, the skeleton {self.skeleton.name!r}"
                f" has {len(self.skeleton.joints)}: set task.joints"
            )

    # -- prediction --------------------------------------------------------------------------------

    @torch.no_grad()
    def heatmaps(self, model: nn.Module, x: Tensor) -> Tensor:
        maps: Tensor = model(x)
        if not self.flip_test:
            return maps
        mirrored: Tensor = model(x.flip(-1)).flip(-1)[:, self.skeleton.mirror]
        if self.targets == "msra":
            # strides count from the left edge, so a mirrored map is one pixel off
            mirrored = torch.cat([mirrored[..., :1], mirrored[..., :-1]], -1)
        return (maps + mirrored) / 2

    def locate(self, maps: Tensor, size: ImageSize) -> tuple[Tensor, Tensor]:
        """Joints (N, J, 2) in pixels of an input of `size`, and the peaks' heights (N, J)."""
        points, peaks = decode_heatmaps(maps, self.decode, self.targets)
        h, w = maps.shape[-2:]
        if self.targets == "udp":
            step = torch.tensor([(size[1] - 1) / (w - 1), (size[0] - 1) / (h - 1)])
        else:
            step = torch.tensor([size[1] / w, size[0] / h])
        nowhere = (peaks <= 0)[..., None]
        return torch.where(nowhere, -1.0, points * step.to(points)), peaks

    def find(self, model: nn.Module, people: People) -> dict[str, NDArray[Any]]:
        """Joints of all people in image pixels, with what is needed to judge them."""
        place = next(model.parameters()).device
        columns: dict[str, list[Tensor]] = {}
        for batch in in_batches(people, self.test_batch, place):
            self._check(batch)
            points, peaks = self.locate(self.heatmaps(model, batch["x"]), people.size)
            found = {"predicted": transform_joints(batch["warp"], points), "peaks": peaks}
            for name, value in (
                *found.items(),
                *((k, batch[k]) for k in ("truth", "reference", "area", "image", "score")),
            ):
                columns.setdefault(name, []).append(value.cpu())
        return {name: torch.cat(values).numpy() for name, values in columns.items()}

    def evaluate(self, result: Any, data: People) -> dict[str, float]:
        sizes = self.sizes or (data.size,)
        found: dict[str, dict[str, float]] = {}
        for size in sizes:
            for how in self.how:
                name = f"{size[0]}x{size[1]}" + (f"_{how}" if len(self.how) > 1 else "")
                view = data.at(size, self.capture, how)
                found[name] = self.judge(self.find(result, view), view.annotated)
        headline = next(iter(next(iter(found.values()))))
        out = {headline: float(np.mean([f[headline] for f in found.values()]))}
        for name, metrics in found.items():
            out |= {f"{metric}_{name}": value for metric, value in metrics.items()}
        return out

    def references(self, start: Any, data: Any) -> dict[str, dict[str, float]]:
        """One pose for everybody: the mean of the test people's own, each in its box. No network
        is needed for it, and nobody without one could know it so well.
        """
        if not isinstance(data, People) or not len(data) or data.annotated:
            return {}
        columns: dict[str, list[Tensor]] = {}
        for batch in in_batches(data, self.test_batch):
            for name in ("y", "warp", "truth", "reference", "area", "image"):
                columns.setdefault(name, []).append(batch[name])
        found = {name: torch.cat(values) for name, values in columns.items()}
        joints, warp = found.pop("y"), found.pop("warp")
        seen = (joints[..., 2:] > 0).float()
        mean = (joints[..., :2] * seen).sum(0) / seen.sum(0).clamp(min=1)
        found["predicted"] = transform_joints(warp, mean.expand(len(warp), -1, -1))
        found["peaks"] = torch.ones(joints.shape[:2])
        return {"one pose for everybody": self.judge({k: v.numpy() for k, v in found.items()})}

    def judge(
        self, found: Mapping[str, NDArray[Any]], annotated: Sequence[Person] = ()
    ) -> dict[str, float]:
        """annotated: whom answers are held against where the boxes are a detector's."""
        if annotated:
            return self._judge_detected(found, annotated)
        truth, visible = found["truth"][..., :2], found["truth"][..., 2]
        if self.joints == "mpii":
            return pckh(found["predicted"], truth, visible, found["reference"])
        near = {"pck": pck(found["predicted"], truth, visible, found["reference"], 0.2)}
        if self.joints == "lsp":
            return near
        like = coco_ap(
            found["predicted"],
            found["peaks"].mean(1),
            truth,
            visible,
            found["area"],
            found["image"],
            self.skeleton.sigmas or (UNIFORM_SIGMA,) * len(self.skeleton.joints),
        )
        return like if self.joints == "coco" else like | near

    def _judge_detected(
        self, found: Mapping[str, NDArray[Any]], annotated: Sequence[Person]
    ) -> dict[str, float]:
        """AP as COCO's protocol has it: a pose's score is its box's times the mean of its joints
        above .2, and of poses that are almost the same the best counts.
        """
        sigmas = self.skeleton.sigmas or (UNIFORM_SIGMA,) * len(self.skeleton.joints)
        sure = found["peaks"] > 0.2
        joints = (found["peaks"] * sure).sum(1) / np.maximum(1, sure.sum(1))
        scores = joints * found["score"]
        kept = distinct(found["predicted"], scores, found["area"], found["image"], sigmas)
        truth = np.stack([p.joints for p in annotated])
        return coco_ap(
            found["predicted"][kept],
            scores[kept],
            truth[..., :2],
            truth[..., 2],
            np.array([p.area for p in annotated]),
            np.array([p.image_id for p in annotated]),
            sigmas,
            found["image"][kept],
        )

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
                image = enlarge_nearest(as_image(batch["x"][0]), max(sizes))
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

    def embedding(self, model: Any, data: People, sizes: Sequence[ImageSize]) -> Picture:
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
        """Joints of every image of a file or folder: keypoints.json (as COCO) and drawn overlays;
        of a film likewise, with a number for each person. Options: size (HxW; default the highest
        evaluated), boxes (a COCO-style JSON list or annotation file, or detections) or detector (a
        file of FastestDet's weights, or torchvision:NAME:PATH); without both a person is taken to
        fill its image; score (the lowest of a detection that counts), capture (HxW: pretend the
        camera has only this) and how (bilinear, area, bicubic). Photos are turned as their EXIF
        says, and joints and boxes count the pixels of the upright photo."""
        from fedlens.tasks.apply.keypoints import find_keypoints

        check_options(self, options, "size", "boxes", "capture", "how", "detector", "score")
        return find_keypoints(self, folder, source, target, options)

"""People: images with joints, cropped around one person at the resolution of whoever holds them.

A client's camera has a native resolution. So a person is first recorded: the box around it, with a margin for augmentation, is cut out
of the image and reduced (with antialiasing) until the box itself has the native size. Whatever comes later, rotation, scaling,
flipping, works on those pixels and on nothing finer.

A batch holds x (N, 3, H, W), ImageNet-normalised; y (N, J, 3), joints as (x, y, weight) in pixels of x; warp (N, 2, 3) from pixels of x
to pixels of the image; truth (N, J, 3), joints in the image; reference (N), the length PCK divides by; area (N); image and person (N),
numbers. Coordinates count pixel centres from 0.

Boxes: MPII's is a square of 200 * scale pixels, stretched to the input's shape, as its public code does (scale * 1.25, centre 15 *
scale lower, one-based); COCO's and LSP's is the annotated box or that of the joints, times 1.25, widened to the input's shape.
Augmentation as in public ViTPose code: flip 0.5; scale clip(N(1, 0.5), 0.5, 1.5); rotation clip(N(0, 40), +-80) degrees with
probability 0.6. Deviation: crops align pixel centres, UDP's warp aligns corner pixels; there and back is exact either way.
"""

from __future__ import annotations

import csv
import json
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.client import Batch, generator
from fedlens.data.source import DataError, Source
from fedlens.federation import Federation

Array = np.ndarray[Any, Any]
Size = tuple[int, int]
How = Literal["bilinear", "area", "bicubic"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Skeleton:
    """flips: pairs of joints that change places in a mirror. bones: what is drawn. sigmas: of COCO's similarity."""

    name: str
    joints: tuple[str, ...]
    flips: tuple[tuple[int, int], ...]
    bones: tuple[tuple[int, int], ...]
    sigmas: tuple[float, ...] = ()

    @property
    def mirror(self) -> list[int]:
        order = list(range(len(self.joints)))
        for a, b in self.flips:
            order[a], order[b] = b, a
        return order


SKELETONS = {
    "mpii": Skeleton(
        "mpii",
        ("right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle", "pelvis", "thorax", "upper_neck", "head_top",
         "right_wrist", "right_elbow", "right_shoulder", "left_shoulder", "left_elbow", "left_wrist"),
        ((0, 5), (1, 4), (2, 3), (10, 15), (11, 14), (12, 13)),
        ((0, 1), (1, 2), (2, 6), (6, 3), (3, 4), (4, 5), (6, 7), (7, 8), (8, 9), (10, 11), (11, 12), (12, 7), (7, 13), (13, 14), (14, 15)),
    ),
    "lsp": Skeleton(
        "lsp",
        ("right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle", "right_wrist", "right_elbow", "right_shoulder",
         "left_shoulder", "left_elbow", "left_wrist", "neck", "head_top"),
        ((0, 5), (1, 4), (2, 3), (6, 11), (7, 10), (8, 9)),
        ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (6, 7), (7, 8), (8, 12), (12, 9), (9, 10), (10, 11), (12, 13), (8, 2), (9, 3)),
    ),
    "coco": Skeleton(
        "coco",
        ("nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow", "right_elbow",
         "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle", "right_ankle"),
        ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, 14), (15, 16)),
        ((15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10),
         (0, 1), (0, 2), (1, 3), (2, 4)),
        (.026, .025, .025, .035, .035, .079, .079, .072, .072, .062, .062, .107, .107, .087, .087, .089, .089),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Person:
    """image: a file, or pixels (H, W, 3) uint8. joints: (J, 3) as x, y, visible. centre and box (width, height): what is cropped. All
    in image pixels."""

    image: Path | Array
    joints: Array
    centre: tuple[float, float]
    box: tuple[float, float]
    reference: float
    area: float = 0.0
    image_id: int = 0


@dataclass(frozen=True)
class Augment:
    flip: float = 0.5
    scale: float = 0.5
    rotation: float = 40.0
    rotate_often: float = 0.6


@dataclass(frozen=True)
class People:
    """size: (height, width) of x. capture: the resolution the camera has, if images are interpolated from it to `size` by `how` before
    use."""

    people: Sequence[Person]
    skeleton: Skeleton
    size: Size
    augment: Augment = Augment()
    capture: Size | None = None
    how: How = "bilinear"
    budget: int = 1 << 30  # bytes of recorded pixels kept in memory; beyond that images are read again
    _kept: dict[int, tuple[Array, Array]] = field(default_factory=dict, repr=False, compare=False)
    _views: dict[Any, People] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.people)

    def at(self, size: Size, capture: Size | None = None, how: How = "bilinear") -> People:
        """The same people seen at another resolution, or captured at one and interpolated to another."""
        if (size, capture, how) == (self.size, self.capture, self.how):
            return self
        key = (size, capture, how)
        if key not in self._views:  # kept, because a test set is looked at from the same resolutions again and again
            self._views[key] = replace(self, size=size, capture=capture, how=how, _kept={}, _views={})
        return self._views[key]

    def subset(self, index: Sequence[int]) -> People:
        return replace(self, people=[self.people[int(i)] for i in index], _kept={}, _views={})

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        chosen = [int(i) for i in index]
        recorded = [self._record(k) for k in chosen]
        canvas = torch.from_numpy(np.stack([pixels for pixels, _ in recorded])).permute(0, 3, 1, 2)
        to_image = torch.from_numpy(np.stack([m for _, m in recorded]))
        boxes = torch.tensor([self.people[k].box for k in chosen], dtype=torch.float64)
        to_canvas = self._view(boxes, rng)
        x = self._look(canvas, to_canvas, still=rng is None)
        warp = to_image @ to_canvas  # 3x3, pixels of x -> canvas -> image
        truth = torch.from_numpy(np.stack([self.people[k].joints for k in chosen])).float()
        if self.capture is not None:
            x = F.interpolate(x, size=self.size, mode=self.how, **({} if self.how == "area" else {"align_corners": False}))
            warp = warp @ _resized(self.size, self.capture)
        mirrored = torch.linalg.det(warp[:, :2, :2]) < 0
        y = transform(torch.linalg.inv(warp)[:, :2], truth.double())
        y = torch.where(mirrored[:, None, None], y[:, self.skeleton.mirror], y)
        mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
        return {
            "x": (x - mean) / std,
            "y": y.float(),
            "warp": warp[:, :2].float(),
            "truth": truth,
            "reference": torch.tensor([self.people[k].reference for k in chosen]),
            "area": torch.tensor([self.people[k].area for k in chosen]),
            "image": torch.tensor([self.people[k].image_id for k in chosen]),
            "person": torch.tensor(chosen),
        }

    # -- recording ---------------------------------------------------------------------------------------------------------------

    @property
    def _native(self) -> Size:
        return self.capture or self.size

    @property
    def _margin(self) -> Size:
        """Whole pixels, so that the plain view is a cut and not a resampling."""
        return self._native[0] // 4, self._native[1] // 4

    def _record(self, k: int) -> tuple[Array, Array]:
        """Pixels of the box with its margin, and the map (3x3) from them to the image."""
        if k in self._kept:
            return self._kept[k]
        (h, w), (mh, mw), person = self._native, self._margin, self.people[k]
        bw, bh = person.box[0] * (w + 2 * mw) / w, person.box[1] * (h + 2 * mh) / h
        left, top = round(person.centre[0] + 0.5 - bw / 2), round(person.centre[1] + 0.5 - bh / 2)
        right, bottom = max(left + 1, round(left + bw)), max(top + 1, round(top + bh))
        pixels = read_image(person.image).crop((left, top, right, bottom)).resize((w + 2 * mw, h + 2 * mh), 2)
        sx, sy = (right - left) / (w + 2 * mw), (bottom - top) / (h + 2 * mh)
        to_image = np.array([[sx, 0, sx / 2 - 0.5 + left], [0, sy, sy / 2 - 0.5 + top], [0, 0, 1]])
        kept = np.asarray(pixels), to_image
        if len(self) * kept[0].nbytes <= self.budget:
            self._kept[k] = kept
        return kept

    def _view(self, boxes: Tensor, rng: Generator | None) -> Tensor:
        """(N, 3, 3) from pixels of the crop to pixels of the canvas: turned, scaled and mirrored about the middle when training.
        A rotation happens in the image; where the box is stretched to the crop's shape, it is not one in the crop."""
        n, (h, w), (mh, mw) = len(boxes), self._native, self._margin
        a = torch.eye(2, dtype=torch.float64).expand(n, 2, 2).clone()
        if rng is not None:
            draw = torch.randn(n, 2, generator=rng, dtype=torch.float64)
            chance = torch.rand(n, 2, generator=rng, dtype=torch.float64)
            f = self.augment
            scale = (1 + f.scale * draw[:, 0]).clamp(1 - f.scale, 1 + f.scale)
            angle = (f.rotation * draw[:, 1]).clamp(-2 * f.rotation, 2 * f.rotation) * (chance[:, 0] < f.rotate_often)
            c, s = torch.cos(angle * math.pi / 180), torch.sin(angle * math.pi / 180)
            turn = torch.stack([c, -s, s, c], 1).view(n, 2, 2) * scale[:, None, None]
            turn[:, :, 0] *= torch.where(chance[:, 1] < f.flip, -1.0, 1.0)[:, None]
            stretch = boxes / torch.tensor([w, h])
            a = turn * stretch[:, None, :] / stretch[:, :, None]
        middle = torch.tensor([(w - 1) / 2, (h - 1) / 2], dtype=torch.float64)
        shift = middle + torch.tensor([mw, mh]) - a @ middle
        last = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(n, 1, 3)
        return torch.cat([torch.cat([a, shift[:, :, None]], 2), last], 1)

    def _look(self, canvas: Tensor, to_canvas: Tensor, still: bool) -> Tensor:
        (h, w), (mh, mw) = self._native, self._margin
        if still:
            return canvas[:, :, mh : mh + h, mw : mw + w].float() / 255
        rows, columns = torch.meshgrid(torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij")
        here = torch.stack([columns, rows, torch.ones_like(rows)]).reshape(3, -1)
        there = (to_canvas[:, :2] @ here).reshape(-1, 2, h, w).permute(0, 2, 3, 1)
        whole = torch.tensor([canvas.shape[3], canvas.shape[2]])
        grid = ((2 * there + 1) / whole - 1).float()
        return F.grid_sample(canvas.float() / 255, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def read_image(image: Path | Array) -> Any:
    from PIL import Image, UnidentifiedImageError

    if not isinstance(image, Path):
        return Image.fromarray(image)
    try:
        with Image.open(image) as file:
            return file.convert("RGB")
    except FileNotFoundError as e:
        raise DataError(f"no image at {image}") from e
    except (UnidentifiedImageError, OSError) as e:
        raise DataError(f"{image} is not an image that can be read") from e


def transform(warp: Tensor, joints: Tensor) -> Tensor:
    """(N, 2, 3) applied to the first two of (N, J, 2 or more); the rest is kept."""
    points = torch.einsum("nij,nkj->nki", warp[:, :, :2], joints[..., :2]) + warp[:, None, :, 2]
    return torch.cat([points, joints[..., 2:]], -1)


def _resized(size: Size, capture: Size) -> Tensor:
    """Pixels of the interpolated image -> pixels of the captured one, pixel centres kept."""
    ry, rx = capture[0] / size[0], capture[1] / size[1]
    return torch.tensor([[rx, 0, rx / 2 - 0.5], [0, ry, ry / 2 - 0.5], [0, 0, 1]], dtype=torch.float64)


def fit(box: tuple[float, float], size: Size, pad: float = 1.25) -> tuple[float, float]:
    """A box (width, height) widened to the shape of an input of `size`, then padded."""
    width, height = max(box[0], 1.0), max(box[1], 1.0)
    aspect = size[1] / size[0]
    if width > aspect * height:
        height = width / aspect
    else:
        width = height * aspect
    return width * pad, height * pad


def joints_box(joints: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """Centre and (width, height) of the visible joints."""
    seen = joints[joints[:, 2] > 0, :2]
    low, high = seen.min(0), seen.max(0)
    return (float(low[0] + high[0]) / 2, float(low[1] + high[1]) / 2), (float(high[0] - low[0]), float(high[1] - low[1]))


@dataclass
class PoseSource(Source):
    """sizes: (height, width) native to client 0, 1, ...; repeated if there are more clients. per_client: people each holds (all, shared
    alike, if not given). test_people: how many the server tests on. hold_out: the part of its people a client keeps for its own
    evaluation. flip, scale, rotation: augmentation."""

    sizes: tuple[tuple[int, int], ...] = ((64, 48), (48, 36), (32, 24))
    per_client: int | None = None
    test_people: int | None = None
    hold_out: float = 0.0
    flip: float = 0.5
    scale: float = 0.5
    rotation: float = 40.0

    skeleton_name = "lsp"

    @abstractmethod
    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        """Training and test people. What had to be left out or guessed goes into `notes`."""

    @property
    def skeleton(self) -> Skeleton:
        return SKELETONS[self.skeleton_name]

    @property
    def shape(self) -> Size:
        return self.sizes[0]

    def federation(self, clients: int, seed: int) -> Federation:
        self._check()
        notes: list[str] = []
        train, test = self.read(notes)
        test = test[: self.test_people]
        share = self.per_client or len(train) // clients
        if not train or share < 1 or share * clients > len(train):
            raise DataError(f"{clients} clients with {max(share, 1)} people each need more than the {len(train)} there are")
        order = torch.randperm(len(train), generator=generator(seed, 0x905E)).tolist()
        augment = Augment(self.flip, self.scale, self.rotation)
        own = [self.sizes[k % len(self.sizes)] for k in range(clients)]
        everyone = People(train, self.skeleton, self.shape, augment)
        parts = [everyone.subset(order[k * share : (k + 1) * share]).at(size) for k, size in enumerate(own)]
        kept = round(self.hold_out * share)
        held_out = [p.subset(range(kept)) for p in parts] if kept else ()
        facts = {"resolutions": [f"{h}x{w}" for h, w in own], "people": [share - kept] * clients, "notes": notes}
        whole = People(test, self.skeleton, max(own), augment) if test else None
        return Federation([p.subset(range(kept, share)) for p in parts], held_out, whole, facts)

    def _check(self) -> None:
        if not self.sizes or any(min(s) < 8 for s in self.sizes):
            raise DataError("sizes must name at least one resolution, and none below 8 pixels")
        aspects = [w / h for h, w in self.sizes]
        if max(aspects) > 1.05 * min(aspects):
            raise DataError("all sizes must have the same shape (3:4 in the paper): crops would otherwise show different things")
        if not 0 <= self.hold_out < 1:
            raise DataError("hold_out is a part of the people, from 0 to less than 1")


def keep_usable(people: Sequence[Person], notes: list[str]) -> list[Person]:
    """Without a visible joint there is nothing to learn from a person."""
    usable = [p for p in people if (p.joints[:, 2] > 0).any()]
    if left := len(people) - len(usable):
        notes.append(f"{left} people without a visible joint were left out")
    return usable


def inside(joints: Array, width: float, height: float) -> tuple[Array, int]:
    """Joints marked visible but lying outside the image become invisible; how many there were."""
    out = (joints[:, 2] > 0) & ((joints[:, 0] < 0) | (joints[:, 1] < 0) | (joints[:, 0] > width - 1) | (joints[:, 1] > height - 1))
    fixed = joints.copy()
    fixed[out, 2] = 0
    return fixed, int(out.sum())


def torso(joints: Array) -> float:
    """LSP's reference length: left shoulder to right hip."""
    return float(np.hypot(*(joints[9, :2] - joints[2, :2])))


@dataclass
class Lspet(PoseSource):
    """Leeds Sports Pose (Extended): `images/` and joints.csv (with a split) or joints.mat (every fifth person is then tested on).
    folder: default $FEDLENS_DATA/lspet or ../shared/data/lspet. PCK@0.2 of the torso."""

    folder: str = ""

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = _folder(self.folder, "lspet")
        rows = _lsp_csv(root) if (root / "joints.csv").is_file() else _lsp_mat(root)
        people: dict[bool, list[Person]] = {True: [], False: []}
        outside = 0
        for name, joints, size, tested in rows:
            joints, out = inside(joints, *size) if size else (joints, 0)
            outside += out
            if not (joints[:, 2] > 0).any():
                people[tested].append(Person(root / "images" / name, joints, (0, 0), (1, 1), 1))
                continue
            centre, box = joints_box(joints)
            people[tested].append(Person(root / "images" / name, joints, centre, fit(box, self.shape), torso(joints), box[0] * box[1]))
        if outside:
            notes.append(f"{outside} joints outside their image count as invisible")
        return keep_usable(people[False], notes), keep_usable(people[True], notes)


def _folder(given: str, name: str) -> Path:
    root = Path(given) if given else Path(os.environ.get("FEDLENS_DATA", Path("..") / "shared" / "data")) / name
    if not root.is_dir():
        raise DataError(f"no folder {root}: give the data's own with data.folder=...")
    return root


Row = tuple[str, Array, tuple[float, float] | None, bool]


def _lsp_csv(root: Path) -> list[Row]:
    names = SKELETONS["lsp"].joints
    rows: list[Row] = []
    with open(root / "joints.csv", newline="") as file:
        for row in csv.DictReader(file):
            try:
                joints = np.array([[float(row[f"{n}_{k}"]) for k in "xyv"] for n in names])
                rows.append((row["image"], joints, (float(row["width"]), float(row["height"])), row["split"] == "test"))
            except (KeyError, TypeError, ValueError) as e:
                raise DataError(f"{root / 'joints.csv'}, line {len(rows) + 2}: {e} is missing or not a number") from e
    return rows


def _lsp_mat(root: Path) -> list[Row]:
    if not (root / "joints.mat").is_file():
        raise DataError(f"neither joints.csv nor joints.mat in {root}")
    found = _mat(root / "joints.mat")["joints"]
    joints = found if found.shape[1] == 3 else found.transpose(1, 0, 2)  # LSP itself has (3, 14, N), LSPET (14, 3, N)
    files = sorted(p.name for p in (root / "images").glob("*.jpg"))
    if len(files) != joints.shape[2]:
        raise DataError(f"{len(files)} images in {root / 'images'}, but joints.mat knows {joints.shape[2]}")
    return [(name, joints[:, :, k].astype(float), None, k % 5 == 4) for k, name in enumerate(files)]


def _mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError as e:
        raise DataError('reading .mat files needs scipy: pip install "fedlens[pose]"') from e
    found: dict[str, Any] = loadmat(path)
    return found


@dataclass
class Mpii(PoseSource):
    """MPII human pose: images/ and, there or in annotations/, the usual JSON (image, center, scale, joints, joints_vis).
    mpii_gt_val.mat has the head boxes PCKh needs; without it the head segment of the joints takes their place, and that is said. train,
    val: file names."""

    folder: str = ""
    train: str = "mpii_train.json"
    val: str = "mpii_val.json"
    heads: str = "mpii_gt_val.mat"
    sizes: tuple[tuple[int, int], ...] = ((256, 192), (192, 144), (128, 96))

    skeleton_name = "mpii"

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = _folder(self.folder, "mpii")
        train = [self._person(root, entry, None) for entry in _json(root, self.train)]
        entries = _json(root, self.val)
        heads = self._heads(root, len(entries), notes)
        test = [self._person(root, entry, heads[k] if heads is not None else None) for k, entry in enumerate(entries)]
        return keep_usable(train, notes), keep_usable(test, notes)

    def _heads(self, root: Path, people: int, notes: list[str]) -> list[tuple[float, Array]] | None:
        path = _find(root, self.heads)
        if path is None:
            notes.append(f"{self.heads} is not there: PCKh divides by the head segment of the joints, not by the head box")
            return None
        found = _mat(path)
        boxes, missing = found["headboxes_src"], found["jnt_missing"]
        if boxes.shape[-1] != people:
            raise DataError(f"{path.name} has {boxes.shape[-1]} head boxes for the {people} people of {self.val}")
        return [(0.6 * float(np.linalg.norm(boxes[1, :, k] - boxes[0, :, k])), 1.0 - missing[:, k]) for k in range(people)]

    def _person(self, root: Path, entry: dict[str, Any], head: tuple[float, Array] | None) -> Person:
        scale, (x, y) = float(entry["scale"]), entry["center"]
        joints = np.zeros((16, 3))
        if "joints" in entry:
            joints[:, :2] = np.asarray(entry["joints"], float) - 1
            joints[:, 2] = np.asarray(entry["joints_vis"], float) > 0
        joints[(joints[:, :2] < 0).any(1), 2] = 0
        if head is not None:
            joints[:, 2] *= head[1]
        reference = head[0] if head is not None else float(np.hypot(*(joints[9, :2] - joints[8, :2])))
        side = 200 * scale * 1.25
        path = root / "images" / str(entry["image"])
        path = path if path.exists() else root / str(entry["image"])
        return Person(path, joints, (x - 1, y + 15 * scale - 1), (side, side), max(reference, 1e-6))


@dataclass
class CocoPose(PoseSource):
    """COCO keypoints: annotation files in the folder or its annotations/, images in train_images and val_images. Evaluated by OKS-AP on
    the annotated boxes."""

    folder: str = ""
    train: str = "person_keypoints_train2017.json"
    val: str = "person_keypoints_val2017.json"
    train_images: str = "train2017"
    val_images: str = "val2017"
    sizes: tuple[tuple[int, int], ...] = ((256, 192), (192, 144), (128, 96))

    skeleton_name = "coco"

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = _folder(self.folder, "coco")
        return self._people(root, self.train, self.train_images, notes), self._people(root, self.val, self.val_images, notes)

    def _people(self, root: Path, name: str, images: str, notes: list[str]) -> list[Person]:
        found = _json(root, name)
        files = {image["id"]: image for image in found["images"]}
        people, outside = [], 0
        for entry in found["annotations"]:
            if entry.get("iscrowd") or "keypoints" not in entry:
                continue
            image = files[entry["image_id"]]
            joints, out = inside(np.asarray(entry["keypoints"], float).reshape(-1, 3), image["width"], image["height"])
            outside += out
            left, top, width, height = entry["bbox"]
            centre = (left + (width - 1) / 2, top + (height - 1) / 2)
            path = root / images / image["file_name"]
            people.append(
                Person(path, joints, centre, fit((width, height), self.shape), max(width, height), float(entry["area"]), int(image["id"]))
            )
        if outside:
            notes.append(f"{name}: {outside} joints outside their image count as invisible")
        return keep_usable(people, notes)


def _find(root: Path, name: str) -> Path | None:
    return next((p for p in (root / name, root / "annotations" / name) if p.is_file()), None)


def _json(root: Path, name: str) -> Any:
    path = _find(root, name)
    if path is None:
        raise DataError(f"no {name} in {root} or {root / 'annotations'}")
    try:
        return json.loads(path.read_text())
    except ValueError as e:
        raise DataError(f"{path} is not JSON: {e}") from e


@dataclass
class StickFigures(PoseSource):
    """Articulated figures on textured ground, drawn from the seed: pose estimation without data on disk. Fourteen joints, as LSP.
    people: drawn for training."""

    people: int = 600
    tests: int = 100
    canvas: tuple[int, int] = (160, 120)

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        return [self.draw(k) for k in range(self.people)], [self.draw(k) for k in range(10**6, 10**6 + self.tests)]

    def draw(self, number: int) -> Person:
        from PIL import Image, ImageDraw

        rng = np.random.default_rng([0x571C, number])
        height, width = self.canvas
        coarse = rng.integers(30, 200, (max(2, height // 16), max(2, width // 16), 3), np.uint8)
        ground = np.asarray(Image.fromarray(coarse).resize((width, height), 3), float) + rng.normal(0, 12, (height, width, 3))
        image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
        joints = _articulate(rng, height, width)
        pen = ImageDraw.Draw(image)
        thick = max(2, round(0.035 * height))
        # Left is reddish and right bluish, so that the sides can be told apart at all.
        colours = {"l": (220, 70, 60), "r": (60, 90, 220), "m": (230, 220, 90)}
        for a, b in SKELETONS["lsp"].bones:
            sides = {SKELETONS["lsp"].joints[k][0] for k in (a, b)}
            colour = colours["l" if sides == {"l"} else "r" if sides == {"r"} else "m"]
            shade = tuple(int(c * rng.uniform(0.8, 1.1)) for c in colour)
            pen.line([*joints[a, :2], *joints[b, :2]], fill=tuple(min(255, s) for s in shade), width=thick)
        x, y = joints[13, :2]
        pen.ellipse([x - thick, y - thick, x + thick, y + thick], fill=(240, 200, 170))
        joints, _ = inside(joints, width, height)
        centre, box = joints_box(joints)
        return Person(np.asarray(image), joints, centre, fit(box, self.shape), torso(joints), box[0] * box[1], number)


def _articulate(rng: np.random.Generator, height: int, width: int) -> Array:
    """A tree of limbs from the hips outward, angles around standing upright."""
    unit = height * rng.uniform(0.8, 1.0)
    lean = rng.normal(0, 0.15)

    def go(start: Array, angle: float, length: float) -> Array:
        return start + unit * length * np.array([math.sin(angle), -math.cos(angle)])

    hips = np.array([width * rng.uniform(0.42, 0.58), height * rng.uniform(0.48, 0.56)])
    neck = go(hips, lean, 0.27)
    across = np.array([math.cos(lean), math.sin(lean)])
    joints = np.ones((14, 3))
    joints[12, :2], joints[13, :2] = neck, go(neck, lean + rng.normal(0, 0.2), 0.13)
    # Seen from the front: the figure's right is the picture's left.
    for side, hip, knee, ankle, wrist, elbow, shoulder in ((-1, 2, 1, 0, 6, 7, 8), (1, 3, 4, 5, 11, 10, 9)):
        joints[hip, :2] = hips + side * 0.055 * unit * across
        joints[shoulder, :2] = neck + side * 0.085 * unit * across
        thigh = math.pi - side * abs(rng.normal(0.15, 0.35))
        joints[knee, :2] = go(joints[hip, :2], thigh, 0.2)
        joints[ankle, :2] = go(joints[knee, :2], thigh + side * rng.normal(0.1, 0.3), 0.2)
        arm = math.pi - side * rng.uniform(0.1, 2.4)
        joints[elbow, :2] = go(joints[shoulder, :2], arm, 0.14)
        joints[wrist, :2] = go(joints[elbow, :2], arm - side * rng.uniform(-0.2, 1.6), 0.13)
    return joints

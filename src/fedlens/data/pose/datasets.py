"""Poses as they are published: LSP and LSPET, MPII (COCO: `coco.py`). Each becomes a list of
`Person`, shared among cameras of different resolution.

Boxes: MPII's is a square of 200 * scale pixels, stretched to the input's shape, as its public code
does (scale * 1.25, centre 15 * scale lower, one-based); COCO's and LSP's is the annotated box or
that of the joints, times 1.25, widened to the input's shape.
"""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.core.client import generator
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural, NotNegative, Share
from fedlens.data.paths import locate
from fedlens.data.pose.people import (
    ImageSize,
    People,
    Person,
    PoseAugmentation,
    fit_box,
    joints_box,
)
from fedlens.data.pose.skeletons import SKELETONS, PoseFacts, Skeleton
from fedlens.data.source import DataError, Source


@dataclass
class PoseSource(Source):
    """Abstract: people with joints, shared among cameras of different resolution. These arguments
    are those of every pose dataset.

    Args:
        sizes: (height, width) native to client 0, 1, ...; repeated if there are more clients.
        per_client: people each holds; all, shared alike, if not given.
        test_people: how many the server tests on.
        hold_out: the share of its people that a client keeps for its own evaluation.
        flip: chance that a training example is mirrored.
        scale: deviation of the random scale of training examples.
        rotation: deviation of their random rotation, in degrees.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 48), (48, 36), (32, 24))
    per_client: Count | None = None
    test_people: Natural | None = None
    hold_out: Fraction = 0.0
    flip: Share = 0.5
    scale: Fraction = 0.5
    rotation: NotNegative = 40.0

    skeleton_name = "lsp"
    # of the test images, where a detector's boxes are tested on
    annotated: ClassVar[Sequence[Person]] = ()

    @abstractmethod
    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        """Training and test people. What had to be left out or guessed goes into `notes`."""

    @property
    def skeleton(self) -> Skeleton:
        return SKELETONS[self.skeleton_name]

    @property
    def shape(self) -> ImageSize:
        return self.sizes[0]

    def federation(self, clients: int, seed: int) -> Federation:
        self._check()
        notes: list[str] = []
        train, test = self.read(notes)
        test = test[: self.test_people]
        share = self.per_client or len(train) // clients
        if not train or share < 1 or share * clients > len(train):
            raise DataError(
                f"{clients} clients with {max(share, 1)} people each need more than the"
                f" {len(train)} there are"
            )
        order = torch.randperm(len(train), generator=generator(seed, 0x905E)).tolist()
        augment = PoseAugmentation(self.flip, self.scale, self.rotation)
        own = [self.sizes[k % len(self.sizes)] for k in range(clients)]
        everyone = People(train, self.skeleton, self.shape, augment)
        parts = [
            everyone.subset(order[k * share : (k + 1) * share]).at(size)
            for k, size in enumerate(own)
        ]
        kept = round(self.hold_out * share)
        held_out = [p.subset(range(kept)) for p in parts] if kept else ()
        people = {"people": [share - kept] * clients}
        facts = PoseFacts(
            resolutions=tuple(own),
            notes=tuple(notes),
            details=people,
            skeleton=self.skeleton.table(),
        )
        whole = None
        if test:
            known = self.annotated
            whole = People(test, self.skeleton, max(own), augment, annotated=known)
        return Federation([p.subset(range(kept, share)) for p in parts], held_out, whole, facts)

    def _check(self) -> None:
        if not self.sizes or any(min(s) < 8 for s in self.sizes):
            raise DataError("sizes must name at least one resolution, and none below 8 pixels")
        aspects = [w / h for h, w in self.sizes]
        if max(aspects) > 1.05 * min(aspects):
            raise DataError(
                "all sizes must have the same shape (3:4 in the paper): crops would otherwise show"
                " different things"
            )


def keep_usable(people: Sequence[Person], notes: list[str]) -> list[Person]:
    """Without a visible joint there is nothing to learn from a person."""
    usable = [p for p in people if (p.joints[:, 2] > 0).any()]
    if left := len(people) - len(usable):
        notes.append(f"{left} people without a visible joint were left out")
    return usable


def hide_outside(joints: NDArray[Any], width: float, height: float) -> tuple[NDArray[Any], int]:
    """Joints marked visible but lying outside the image become invisible; how many there were."""
    out = (joints[:, 2] > 0) & (
        (joints[:, 0] < 0)
        | (joints[:, 1] < 0)
        | (joints[:, 0] > width - 1)
        | (joints[:, 1] > height - 1)
    )
    fixed = joints.copy()
    fixed[out, 2] = 0
    return fixed, int(out.sum())


def torso(joints: NDArray[Any]) -> float:
    """LSP's reference length: left shoulder to right hip."""
    return float(np.hypot(*(joints[9, :2] - joints[2, :2])))


@dataclass
class Lspet(PoseSource):
    """Leeds Sports Pose (Extended): `images/` and joints.csv (with a split) or joints.mat (every
    fifth person is then tested on). PCK@0.2 of the torso.

    Args:
        folder: where they lie.
    """

    folder: str = "lspet"

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = locate(self.folder, "folder of Lspet", "data.folder")
        rows = _lsp_csv(root) if (root / "joints.csv").is_file() else _lsp_mat(root)
        people: dict[bool, list[Person]] = {True: [], False: []}
        outside = 0
        for name, joints, size, tested in rows:
            joints, out = hide_outside(joints, *size) if size else (joints, 0)
            outside += out
            if not (joints[:, 2] > 0).any():
                people[tested].append(Person(root / "images" / name, joints, (0, 0), (1, 1), 1))
                continue
            centre, box = joints_box(joints)
            people[tested].append(
                Person(
                    root / "images" / name,
                    joints,
                    centre,
                    fit_box(box, self.shape),
                    torso(joints),
                    box[0] * box[1],
                )
            )
        if outside:
            notes.append(f"{outside} joints outside their image count as invisible")
        return keep_usable(people[False], notes), keep_usable(people[True], notes)


AnnotationRow = tuple[str, NDArray[Any], tuple[float, float] | None, bool]


def _lsp_csv(root: Path) -> list[AnnotationRow]:
    names = SKELETONS["lsp"].joints
    rows: list[AnnotationRow] = []
    with open(root / "joints.csv", newline="") as file:
        for row in csv.DictReader(file):
            try:
                joints = np.array([[float(row[f"{n}_{k}"]) for k in "xyv"] for n in names])
                rows.append(
                    (
                        row["image"],
                        joints,
                        (float(row["width"]), float(row["height"])),
                        row["split"] == "test",
                    )
                )
            except (KeyError, TypeError, ValueError) as e:
                raise DataError(
                    f"{root / 'joints.csv'}, line {len(rows) + 2}: {e} is missing or not a number"
                ) from e
    return rows


def _lsp_mat(root: Path) -> list[AnnotationRow]:
    if not (root / "joints.mat").is_file():
        raise DataError(f"neither joints.csv nor joints.mat in {root}")
    found = _mat(root / "joints.mat")["joints"]
    # LSP itself has (3, 14, N), LSPET (14, 3, N)
    joints = found if found.shape[1] == 3 else found.transpose(1, 0, 2)
    files = sorted(p.name for p in (root / "images").glob("*.jpg"))
    if len(files) != joints.shape[2]:
        raise DataError(
            f"{len(files)} images in {root / 'images'}, but joints.mat knows {joints.shape[2]}"
        )
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
    """MPII human pose: images/ and, there or in annotations/, the usual JSON (image, center, scale,
    joints, joints_vis).

    Args:
        folder: where they lie.
        train: name of the file of training annotations.
        val: name of the file of test annotations.
        heads: the .mat file with the head boxes that PCKh needs; without it the head segment of the
            joints takes their place, and a note says so.
        sizes: (height, width) native to client 0, 1, ...; repeated if there are more clients.
    """

    folder: str = "mpii"
    train: str = "mpii_train.json"
    val: str = "mpii_val.json"
    heads: str = "mpii_gt_val.mat"
    sizes: tuple[tuple[int, int], ...] = ((256, 192), (192, 144), (128, 96))

    skeleton_name = "mpii"

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = locate(self.folder, "folder of Mpii", "data.folder")
        train = self._people(root, self.train, None)
        heads = self._heads(root, len(find_annotations(root, self.val)), notes)
        return keep_usable(train, notes), keep_usable(self._people(root, self.val, heads), notes)

    def _people(
        self, root: Path, name: str, heads: list[tuple[float, NDArray[Any]]] | None
    ) -> list[Person]:
        people = []
        for k, entry in enumerate(find_annotations(root, name)):
            with naming(root, name, f"entry {k}"):
                people.append(self._person(root, entry, heads[k] if heads is not None else None))
        return people

    def _heads(
        self, root: Path, people: int, notes: list[str]
    ) -> list[tuple[float, NDArray[Any]]] | None:
        path = _find(root, self.heads)
        if path is None:
            notes.append(
                f"{self.heads} is not there: PCKh divides by the head segment of the joints, not by"
                " the head box"
            )
            return None
        found = _mat(path)
        boxes, missing = found["headboxes_src"], found["jnt_missing"]
        if boxes.shape[-1] != people:
            raise DataError(
                f"{path.name} has {boxes.shape[-1]} head boxes for the {people} people of"
                f" {self.val}"
            )
        return [
            (0.6 * float(np.linalg.norm(boxes[1, :, k] - boxes[0, :, k])), 1.0 - missing[:, k])
            for k in range(people)
        ]

    def _person(
        self, root: Path, entry: dict[str, Any], head: tuple[float, NDArray[Any]] | None
    ) -> Person:
        scale, (x, y) = float(entry["scale"]), entry["center"]
        joints = np.zeros((16, 3))
        if "joints" in entry:
            joints[:, :2] = np.asarray(entry["joints"], float) - 1
            joints[:, 2] = np.asarray(entry["joints_vis"], float) > 0
        joints[(joints[:, :2] < 0).any(1), 2] = 0
        if head is not None:
            joints[:, 2] *= head[1]
        reference = (
            head[0] if head is not None else float(np.hypot(*(joints[9, :2] - joints[8, :2])))
        )
        side = 200 * scale * 1.25
        path = root / "images" / str(entry["image"])
        path = path if path.exists() else root / str(entry["image"])
        return Person(path, joints, (x - 1, y + 15 * scale - 1), (side, side), max(reference, 1e-6))


@contextmanager
def naming(root: Path, name: str, entry: str) -> Iterator[None]:
    """What is wrong with an entry of somebody's file is said with its name and place."""
    try:
        yield
    except KeyError as e:
        raise DataError(f"{_find(root, name)}, {entry}: {e} is missing") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise DataError(f"{_find(root, name)}, {entry}: {e}") from e


def _find(root: Path, name: str) -> Path | None:
    return next((p for p in (root / name, root / "annotations" / name) if p.is_file()), None)


def find_annotations(root: Path, name: str) -> Any:
    """A JSON file of the folder, or of its annotations/."""
    path = _find(root, name)
    if path is None:
        raise DataError(f"no {name} in {root} or {root / 'annotations'}")
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path} is not JSON: {e}") from e

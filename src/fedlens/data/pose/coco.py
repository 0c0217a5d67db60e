"""Keypoints in COCO's format, published or one's own: people, hands, animals, faces, parts.

Joints, bones, partners and sigmas come from the file's category. What an entry lacks is made up for
where that is harmless (a box around the joints, an area from the box, the size of an image from its
file), otherwise the entry is left out; either is counted, with the first entry as an example. What
makes the whole file useless is one message.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.limits import Share
from fedlens.data.images.reading import opened
from fedlens.data.paths import locate
from fedlens.data.pose.datasets import PoseSource, find_annotations, hide_outside, keep_usable
from fedlens.data.pose.people import Person, fit_box, joints_box
from fedlens.data.pose.skeletons import (
    SKELETONS,
    UNIFORM_SIGMA,
    Skeleton,
    check_sigmas,
    find_skeleton,
)
from fedlens.data.source import DataError

SizedBox = tuple[float, float, float, float]  # left, top, width, height
_NAMES = ("file_name", "image", "image_path", "path")  # as tools call an image's file


@dataclass
class CocoPose(PoseSource):
    """Keypoints in COCO's format. A bare list of annotations that name their image will do as well.
    Judged by OKS-AP on the annotated boxes.

    Args:
        folder: where annotations (there or in annotations/) and images lie.
        train: name of the file of training annotations.
        val: name of the file of test annotations; "" tests on nothing.
        train_images: folder of the training images, where the file does not say.
        val_images: folder of the test images, where the file does not say.
        sizes: (height, width) native to client 0, 1, ...; repeated if there are more clients.
        category: its name or id, where the file has keypoints of several.
        flips: pairs of names that change places in a mirror, unless left and right in the names say
            it.
        sigmas: one a joint, for the similarity; without any those of the file, of COCO's seventeen,
            or .05 for all.
        boxes: a file of detections (test_coco_det_*.json), to test on them in place of the
            annotated boxes.
        least_score: detections with a lower score are left out.
    """

    folder: str = "coco"
    train: str = "person_keypoints_train2017.json"
    val: str = "person_keypoints_val2017.json"
    train_images: str = "train2017"
    val_images: str = "val2017"
    sizes: tuple[tuple[int, int], ...] = ((256, 192), (192, 144), (128, 96))
    category: str = ""
    flips: tuple[tuple[str, str], ...] = ()
    sigmas: tuple[float, ...] = ()
    boxes: str = ""
    least_score: Share = 0.0
    found: Skeleton | None = field(default=None, init=False, repr=False)

    @property
    def skeleton(self) -> Skeleton:
        return self.found or SKELETONS["coco"]

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        root = locate(self.folder, "folder of CocoPose", "data.folder")
        if self.boxes and self.test_people is not None:
            raise DataError("data.boxes are tested on as a whole: leave data.test_people out")
        parts: list[list[Person]] = []
        known: Skeleton | None = None
        for name, images in ((self.train, self.train_images), (self.val, self.val_images)):
            if not name:
                parts.append([])
                continue
            file = CocoFile.open(root, name, images, self.category)
            if known is None:
                self.found = known = self._skeleton(file, notes)
            elif len(file.skeleton.joints) != len(known.joints):
                raise DataError(
                    f"{name} has {len(file.skeleton.joints)} joints a person, {self.train} has"
                    f" {len(known.joints)}"
                )
            parts.append(keep_usable(file.people(self.shape, known), notes))
            if self.boxes and name == self.val and len(parts) == 2:
                self.annotated = parts[1]  # type: ignore[misc]
                parts[1] = self._detected(root, file)
            notes += file.tally.notes()
        return parts[0], parts[1]

    def _detected(self, root: Path, file: CocoFile) -> list[Person]:
        """People as a detector saw them, without joints."""
        entries = find_annotations(root, self.boxes)
        if not isinstance(entries, list):
            raise DataError(
                f"{self.boxes} is no list of detections (image_id, bbox, score, category_id)"
            )
        found = file.detected(entries, self.boxes, self.shape, self.least_score)
        if not found:
            raise DataError(f"{self.boxes} has no box of anybody in the images of {file.name}")
        return found

    def _skeleton(self, file: CocoFile, notes: list[str]) -> Skeleton:
        """As the file has it, with what the recipe says in its place; and what was assumed."""
        found = file.skeleton
        count = len(found.joints)
        try:
            sigmas = check_sigmas(self.sigmas, count) or found.sigmas
            flips = _named_pairs(self.flips, found.joints) or found.flips
        except ValueError as e:
            raise DataError(f"data.{e}") from e
        if not sigmas:
            sigmas = (UNIFORM_SIGMA,) * count
            notes.append(
                f"{file.name} has no sigmas: the similarity takes {UNIFORM_SIGMA} for all {count}"
                " joints (data.sigmas sets them)"
            )
        if not flips and count > 1 and self.flip:
            notes.append(
                f"no two of the {count} joints of {file.name} are each other's left and right: in a"
                " mirror all keep their names (data.flips names pairs; data.flip=0 and"
                " task.flip_test=false mirror nothing)"
            )
        return replace(found, flips=flips, sigmas=sigmas)


def _named_pairs(
    pairs: Sequence[tuple[str, str]], joints: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    for name in (n for pair in pairs for n in pair):
        if name not in joints:
            raise ValueError(f"flips: no joint is called {name!r}; there are {', '.join(joints)}")
    return tuple((joints.index(a), joints.index(b)) for a, b in pairs)


class Tally:
    """What was left out or made up for in a file: how often, and where first."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.first = name, Counter[str](), dict[str, str]()

    def add(self, what: str, entry: str, times: int = 1) -> None:
        if times:
            self.count[what] += times
            self.first.setdefault(what, entry)

    def notes(self) -> list[str]:
        return [
            f"{self.name}: {n} {what} (first: {self.first[what]})" for what, n in self.count.items()
        ]


class CocoFile:
    """An annotation file: its skeleton, and its people."""

    def __init__(self, name: str, found: Any, folder: Path, category: str = "") -> None:
        self.name, self.folder, self.tally = name, folder, Tally(name)
        self.entries, images, categories = self._tables(found)
        self.images = self._images(images)
        self.category = self._choose(categories, category)
        self.skeleton = self._read_skeleton()

    @classmethod
    def open(cls, root: Path, name: str, images: str, category: str = "") -> CocoFile:
        return cls(name, find_annotations(root, name), root / images, category)

    # -- the tables --------------------------------------------------------------------------------

    def _tables(self, found: Any) -> tuple[list[Any], list[Any], list[Any]]:
        if isinstance(found, list):
            found = {"annotations": found}
        if not isinstance(found, dict) or not isinstance(found.get("annotations"), list):
            raise DataError(
                f"{self.name} is neither COCO's (images, annotations, categories) nor a list of"
                " annotations"
            )
        tables = [found.get(key) or [] for key in ("annotations", "images", "categories")]
        for key, table in zip(("annotations", "images", "categories"), tables, strict=True):
            if not isinstance(table, list):
                raise DataError(f"{self.name}: {key} is no list")
        annotations, images, categories = tables
        if not any(isinstance(e, dict) and "keypoints" in e for e in annotations):
            raise DataError(
                f"{self.name} has no keypoints in its {len(annotations)} annotations: boxes alone"
                " are for `fedlens apply RUN PHOTOS OUTPUT boxes=FILE`"
            )
        return annotations, images, categories

    def _images(self, images: Sequence[Any]) -> dict[Any, dict[str, Any]]:
        found: dict[Any, dict[str, Any]] = {}
        for k, image in enumerate(images):
            named = isinstance(image, dict) and _file_name(image)
            if not named or not isinstance(image.get("id"), int | str):
                self.tally.add("images without an id or a file name were left out", f"images[{k}]")
                continue
            found[image["id"]] = image
        return found

    def _choose(self, categories: Sequence[Any], wanted: str) -> dict[str, Any]:
        """The category whose keypoints are meant."""
        listed = [c for c in categories if isinstance(c, dict)]
        used = {
            str(e.get("category_id"))
            for e in self.entries
            if isinstance(e, dict) and e.get("keypoints")
        }
        able = [c for c in listed if c.get("keypoints") or str(c.get("id")) in used]
        if wanted:
            able = [c for c in listed if wanted in (str(c.get("name")), str(c.get("id")))]
            if not able:
                names = ", ".join(str(c.get("name", c.get("id"))) for c in listed) or "none"
                raise DataError(f"{self.name} has no category {wanted!r}: there is {names}")
        if len(able) > 1:
            names = ", ".join(str(c.get("name", c.get("id"))) for c in able)
            raise DataError(
                f"{self.name} has keypoints of several categories: set data.category to one of"
                f" {names}"
            )
        return able[0] if able else {}

    def _read_skeleton(self) -> Skeleton:
        category, where = self.category, f"{self.name}, category {self.category.get('name', '')!r}"
        names = category.get("keypoints")
        if not isinstance(names, list) or not names:
            count = self._usual_count()
            if count == 17:
                self.tally.add("joints are taken for COCO's: no category names them", "17", 17)
                return SKELETONS["coco"]
            names = [f"joint_{k + 1}" for k in range(count)]
        same = tuple(names) == SKELETONS["coco"].joints
        if same and not category.get("sigmas"):
            return SKELETONS["coco"]
        table: dict[str, Any] = {
            "name": str(category.get("name", "own")),
            "joints": [str(n) for n in names],
        }
        table["bones"] = self._from_one(category.get("skeleton") or [], where)
        if category.get("flip_pairs"):
            table["flips"] = self._from_one(category["flip_pairs"], where)
        table["sigmas"] = category.get("sigmas") or []
        try:
            return find_skeleton(table)
        except (TypeError, ValueError) as e:
            raise DataError(f"{where}: {e}") from e

    def _from_one(self, pairs: Any, where: str) -> list[list[int]]:
        """COCO counts joints from 1; files with a 0 count from 0."""
        try:
            found = [[int(k) for k in pair] for pair in pairs]
        except (TypeError, ValueError) as e:
            raise DataError(f"{where}: the skeleton is a list of pairs of joints") from e
        lowest = min((k for pair in found for k in pair), default=1)
        return [[k - (1 if lowest else 0) for k in pair] for pair in found]

    def _usual_count(self) -> int:
        sizes = Counter(
            len(e["keypoints"]) // 3
            for e in self.entries
            if isinstance(e, dict) and isinstance(e.get("keypoints"), list)
        )
        usual = sizes.most_common(1)[0][0] if sizes else 0
        if usual < 1:
            raise DataError(
                f"{self.name}: keypoints are lists of x, y and visibility of each joint"
            )
        return usual

    # -- people ------------------------------------------------------------------------------------

    def people(self, shape: tuple[int, int], skeleton: Skeleton) -> list[Person]:
        found = []
        numbers = self._image_numbers()
        sizes: dict[Path, tuple[float, float] | None] = {}
        for k, entry in enumerate(self.entries):
            where = f"annotations[{k}]"
            if not isinstance(entry, dict):
                self.tally.add("annotations that are no tables were left out", where)
                continue
            where += f", id {entry['id']}" if isinstance(entry.get("id"), int | str) else ""
            if entry.get("iscrowd") or not self._is_of_category(entry):
                continue
            person = self._person(entry, where, len(skeleton.joints), shape, numbers, sizes)
            if person is not None:
                found.append(person)
        if not found:
            why = "; ".join(self.tally.notes()) or "all are crowds or of other categories"
            raise DataError(
                f"none of the {len(self.entries)} annotations of {self.name} can be used: {why}"
            )
        return found

    def detected(
        self, entries: Sequence[Any], name: str, shape: tuple[int, int], least: float
    ) -> list[Person]:
        """Detections in our images; `name` is their file's."""
        numbers, found = self._image_numbers(), []
        nothing = np.zeros((len(self.skeleton.joints), 3))
        for k, entry in enumerate(entries):
            where = f"{name}[{k}]"
            table = entry if isinstance(entry, dict) else {}
            wanted, score = table.get("image_id"), table.get("score")
            image = self.images.get(wanted) if isinstance(wanted, int | str) else None
            box = _box(table.get("bbox"))
            sure = _number(score)
            if image is None or box is None or sure is None:
                self.tally.add("detections without an image, a box or a score were left out", where)
                continue
            path = self._place(_file_name(image))
            if sure < least or not self._is_of_category(table) or not path.is_file():
                continue
            left, top, width, height = box
            centre = (left + (width - 1) / 2, top + (height - 1) / 2)
            crop, reference = fit_box((width, height), shape), max(width, height)
            area, number = width * height, numbers[wanted]
            found.append(Person(path, nothing, centre, crop, reference, area, number, score=sure))
        return found

    def _is_of_category(self, entry: Mapping[str, Any]) -> bool:
        ours = self.category.get("id")
        return ours is None or entry.get("category_id", ours) == ours

    def _image_numbers(self) -> dict[Any, int]:
        """Ids as they are where all are numbers; AP groups people by them."""
        if all(isinstance(i, int) for i in self.images):
            return {i: int(i) for i in self.images}
        return {i: k for k, i in enumerate(self.images)}

    def _person(
        self,
        entry: Mapping[str, Any],
        where: str,
        count: int,
        shape: tuple[int, int],
        numbers: dict[Any, int],
        sizes: dict[Path, tuple[float, float] | None],
    ) -> Person | None:
        image = self._image_of(entry, where)
        joints = self._joints(entry.get("keypoints"), count, where)
        if image is None or joints is None:
            return None
        path = self._place(_file_name(image))
        if path not in sizes:
            sizes[path] = _size(image, path)
        size = sizes[path]
        if size is None:
            self.tally.add("people whose image is missing or broken were left out", path.name)
            return None
        joints, out = hide_outside(joints, *size)
        self.tally.add("joints outside their image count as invisible", where, out)
        box = _box(entry.get("bbox"))
        if box is None:
            if not (joints[:, 2] > 0).any():
                return Person(path, joints, (0, 0), (1, 1), 1)  # left out and counted later
            self.tally.add("people without a box have the one around their joints", where)
            (x, y), (w, h) = joints_box(joints)
            if max(w, h) < 1:
                self.tally.add("people with neither a box nor two joints were left out", where)
                return None
            box = (x - (w - 1) / 2, y - (h - 1) / 2, max(w, 1.0), max(h, 1.0))
        left, top, width, height = box
        area = _number(entry.get("area"))
        if area is None:
            self.tally.add("people without an area have that of their box", where)
            area = width * height
        key = image.get("id", str(path))
        return Person(
            path,
            joints,
            (left + (width - 1) / 2, top + (height - 1) / 2),
            fit_box((width, height), shape),
            max(width, height),
            area,
            numbers.setdefault(key, 1 + max(numbers.values(), default=-1)),
        )

    def _image_of(self, entry: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
        wanted = entry.get("image_id")
        known = self.images.get(wanted) if isinstance(wanted, int | str) else None
        if known is not None:
            return known
        if _file_name(entry):  # an annotation that names its image itself
            return {k: v for k, v in entry.items() if k in (*_NAMES, "width", "height")}
        self.tally.add("people in images that the file does not list were left out", where)
        return None

    def _joints(self, value: Any, count: int, where: str) -> NDArray[Any] | None:
        try:
            flat = np.asarray(value, float).ravel() if isinstance(value, list) else np.zeros(0)
        except (TypeError, ValueError):
            flat = np.zeros(0)
        if flat.size == 2 * count:  # x and y alone: all are there
            flat = np.c_[flat.reshape(count, 2), np.ones(count)].ravel()
        if flat.size != 3 * count:
            self.tally.add(
                f"people whose keypoints are not {count} times x, y and visibility were left out",
                where,
            )
            return None
        joints = flat.reshape(count, 3).copy()
        broken = ~np.isfinite(joints).all(1)
        joints[broken] = 0
        self.tally.add(
            "joints without finite coordinates count as invisible", where, int(broken.sum())
        )
        return joints

    def _place(self, name: str) -> Path:
        """In the folder of images, or where the annotation file lies, or the path itself."""
        inside = self.folder / name
        return inside if inside.exists() else self.folder.parent / name


def _file_name(table: Mapping[str, Any]) -> str:
    return next((str(table[k]) for k in _NAMES if isinstance(table.get(k), str) and table[k]), "")


def _number(value: Any) -> float | None:
    """Positive and finite, or nothing."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and math.isfinite(value) and value > 0 else None


def _box(value: Any) -> SizedBox | None:
    if not isinstance(value, list) or len(value) != 4:
        return None
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        return None
    left, top, width, height = (float(v) for v in value)
    return (left, top, width, height) if width > 0 and height > 0 else None


def _size(image: Mapping[str, Any], path: Path) -> tuple[float, float] | None:
    """Width and height, as they are written or as the file has them; none without a file."""
    if not path.is_file():
        return None
    width, height = _number(image.get("width")), _number(image.get("height"))
    if width is not None and height is not None:
        return width, height
    try:
        with opened(path) as picture:
            return float(picture.size[0]), float(picture.size[1])
    except (OSError, ValueError):
        return None

"""A trained pose network on a user's photos: boxes around the people in them, and what is written
about them (as COCO).

Photos are upright (as their EXIF says), and boxes and joints count the pixels of the upright photo.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.core.weights import load_weights, result_file
from fedlens.data.paths import images_at
from fedlens.data.pose.people import How, ImageSize, People, Person, fit_box, open_image
from fedlens.data.pose.skeletons import Skeleton
from fedlens.data.source import DataError
from fedlens.tasks.pose_drawing import draw_joints, save_png

if TYPE_CHECKING:
    from fedlens.tasks.pose import Pose

BOXES_FORMAT = (
    '[{"file_name": "a.jpg", "bbox": [left, top, width, height]}, ...] or the annotations of COCO'
    " are needed"
)
PersonBox = tuple[float, float, float, float]  # left, top, width, height


def find_keypoints(
    task: Pose, folder: Path, source: Path, target: Path, options: Mapping[str, Any]
) -> str:
    """folder: of the run, or a file of weights. target: a folder for keypoints.json and one overlay
    per photo."""
    plan = KeypointOptions(task, **options)
    photos, unread = read_photos(source)
    found = find_people(photos, plan.boxes)
    model = load_weights(task.model(), result_file(folder)).eval()
    people = [f.person(photos, len(task.skeleton.joints), plan.size) for f in found]
    made = task.find(
        model, People(people, task.skeleton, plan.size, capture=plan.capture, how=plan.how)
    )
    target.mkdir(parents=True, exist_ok=True)
    written = as_coco(made["predicted"], made["peaks"], found, photos, task.skeleton)
    (target / "keypoints.json").write_text(json.dumps(written, indent=1))
    for number, (photo, name) in enumerate(zip(photos, overlay_names(photos), strict=True)):
        own = [made["predicted"][k] for k, f in enumerate(found) if f.photo == number]
        write_overlay(photo.file, own, task.skeleton, target / name)
    left = f", {len(unread)} could not be read ({unread[0]})" if unread else ""
    return (
        f"{len(people)} people in {len(photos)} images{left}: {target / 'keypoints.json'} and"
        " one overlay each"
    )


class KeypointOptions:
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


def parse_size(text: Any) -> ImageSize:
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


@dataclass(frozen=True)
class Photo:
    """name: its path below the folder that was asked for. size: (width, height)."""

    file: Path
    name: str
    size: tuple[int, int]


@dataclass(frozen=True)
class PersonInPhoto:
    """Somebody to look at: the box around the person, in which photo."""

    photo: int
    box: PersonBox
    pad: float

    def person(self, photos: Sequence[Photo], joints: int, size: ImageSize) -> Person:
        left, top, w, h = self.box
        centre = (left + (w - 1) / 2, top + (h - 1) / 2)
        crop = fit_box((w, h), size, self.pad)
        return Person(
            photos[self.photo].file,
            np.zeros((joints, 3)),
            centre,
            crop,
            1.0,
            w * h,
            self.photo,
            upright=True,
        )


def read_photos(source: Path) -> tuple[list[Photo], list[str]]:
    """Those that can be read, and the names of the others. They are decoded once for that: a header
    promises much.
    """
    root = source if source.is_dir() else source.parent
    photos, unread, files = [], [], images_at(source)
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            photos.append(Photo(file, name, open_image(file, upright=True).size))
        except DataError:
            unread.append(name)
    if not photos:
        raise ValueError(f"none of the {len(files)} images at {source} can be read ({unread[0]})")
    return photos, unread


def overlay_names(photos: Sequence[Photo]) -> list[str]:
    """a/1-pose.png for a/1.jpg. Where two photos differ in the suffix alone, all keep theirs:
    a/1.jpg-pose.png.
    """
    short = [PurePosixPath(p.name).with_suffix("").as_posix() for p in photos]
    kept = short if len({*short}) == len(short) else [p.name for p in photos]
    return [f"{name}-pose.png" for name in kept]


# -- boxes -----------------------------------------------------------------------------------------


def find_people(photos: Sequence[Photo], boxes: Path | None) -> list[PersonInPhoto]:
    """By the boxes of a file; without one a person is taken to fill its photo."""
    if boxes is None:
        return [
            PersonInPhoto(k, (0.0, 0.0, float(p.size[0]), float(p.size[1])), 1.0)
            for k, p in enumerate(photos)
        ]
    given = match_boxes(photos, read_boxes(boxes), boxes)
    for photo, own in zip(photos, given, strict=True):
        for box in own:
            check_box(box, photo, boxes)
    found = [PersonInPhoto(k, box, 1.25) for k, own in enumerate(given) for box in own]
    if not found:
        raise ValueError(f"{boxes} has no box for any of the images")
    return found


def read_boxes(path: Path) -> dict[str, list[PersonBox]]:
    """Name, as it is written there -> boxes."""
    try:
        found = json.loads(path.read_text())
        entries = found["annotations"] if isinstance(found, dict) else found
        files = (
            {i["id"]: i["file_name"] for i in found["images"]} if isinstance(found, dict) else {}
        )
        out: dict[str, list[PersonBox]] = {}
        for entry in entries:
            name = entry["file_name"] if "file_name" in entry else files[entry["image_id"]]
            out.setdefault(PurePosixPath(name).as_posix(), []).append(as_box(entry["bbox"]))
        return out
    except OSError as e:
        raise ValueError(f"the boxes at {path} cannot be read: {e.strerror or e}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a list of boxes: {BOXES_FORMAT}") from e


def as_box(value: Any) -> PersonBox:
    if not isinstance(value, list):  # a text of four digits could be taken apart as well
        raise TypeError(value)
    left, top, width, height = (float(v) for v in value)
    return left, top, width, height


def match_boxes(
    photos: Sequence[Photo], known: Mapping[str, list[PersonBox]], path: Path
) -> list[list[PersonBox]]:
    """The boxes of each photo: those under its path, otherwise those under its bare name, if that
    can mean only one.
    """
    paths, count = {p.name for p in photos}, Counter(PurePosixPath(p.name).name for p in photos)
    loose: dict[str, list[str]] = {}
    for name in known.keys() - paths:
        loose.setdefault(PurePosixPath(name).name, []).append(name)
    out = []
    for photo in photos:
        bare = PurePosixPath(photo.name).name
        names = [photo.name] if photo.name in known else sorted(loose.get(bare, []))
        if photo.name not in known and names and (len(names) > 1 or count[bare] > 1):
            raise ValueError(
                f"{path}: is {names[0]} the photo {photo.name}? Several have this name: write paths"
                " as below the folder of photos"
            )
        out.append(known[names[0]] if names else [])
    return out


def check_box(box: PersonBox, photo: Photo, path: Path) -> None:
    left, top, width, height = box
    said = f"{path}: the box [{', '.join(f'{v:g}' for v in box)}] of {photo.name}"
    if not all(math.isfinite(v) for v in box) or width <= 0 or height <= 0:
        raise ValueError(
            f"{said} is none: left, top, width and height are numbers, and the last two above 0"
        )
    if left >= photo.size[0] or top >= photo.size[1] or left + width <= 0 or top + height <= 0:
        raise ValueError(
            f"{said} lies outside the photo, which has {photo.size[0]}x{photo.size[1]} pixels"
        )


# -- writing ---------------------------------------------------------------------------------------


def as_coco(
    joints: NDArray[Any],
    peaks: NDArray[Any],
    people: Sequence[PersonInPhoto],
    photos: Sequence[Photo],
    skeleton: Skeleton,
) -> dict[str, Any]:
    """bbox and area are the person's, not those of the wider crop that the network saw."""
    annotations = []
    for k, person in enumerate(people):
        flags = np.where(peaks[k] > 0, 2.0, 0.0)
        annotations.append(
            {
                "id": k + 1,
                "image_id": person.photo,
                "category_id": 1,
                "num_keypoints": int((flags > 0).sum()),
                "keypoints": [round(float(v), 2) for v in np.c_[joints[k], flags].ravel()],
                "joint_scores": [round(float(p), 4) for p in peaks[k]],
                "score": float(peaks[k].mean()),
                "bbox": list(person.box),
                "area": person.box[2] * person.box[3],
                "iscrowd": 0,
            }
        )
    images = [
        {"id": k, "file_name": p.name, "width": p.size[0], "height": p.size[1]}
        for k, p in enumerate(photos)
    ]
    category = {
        "id": 1,
        "name": "person",
        "keypoints": list(skeleton.joints),
        "skeleton": [[a + 1, b + 1] for a, b in skeleton.bones],
    }
    return {"images": images, "annotations": annotations, "categories": [category]}


def write_overlay(
    photo: Path, people: Sequence[NDArray[Any]], skeleton: Skeleton, target: Path
) -> None:
    pixels = np.asarray(open_image(photo, upright=True)).copy()
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    for joints in people:
        image = draw_joints(image, torch.from_numpy(joints), skeleton)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_png(image, target)

"""A trained pose network on a user's photos: boxes around the people in them, given, found by a
detector or the whole photo; and what is written about them (as COCO). Films: `pose_film.py`.

Photos are upright (as their EXIF says), and boxes and joints count the pixels of the upright photo.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.core.files import write_atomically
from fedlens.core.weights import load_weights, result_file
from fedlens.data.paths import images_at, is_image, is_video, walk
from fedlens.data.pose.people import How, ImageSize, People, Person, fit_box, open_image
from fedlens.data.pose.skeletons import Skeleton
from fedlens.data.source import DataError
from fedlens.tasks.apply.detection import Detector, PersonBox
from fedlens.tasks.pose_drawing import draw_joints, save_png

if TYPE_CHECKING:
    from fedlens.tasks.pose import Pose

BOXES_FORMAT = (
    '[{"file_name": "a.jpg", "bbox": [left, top, width, height]}, ...] or the annotations of COCO'
    " are needed"
)
WHOLE = (
    "no boxes and no detector are given: each whole picture counts as one person. detector=PATH"
    " (FastestDet's weights) or boxes=FILE find the people in it"
)


def find_keypoints(
    task: Pose, folder: Path, source: Path, target: Path, options: Mapping[str, Any]
) -> str:
    """folder: of the run, or a file of weights. target: a folder for keypoints.json and one overlay
    per photo."""
    plan = KeypointOptions(task, **options)
    model = load_weights(task.model(), result_file(folder)).eval()
    if plan.detector is None and plan.boxes is None:
        warnings.warn(WHOLE, stacklevel=2)
    if source.is_file() and is_video(source):
        from fedlens.tasks.apply.pose_film import follow_people

        if plan.boxes is not None:
            raise ValueError("boxes are for photos: the people of a film are found by detector=")
        return follow_people(task, model, source, target, plan)
    photos, unread = read_photos(source)
    found = find_people(photos, plan)
    people = [f.person(photos, len(task.skeleton.joints), plan.size) for f in found]
    view = People(people, task.skeleton, plan.size, capture=plan.capture, how=plan.how)
    nobody = {"predicted": np.zeros((0, 0, 2)), "peaks": np.zeros((0, 0))}
    made = task.find(model, view) if people else nobody
    target.mkdir(parents=True, exist_ok=True)
    written = as_coco(made["predicted"], made["peaks"], found, photos, task.skeleton)
    write_atomically(target / "keypoints.json", as_json(written))
    for number, (photo, name) in enumerate(zip(photos, overlay_names(photos), strict=True)):
        own = [made["predicted"][k] for k, f in enumerate(found) if f.photo == number]
        write_overlay(photo.file, own, task.skeleton, target / name)
    left = f", {len(unread)} could not be read ({', '.join(unread)})" if unread else ""
    passed = passed_over(source)
    left += f", {len(passed)} other files were passed over ({', '.join(passed)})" if passed else ""
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
        detector: Any = None,
        score: Any = None,
    ) -> None:
        if how not in ("bilinear", "area", "bicubic"):
            raise ValueError(f"how is bilinear, area or bicubic, not {how!r}")
        self.size = parse_size(size) if size else max(task.sizes, default=task.size)
        task.check_size(self.size)
        self.capture, self.how = parse_size(capture) if capture else None, how
        self.boxes = Path(boxes) if boxes else None
        if boxes and detector:
            raise ValueError("boxes and detector say the same: give one of them")
        least = None if score is None else parse_score(score)
        self.least = 0.5 if least is None else least
        self.detector = Detector(str(detector), least) if detector else None

    def detected(self, image: Tensor, photo: int) -> list[PersonInPhoto]:
        """Whom the detector finds in a picture (3, H, W) of uint8."""
        assert self.detector is not None
        return [PersonInPhoto(photo, box, 1.25, s) for box, s in self.detector.people(image)]


def parse_score(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value < 1:
        raise ValueError(f"score is the lowest that counts, from 0 to below 1, not {value!r}")
    return float(value)


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
    """name: its path below the folder that was asked for. size: (width, height). pixels: (H, W, 3),
    of a frame that lies in no file."""

    file: Path
    name: str
    size: tuple[int, int]
    pixels: NDArray[Any] | None = None


@dataclass(frozen=True)
class PersonInPhoto:
    """Somebody to look at: the box around the person, in which photo. score: the box's. track: the
    person's number in a film."""

    photo: int
    box: PersonBox
    pad: float
    score: float | None = None
    track: int | None = None

    def called(self, number: int) -> PersonInPhoto:
        return replace(self, track=number)

    def person(self, photos: Sequence[Photo], joints: int, size: ImageSize) -> Person:
        left, top, w, h = self.box
        centre = (left + (w - 1) / 2, top + (h - 1) / 2)
        crop = fit_box((w, h), size, self.pad)
        photo = photos[self.photo]
        return Person(
            photo.file if photo.pixels is None else photo.pixels,
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
        raise ValueError(
            f"none of the {len(files)} images at {source} can be read ({', '.join(unread)})"
        )
    return photos, unread


def passed_over(source: Path) -> list[str]:
    """Files of a folder that are no images by their names."""
    if not source.is_dir():
        return []
    others = [f for _, _, files in walk(source) for f in files if not is_image(f)]
    return sorted(f.relative_to(source).as_posix() for f in others)


def overlay_names(photos: Sequence[Photo]) -> list[str]:
    """a/1-pose.png for a/1.jpg. Where two photos differ in the suffix alone, all keep theirs:
    a/1.jpg-pose.png.
    """
    short = [PurePosixPath(p.name).with_suffix("").as_posix() for p in photos]
    kept = short if len({*short}) == len(short) else [p.name for p in photos]
    return [f"{name}-pose.png" for name in kept]


# -- boxes -----------------------------------------------------------------------------------------


def whole(photo: Photo, number: int) -> PersonInPhoto:
    """One person, who fills the photo."""
    return PersonInPhoto(number, (0.0, 0.0, float(photo.size[0]), float(photo.size[1])), 1.0)


def find_people(photos: Sequence[Photo], plan: KeypointOptions) -> list[PersonInPhoto]:
    """By the boxes of a file or a detector; without both a person is taken to fill its photo."""
    boxes = plan.boxes
    if plan.detector is not None:
        return [
            person
            for k, photo in enumerate(photos)
            for person in plan.detected(as_tensor(open_image(photo.file, upright=True)), k)
        ]
    if boxes is None:
        return [whole(p, k) for k, p in enumerate(photos)]
    given = match_boxes(photos, read_boxes(boxes, photos, plan.least), boxes)
    for photo, own in zip(photos, given, strict=True):
        for box in own:
            check_box(box, photo, boxes)
    found = [PersonInPhoto(k, box, 1.25) for k, own in enumerate(given) for box in own]
    if not found:
        raise ValueError(f"{boxes} has no box for any of the images")
    return found


def read_boxes(
    path: Path, photos: Sequence[Photo] = (), least: float = 0.0
) -> dict[str, list[PersonBox]]:
    """Name, as it is written there -> boxes. Detections as COCO's programs write them know an image
    by its number, which is its name (000000000785.jpg); of them only people (category 1) whose
    score is not below `least` count.
    """
    stems = {p.name: PurePosixPath(p.name).stem for p in photos}
    numbered = {int(stem): name for name, stem in stems.items() if stem.isdecimal()}
    try:
        found = json.loads(path.read_text())
        entries = found["annotations"] if isinstance(found, dict) else found
        files = (
            {i["id"]: i["file_name"] for i in found["images"]} if isinstance(found, dict) else {}
        )
        out: dict[str, list[PersonBox]] = {}
        for entry in entries:
            detection = "score" in entry
            if detection and (entry["score"] < least or entry.get("category_id", 1) != 1):
                continue
            if "file_name" in entry:
                name = entry["file_name"]
            elif detection and not files:
                name = numbered.get(int(entry["image_id"]), f"image {entry['image_id']}")
            else:
                name = files[entry["image_id"]]
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
                **({} if person.track is None else {"track_id": person.track}),
                **({} if person.score is None else {"box_score": round(person.score, 4)}),
                "bbox": [round(v, 2) for v in person.box],
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


def as_json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=1)


def as_tensor(picture: Any) -> Tensor:
    """PIL's image as uint8 (3, H, W)."""
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)


def write_overlay(
    photo: Path, people: Sequence[NDArray[Any]], skeleton: Skeleton, target: Path
) -> None:
    image = as_tensor(open_image(photo, upright=True)).float() / 255
    for joints in people:
        image = draw_joints(image, torch.from_numpy(joints), skeleton)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_png(image, target)

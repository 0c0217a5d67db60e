"""A trained pose network on a user's film: frame by frame, with numbers for people that stay the
same; a film with overlays, and keypoints as COCO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.core.files import write_atomically
from fedlens.data.paths import is_video
from fedlens.data.pose.people import People
from fedlens.data.video.files import FileFrames
from fedlens.data.video.writer import writer
from fedlens.tasks.apply.keypoints import (
    KeypointOptions,
    PersonInPhoto,
    Photo,
    as_coco,
    as_json,
    whole,
)
from fedlens.tasks.apply.tracking import Tracker
from fedlens.tasks.pose_drawing import draw_box, draw_joints

if TYPE_CHECKING:
    from fedlens.tasks.pose import Pose

BLOCK = 8  # frames that are in memory at once


def follow_people(
    task: Pose, model: nn.Module, source: Path, target: Path, plan: KeypointOptions
) -> str:
    """target: a video file, beside which the keypoints are written as .json, or a folder."""
    frames = FileFrames(source)
    if is_video(target):
        film, table = target, target.with_suffix(".json")
    else:
        film, table = target / f"{source.stem}-pose.mp4", target / "keypoints.json"
    table.parent.mkdir(parents=True, exist_ok=True)
    tracker = Tracker()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    with writer(film, frames, frames.size) as write:
        for low in range(0, len(frames), BLOCK):
            pixels = frames.read(low, min(low + BLOCK, len(frames)))
            for found in _block(task, model, pixels, low, tracker, plan):
                write(found["picture"][None])
                images.append(found["image"])
                annotations += found["people"]
    for k, annotation in enumerate(annotations):
        annotation["id"] = k + 1
    for image in images:
        image["file_name"] = source.name
    first = as_coco(np.zeros((0, 0, 2)), np.zeros((0, 0)), [], [], task.skeleton)
    write_atomically(table, as_json({**first, "images": images, "annotations": annotations}))
    return (
        f"{tracker.last} people in {len(annotations)} places in {len(frames)} frames: {film} and"
        f" {table}"
    )


def _block(
    task: Pose, model: nn.Module, pixels: Tensor, low: int, tracker: Tracker, plan: KeypointOptions
) -> Iterator[Mapping[str, Any]]:
    """A few frames: whom they show, their joints, and the pictures with both."""
    arrays = [f.permute(1, 2, 0).contiguous().numpy() for f in pixels]
    height, width = pixels.shape[-2:]
    photos = [Photo(Path(), "", (width, height), array) for array in arrays]
    found: list[PersonInPhoto] = []
    for k, frame in enumerate(pixels):
        who = plan.detected(frame, k) if plan.detector else [whole(photos[k], k)]
        numbers = tracker.follow([p.box for p in who])
        found += [p.called(n) for p, n in zip(who, numbers, strict=True)]
    people = [f.person(photos, len(task.skeleton.joints), plan.size) for f in found]
    view = People(people, task.skeleton, plan.size, capture=plan.capture, how=plan.how)
    made = task.find(model, view) if people else {}
    for k, frame in enumerate(pixels):
        own = [i for i, f in enumerate(found) if f.photo == k]
        picture = frame.float() / 255
        for i in own:
            if plan.detector:
                picture = draw_box(picture, found[i].box, str(found[i].track))
            picture = draw_joints(picture, torch.from_numpy(made["predicted"][i]), task.skeleton)
        here = as_coco(
            np.stack([made["predicted"][i] for i in own]) if own else np.zeros((0, 0, 2)),
            np.stack([made["peaks"][i] for i in own]) if own else np.zeros((0, 0)),
            [found[i] for i in own],
            photos[k : k + 1],
            task.skeleton,
        )
        yield {
            "picture": (picture * 255).round().byte(),
            "image": {**here["images"][0], "id": low + k, "frame": low + k},
            "people": [{**a, "image_id": low + k} for a in here["annotations"]],
        }

"""How well joints were found: PCK (Yang & Ramanan), PCKh as MPII's own evaluation has it, and
COCO's AP over object keypoint similarity.

Points are (N, J, 2) in image pixels, visible is (N, J), reference (N): the length an error is
divided by. PCK@0.2 of LSP divides by the torso. PCKh divides by 0.6 times the diagonal of the head
box, leaves out pelvis and thorax, and its mean weighs every joint by how often it is visible.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MPII_LEFT_OUT = (6, 7)  # pelvis and thorax
MPII_GROUPS = {
    "ankle": (0, 5),
    "knee": (1, 4),
    "hip": (2, 3),
    "wrist": (10, 15),
    "elbow": (11, 14),
    "shoulder": (12, 13),
    "head": (9,),
}


def hits(
    predicted: NDArray[Any],
    truth: NDArray[Any],
    visible: NDArray[Any],
    reference: NDArray[Any],
    threshold: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(N, J) right or not, and (N, J) whether it counts at all. No more than the threshold is
    right.
    """
    error = np.linalg.norm(predicted - truth, axis=-1) / np.maximum(reference, 1e-6)[:, None]
    counts = np.asarray(visible) > 0
    return (error <= threshold) & counts, counts


def pck(
    predicted: NDArray[Any],
    truth: NDArray[Any],
    visible: NDArray[Any],
    reference: NDArray[Any],
    threshold: float = 0.2,
) -> float:
    """Share of visible joints within threshold * reference, in percent.

    Args:
        predicted: joints (N, J, 2), in pixels.
        truth: the annotated joints, likewise.
        visible: (N, J), which of them count.
        reference: a length for each person.
        threshold: share of that length.
    """
    right, counts = hits(predicted, truth, visible, reference, threshold)
    return 100 * float(right.sum()) / max(1, int(counts.sum()))


def pckh(
    predicted: NDArray[Any], truth: NDArray[Any], visible: NDArray[Any], reference: NDArray[Any]
) -> dict[str, float]:
    """MPII's metric: the mean at 0.5, the mean at 0.1 and the groups at 0.5, in percent.

    Args:
        predicted: joints (N, J, 2), in pixels.
        truth: the annotated joints, likewise.
        visible: (N, J), which of them count.
        reference: 0.6 * head box diagonal of each person.
    """
    seen = np.array(visible, float)
    seen[:, list(MPII_LEFT_OUT)] = 0
    out = {
        "pckh": pck(predicted, truth, seen, reference, 0.5),
        "pckh@0.1": pck(predicted, truth, seen, reference, 0.1),
    }
    right, counts = hits(predicted, truth, seen, reference, 0.5)
    rate = 100 * right.sum(0) / np.maximum(1, counts.sum(0))
    return out | {
        f"pckh_{name}": float(np.mean(rate[list(joints)])) for name, joints in MPII_GROUPS.items()
    }


def oks(
    predicted: NDArray[Any],
    truth: NDArray[Any],
    visible: NDArray[Any],
    area: NDArray[Any],
    sigmas: Sequence[float],
) -> NDArray[Any]:
    """Object keypoint similarity of each pair of people: mean over visible joints of exp(-d^2 / (2
    area (2 sigma)^2)).

    Args:
        predicted: joints (N, J, 2), in pixels.
        truth: the annotated joints, likewise.
        visible: (N, J), which of them count.
        area: of each annotated person.
        sigmas: one a joint.
    """
    d2 = ((predicted - truth) ** 2).sum(-1)
    spread = (2 * np.asarray(sigmas)) ** 2
    like = np.exp(-d2 / (2 * spread * (np.asarray(area)[:, None] + np.spacing(1))))
    counts = np.asarray(visible) > 0
    found: NDArray[Any] = (like * counts).sum(1) / np.maximum(1, counts.sum(1))
    return found


def coco_ap(
    predicted: NDArray[Any],
    scores: NDArray[Any],
    truth: NDArray[Any],
    visible: NDArray[Any],
    area: NDArray[Any],
    image: NDArray[Any],
    sigmas: Sequence[float],
    found_in: NDArray[Any] | None = None,
) -> dict[str, float]:
    """AP, AP50, AP75 and AR of COCO's own program, in percent.

    Args:
        predicted: joints (N, J, 2), in pixels; one detection for each annotated person, or a
            detector's.
        scores: of the detections.
        truth: the annotated joints.
        visible: which of them count.
        area: of each annotated person.
        image: of each annotated person.
        sigmas: one a joint.
        found_in: the images of a detector's detections.
    """
    places = image if found_in is None else found_in
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as e:
        raise ValueError('COCO\'s AP needs pycocotools: pip install "fedlens[pose]"') from e
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": int(i)} for i in sorted({*image.tolist(), *places.tolist()})],
            "categories": [{"id": 1, "name": "person"}],
            "annotations": [
                _annotation(k, truth[k], visible[k], float(area[k]), int(image[k]))
                for k in range(len(truth))
            ],
        }
        known.createIndex()
        found = known.loadRes(
            [
                {"image_id": int(places[k]), "category_id": 1, "score": float(scores[k]),
                 "keypoints": np.c_[predicted[k], np.ones(len(predicted[k]))].ravel().tolist()}
                for k in range(len(predicted))
            ]
        )  # fmt: skip
        judge = COCOeval(known, found, "keypoints")
        judge.params.kpt_oks_sigmas = np.asarray(sigmas, float)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    stats = judge.stats
    return {
        "ap": 100 * float(stats[0]),
        "ap50": 100 * float(stats[1]),
        "ap75": 100 * float(stats[2]),
        "ar": 100 * float(stats[5]),
    }


def distinct(
    predicted: NDArray[Any],
    scores: NDArray[Any],
    area: NDArray[Any],
    image: NDArray[Any],
    sigmas: Sequence[float],
    most: float = 0.9,
) -> list[int]:
    """Poses that are not those of somebody with a higher score: similarity at most 0.9, as public
    code has it (soft suppression left aside).
    """
    kept: list[int] = []
    for k in np.argsort(-scores, kind="stable").tolist():
        before = [j for j in kept if image[j] == image[k]]
        count = len(before)
        spread = (area[before] + area[k]) / 2 if count else np.zeros(0)
        seen = np.ones((count, predicted.shape[1]))
        same = np.repeat(predicted[k : k + 1], count, 0)
        if not count or oks(predicted[before], same, seen, spread, sigmas).max() <= most:
            kept.append(k)
    return sorted(kept)


def _annotation(
    number: int, joints: NDArray[Any], visible: NDArray[Any], area: float, image: int
) -> dict[str, Any]:
    seen = np.asarray(visible) > 0
    low, high = joints.min(0), joints.max(0)
    return {
        "id": number + 1,
        "image_id": image,
        "category_id": 1,
        "iscrowd": 0,
        "area": area,
        "num_keypoints": int(seen.sum()),
        "bbox": [float(low[0]), float(low[1]), float(high[0] - low[0]), float(high[1] - low[1])],
        "keypoints": np.c_[joints, 2.0 * seen].ravel().tolist(),
    }

"""Skeletons: which joints there are, which of them change places in a mirror, what is drawn between
them and how exactly each can be found. Three published ones by name, and anybody's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.facts import Facts

# for joints of which nobody says how exactly people mark them; COCO's lie between .025 and .107
UNIFORM_SIGMA = 0.05


@dataclass(frozen=True)
class Skeleton:
    """flips: pairs of joints that change places in a mirror. bones: what is drawn. sigmas: of
    COCO's similarity, one a joint. All count joints from 0.
    """

    name: str
    joints: tuple[str, ...]
    flips: tuple[tuple[int, int], ...] = ()
    bones: tuple[tuple[int, int], ...] = ()
    sigmas: tuple[float, ...] = ()

    @property
    def mirror(self) -> list[int]:
        order = list(range(len(self.joints)))
        for a, b in self.flips:
            order[a], order[b] = b, a
        return order

    def table(self) -> dict[str, Any]:
        """As a recipe has it, in `task.joints`."""
        return {
            "name": self.name,
            "joints": list(self.joints),
            "flips": [list(pair) for pair in self.flips],
            "bones": [list(pair) for pair in self.bones],
            "sigmas": list(self.sigmas),
        }


@dataclass(frozen=True)
class PoseFacts(Facts):
    """
    Args:
        skeleton: what the data's joints are, as `Skeleton.table` has it.
    """

    skeleton: Mapping[str, Any] = field(default_factory=dict)


def find_skeleton(joints: str | Mapping[str, Any]) -> Skeleton:
    """A published one by name, or one's own from a table with name, joints, flips, bones and
    sigmas, of which only joints is needed. Raises ValueError.
    """
    if isinstance(joints, str):
        if joints not in SKELETONS:
            raise ValueError(
                f"no skeleton {joints!r}: there are {', '.join(SKELETONS)}, or a table with joints,"
                " flips, bones and sigmas"
            )
        return SKELETONS[joints]
    if unknown := sorted(joints.keys() - {"name", "joints", "flips", "bones", "sigmas"}):
        raise ValueError(
            f"a skeleton has no {unknown[0]!r}: name, joints, flips, bones and sigmas are its keys"
        )
    names = joints.get("joints")
    if not isinstance(names, list | tuple) or not names:
        raise ValueError("a skeleton needs the names of its joints: joints = ['nose', 'tail']")
    named = tuple(str(n) for n in names)
    flips = joints.get("flips")
    return Skeleton(
        str(joints.get("name", "own")),
        named,
        partners(named) if flips is None else _pairs(flips, "flips", len(named)),
        _pairs(joints.get("bones", ()), "bones", len(named)),
        check_sigmas(joints.get("sigmas", ()), len(named)),
    )


def _pairs(value: Any, what: str, joints: int) -> tuple[tuple[int, int], ...]:
    try:
        found = tuple((int(a), int(b)) for a, b in value)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what} of a skeleton are pairs of joints, not {value!r}") from e
    for pair in found:
        if not all(0 <= k < joints for k in pair):
            raise ValueError(
                f"{what} of a skeleton: {list(pair)} names a joint that is not there; the"
                f" {joints} joints count from 0"
            )
    if what == "flips" and len({k for pair in found for k in pair}) < 2 * len(found):
        raise ValueError(f"flips of a skeleton: a joint has one partner, in {value!r} one has two")
    return found


def check_sigmas(value: Sequence[float], joints: int) -> tuple[float, ...]:
    found = tuple(float(v) for v in value)
    if found and (len(found) != joints or not all(math.isfinite(v) and v > 0 for v in found)):
        raise ValueError(
            f"sigmas of a skeleton are one positive number a joint ({joints}), not {len(found)}:"
            f" {list(found)}"
        )
    return found


_SIDES = {"left": "right", "l": "r"}


def partners(names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Joints whose names differ in left and right alone: left_eye and right_eye, EyeL and EyeR,
    "Front Left Paw" and "Front Right Paw".
    """
    where = {tuple(_words(n)): k for k, n in enumerate(names)}
    found = []
    for words, k in where.items():
        for at, word in enumerate(words):
            other = _SIDES.get(word)
            match = where.get((*words[:at], other, *words[at + 1 :])) if other else None
            if match is not None:
                found.append((k, match))
                break
    return tuple(found)


def _words(name: str) -> list[str]:
    """ "LeftEye", "left_eye" and "left eye" alike: left, eye."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


SKELETONS = {
    "mpii": Skeleton(
        "mpii",
        (
            "right_ankle",
            "right_knee",
            "right_hip",
            "left_hip",
            "left_knee",
            "left_ankle",
            "pelvis",
            "thorax",
            "upper_neck",
            "head_top",
            "right_wrist",
            "right_elbow",
            "right_shoulder",
            "left_shoulder",
            "left_elbow",
            "left_wrist",
        ),
        ((0, 5), (1, 4), (2, 3), (10, 15), (11, 14), (12, 13)),
        (
            (0, 1),
            (1, 2),
            (2, 6),
            (6, 3),
            (3, 4),
            (4, 5),
            (6, 7),
            (7, 8),
            (8, 9),
            (10, 11),
            (11, 12),
            (12, 7),
            (7, 13),
            (13, 14),
            (14, 15),
        ),
    ),
    "lsp": Skeleton(
        "lsp",
        (
            "right_ankle",
            "right_knee",
            "right_hip",
            "left_hip",
            "left_knee",
            "left_ankle",
            "right_wrist",
            "right_elbow",
            "right_shoulder",
            "left_shoulder",
            "left_elbow",
            "left_wrist",
            "neck",
            "head_top",
        ),
        ((0, 5), (1, 4), (2, 3), (6, 11), (7, 10), (8, 9)),
        (
            (0, 1),
            (1, 2),
            (2, 3),
            (3, 4),
            (4, 5),
            (6, 7),
            (7, 8),
            (8, 12),
            (12, 9),
            (9, 10),
            (10, 11),
            (12, 13),
            (8, 2),
            (9, 3),
        ),
    ),
    "coco": Skeleton(
        "coco",
        (
            "nose",
            "left_eye",
            "right_eye",
            "left_ear",
            "right_ear",
            "left_shoulder",
            "right_shoulder",
            "left_elbow",
            "right_elbow",
            "left_wrist",
            "right_wrist",
            "left_hip",
            "right_hip",
            "left_knee",
            "right_knee",
            "left_ankle",
            "right_ankle",
        ),
        ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, 14), (15, 16)),
        (
            (15, 13),
            (13, 11),
            (16, 14),
            (14, 12),
            (11, 12),
            (5, 11),
            (6, 12),
            (5, 6),
            (5, 7),
            (6, 8),
            (7, 9),
            (8, 10),
            (0, 1),
            (0, 2),
            (1, 3),
            (2, 4),
        ),
        (
            0.026,
            0.025,
            0.025,
            0.035,
            0.035,
            0.079,
            0.079,
            0.072,
            0.072,
            0.062,
            0.062,
            0.107,
            0.107,
            0.087,
            0.087,
            0.089,
            0.089,
        ),
    ),
}

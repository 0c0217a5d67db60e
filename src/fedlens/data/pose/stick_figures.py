"""Stick figures: pose estimation without data on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.limits import Count, Natural
from fedlens.data.pose.datasets import PoseSource, hide_outside, torso
from fedlens.data.pose.people import Person, fit_box, joints_box
from fedlens.data.pose.skeletons import SKELETONS


@dataclass
class StickFigures(PoseSource):
    """Articulated figures on textured ground, drawn from the seed: pose estimation without data on
    disk. Fourteen joints, as LSP.

    Args:
        people: drawn for training.
        tests: drawn for testing.
        canvas: (height, width) of an image, in pixels.
    """

    people: Count = 600
    tests: Natural = 100
    canvas: tuple[int, int] = (160, 120)

    def read(self, notes: list[str]) -> tuple[list[Person], list[Person]]:
        return [self.draw(k) for k in range(self.people)], [
            self.draw(k) for k in range(10**6, 10**6 + self.tests)
        ]

    @property
    def thickness(self) -> int:
        """Of a limb, in pixels; the head is twice as wide."""
        return max(2, round(0.035 * self.canvas[0]))

    def draw(self, number: int) -> Person:
        from PIL import Image, ImageDraw

        rng = np.random.default_rng([0x571C, number])
        height, width = self.canvas
        coarse = rng.integers(30, 200, (max(2, height // 16), max(2, width // 16), 3), np.uint8)
        ground = np.asarray(Image.fromarray(coarse).resize((width, height), 3), float) + rng.normal(
            0, 12, (height, width, 3)
        )
        image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
        joints = _articulate(rng, height, width)
        pen = ImageDraw.Draw(image)
        thick = self.thickness
        # Left is reddish and right bluish, so that the sides can be told apart at all.
        colours = {"l": (220, 70, 60), "r": (60, 90, 220), "m": (230, 220, 90)}
        for a, b in SKELETONS["lsp"].bones:
            sides = {SKELETONS["lsp"].joints[k][0] for k in (a, b)}
            colour = colours["l" if sides == {"l"} else "r" if sides == {"r"} else "m"]
            shade = tuple(int(c * rng.uniform(0.8, 1.1)) for c in colour)
            pen.line(
                [*joints[a, :2], *joints[b, :2]],
                fill=tuple(min(255, s) for s in shade),
                width=thick,
            )
        x, y = joints[13, :2]
        pen.ellipse([x - thick, y - thick, x + thick, y + thick], fill=(240, 200, 170))
        joints, _ = hide_outside(joints, width, height)
        centre, box = joints_box(joints)
        return Person(
            np.asarray(image),
            joints,
            centre,
            fit_box(box, self.shape),
            torso(joints),
            box[0] * box[1],
            number,
        )


def _articulate(rng: np.random.Generator, height: int, width: int) -> NDArray[Any]:
    """A tree of limbs from the hips outward, angles around standing upright."""
    unit = height * rng.uniform(0.8, 1.0)
    lean = rng.normal(0, 0.15)

    def go(start: NDArray[Any], angle: float, length: float) -> NDArray[Any]:
        return start + unit * length * np.array([math.sin(angle), -math.cos(angle)])

    hips = np.array([width * rng.uniform(0.42, 0.58), height * rng.uniform(0.48, 0.56)])
    neck = go(hips, lean, 0.27)
    across = np.array([math.cos(lean), math.sin(lean)])
    joints = np.ones((14, 3))
    joints[12, :2], joints[13, :2] = neck, go(neck, lean + rng.normal(0, 0.2), 0.13)
    # Seen from the front: the figure's right is the picture's left.
    for side, hip, knee, ankle, wrist, elbow, shoulder in (
        (-1, 2, 1, 0, 6, 7, 8),
        (1, 3, 4, 5, 11, 10, 9),
    ):
        joints[hip, :2] = hips + side * 0.055 * unit * across
        joints[shoulder, :2] = neck + side * 0.085 * unit * across
        thigh = math.pi - side * abs(rng.normal(0.15, 0.35))
        joints[knee, :2] = go(joints[hip, :2], thigh, 0.2)
        joints[ankle, :2] = go(joints[knee, :2], thigh + side * rng.normal(0.1, 0.3), 0.2)
        arm = math.pi - side * rng.uniform(0.1, 2.4)
        joints[elbow, :2] = go(joints[shoulder, :2], arm, 0.14)
        joints[wrist, :2] = go(joints[elbow, :2], arm - side * rng.uniform(-0.2, 1.6), 0.13)
    return joints

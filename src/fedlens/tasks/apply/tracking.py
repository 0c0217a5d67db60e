"""Who is who from frame to frame: boxes that overlap most belong to the same person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedlens.tasks.apply.detection import PersonBox


def box_overlap(a: PersonBox, b: PersonBox) -> float:
    """Intersection over union."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared / (a[2] * a[3] + b[2] * b[3] - shared)


@dataclass
class Tracker:
    """least: overlap below which a box is somebody else's. patience: frames that a person may be
    out of sight and keep the number."""

    least: float = 0.3
    patience: int = 15
    seen: dict[int, tuple[PersonBox, int]] = field(default_factory=dict)
    frame: int = 0
    last: int = 0

    def follow(self, boxes: Sequence[PersonBox]) -> list[int]:
        """A number for each box of the next frame, from 1. The best pairs are matched first."""
        pairs = sorted(
            (
                (box_overlap(box, before), k, number)
                for k, box in enumerate(boxes)
                for number, (before, _) in self.seen.items()
            ),
            key=lambda pair: (-pair[0], pair[1], pair[2]),
        )
        given: dict[int, int] = {}
        for share, k, number in pairs:
            if share >= self.least and k not in given and number not in given.values():
                given[k] = number
        for k, box in enumerate(boxes):
            if k not in given:
                self.last += 1
                given[k] = self.last
            self.seen[given[k]] = (box, self.frame)
        self.frame += 1
        self.seen = {n: s for n, s in self.seen.items() if self.frame - s[1] <= self.patience}
        return [given[k] for k in range(len(boxes))]

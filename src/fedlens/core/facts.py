"""What is public about a federation before its first round: typed, because sources write it and
tasks, layers, tables and pictures read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Facts:
    """Facts about the split. A room with facts of its own derives from this class.

    Args:
        classes: names of the classes.
        labels: for each client, how many examples of each class.
        shape: of one example.
        resolutions: each client's own (height, width), where they differ.
        look: what sets each client's images apart, in a word.
        skipped: files that could not be read.
        notes: what a split or a task had to move or leave out.
        details: anything else worth a line in `federation.json`; nothing computes with it.
    """

    classes: tuple[str, ...] = ()
    labels: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = ()
    resolutions: tuple[tuple[int, int], ...] = ()
    look: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def noting(self, *notes: str) -> Self:
        """The same with these notes in front."""
        return replace(self, notes=(*notes, *self.notes))

    def table(self) -> dict[str, Any]:
        """Plain values by name, without what is empty."""
        own = {k: v for k, v in asdict(self).items() if k != "details"}
        return {k: v for k, v in {**own, **self.details}.items() if v not in ((), {}, None)}

    def remarks(self) -> list[str]:
        """What a user should know about the data before the first round."""
        return remarks(self.skipped, self.notes)


def remarks(skipped: Sequence[str], notes: Sequence[str], most: int = 5) -> list[str]:
    """What of the data is not there as it lay on disk: files that could not be read, what a split
    or a task moved or left out.
    """
    lines = []
    if skipped:
        one = len(skipped) == 1
        files = "1 file could not" if one else f"{len(skipped)} files could not"
        more = f" and {len(skipped) - most} more" if len(skipped) > most else ""
        named = "; ".join(skipped[:most])
        lines.append(f"{files} be read and {'was' if one else 'were'} left out: {named}{more}")
    lines += notes[:most]
    if len(notes) > most:
        lines.append(f"and {len(notes) - most} more such notes")
    return lines

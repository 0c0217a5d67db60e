"""Cells: one row of a table with one seed, kept as JSON. One that is there is not computed again,
none is begun that would not fit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def compute(
    jobs: Iterable[tuple[Path, Callable[[], Cell]]], minutes: float, told: Callable[[Cell], str]
) -> None:
    """In the order given, until the next one might end after the budget: as long as the longest so
    far. `told` is what is printed of it.
    """
    began, longest = time.perf_counter(), 0.0
    for path, make in jobs:
        if path.exists():
            continue
        if time.perf_counter() - began + longest > 60 * minutes:
            print(f"budget spent before {path.stem}")
            return
        start = time.perf_counter()
        done = make()
        longest = max(longest, time.perf_counter() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(done))
        part.replace(path)
        print(f"{path.stem}: {told(done)}", flush=True)

"""The same layer on other dense tasks. Segmenting drawn figures, all clients of high resolution,
judged at others (Figure 6's question), by the recipe `raf-segmentation`. Enlarging video, cameras
of two resolutions, by the recipe `fedvsr-resolutions`.

    python experiments/raf/dense.py [--seeds 0,1,2] [--minutes 8]    cells.jsonl, finished ones stay
    python experiments/raf/tables.py                                 writes README.md's tables

Rows: a stack without MultiResolution, and with it. 35 s of processor time a cell to segment, two
minutes to enlarge.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from cells import Cell, compute, flat_settings, versions  # noqa: E402
from tables import CELLS, DENSE, VIDEO, cells_in  # noqa: E402

# by task: its recipe, and by row the stack; None is the recipe's own
TASKS: dict[str, tuple[str, dict[str, str | None]]] = {
    DENSE: ("raf-segmentation", {"fedavg": "fedavg", "raf-fedavg": None}),
    VIDEO: (
        "fedvsr-resolutions",
        {"fedavg": "fedavg", "raf-fedavg": "raf", "fedvsr": "fedvsr", "raf-fedvsr": None},
    ),
}


def cell_of(task: str, row: str, seed: int) -> Cell:
    from fedlens.config import recipe as recipes
    from fedlens.runs.job import run_job

    recipe, rows = TASKS[task]
    overrides = {"seed": seed, "workers": 0, "evaluate_every": 40}
    config = recipes.read(recipe, overrides, algorithm=rows[row])
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_job(config, Path(folder) / "run")
    settings = {k: v for k, v in flat_settings(config.tables()).items() if k != "seed"}
    return {
        "data": task,
        "row": row,
        "seed": seed,
        "metrics": outcome.metrics,
        "references": outcome.summary["references"],
        "settings": settings,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=8.0)
    given = parser.parse_args()
    jobs = [
        ({"data": task, "row": row, "seed": seed}, partial(cell_of, task, row, seed))
        for seed in map(int, given.seeds.split(","))
        for task, (_, rows) in TASKS.items()
        for row in rows
    ]
    compute(cells_in(CELLS), jobs, given.minutes, lambda c: str(c["metrics"]))


if __name__ == "__main__":
    main()

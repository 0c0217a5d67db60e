"""The same layer on another dense task: segmenting drawn figures, all clients of high resolution,
judged at others (Figure 6's question), by the recipe `raf-segmentation`.

    python experiments/raf/dense.py [--seeds 0,1,2] [--minutes 8]    cells.jsonl, finished ones stay
    python experiments/raf/tables.py                                 writes README.md's tables

Rows: FedAvg, and with MultiResolution around it. 35 s of processor time a cell.
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
from tables import CELLS, DENSE, cells_in  # noqa: E402

ROWS = {"fedavg": "fedavg", "raf-fedavg": None}  # the recipe's own stack is RAF


def cell_of(row: str, seed: int) -> Cell:
    from fedlens.config import recipe as recipes
    from fedlens.runs.job import run_job

    overrides = {"seed": seed, "workers": 0, "evaluate_every": 40}
    config = recipes.read("raf-segmentation", overrides, algorithm=ROWS[row])
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_job(config, Path(folder) / "run")
    settings = {k: v for k, v in flat_settings(config.tables()).items() if k != "seed"}
    return {
        "data": DENSE,
        "row": row,
        "seed": seed,
        "iou": outcome.metrics,
        "settings": settings,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=8.0)
    given = parser.parse_args()
    jobs = [
        ({"data": DENSE, "row": row, "seed": seed}, partial(cell_of, row, seed))
        for seed in map(int, given.seeds.split(","))
        for row in ROWS
    ]
    compute(cells_in(CELLS), jobs, given.minutes, lambda c: str(c["iou"]))


if __name__ == "__main__":
    main()

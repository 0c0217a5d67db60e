"""Cells to tables: PCK@0.2 by row and resolution beside the paper's Table II, and what distillation changes, with paired intervals.

python experiments/raf/tables.py [lspet|stick]

The interval is a percentile bootstrap over people (10,000 draws): a drawn person counts with both models, and with all seeds of both.
Prints Markdown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROWS = {"fedavg": "Base (FedAvg)", "fedprox": "Base (FedProx)", "raf-fedavg": "RAF (FedAvg)", "raf-fedprox": "RAF (FedProx)"}
SIZES = ("32x24", "48x36", "64x48", "80x60", "96x72", "128x96")
PAPER = {
    "fedavg": (51.8, 64.6, 68.5, 69.0, 67.5, 60.7), "fedprox": (51.8, 65.0, 68.5, 68.7, 66.6, 59.5),
    "raf-fedavg": (57.2, 67.1, 69.5, 69.9, 69.1, 64.6), "raf-fedprox": (57.1, 67.0, 69.7, 70.1, 69.0, 64.4),
}  # fmt: skip
Array = np.ndarray[Any, Any]


def read(folder: Path, data: str) -> dict[tuple[str, int], dict[str, Any]]:
    cells = (json.loads(p.read_text()) for p in sorted(folder.glob(f"{data}-*.json")))
    return {(c["row"], c["seed"]): c for c in cells}


def people(cells: dict[tuple[str, int], dict[str, Any]], row: str, seeds: list[int], size: str) -> tuple[Array, Array]:
    """Right joints and joints that count, per person, summed over the seeds."""
    found = [cells[row, s] for s in seeds]
    return sum(np.array(c["right"][size]) for c in found), sum(np.array(c["counts"][size]) for c in found)


def interval(raf: tuple[Array, Array], base: tuple[Array, Array], draws: int = 10_000) -> tuple[float, float, float]:
    """Difference in percentage points, and the bounds that hold 95 % of the draws."""
    rng = np.random.default_rng(0)
    n = len(raf[0])
    index = rng.integers(0, n, (draws, n))

    def rate(pair: tuple[Array, Array], chosen: Any) -> Any:
        return 100 * pair[0][chosen].sum(-1) / pair[1][chosen].sum(-1)

    whole = np.arange(n)
    spread = rate(raf, index) - rate(base, index)
    low, high = np.percentile(spread, [2.5, 97.5])
    return float(rate(raf, whole) - rate(base, whole)), float(low), float(high)


def main() -> None:
    cells = read(HERE / "cells", sys.argv[1] if len(sys.argv) > 1 else "lspet")
    rows = [r for r in ROWS if any(row == r for row, _ in cells)]
    print("| ours, PCK@0.2 (mean over seeds) | seeds | " + " | ".join(SIZES) + " |\n|---" * 1 + "|---" * (len(SIZES) + 1) + "|")
    for row in rows:
        seeds = sorted(s for r, s in cells if r == row)
        values = [np.mean([cells[row, s]["pck"][size] for s in seeds]) for size in SIZES]
        print(f"| {ROWS[row]} | {len(seeds)} | " + " | ".join(f"{v:.1f}" for v in values) + " |")
    print("\n| paper, PCKh@0.5 at 4 x the size | " + " | ".join(SIZES) + " |\n|---" + "|---" * len(SIZES) + "|")
    for row, values in PAPER.items():
        print(f"| {ROWS[row]} | " + " | ".join(f"{v:.1f}" for v in values) + " |")
    print("\n| RAF minus base (95 % interval) | " + " | ".join(SIZES) + " |\n|---" + "|---" * len(SIZES) + "|")
    for base in ("fedavg", "fedprox"):
        raf = f"raf-{base}"
        seeds = sorted({s for r, s in cells if r == base} & {s for r, s in cells if r == raf})
        if seeds:
            gaps = [interval(people(cells, raf, seeds, size), people(cells, base, seeds, size)) for size in SIZES]
            print(f"| {base}, seeds {seeds} | " + " | ".join(f"{d:+.1f} ({low:+.1f} .. {high:+.1f})" for d, low, high in gaps) + " |")
        told = [np.array(PAPER[raf]) - np.array(PAPER[base])]
        print(f"| {base}, paper | " + " | ".join(f"{d:+.1f}" for d in told[0]) + " |")


if __name__ == "__main__":
    main()

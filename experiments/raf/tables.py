"""Cells to tables: PCK@0.2 by row and resolution beside the paper's Table II, and what distillation
changes, with paired intervals.

python experiments/raf/tables.py

The interval is a percentile bootstrap over people (10,000 draws): a drawn person counts with both
models, and with all seeds of both. Writes the blocks of README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from blocks import fill  # noqa: E402
from cells import Cells  # noqa: E402

CELLS = HERE / "cells.jsonl"
DENSE = "segmentation"
VIDEO = "video"
ROWS = {
    "fedavg": "Base (FedAvg)",
    "fedprox": "Base (FedProx)",
    "raf-fedavg": "RAF (FedAvg)",
    "raf-fedprox": "RAF (FedProx)",
}
VIDEO_ROWS = {
    "fedavg": "FedAvg",
    "raf-fedavg": "FedAvg with MultiResolution",
    "fedvsr": "FedVSR",
    "raf-fedvsr": "FedVSR with MultiResolution",
}
SIZES = ("32x24", "48x36", "64x48", "80x60", "96x72", "128x96")
PAPER = {
    "fedavg": (51.8, 64.6, 68.5, 69.0, 67.5, 60.7),
    "fedprox": (51.8, 65.0, 68.5, 68.7, 66.6, 59.5),
    "raf-fedavg": (57.2, 67.1, 69.5, 69.9, 69.1, 64.6),
    "raf-fedprox": (57.1, 67.0, 69.7, 70.1, 69.0, 64.4),
}
Array = np.ndarray[Any, Any]


def cells_in(path: Path) -> Cells:
    return Cells(path, "data", "row", "seed")


def people(
    cells: dict[tuple[str, int], dict[str, Any]], row: str, seeds: list[int], size: str
) -> tuple[Array, Array]:
    """Right joints and joints that count, per person, summed over the seeds."""
    found = [cells[row, s] for s in seeds]
    return sum(np.array(c["right"][size]) for c in found), sum(
        np.array(c["counts"][size]) for c in found
    )


def interval(
    raf: tuple[Array, Array], base: tuple[Array, Array], draws: int = 10_000
) -> tuple[float, float, float]:
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


def header(*names: str) -> str:
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|"


def line(name: str, values: Any, form: str = "{:.1f}") -> str:
    return f"| {name} | " + " | ".join(form.format(v) for v in values) + " |"


def ours(data: str) -> str:
    cells = {(c["row"], c["seed"]): c for c in cells_in(CELLS).read(data=data)}
    lines = [header("ours, PCK@0.2", "seeds", *SIZES)]
    for row, name in ROWS.items():
        seeds = sorted(s for r, s in cells if r == row)
        if seeds:
            means = [np.mean([cells[row, s]["pck"][size] for s in seeds]) for size in SIZES]
            lines.append(line(f"{name} | {len(seeds)}", means))
    lines += ["", header("RAF minus base (95 % interval)", "seeds", *SIZES)]
    for base in ("fedavg", "fedprox"):
        raf = f"raf-{base}"
        seeds = sorted({s for r, s in cells if r == base} & {s for r, s in cells if r == raf})
        if seeds:
            gaps = [
                interval(people(cells, raf, seeds, size), people(cells, base, seeds, size))
                for size in SIZES
            ]
            shown = [f"{d:+.1f} ({low:+.1f} .. {high:+.1f})" for d, low, high in gaps]
            lines.append(line(f"under {ROWS[base][6:-1]} | {len(seeds)}", shown, "{}"))
    return "\n".join(lines)


def paper() -> str:
    lines = [
        header(
            "paper, PCKh@0.5 on MPII",
            "128x96",
            "192x144",
            "256x192",
            "320x240",
            "384x288",
            "512x384",
        )
    ]
    lines += [line(ROWS[row], values) for row, values in PAPER.items()]
    gaps = {
        base: np.array(PAPER[f"raf-{base}"]) - np.array(PAPER[base])
        for base in ("fedavg", "fedprox")
    }
    return "\n".join(
        lines
        + [
            line(f"RAF minus base under {ROWS[base][6:-1]}", gap, "{:+.1f}")
            for base, gap in gaps.items()
        ]
    )


def segmentation() -> str:
    sizes = ("24x20", "32x24", "48x36", "64x48", "96x72")
    keys = {size: f"iou_{size}" for size in sizes}
    lines, gap = dense(DENSE, keys, ROWS, "fedavg", "{0:.1f} ± {1:.1f}")
    return "\n".join([header("IoU of the figure, %", "seeds", *sizes), *lines, gap])


def video() -> str:
    keys = {"PSNR, native": "psnr", "PSNR, half size": "half_size_psnr"}
    keys |= {"SSIM, native": "ssim", "SSIM, half size": "half_size_ssim"}
    out = [header("video x4", "seeds", *keys)]
    held = cells_in(CELLS).read(data=VIDEO)
    if held:
        bicubic = held[0]["references"]["bicubic"]
        out.append(line("bicubic | -", [bicubic[k] for k in keys.values()], "{:.3f}"))
    gaps = []
    for base in ("fedavg", "fedvsr"):
        lines, gap = dense(VIDEO, keys, VIDEO_ROWS, base, "{0:.3f} ± {1:.3f}")
        out += lines
        gaps.append(gap.replace("RAF minus base", f"with minus without, {VIDEO_ROWS[base]}"))
    return "\n".join([*out, *gaps])


def dense(
    task: str, keys: dict[str, str], names: dict[str, str], base: str, form: str
) -> tuple[list[str], str]:
    """The lines of a base and of RAF on it over the seeds that both have, and that of their
    difference seed by seed."""
    cells = {(c["row"], c["seed"]): c["metrics"] for c in cells_in(CELLS).read(data=task)}
    rows = (base, f"raf-{base}")
    seeds = sorted(s for r, s in cells if r == rows[0] and (rows[1], s) in cells)
    if not seeds:
        blank = [""] * len(keys)
        return [line(f"{names[r]} | 0", ["not run", *blank[1:]], "{}") for r in rows], ""
    of = {r: np.array([[cells[r, s][k] for k in keys.values()] for s in seeds]) for r in rows}

    def shown(name: str, values: Array, how: str) -> str:
        pairs = [how.format(*pair) for pair in zip(values.mean(0), spread(values), strict=True)]
        return line(f"{name} | {len(seeds)}", pairs, "{}")

    lines = [shown(names[r], of[r], form) for r in rows]
    gap = shown("RAF minus base, by seed", of[rows[1]] - of[rows[0]], form.replace("{0:", "{0:+"))
    return lines, gap


def spread(values: Array) -> Array:
    """Standard deviation over seeds."""
    found: Array = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return found


BLOCKS = {
    "lspet": lambda: ours("lspet"),
    "stick": lambda: ours("stick"),
    "paper": paper,
    "segmentation": segmentation,
    "video": video,
}

if __name__ == "__main__":
    cells_in(CELLS).tidy()
    fill(HERE / "README.md", BLOCKS)

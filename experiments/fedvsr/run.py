"""The comparison of FedVSR with its rivals on real video: train on SPMCS clips, test on Vid4, light
network, x4.

    python experiments/fedvsr/run.py --data ../shared/data --minutes 20 \\
        [--seeds 0,1,2] [--rows FedAvg,FedVSR] [--workers 2]
    python experiments/fedvsr/run.py --rows FedAvg,FedVSR --seeds 0 lr=0.0005   another setting
    python experiments/fedvsr/run.py --table      writes the tables of README.md

A cell is one algorithm on one split with one seed; finished ones are kept in cells.jsonl and are
not run again. Seed 0 of every row comes first. No cell is begun after the budget is used up.
Cells run beside each other, each on one thread, so that their bits do not depend on how many there
are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Algorithm, Layer, stack
from fedlens.core.rounds import Round, run
from fedlens.data.video.clips import Clips
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, FedSR, HighFrequency, LossAware, Median, Scaffold
from fedlens.models.vsr import Bicubic
from fedlens.tasks.super_resolution import SuperResolution

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import overhead  # noqa: E402
from blocks import fill  # noqa: E402
from cells import Cells, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "setup", "split", "row", "seed")
SPLITS = {"groups": "more heterogeneous", "pooled": "less heterogeneous"}
ROWS: dict[str, list[Layer]] = {
    "FedAvg": [],
    "FedVSR": [HighFrequency(), LossAware()],
    "FedProx": [FedProx(mu=1e-3)],
    "SCAFFOLD": [Scaffold()],
    "FedMedian": [Median()],
    "FedSR": [FedSR()],
    "F-HiFr": [HighFrequency()],
    "F-ALA": [LossAware()],
    "F-GLA": [LossAware(greedy=True)],
}
METRICS = ("psnr_y", "ssim_y", "psnr", "temporal", "vmaf", "lpips")
SETTING = {
    "clients": 12,
    "cohort": 4,
    "rounds": 20,
    "frames": 4,
    "crop": 64,
    "regions": 2,
    "repeat": 2,
    "batch": 4,
    "lr": 1e-3,
    "test_frames": 4,
    "weight": 1.0,  # of the high-frequency loss
}
Setting = dict[str, float]


def source(data: Path, split: str, setting: Setting) -> Clips:
    whole = {k: int(setting[k]) for k in ("frames", "crop", "regions", "repeat", "test_frames")}
    return Clips(
        str(data / "spmcs" / "HR480"), test=str(data / "vid4" / "GT"), split=split, **whole
    )  # type: ignore[arg-type]


def make(row: str, task: SuperResolution, seed: int, setting: Setting) -> Algorithm:
    base = FedAvg(
        task,
        lr=setting["lr"],
        optimizer="adam",
        betas=(0.9, 0.99),
        batch=int(setting["batch"]),
        weights="uniform",
        seed=seed,
    )
    return stack(
        base,
        *(
            HighFrequency(setting["weight"]) if isinstance(part, HighFrequency) else part
            for part in ROWS[row]
        ),
    )


def cell(row: str, split: str, seed: int, data: Path, setting: Setting) -> dict[str, Any]:
    """Train, then test with every metric. Bicubic needs no training."""
    torch.set_num_threads(1)
    task = SuperResolution(metrics=METRICS, lpips_weights=str(data / "weights" / "lpips"))
    federation = source(data, split, setting).federation(int(setting["clients"]), seed)
    began = time.perf_counter()
    curve: list[dict[str, float | None]] = []
    if row == "bicubic":
        model: Any = Bicubic()
    else:
        algorithm = make(row, task, seed, setting)

        def note(_: Any, r: Round) -> None:
            losses = [s["loss"] for s in r.scalars.values()]
            curve.append(
                {
                    "loss": r.loss,
                    "smallest": min(losses),
                    "largest": max(losses),
                    "mix": r.state.scalars.get("mix"),
                }
            )

        with Simulator(algorithm, federation, workers=0) as engine:
            state = run(
                algorithm,
                engine,
                int(setting["rounds"]),
                cohort=int(setting["cohort"]),
                seed=seed,
                after_round=note,
            )
        model = algorithm.result(state)
    trained = time.perf_counter()
    with torch.no_grad():
        metrics = task.evaluate(model, federation.test)
    tested = time.perf_counter()
    seconds = {"train": round(trained - began, 1), "test": round(tested - trained, 1)}
    return {
        "row": row,
        "split": split,
        "seed": seed,
        "metrics": metrics,
        "seconds": seconds,
        "settings": setting,
        "versions": versions(),
        "rounds": curve,
    }


def main() -> None:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("FEDLENS_DATA", "")),
    )
    parse.add_argument("--minutes", type=float, default=20)
    parse.add_argument("--seeds", default="0,1,2")
    parse.add_argument("--rows", default=",".join(ROWS))
    parse.add_argument("--splits", default=",".join(SPLITS))
    parse.add_argument("--workers", type=int, default=1, help="cells beside each other")
    parse.add_argument("--table", action="store_true")
    parse.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help=f"other than usual: {', '.join(SETTING)}"
    )
    options = parse.parse_args()
    if options.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    other = {k: float(v) for k, _, v in (text.partition("=") for text in options.settings)}
    if unknown := sorted(other.keys() - SETTING.keys()):
        parse.error(f"there is no setting {unknown[0]!r}")
    jobs = [
        (row, split, int(s))
        for s in options.seeds.split(",")
        for split in options.splits.split(",")
        for row in options.rows.split(",")
    ]
    work(
        [("bicubic", "pooled", 0), *jobs],
        options.data,
        other,
        options.workers,
        60 * options.minutes,
    )


def work(
    jobs: list[tuple[str, str, int]], data: Path, other: Setting, workers: int, seconds: float
) -> None:
    """Seed 0 of everything first; finished cells are kept."""
    setup = "-".join(f"{k}={v:g}" for k, v in sorted(other.items()))
    label = {"setup": setup} if setup else {}
    done = {(c["row"], c["split"], c["seed"]) for c in CELLS.read(setup=label.get("setup"))}
    todo = [job for job in jobs if job not in done]
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while todo or running:
            while todo and len(running) < workers and time.monotonic() < end:
                running.add(pool.submit(cell, *todo.pop(0), data, SETTING | other))
            if not running:
                print(f"the budget is used up, {len(todo)} cells are left")
                return
            for ready in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(ready)
                found = ready.result()
                CELLS.append(found | label)
                shown = {k: round(v, 4) for k, v in found["metrics"].items()}
                print(
                    found["row"], found["split"], found["seed"], found["seconds"], shown, flush=True
                )


SHOWN = {
    "psnr_y": ("PSNR-Y", 3),
    "ssim_y": ("SSIM-Y", 4),
    "psnr": ("PSNR", 3),
    "lpips_loss": ("LPIPS", 4),
    "vmaf": ("VMAF", 2),
    "temporal_loss": ("temporal", 3),
}


def cells(setup: str | None = None) -> dict[tuple[str, str, int], dict[str, float]]:
    """(row, split, seed) -> metrics. Bicubic knows no split."""
    return {
        (c["row"], s, c["seed"]): c["metrics"]
        for c in CELLS.read(setup=setup)
        for s in (SPLITS if c["row"] == "bicubic" else [c["split"]])
    }


def table(split: str) -> str:
    """Markdown: mean and spread over the finished seeds."""
    found = cells()
    return markdown(
        "",
        {
            row: [m for (r, own, _), m in found.items() if (r, own) == (row, split)]
            for row in ["bicubic", *ROWS]
        },
    )


def apart(
    row: str, base: str, split: str, setup: str | None = None, base_setup: str | None = None
) -> list[dict[str, float]]:
    """The gap between two rows, seed by seed, since all rows share their seeds."""
    here, there = cells(setup), cells(base_setup)
    shared = [s for r, own, s in here if (r, own) == (row, split) and (base, split, s) in there]
    return [
        {key: here[row, split, s][key] - there[base, split, s][key] for key in SHOWN}
        for s in shared
    ]


def gaps(split: str) -> str:
    """Markdown: the gap to FedAvg."""
    return markdown(
        "minus FedAvg", {row: apart(row, "FedAvg", split) for row in ROWS if row != "FedAvg"}, "+"
    )


def batches(split: str = "groups") -> str:
    """Markdown: what batches of 1 do, and what comes of comparing one method's 1 with another's 4,
    as the public scripts do.
    """
    one = "batch=1"
    rows = {
        "FedVSR minus FedAvg, both batches of 4": apart("FedVSR", "FedAvg", split),
        "FedVSR minus FedAvg, both batches of 1": apart("FedVSR", "FedAvg", split, one, one),
        "FedAvg: batches of 1 minus batches of 4": apart("FedAvg", "FedAvg", split, one),
        "FedVSR with 1 minus FedAvg with 4": apart("FedVSR", "FedAvg", split, one),
    }
    return markdown("gap", rows, "+")


def others(split: str = "groups") -> str:
    """Markdown: the rows that were run with another setting, under the usual ones."""
    setups = sorted({c["setup"] for c in CELLS.read() if "setup" in c})
    known = {row for setup in setups for row, _, _ in cells(setup)} - {"bicubic"}
    rows = {}
    for setup in [None, *setups]:
        found = cells(setup)
        rows |= {
            f"{setup or 'usual'}: {row}": [
                m for (r, own, _), m in found.items() if (r, own) == (row, split)
            ]
            for row in ROWS
            if row in known
        }
    return markdown("", rows)


def markdown(corner: str, rows: dict[str, list[dict[str, float]]], sign: str = "") -> str:
    lines = [
        f"| {corner} | {' | '.join(n for n, _ in SHOWN.values())} | seeds |",
        "|---" * (len(SHOWN) + 2) + "|",
    ]
    for name, found in rows.items():
        if found:
            values = [
                told([m[key] for m in found], digits, sign) for key, (_, digits) in SHOWN.items()
            ]
            lines.append(f"| {name} | {' | '.join(values)} | {len(found)} |")
    return "\n".join(lines)


def told(numbers: list[float], digits: int, sign: str = "") -> str:
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):{sign}.{digits}f}{spread}"


BLOCKS: dict[str, Callable[[], str]] = {
    f"{kind.__name__}-{split}": partial(kind, split) for split in SPLITS for kind in (table, gaps)
}
BLOCKS |= {"batches": batches, "others": others, "overhead": overhead.table}


if __name__ == "__main__":
    main()

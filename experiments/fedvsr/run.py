"""The comparison of FedVSR with its rivals on real video: train on SPMCS clips, test on Vid4, light network, x4.

    python experiments/fedvsr/run.py --data ../shared/data --minutes 20 [--seeds 0,1,2] [--rows FedAvg,FedVSR]
    python experiments/fedvsr/run.py --table                     prints the tables of README.md from the finished cells

A cell is one algorithm on one split with one seed; finished ones are kept as JSON under cells/ and are not run again. Seed 0 of every row
comes first. No cell is begun after the budget is used up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithm import Algorithm, Layer, stack
from fedlens.algorithms import FedAvg
from fedlens.data.clips import Clips
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, FedSR, HighFrequency, LossAware, Median, Scaffold
from fedlens.models.vsr import Bicubic
from fedlens.rounds import run
from fedlens.tasks.super_resolution import SuperResolution

HERE = Path(__file__).parent
CELLS = HERE / "cells"
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
METRICS = ("psnr_y", "ssim_y", "psnr", "temporal", "vmaf")  # what each cell measures; --lpips adds LPIPS
SETTING = {
    "clients": 12,
    "cohort": 4,
    "rounds": 6,
    "frames": 4,
    "crop": 48,
    "regions": 2,
    "repeat": 2,
    "batch": 4,
    "lr": 1e-3,
    "test_frames": 2,
}


def source(data: Path, split: str) -> Clips:
    return Clips(
        str(data / "spmcs" / "HR480"),
        test=str(data / "vid4" / "GT"),
        split=split,  # type: ignore[arg-type]
        frames=int(SETTING["frames"]),
        crop=int(SETTING["crop"]),
        regions=int(SETTING["regions"]),
        repeat=int(SETTING["repeat"]),
        test_frames=int(SETTING["test_frames"]),
    )


def make(row: str, task: SuperResolution, seed: int) -> Algorithm:
    base = FedAvg(task, lr=SETTING["lr"], optimizer="adam", betas=(0.9, 0.99), batch=int(SETTING["batch"]), weights="uniform", seed=seed)
    return stack(base, *ROWS[row])


def cell(row: str, split: str, seed: int, data: Path, lpips: bool = False) -> dict[str, Any]:
    """Train, then test with every metric. Bicubic needs no training."""
    task = SuperResolution(metrics=(*METRICS, *(["lpips"] if lpips else [])), lpips_weights=str(data / "weights" / "lpips"))
    federation = source(data, split).federation(int(SETTING["clients"]), seed)
    began = time.perf_counter()
    curve: list[float | None] = []
    if row == "bicubic":
        model: Any = Bicubic()
    else:
        algorithm = make(row, task, seed)
        with Simulator(algorithm, federation, workers=0) as engine:
            rounds, cohort = int(SETTING["rounds"]), int(SETTING["cohort"])
            state = run(algorithm, engine, rounds, cohort=cohort, seed=seed, after_round=lambda _, r: curve.append(r.loss))
        model = algorithm.result(state)
    trained = time.perf_counter()
    with torch.no_grad():
        metrics = task.evaluate(model, federation.test)
    tested = time.perf_counter()
    seconds = {"train": round(trained - began, 1), "test": round(tested - trained, 1)}
    return {"row": row, "split": split, "seed": seed, "metrics": metrics, "loss": curve, "seconds": seconds, "setting": SETTING}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--data", type=Path, default=Path(os.environ.get("FEDLENS_DATA", HERE.parents[2] / "shared" / "data")))
    parse.add_argument("--minutes", type=float, default=20)
    parse.add_argument("--seeds", default="0,1,2")
    parse.add_argument("--rows", default=",".join(ROWS))
    parse.add_argument("--lpips", action="store_true", help="a third of a cell's time")
    parse.add_argument("--cells", type=int, default=1000, help="stop after so many")
    parse.add_argument("--table", action="store_true")
    options = parse.parse_args()
    if options.table:
        print(table())
        return
    torch.set_num_threads(1)
    CELLS.mkdir(exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    jobs = [(row, split, int(s)) for s in options.seeds.split(",") for split in SPLITS for row in options.rows.split(",")]
    done = 0
    for row, split, seed in [("bicubic", "pooled", 0), *jobs]:
        path = CELLS / f"{row}-{split}-{seed}.json"
        if path.exists():
            continue
        if time.monotonic() > end or done == options.cells:
            print("the budget is used up")
            break
        found = cell(row, split, seed, options.data, options.lpips)
        path.write_text(json.dumps(found, indent=1))
        done += 1
        print(row, split, seed, found["seconds"], {k: round(v, 4) for k, v in found["metrics"].items()}, flush=True)


def table() -> str:
    """Markdown: mean over the finished seeds, with the spread where there is more than one."""
    cells = [json.loads(p.read_text()) for p in sorted(CELLS.glob("*.json"))]
    shown = {
        "psnr_y": ("PSNR-Y", 3),
        "ssim_y": ("SSIM-Y", 4),
        "psnr": ("PSNR", 3),
        "lpips_loss": ("LPIPS", 4),
        "vmaf": ("VMAF", 2),
        "temporal_loss": ("temporal", 3),
    }
    out = []
    for split, name in SPLITS.items():
        out += [
            f"\n**{name}** (`split={split}`)\n",
            f"| | {' | '.join(n for n, _ in shown.values())} | seeds |",
            "|---" * (len(shown) + 2) + "|",
        ]
        for row in ["bicubic", *ROWS]:
            mine = [c for c in cells if c["row"] == row and (c["split"] == split or row == "bicubic")]
            if not mine:
                continue
            values = []
            for key, (_, digits) in shown.items():
                numbers = [c["metrics"][key] for c in mine if key in c["metrics"]]
                if not numbers:
                    values.append("-")
                    continue
                spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
                values.append(f"{statistics.mean(numbers):.{digits}f}{spread}")
            out.append(f"| {row} | {' | '.join(values)} | {len(mine)} |")
    return "\n".join(out)


if __name__ == "__main__":
    main()

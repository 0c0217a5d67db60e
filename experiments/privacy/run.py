"""Accuracy against epsilon: single examples at few sites, and whole clients of a fleet.

    python experiments/privacy/run.py [--minutes 12] [--seeds 0]   computes what is missing
    python experiments/privacy/run.py --table                      writes the tables into README.md

Needs $FEDLENS_DATA (cifar10) and the extra `privacy`. The noise of a row is what its epsilon needs,
by the accountant, for the rounds that are planned.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from blocks import fill  # noqa: E402
from cells import Cell, Cells, compute, flat_settings, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "level", "row", "seed")
DATA = os.environ.get("FEDLENS_DATA", "data")
DELTA = 1e-5
Layer = dict[str, Any]
TASK = {"name": "Classification", "model": "niid", "mean": [0.48], "std": [0.25]}
LEVELS: dict[str, dict[str, Any]] = {
    # three sites of 1,666 images
    "example": {
        "clients": 3,
        "rounds": 30,
        "fedavg": {"batch": 256, "epochs": 2, "momentum": 0.9},
        "plain": {"lr": 0.05},
        "noisy": {"lr": 0.25},
        "layer": {"name": "DPSGD", "clip": 1.0, "microbatch": 64},
    },
    # 2,500 clients of two images, 500 of them in a round
    "client": {
        "clients": 2500,
        "cohort": 500,
        "rounds": 40,
        "fedavg": {"batch": 2, "epochs": 1, "weights": "uniform"},
        "plain": {"lr": 0.1, "server_lr": 1.0},
        "noisy": {"lr": 0.1, "server_lr": 2.0},
        "layer": {"name": "PrivateMean", "clip": 0.3},
    },
}
# by level and row: epsilon (None: no noise), and what else is other
ROWS: dict[str, dict[str, tuple[float | None, Layer]]] = {
    "example": {
        "no privacy": (None, {}),
        "epsilon 16": (16.0, {}),
        "epsilon 8": (8.0, {}),
        "epsilon 2": (2.0, {}),
    },
    "client": {
        "no privacy": (None, {}),
        "epsilon 16, secret cohort": (16.0, {"secret_cohort": True}),
        "epsilon 8, secret cohort": (8.0, {"secret_cohort": True}),
        "epsilon 8, cohort known": (8.0, {}),
    },
}


def config_of(level: str, row: str, seed: int, noise: float | None) -> Any:
    from fedlens.config import recipe as recipes

    how, (epsilon, more) = LEVELS[level], ROWS[level][row]
    rates = how["plain" if epsilon is None else "noisy"]
    stack: list[Layer] = [{"name": "FedAvg", **how["fedavg"], **rates}]
    if noise is not None:
        stack.append({**how["layer"], **more, "delta": DELTA, "noise": noise})
    federation = {
        "clients": how["clients"],
        "rounds": how["rounds"],
        "evaluate_every": how["rounds"],
        "checkpoint_every": 0,
        "seed": seed,
        "workers": 2,
    }
    if "cohort" in how:
        federation["cohort"] = how["cohort"]
    data = {"name": "Cifar10", "root": f"{DATA}/cifar10/jpg", "partition": "iid"}
    tables = {"task": TASK, "data": data, "federation": federation, "algorithm": stack}
    return recipes.from_tables(tables, f"{level}, {row}")


def noise_of(level: str, row: str, seed: int) -> float | None:
    """What the wanted epsilon needs. A client whose cohort is known pays for the rounds it is asked
    in: for the most that any is."""
    from fedlens.core.rounds import sample
    from fedlens.trust.accounting import Account, noise_for

    epsilon, _ = ROWS[level][row]
    if epsilon is None:
        return None
    config = config_of(level, row, seed, 1.0)
    s = config.settings
    algorithm = config.build_algorithm(config.build_task())
    examples = 5000 // s.clients
    account = Account(algorithm, s.clients, s.cohort or s.clients, lambda _: examples)
    cost = account.mechanism(0)
    assert cost is not None
    rounds = s.rounds
    if cost.unit == "client" and cost.sampling == "none":
        asked = [i for n in range(rounds) for i in sample(range(s.clients), s.cohort, seed, n)]
        rounds = max(asked.count(i) for i in set(asked))
    return noise_for(epsilon, cost, rounds)


def cell_of(level: str, row: str, seed: int) -> Cell:
    from fedlens.runs.job import run_job

    noise = noise_of(level, row, seed)
    config = config_of(level, row, seed, None if noise is None else round(noise, 4) + 1e-4)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_job(config, Path(folder) / "run")
    settings = {k: v for k, v in flat_settings(config.tables()).items() if DATA not in str(v)}
    return {
        "level": level,
        "row": row,
        "seed": seed,
        "accuracy": outcome.metrics["accuracy"],
        "privacy": outcome.summary["privacy"],
        "seconds": round(outcome.summary["seconds"], 1),
        "settings": settings,
        "versions": versions(),
    }


def table(level: str) -> str:
    lines = [
        "| row | seeds | accuracy, % | epsilon spent | noise x clip | sums |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS[level]:
        cells = CELLS.read(level=level, row=row)
        if not cells:
            lines.append(f"| {row} | 0 | not run | | | |")
            continue
        found = [100 * c["accuracy"] for c in cells]
        spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
        told = [c["privacy"] for c in cells if c["privacy"]]
        spent = f"{max(p['epsilon'] for p in told):.3g}" if told else "-"
        noise = f"{statistics.mean(p['noise'] for p in told):.3g}" if told else "-"
        sums = str(max(p["sums"] for p in told)) if told else "-"
        mean = statistics.mean(found)
        lines.append(f"| {row} | {len(found)} | {mean:.1f}{spread} | {spent} | {noise} | {sums} |")
    lines.append("| guessing | - | 10.0 | 0 | - | - |")
    said = [c["privacy"]["sentence"] for c in CELLS.read(level=level) if c["privacy"]]
    return "\n".join([*lines, *([f"\nThe last of them in full: {said[-1]}."] if said else [])])


BLOCKS: dict[str, Callable[[], str]] = {level: partial(table, level) for level in LEVELS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--level", choices=list(LEVELS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    jobs = [
        ({"level": level, "row": row, "seed": seed}, partial(cell_of, level, row, seed))
        for seed in map(int, given.seeds.split(","))
        for level in ([given.level] if given.level else LEVELS)
        for row in ROWS[level]
    ]
    compute(CELLS, jobs, given.minutes, lambda c: f"{c['accuracy']:.4f} in {c['seconds']} s")


if __name__ == "__main__":
    main()

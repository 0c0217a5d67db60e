"""Accuracy against epsilon: single examples at few sites, and whole clients of a fleet; and what
FedDeblur makes of noise, beside what its server makes of the messages.

    python experiments/privacy/run.py [--minutes 12] [--seeds 0]   computes what is missing
    python experiments/privacy/run.py --table                      writes the tables into README.md

Needs $FEDLENS_DATA (cifar10, classic) and the extra `privacy`. The noise of a row is what its
epsilon needs, by the accountant, for the rounds that are planned.
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

CELLS = Cells(HERE / "cells.jsonl", "level", "row", "rate", "seed")
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
        "rate": "lr",
        "rates": (0.05, 0.25),
        "layer": {"name": "DPSGD", "clip": 1.0, "microbatch": 64},
    },
    # 2,500 clients of two images, 500 of them in a round
    "client": {
        "clients": 2500,
        "cohort": 500,
        "rounds": 40,
        "fedavg": {"batch": 2, "epochs": 1, "weights": "uniform", "lr": 0.1},
        "rate": "server_lr",
        "rates": (2.0, 4.0),
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
        # what the clip alone does: steps of two images are long and point everywhere
        "no noise, clipped": (None, {"name": "NormClip", "bound": 0.3, "where": "client"}),
        "epsilon 16, secret cohort": (16.0, {"secret_cohort": True}),
        "epsilon 8, secret cohort": (8.0, {"secret_cohort": True}),
        "epsilon 8, cohort known": (8.0, {}),
    },
}


def config_of(level: str, row: str, rate: float, seed: int, noise: float | None) -> Any:
    from fedlens.config import recipe as recipes

    how, (_, more) = LEVELS[level], ROWS[level][row]
    stack: list[Layer] = [{"name": "FedAvg", **how["fedavg"], how["rate"]: rate}]
    if noise is not None:
        stack.append({**how["layer"], **more, "delta": DELTA, "noise": noise})
    elif more:
        stack.append(more)
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
    config = config_of(level, row, 1.0, seed, 1.0)
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


def best_rate(level: str, row: str) -> float | None:
    """The step size that does best with seed 0; every row has the same ones to choose from."""
    cells = CELLS.read(level=level, row=row, seed=0)
    return max(cells, key=lambda c: c["accuracy"])["rate"] if cells else None


def cell_of(level: str, row: str, rate: float | None, seed: int) -> Cell:
    from fedlens.runs.job import run_job

    rate = best_rate(level, row) if rate is None else rate
    assert rate is not None
    noise = noise_of(level, row, seed)
    config = config_of(level, row, rate, seed, None if noise is None else round(noise, 4) + 1e-4)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_job(config, Path(folder) / "run")
    settings = {k: v for k, v in flat_settings(config.tables()).items() if DATA not in str(v)}
    return {
        "level": level,
        "row": row,
        "rate": rate,
        "seed": seed,
        "accuracy": outcome.metrics["accuracy"],
        "privacy": outcome.summary["privacy"],
        "seconds": round(outcome.summary["seconds"], 1),
        "settings": settings,
        "versions": versions(),
    }


SIGMAS = (0.0, 1.0, 5.0, 20.0)  # grey levels


def deblur_cell(sigma: float, seed: int) -> Cell:
    """What is restored, and what `fedlens audit` gets of client 0's photo in 12 rounds."""
    from fedlens.audit.audit import audit
    from fedlens.config import recipe as recipes
    from fedlens.runs.job import run_job

    given = {
        "data.image": f"{DATA}/classic/gray_set12/01.png",
        "NoisyViews.sigma": sigma,
        "rounds": 200,
        "evaluate_every": 200,
        "tol": 0,
        "seed": seed,
        "workers": 0,
    }
    config = recipes.read("deblur", given, "FedDeblur+NoisyViews")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        outcome = run_job(config, folder)
        found = audit(folder, attacks=["feddeblur"], clients=[0], protections=False)
    attack = found.rows[0].finding
    settings = {k: v for k, v in flat_settings(config.tables()).items() if DATA not in str(v)}
    return {
        "level": "deblur",
        "row": f"sigma {sigma:g}",
        "seed": seed,
        "psnr": outcome.metrics["psnr"],
        "measure": attack.measure,
        "stolen": attack.score,
        "baseline": attack.baseline,
        "settings": settings,
        "versions": versions(),
    }


def deblur_table() -> str:
    lines = ["| noise on a pixel | seeds | restored, dB | the server's copy of a photo | a guess |"]
    lines.append("|---|---|---|---|---|")
    for sigma in SIGMAS:
        cells = CELLS.read(level="deblur", row=f"sigma {sigma:g}")
        if not cells:
            lines.append(f"| {sigma:g} | 0 | not run | | |")
            continue
        psnr, stolen, guess = (
            statistics.mean(c[key] for c in cells) for key in ("psnr", "stolen", "baseline")
        )
        named = cells[0]["measure"]
        lines.append(
            f"| {sigma:g} | {len(cells)} | {psnr:.2f} | {stolen:.2f} ({named}) | {guess:.2f} |"
        )
    return "\n".join(lines)


def table(level: str) -> str:
    lines = [
        f"| row | {LEVELS[level]['rate']} | seeds | accuracy, % | epsilon spent | noise x clip |"
        " sums |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS[level]:
        rate = best_rate(level, row)
        cells = CELLS.read(level=level, row=row, rate=rate)
        if not cells:
            lines.append(f"| {row} | | 0 | not run | | | |")
            continue
        found = [100 * c["accuracy"] for c in cells]
        spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
        told = [c["privacy"] for c in cells if c["privacy"]]
        spent = f"{max(p['epsilon'] for p in told):.3g}" if told else "-"
        noise = f"{statistics.mean(p['noise'] for p in told):.3g}" if told else "-"
        sums = str(max(p["sums"] for p in told)) if told else "-"
        mean = statistics.mean(found)
        lines.append(
            f"| {row} | {rate:g} | {len(found)} | {mean:.1f}{spread} | {spent} | {noise} | {sums} |"
        )
    lines.append("| guessing | - | - | 10.0 | 0 | - | - |")
    said = [c["privacy"]["sentence"] for c in CELLS.read(level=level) if c["privacy"]]
    return "\n".join([*lines, *([f"\nThe last of them in full: {said[-1]}."] if said else [])])


BLOCKS: dict[str, Callable[[], str]] = {
    **{level: partial(table, level) for level in LEVELS},
    "deblur": deblur_table,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--level", choices=list(BLOCKS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    wanted = [given.level] if given.level else list(BLOCKS)
    jobs: list[tuple[Cell, Callable[[], Cell]]] = []
    for seed in map(int, given.seeds.split(",")):
        for level in (name for name in LEVELS if name in wanted):
            for row in ROWS[level]:
                for rate in LEVELS[level]["rates"] if seed == 0 else (best_rate(level, row),):
                    cell = {"level": level, "row": row, "rate": rate, "seed": seed}
                    jobs.append((cell, partial(cell_of, level, row, rate, seed)))
        for sigma in SIGMAS if "deblur" in wanted else ():
            cell = {"level": "deblur", "row": f"sigma {sigma:g}", "seed": seed}
            jobs.append((cell, partial(deblur_cell, sigma, seed)))
    compute(CELLS, jobs, given.minutes, lambda c: str(c.get("accuracy", c.get("psnr"))))


if __name__ == "__main__":
    main()

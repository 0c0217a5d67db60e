"""What SecureSum changes in a method's result: every method with and without it, the same seeds.

    python experiments/trust/run.py [--minutes 5]     computes what is missing in cells.jsonl
    python experiments/trust/run.py --only FedVSR     the same, of some rows
    python experiments/trust/run.py --table           writes the table into README.md

Needs $FEDLENS_DATA (classic, spmcs, vid4, jhmdb21, cifar10, lspet). Masks are off (`masks =
false`): they cancel bit for bit, which tests/trust/test_secure_sum.py holds for every stack, so the
fixed point is all that can change a result.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens.config.recipe import Config
    from fedlens.runs.job import Outcome

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from blocks import fill  # noqa: E402
from cells import Cell, Cells, compute, flat_settings, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "method", "secure", "seed", shared_by="method")
DATA = os.environ.get("FEDLENS_DATA", "data")
PHOTO = f"{DATA}/classic/gray_set12/01.png"
SEEDS = (0, 1)
# by row: the recipe, what is other than in it, the metric and its unit
METHODS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "FedDeblur, complete views": (
        "deblur",
        {"data.image": PHOTO, "rounds": 200, "evaluate_every": 100, "tol": 0},
        "psnr",
        "dB",
    ),
    "FedDeblur, partial views": (
        "deblur-partial",
        {"data.image": PHOTO, "rounds": 200, "evaluate_every": 100, "tol": 0},
        "psnr",
        "dB",
    ),
    "FedDeblur, six of ten answer": (
        "deblur",
        {"data.image": PHOTO, "rounds": 200, "evaluate_every": 100, "tol": 0, "cohort": 6},
        "psnr",
        "dB",
    ),
    "FedVSR, SPMCS": (
        "fedvsr-small",
        {"rounds": 20, "evaluate_every": 20, "batch": 1, "cohort": 4},
        "psnr_y",
        "dB",
    ),
    "FedVSSL, JHMDB-21": (
        "fedvssl-jhmdb",
        {"rounds": 16, "evaluate_every": 16, "task.motion": True, "task.shift": "pixels"},
        "recall_at_1",
        "share",
    ),
    "FBL, CIFAR-10": (
        "fbl",
        {"rounds": 20, "evaluate_every": 20, "data.root": f"{DATA}/cifar10", "data.limit": 2000,
         "data.test_limit": 1000, "generator.root": f"{DATA}/cifar10/jpg/public", "clients": 8,
         "cohort": 5, "Balance.cache": ""},
        "accuracy",
        "share",
    ),
    "RAF, LSPET": (
        "raf-lspet",
        {"rounds": 20, "evaluate_every": 20, "task.network": "resnet-18", "task.stages": 1},
        "pck",
        "share",
    ),
}  # fmt: skip


def run_of(method: str, **other: Any) -> tuple[Config, Outcome]:
    """The method's recipe with other settings, run."""
    from fedlens.config import recipe as recipes
    from fedlens.runs.job import run_job

    recipe, overrides, _, _ = METHODS[method]
    config = recipes.read(recipe, {**overrides, "workers": 0, **other})
    with tempfile.TemporaryDirectory() as folder:
        return config, run_job(config, Path(folder) / "run")


def untrained(method: str, seed: int) -> dict[str, float]:
    """What somebody gets who learned nothing: the network before the first round (FedVSR's is the
    bicubic enlargement), of FedDeblur the mean of the blurred photos."""
    from fedlens.deblur.observation import SceneFacts, without_rim
    from fedlens.deblur.task import mosaic, score

    _, outcome = run_of(method, seed=seed, rounds=0, evaluate_every=1)
    federation = outcome.setup.federation
    if not isinstance(federation.facts, SceneFacts):
        return outcome.metrics
    ((name, truth),) = federation.test.items()
    photos = mosaic([held[name] for held in federation.holdings])
    return score(without_rim(photos, federation.facts.pad).clamp(0, 255), truth)


def cell_of(method: str, secure: bool, seed: int) -> Cell:
    hidden = {"SecureSum.masks": False} if secure else {}
    config, outcome = run_of(method, seed=seed, secure=secure, **hidden)
    state = outcome.rounds[-1]["state"]
    settings = {k: v for k, v in flat_settings(config.tables()).items() if DATA not in str(v)}
    return {
        "method": method,
        "secure": secure,
        "seed": seed,
        "metrics": outcome.metrics,
        **({} if secure else {"untrained": untrained(method, seed)}),
        "saturated": sum(r["state"].get("saturated", 0) for r in outcome.rounds),
        "skipped": sum(bool(r.get("skipped")) for r in outcome.rounds),
        "bytes_up": outcome.rounds[-1]["bytes_up"],
        "last": state,
        "settings": settings,
        "versions": versions(),
    }


def table() -> str:
    rows = [
        "| method | metric | nothing learned | without | with SecureSum | difference |"
        " clipped numbers | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, (_, _, metric, unit) in METHODS.items():
        pairs = [
            (plain, CELLS.find({"method": method, "secure": True, "seed": plain["seed"]}))
            for plain in CELLS.read(method=method, secure=False)
        ]
        done = [(a, b) for a, b in pairs if b is not None]
        if not done:
            rows.append(f"| {method} | {metric} | not run | not run | not run | | | |")
            continue
        without, secured = (
            [c["metrics"][metric] for c in side] for side in zip(*done, strict=True)
        )
        nothing = [c["untrained"][metric] for c, _ in done]
        change = [b - a for a, b in zip(without, secured, strict=True)]
        clipped = sum(b["saturated"] for _, b in done)
        skipped = sum(b["skipped"] for _, b in done)
        shown = "db" if unit == "dB" else ""
        digits = 3 if shown else 4
        text = [" / ".join(f"{v:.{digits}f}" for v in side) for side in (nothing, without, secured)]
        difference = " / ".join(f"{d:+.4f}" for d in change)
        rows.append(
            f"| {method} | {metric} | {' | '.join(text)} | {difference} | {clipped:.0f} |"
            f" {skipped} |"
        )
    return "\n".join(rows)


BLOCKS = {"with-and-without": table}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name begins like this")
    given = parser.parse_args()
    if given.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    jobs = [
        (
            {"method": method, "secure": secure, "seed": seed},
            partial(cell_of, method, secure, seed),
        )
        for seed in SEEDS
        for method in METHODS
        if method.startswith(given.only)
        for secure in (False, True)
    ]
    compute(CELLS, jobs, given.minutes, lambda c: str(c["metrics"]))


if __name__ == "__main__":
    main()

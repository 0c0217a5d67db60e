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

CELLS = Cells(HERE / "cells.jsonl", "method", "how", "seed", shared_by="method")
DATA = os.environ.get("FEDLENS_DATA", "data")
PHOTO = f"{DATA}/classic/gray_set12/01.png"
SEEDS = (0, 1)
PLAIN, SECURE, ROUNDED = "plain", "SecureSum", "other rounding"
# what is other than in the recipe. Two threads sum in another order: the last bits differ and
# nothing else, which is how much a difference between two runs of this method means.
HOW: dict[str, dict[str, Any]] = {
    PLAIN: {},
    SECURE: {"secure": True, "SecureSum.masks": False},
    ROUNDED: {"threads": 2},
}
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
    "RAF, drawn figures": ("raf", {"rounds": 20, "evaluate_every": 20}, "pck", "share"),
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


def cell_of(method: str, how: str, seed: int) -> Cell:
    config, outcome = run_of(method, seed=seed, **HOW[how])
    state = outcome.rounds[-1]["state"]
    settings = {k: v for k, v in flat_settings(config.tables()).items() if DATA not in str(v)}
    return {
        "method": method,
        "how": how,
        "seed": seed,
        "metrics": outcome.metrics,
        **({"untrained": untrained(method, seed)} if how == PLAIN else {}),
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
        " other rounding | clipped numbers | skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, (_, _, metric, unit) in METHODS.items():
        found = {(c["how"], c["seed"]): c for c in CELLS.read(method=method)}
        seeds = [s for s in SEEDS if {(PLAIN, s), (SECURE, s)} <= found.keys()]
        if not seeds:
            rows.append(f"| {method} | {metric} | not run | not run | not run | | | | |")
            continue
        form = "{:.3f}" if unit == "dB" else "{:.4f}"

        def gaps(how: str, found: Any = found, metric: str = metric) -> str:
            both = [s for s in SEEDS if {(PLAIN, s), (how, s)} <= found.keys()]
            scores = [[found[h, s]["metrics"][metric] for s in both] for h in (PLAIN, how)]
            return " / ".join(f"{b - a:+.4f}" for a, b in zip(*scores, strict=True))

        sides = (
            [found[PLAIN, s]["untrained"][metric] for s in seeds],
            *([found[how, s]["metrics"][metric] for s in seeds] for how in (PLAIN, SECURE)),
        )
        secured = [found[SECURE, s] for s in seeds]
        rows.append(
            f"| {method} | {metric} | "
            + " | ".join(" / ".join(map(form.format, side)) for side in sides)
            + f" | {gaps(SECURE)} | {gaps(ROUNDED)} | {sum(c['saturated'] for c in secured):.0f} |"
            f" {sum(c['skipped'] for c in secured)} |"
        )
    return "\n".join(rows)


BLOCKS = {"with-and-without": table}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name begins like this")
    parser.add_argument("--how", default=",".join(HOW), help="which of the runs of a row")
    given = parser.parse_args()
    if given.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    jobs = [
        (
            {"method": method, "how": how, "seed": seed},
            partial(cell_of, method, how, seed),
        )
        for seed in SEEDS
        for method in METHODS
        if method.startswith(given.only)
        for how in HOW
        if how in given.how.split(",")
    ]
    compute(CELLS, jobs, given.minutes, lambda c: str(c["metrics"]))


if __name__ == "__main__":
    main()

"""All baselines on one recipe: a cell per method and seed, kept in cells.jsonl, seed 0 first.

    python experiments/baselines/run.py cifar10-0.1 --budget 30 --seeds 0,1,2   in minutes
    python experiments/baselines/run.py cifar10-0.1 --table   what is there, into README.md

A cell that is there is not computed again. One process, one thread. All methods share the recipe's
network, learning rate, batches and rounds; a method's own parameter is the one its paper names for
CIFAR-like data (METHODS below), not tuned here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlens import run
from fedlens.config.files import load_tables
from fedlens.config.recipe import Config, from_tables
from fedlens.core.federation import Federation
from fedlens.engines.simulator import Simulator
from fedlens.runs.setup import make_setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from blocks import fill  # noqa: E402
from cells import Cells, compute, flat_settings, versions  # noqa: E402

# name -> (layers, overrides of the recipe)
METHODS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "FedAvg": ([], {}),
    "FedAvg, IID data": ([], {"data.partition": "iid"}),
    "FedProx 0.01": ([{"name": "FedProx", "mu": 0.01}], {}),
    "Scaffold": ([{"name": "Scaffold"}], {}),
    "Scaffold, plain SGD": ([{"name": "Scaffold"}], {"FedAvg.momentum": 0.0, "FedAvg.lr": 0.1}),
    "FedAvg, plain SGD": ([], {"FedAvg.momentum": 0.0, "FedAvg.lr": 0.1}),
    "Scaffold, plain SGD, small steps": (
        [{"name": "Scaffold"}],
        {"FedAvg.momentum": 0.0, "FedAvg.lr": 0.02},
    ),
    "FedAvg, plain SGD, small steps": ([], {"FedAvg.momentum": 0.0, "FedAvg.lr": 0.02}),
    "FedNova": ([{"name": "FedNova"}], {}),
    "FedDyn 0.01": ([{"name": "FedDyn", "alpha": 0.01}], {"FedAvg.clip": 10.0}),
    "FedDyn 0.1": ([{"name": "FedDyn", "alpha": 0.1}], {"FedAvg.clip": 10.0}),
    "Moon 1": ([{"name": "Moon", "mu": 1.0}], {}),
    "FedNTD": ([{"name": "FedNTD"}], {}),
    "FedGen": ([{"name": "FedGen"}], {}),
    "FedGen 0.1": ([{"name": "FedGen", "alpha": 0.1, "beta": 0.1}], {}),
    "FedCDA": ([{"name": "FedCDA", "warmup": 5}], {}),
    "FedAvgM 0.7": ([{"name": "FedAvgM", "beta": 0.7}], {}),
    "FedAdam": ([{"name": "FedAdam", "lr": 0.01}], {}),
    "FedYogi": ([{"name": "FedYogi", "lr": 0.01}], {}),
    "LossAware": ([{"name": "LossAware"}], {}),
    "Median": ([{"name": "Median"}], {}),
    "TrimmedMean 0.1": ([{"name": "TrimmedMean", "share": 0.1}], {}),
    "MultiKrum 5": ([{"name": "MultiKrum", "liars": 1, "keep": 5}], {}),
    "GeometricMedian": ([{"name": "GeometricMedian"}], {}),
}
NOTHING_LEARNED = "the client's commonest class"
# After a model for each client: compared on the clients' own held-out parts.
PERSONAL: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "FedAvg": METHODS["FedAvg"],
    NOTHING_LEARNED: ([], {}),
    "every client alone": ([{"name": "FineTune", "rounds": 20}], {}),
    "FedAvg, last round alone": ([{"name": "FineTune"}], {}),
    "FedPer": ([{"name": "FedPer"}], {}),
    "FedRep": ([{"name": "FedRep"}], {}),
    "LG-FedAvg": ([{"name": "LGFedAvg"}], {}),
    "Ditto 0.1": ([{"name": "Ditto", "lam": 0.1}], {}),
    "Ditto 1": ([{"name": "Ditto", "lam": 1.0}], {}),
    "pFedMe": ([{"name": "PFedMe"}], {}),
}


def cell(recipe: Path, method: str, seed: int, overrides: dict[str, Any]) -> dict[str, Any]:
    tables = load_tables(recipe)
    layers, own = (METHODS | PERSONAL)[method]
    config = from_tables(
        {**tables, "algorithm": [*tables["algorithm"], *layers]},
        recipe.stem,
        {**own, **overrides, "federation.seed": seed},
    )
    setup = make_setup(config)
    if method == NOTHING_LEARNED:
        return nothing_learned(config, setup.federation, recipe.stem, seed)
    s, curve, up, down, lost = setup.settings, [], 0, 0, 0
    began, worked = time.perf_counter(), time.process_time()

    def heard(_: Any, r: Any) -> None:
        nonlocal up, down, lost
        up, down, lost = up + r.bytes_up, down + r.bytes_down, lost + len(r.lost)
        curve.append(
            {"round": r.number + 1, "training_loss": r.loss, "bytes": up + down, **dict(r.metrics)}
        )

    with Simulator(setup.algorithm, setup.federation, workers=s.workers, threads=1) as engine:
        run(
            setup.algorithm,
            engine,
            s.rounds,
            cohort=s.cohort,
            seed=seed,
            test=setup.federation.test,
            evaluate_every=s.evaluate_every,
            personal=setup.personal,
            after_round=heard,
        )
    final = curve[-1]
    return {
        "recipe": recipe.stem,
        "method": method,
        "seed": seed,
        "settings": flat_settings(config.tables()),
        "accuracy": final.get("accuracy"),
        "worst_class": final.get("accuracy_worst_class"),
        "client_mean": final.get("client_accuracy"),
        "client_worst": final.get("client_accuracy_worst"),
        "bytes_up": up,
        "bytes_down": down,
        "lost": lost,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "curve": curve,
        "versions": versions(),
    }


def nothing_learned(
    config: Config, federation: Federation, recipe: str, seed: int
) -> dict[str, Any]:
    """What a client reaches that answers everything with the class it has most of."""
    right = []
    for mine, held_out in zip(federation.holdings, federation.held_out, strict=True):
        if held_out is not None and len(held_out):
            labels = mine.batch(torch.arange(len(mine)))["y"]
            asked = held_out.batch(torch.arange(len(held_out)))["y"]
            right.append(float((asked == labels.mode().values).double().mean()))
    cell = {"recipe": recipe, "method": NOTHING_LEARNED, "seed": seed}
    figures = {"client_mean": statistics.fmean(right), "client_worst": min(right)}
    settings = {"settings": flat_settings(config.tables()), "versions": versions()}
    nothing = {"accuracy": None, "bytes_up": 0, "bytes_down": 0, "lost": 0, "seconds": 0.0}
    return {**cell, **figures, **nothing, **settings, "cpu_seconds": 0.0, "curve": []}


def reached(done: dict[str, Any], target: float) -> tuple[int, int] | None:
    """Round and bytes at which an evaluation first showed the target."""
    hit = next((c for c in done["curve"] if c.get("accuracy", 0.0) >= target), None)
    return (hit["round"], hit["bytes"]) if hit else None


def cells_in(path: Path) -> Cells:
    return Cells(path, "recipe", "method", "seed")


def table(cells: Cells, recipe: str) -> str:
    """Mean and spread over seeds, and the gap to FedAvg seed by seed (mean, least and largest): all
    rows share their seeds' splits and initial weights. Rounds and megabytes to the target are of
    seed 0."""
    target, everything = TARGETS[recipe], cells.read(recipe=recipe)
    head = [
        "method",
        "seeds",
        "accuracy",
        "minus FedAvg",
        "worst class",
        "worst client",
        f"rounds to {target:.0%}",
        "MB to it",
        "MB in all",
        "CPU s",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    plain = {c["seed"]: c for c in everything if c["method"] == "FedAvg"}
    for method in METHODS:
        found = [c for c in everything if c["method"] == method]
        if not found:
            continue

        def figure(key: str, found: list[dict[str, Any]] = found) -> str:
            values = [100 * c[key] for c in found if c[key] is not None]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            return f"{statistics.mean(values):.1f}{spread}" if values else "-"

        hit = reached(found[0], target)
        gaps = [
            100 * (c["accuracy"] - plain[c["seed"]]["accuracy"])
            for c in found
            if c["seed"] in plain and method != "FedAvg"
        ]
        gap = (
            f"{statistics.mean(gaps):+.1f} ({min(gaps):+.1f} .. {max(gaps):+.1f})" if gaps else "-"
        )
        row = [
            method,
            str(len(found)),
            figure("accuracy"),
            gap,
            figure("worst_class"),
            figure("client_worst"),
            str(hit[0]) if hit else "-",
            f"{hit[1] / 1e6:.0f}" if hit else "-",
            f"{(found[0]['bytes_up'] + found[0]['bytes_down']) / 1e6:.0f}",
            f"{statistics.mean(c['cpu_seconds'] for c in found):.0f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def personal_table(cells: Cells, recipe: str) -> str:
    """Of the clients' own held-out parts, each client counting alike: mean and worst over clients,
    then mean and spread over seeds."""
    everything = cells.read(recipe=recipe)
    plain = {c["seed"]: c["client_mean"] for c in everything if c["method"] == "FedAvg"}
    lines = [
        "| method | seeds | mean client | minus FedAvg | worst client | MB up | CPU s |",
        "|" + "---|" * 7,
    ]
    for method in PERSONAL:
        found = [c for c in everything if c["method"] == method]
        if not found:
            continue
        figures = []
        for key in ("client_mean", "client_worst"):
            values = [100 * c[key] for c in found]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            figures.append(f"{statistics.mean(values):.1f}{spread}")
        gaps = [100 * (c["client_mean"] - plain[c["seed"]]) for c in found if c["seed"] in plain]
        gap = f"{statistics.mean(gaps):+.1f} ({min(gaps):+.1f} .. {max(gaps):+.1f})"
        row = [
            method,
            str(len(found)),
            figures[0],
            gap if method != "FedAvg" and gaps else "-",
            figures[1],
            f"{found[0]['bytes_up'] / 1e6:.1f}",
            f"{statistics.mean(c['cpu_seconds'] for c in found):.0f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def overhead() -> str:
    """What `benchmarks/overhead.py` printed (kept in results/overhead.json), in units of FedAvg's
    round and of the model.
    """
    found = json.loads((HERE / "results" / "overhead.json").read_text())["methods"]
    model = found["FedAvg"]["bytes_down_per_client"]
    head = [
        "method",
        "seconds a round",
        "down",
        "up",
        "a client keeps",
        "the server keeps",
        "peak memory, MB more",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    sizes = (
        "bytes_down_per_client",
        "bytes_up_per_client",
        "client_memory_bytes",
        "server_state_bytes",
    )
    for name, f in found.items():
        row = [
            f"{f['ratio']:.2f}",
            *(f"{f[key] / model:.3g} P" if f[key] else "-" for key in sizes),
            f"{f['peak_over_fedavg'] / 1e6:.0f}",
        ]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def scaffold() -> str:
    """What `scaffold.py` printed."""
    return (HERE / "results" / "scaffold.md").read_text().strip()


# accuracies that many methods reach, not all
TARGETS = {
    "cifar10-0.1": 0.3,
    "cifar10-0.5": 0.35,
    "tiny-imagenet-20": 0.15,
}
CELLS = HERE / "cells.jsonl"
BLOCKS = {name: partial(table, cells_in(CELLS), name) for name in TARGETS} | {
    "personal": partial(personal_table, cells_in(CELLS), "cifar10-0.1"),
    "overhead": overhead,
    "scaffold": scaffold,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=sorted(p.stem for p in HERE.glob("*.toml")))
    parser.add_argument("--budget", type=float, default=30, help="minutes")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=None, help="some of the rows, separated by ;")
    parser.add_argument("--personal", action="store_true", help="the rows of the personal table")
    parser.add_argument(
        "--set", action="append", default=[], help="an override of the recipe, as key=value"
    )
    parser.add_argument("--out", type=Path, default=CELLS, help="the file of cells")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    cells = cells_in(options.out)
    if options.table:
        cells.tidy()
        print(table(cells, options.recipe))
        fill(HERE / "README.md", BLOCKS)
        return
    torch.set_num_threads(1)
    overrides = {k: json.loads(v) for k, v in (pair.split("=", 1) for pair in options.set)}
    methods = options.methods.split(";") if options.methods else list(METHODS)
    methods = list(PERSONAL) if options.personal else methods
    jobs = [
        (
            {"recipe": options.recipe, "method": method, "seed": seed},
            partial(cell, HERE / f"{options.recipe}.toml", method, seed, overrides),
        )
        for seed in (int(s) for s in options.seeds.split(","))
        for method in methods
    ]
    compute(
        cells,
        jobs,
        options.budget,
        lambda c: (
            f"{100 * (c['client_mean'] if c['accuracy'] is None else c['accuracy']):.1f} %,"
            f" {c['cpu_seconds']:.0f} s CPU, {c['seconds']:.0f} s"
        ),
    )


if __name__ == "__main__":
    main()

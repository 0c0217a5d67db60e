"""Table II of the RAF paper on the LSPET people of the data pack: a cell per row and seed, as JSON in cells/; tables.py reads them.

    python experiments/raf/run.py --rows fedavg,raf-fedavg,fedprox,raf-fedprox --seeds 0 --budget 1200

A cell that is there is not computed again; no new one is begun once the budget (seconds) is spent. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fedlens import run, stack
from fedlens.algorithms import FedAvg
from fedlens.data.pose import Lspet
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, MultiResolution
from fedlens.metrics.pose import hits
from fedlens.tasks.pose import Pose

HERE = Path(__file__).parent
SEEN = ((64, 48), (48, 36), (32, 24))
ALL = ((32, 24), (48, 36), (64, 48), (80, 60), (96, 72), (128, 96))
SETTINGS: dict[str, Any] = {
    "rounds": 36, "epochs": 1, "batch": 16, "lr": 2e-3, "weight_decay": 0.01, "schedule": "cosine", "mu": 0.01, "alpha": 1.0,
    "network": "vit-tiny", "scale": 0.25, "rotation": 30.0, "decode": "dark",
}  # fmt: skip


def cell(row: str, seed: int, settings: dict[str, Any], positions: str = "conv") -> dict[str, Any]:
    """Train one row and judge it at all six resolutions; right joints per person are kept for the paired bootstrap."""
    s = settings
    source = Lspet(sizes=SEEN, scale=s["scale"], rotation=s["rotation"], folder=s.get("folder", ""))
    federation = source.federation(s.get("clients", 3), seed)
    task = Pose("lsp", s["network"], patch=4, positions="absolute" if row.endswith("-ape") else "conv", size=SEEN[0], decode=s["decode"])
    base = FedAvg(
        task, lr=s["lr"], optimizer="adamw", weight_decay=s["weight_decay"], schedule=s["schedule"], epochs=s["epochs"], batch=s["batch"],
        seed=seed, weights="uniform",
    )  # fmt: skip
    layers: list[Any] = [FedProx(s["mu"])] if "fedprox" in row else []
    if row.startswith("raf"):
        layers.append(MultiResolution(sizes=SEEN, alpha=s["alpha"]))
    algorithm = stack(base, *layers)
    losses: list[float | None] = []
    began, worked = time.perf_counter(), time.process_time()

    def heard(_: Any, done: Any) -> None:
        losses.append(done.loss)
        if done.number % 6 == 5:
            print(f"  round {done.number + 1}: loss {done.loss:.5f}, {time.perf_counter() - began:.0f} s", flush=True)

    with Simulator(algorithm, federation, workers=0, threads=1) as engine:
        state = run(algorithm, engine, s["rounds"], seed=seed, after_round=heard)
    trained = time.perf_counter() - began
    model = algorithm.result(state)
    right, counts, train_pck = {}, {}, {}
    assert federation.test is not None
    for size in ALL:
        found = task.find(model, federation.test.at(size))
        ok, there = hits(found["predicted"], found["truth"][..., :2], found["truth"][..., 2], found["reference"], 0.2)
        name = f"{size[0]}x{size[1]}"
        right[name], counts[name] = ok.sum(1).tolist(), there.sum(1).tolist()
    for people in federation.holdings:
        name = f"{people.size[0]}x{people.size[1]}"
        train_pck[name] = task.judge(task.find(model, people))["pck"]
    return {
        "row": row, "seed": seed, "settings": s, "losses": losses, "train_seconds": trained, "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked, "right": right, "counts": counts, "train_pck": train_pck,
        "pck": {k: 100 * sum(right[k]) / sum(counts[k]) for k in right}, "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="fedavg,raf-fedavg,fedprox,raf-fedprox")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--budget", type=float, default=1200)
    parser.add_argument("--out", type=Path, default=HERE / "cells")
    parser.add_argument("--set", action="append", default=[], help="a setting as key=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = dict(SETTINGS)
    for pair in options.set:
        key, value = pair.split("=", 1)
        settings[key] = type(SETTINGS[key])(value) if key in SETTINGS else value
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for seed in (int(s) for s in options.seeds.split(",")):
        for row in options.rows.split(","):
            path = options.out / f"{row}-{seed}.json"
            if path.exists():
                continue
            if time.perf_counter() - began > options.budget:
                print(f"budget spent before {path.name}")
                return
            print(path.name, flush=True)
            done = cell(row, seed, settings)
            path.write_text(json.dumps(done))
            print(json.dumps({k: round(v, 1) for k, v in done["pck"].items()}), f"{done['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()

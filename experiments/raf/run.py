"""Table II of the RAF paper in small: a cell per row and seed, in cells.jsonl; tables.py reads
them.

python experiments/raf/run.py lspet --rows fedavg,raf-fedavg,fedprox,raf-fedprox --seeds 0 --limit
400

`lspet` takes the people of the data pack, `stick` draws figures. A cell that is there is not
computed again. After `limit` seconds the run stops at the end of a round and leaves a .part file;
calling again goes on from there, to the same bits. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedlens import Message, Progress, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.files import write_atomically
from fedlens.data.pose.datasets import Lspet, PoseSource
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, MultiResolution
from fedlens.metrics.pose import hits
from fedlens.tasks.pose import Pose

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from cells import versions  # noqa: E402
from tables import CELLS, cells_in  # noqa: E402

SEEN = ((64, 48), (48, 36), (32, 24))
ALL = ((32, 24), (48, 36), (64, 48), (80, 60), (96, 72), (128, 96))
COMMON: dict[str, Any] = {
    "network": "vit-tiny",
    "epochs": 1,
    "lr": 2e-3,
    "weight_decay": 0.01,
    "schedule": "cosine",
    "mu": 0.01,
    "alpha": 1.0,
    "sigma": 4.0,
    "scale": 0.15,
    "rotation": 15.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    # FedProx's usual mu of 0.01 goes with a cross-entropy of about 2; the loss here is about 0.015,
    # and AdamW makes what matters of it.
    "lspet": {**COMMON, "rounds": 60, "batch": 8, "mu": 1e-4},
    "stick": {
        **COMMON,
        "network": "vit-nano",
        "lr": 3e-3,
        "rounds": 24,
        "batch": 8,
        "people": 360,
        "tests": 100,
    },
}


class OutOfTime(Exception):
    """The limit is reached; a .part file has what is done."""


def build(row: str, seed: int, data: str, s: dict[str, Any]) -> tuple[Pose, Algorithm, Federation]:
    augment = {"sizes": SEEN, "scale": s["scale"], "rotation": s["rotation"]}
    source: PoseSource = (
        Lspet(**augment)
        if data == "lspet"
        else StickFigures(people=s["people"], tests=s["tests"], **augment)
    )
    positions: Any = "absolute" if row.endswith("-ape") else "conv"
    task = Pose(
        "lsp",
        s["network"],
        patch=4,
        positions=positions,
        size=SEEN[0],
        sigma=s["sigma"],
        flip_test=False,
    )
    base = FedAvg(
        task,
        lr=s["lr"],
        optimizer="adamw",
        weight_decay=s["weight_decay"],
        schedule=s["schedule"],
        epochs=s["epochs"],
        batch=s["batch"],
        seed=seed,
        weights="uniform",
    )
    layers: list[Any] = [FedProx(s["mu"])] if "fedprox" in row else []
    if row.startswith("raf"):
        layers.append(MultiResolution(sizes=SEEN, alpha=s["alpha"]))
    return task, stack(base, *layers), source.federation(3, seed)


def train(
    algorithm: Algorithm, federation: Federation, seed: int, rounds: int, part: Path, until: float
) -> tuple[Message, dict[str, Any]]:
    """From where the .part file stands to the last round; none of these rows has client memory, so
    the state is all there is.
    """
    notes: dict[str, Any] = {"losses": [], "train_seconds": 0.0, "train_cpu_seconds": 0.0}
    progress = None
    if part.exists():
        size, rest = part.read_bytes().split(b"\n", 1)
        notes = json.loads(rest[: int(size)])
        progress = Progress(Message.from_bytes(rest[int(size) :], copy=True), len(notes["losses"]))
    clock = [time.perf_counter(), time.process_time()]

    def heard(here: Progress, done: Any) -> None:
        now = [time.perf_counter(), time.process_time()]
        notes["train_seconds"] += now[0] - clock[0]
        notes["train_cpu_seconds"] += now[1] - clock[1]
        clock[:] = now
        notes["losses"].append(done.loss)
        written = json.dumps(notes).encode()
        write_atomically(part, b"%d\n" % len(written) + written + here.state.to_bytes())
        print(
            f"  round {here.done}: loss {done.loss:.5f}, {notes['train_cpu_seconds']:.0f} s",
            flush=True,
        )
        if now[0] > until and here.done < rounds:
            raise OutOfTime

    with Simulator(algorithm, federation, workers=0, threads=1) as engine:
        return (
            run(algorithm, engine, rounds, seed=seed, progress=progress, after_round=heard),
            notes,
        )


def cell(
    row: str, seed: int, data: str, settings: dict[str, Any], part: Path, until: float
) -> dict[str, Any]:
    """Train one row and judge it at all six resolutions; right joints per person are kept for the
    paired bootstrap.
    """
    task, algorithm, federation = build(row, seed, data, settings)
    state, notes = train(algorithm, federation, seed, settings["rounds"], part, until)
    model = algorithm.result(state)
    right, counts = {}, {}
    assert federation.test is not None
    for size in ALL:
        found = task.find(model, federation.test.at(size))
        ok, there = hits(
            found["predicted"],
            found["truth"][..., :2],
            found["truth"][..., 2],
            found["reference"],
            0.2,
        )
        right[f"{size[0]}x{size[1]}"], counts[f"{size[0]}x{size[1]}"] = (
            ok.sum(1).tolist(),
            there.sum(1).tolist(),
        )
    pck = {k: 100 * sum(right[k]) / sum(counts[k]) for k in right}
    own = {
        f"{p.size[0]}x{p.size[1]}": task.judge(task.find(model, p.subset(range(min(100, len(p))))))[
            "pck"
        ]
        for p in federation.holdings
    }
    return {
        "row": row,
        "seed": seed,
        "data": data,
        "settings": settings,
        **notes,
        "right": right,
        "counts": counts,
        "pck": pck,
        "train_pck": own,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(SETTINGS))
    parser.add_argument("--rows", default="fedavg,raf-fedavg,fedprox,raf-fedprox")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--limit", type=float, default=1200)
    parser.add_argument("--out", type=Path, default=CELLS, help="the file of cells")
    parser.add_argument("--set", action="append", default=[], help="a setting as key=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.perf_counter() + options.limit
    settings = dict(SETTINGS[options.data])
    for pair in options.set:
        key, value = pair.split("=", 1)
        settings[key] = type(settings[key])(value)
    cells = cells_in(options.out)
    for seed in (int(s) for s in options.seeds.split(",")):
        for row in options.rows.split(","):
            name = f"{options.data}-{row}-{seed}"
            if cells.find({"data": options.data, "row": row, "seed": seed}):
                continue
            print(name, flush=True)
            part = options.out.with_name(f"{name}.part")
            try:
                done = cell(row, seed, options.data, settings, part, until)
            except OutOfTime:
                print("out of time; call again to go on")
                return
            cells.append(done)
            part.unlink()
            print(
                json.dumps({k: round(v, 1) for k, v in done["pck"].items()}),
                f"{done['train_cpu_seconds']:.0f} s",
                flush=True,
            )
            if time.perf_counter() > until:
                return


if __name__ == "__main__":
    main()

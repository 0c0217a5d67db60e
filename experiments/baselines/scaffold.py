"""Why SCAFFOLD fails on CIFAR-10 at Dirichlet 0.1: the table's own run (plain SGD, 0.1), with one
thing changed at a time.

    python experiments/baselines/scaffold.py --seeds 0,1,2 [--rows "as it is;half of it"] [--rounds
    8] python experiments/baselines/scaffold.py --probe --seeds 0,1,2

The first prints a row per variant: each seed's accuracy after the last round and the best on the
way; the first round in which a client's mean loss passed 100 or its reply was not finite ("-":
none); the largest |c - c_i| in use and the longest way of a client before it.

The second looks at a single round. All splits start from the same model (eight rounds of FedAvg at
Dirichlet 0.5), with c_i the client's exact gradient there and c their mean: nothing is old, all
weigh alike and take the same number of steps. It prints the test loss of the mean model after so
many local steps, and the longest way of a client after the last of them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlens import run
from fedlens.algorithms.fedavg import FedAvg
from fedlens.config.files import load_tables
from fedlens.config.recipe import from_tables
from fedlens.core import tree
from fedlens.core.algorithm import stack
from fedlens.core.client import Client, generator
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.engines.simulator import Simulator
from fedlens.layers.scaffold import Scaffold
from fedlens.runs.setup import make_setup

RECIPE = Path(__file__).resolve().parent / "cifar10-0.1.toml"


@dataclass
class Part(Scaffold):
    """Option II with only a share of the correction, or with that of some parameters only; c_i
    stays the mean gradient along the path.
    """

    share: float = 1.0
    only: str = ""

    def client_step(self, message: Message, client: Client) -> Message:
        c = message.trees["control"]
        c_i = client.memory.get("control") or tree.zeros_like(c)
        used = {n: (self.share if n.startswith(self.only) else 0.0) * (c[n] - c_i[n]) for n in c}
        reply = self.inner.client_step(message, client.drift(used))
        new = {n: -used[n] - reply.trees["delta"][n] / reply.scalars["lr_sum"] for n in c}
        client.memory["control"] = new
        reply = reply.note(correction=tree.norm(used), way=tree.norm(reply.trees["delta"]))
        return reply.put(control=tree.subtract(new, c_i)).weigh("control", 1.0)


# name -> (layer, overrides of the recipe); all with plain SGD at 0.1 unless they say otherwise
ROWS: dict[str, tuple[Scaffold | None, dict[str, Any]]] = {
    "FedAvg": (None, {}),
    "as it is": (Part(), {}),
    "option I": (Scaffold(option="I"), {}),
    "half of it": (Part(share=0.5), {}),
    "head only": (Part(only="head"), {}),
    "body only": (Part(only="body"), {}),
    "16 equal steps, equal weights": (Part(), {"FedAvg.steps": 16, "FedAvg.weights": "uniform"}),
    "Dirichlet 0.5": (Part(), {"data.alpha": 0.5}),
    "5 epochs": (Part(), {"FedAvg.epochs": 5}),
    "80 equal steps, equal weights": (Part(), {"FedAvg.steps": 80, "FedAvg.weights": "uniform"}),
    "80 equal steps, by samples": (Part(), {"FedAvg.steps": 80}),
    "FedAvg, 5 epochs": (None, {"FedAvg.epochs": 5}),
}


def measure(row: str, seed: int, rounds: int) -> tuple[float, float, int | None, float, float]:
    layer, own = ROWS[row]
    settings = {
        "FedAvg.momentum": 0.0,
        "FedAvg.lr": 0.1,
        "federation.seed": seed,
        "federation.rounds": rounds,
        **own,
    }
    setup = make_setup(from_tables(load_tables(RECIPE), RECIPE.stem, settings))
    algorithm = stack(setup.algorithm, layer) if layer else setup.algorithm
    accuracies, broke, push, way = [], None, 0.0, 0.0

    def heard(_: Any, r: Any) -> None:
        nonlocal broke, push, way
        accuracies.append(r.metrics["accuracy"])
        if broke is None and (r.lost or any(not s["loss"] < 100 for s in r.scalars.values())):
            broke = r.number + 1
        if broke is None:
            push = max(push, *(s.get("correction", 0.0) for s in r.scalars.values()))
            way = max(way, *(s.get("way", 0.0) for s in r.scalars.values()))

    with Simulator(algorithm, setup.federation, workers=0, threads=1) as engine:
        run(
            algorithm,
            engine,
            rounds,
            seed=seed,
            test=setup.federation.test,
            evaluate_every=1,
            after_round=heard,
        )
    return accuracies[-1], max(accuracies), broke, push, way


STEPS = (1, 2, 4, 8, 16)


def probe(seed: int) -> None:
    tables = load_tables(RECIPE)
    plain = {"FedAvg.momentum": 0.0, "FedAvg.lr": 0.1, "federation.seed": seed}
    setup = make_setup(from_tables(tables, RECIPE.stem, {**plain, "data.alpha": 0.5}))
    with Simulator(setup.algorithm, setup.federation, workers=0, threads=1) as engine:
        start = Message({"model": run(setup.algorithm, engine, 8, seed=seed).trees["model"]})
    for split in ({"data.partition": "iid"}, {"data.alpha": 0.5}, {"data.alpha": 0.1}):
        setup = make_setup(from_tables(tables, RECIPE.stem, {**plain, **split}))
        base, holdings, test = setup.algorithm, setup.federation.holdings, setup.federation.test
        assert isinstance(base, FedAvg)
        own = [
            base.gradient(start, Client(i, data, generator(seed, i), {}))
            for i, data in enumerate(holdings)
        ]
        common = mean(own)
        push = [tree.subtract(common, g) for g in own]
        for lr in (0.1, 0.02):
            for name, share in (("SCAFFOLD", 1.0), ("FedAvg", 0.0)):
                losses, way = [base.evaluate(start, test, {})["loss"]], 0.0
                for steps in STEPS:
                    local = replace(base, lr=lr, steps=steps)
                    deltas = []
                    for i, data in enumerate(holdings):
                        client = Client(i, data, generator(seed, i), {})
                        client = client.drift(tree.scale(push[i], share))
                        deltas.append(local.client_step(start, client).trees["delta"])
                    losses.append(
                        local.evaluate(
                            Message({"model": tree.add(start.trees["model"], mean(deltas))}),
                            test,
                            {},
                        )["loss"]
                    )
                    way = max(tree.norm(d) for d in deltas)
                sizes = f"{tree.norm(common):.1f} | {sum(map(tree.norm, push)) / len(push):.1f}"
                row = " | ".join(f"{loss:.2f}" for loss in losses)
                print(
                    f"| {seed} | {next(iter(split.values()))} | {sizes} | {lr} | {name} | {row} |"
                    f" {way:.1f} |",
                    flush=True,
                )


def mean(trees: list[Tree]) -> Tree:
    return {n: torch.stack([t[n] for t in trees]).mean(0) for n in trees[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rows", default=";".join(ROWS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--probe", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.probe:
        head = [
            "seed",
            "split",
            "c",
            "mean c - c_i",
            "lr",
            "method",
            "0 steps",
            *map(str, STEPS),
            "longest way",
        ]
        print(f"| {' | '.join(head)} |\n" + "|---" * len(head) + "|", flush=True)
        for seed in options.seeds.split(","):
            probe(int(seed))
        return
    print(
        "| variant | accuracy | best | broke in round | largest correction | longest way |\n"
        + "|---" * 6
        + "|",
        flush=True,
    )
    for row in options.rows.split(";"):
        found = [measure(row, int(seed), options.rounds) for seed in options.seeds.split(",")]
        last, best, broke, push, way = zip(*found, strict=True)
        percent = [", ".join(f"{100 * a:.1f}" for a in values) for values in (last, best)]
        sizes = [", ".join(f"{v:.1f}" if v else "-" for v in values) for values in (push, way)]
        cells = [*percent, ", ".join(str(b or "-") for b in broke), *sizes]
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

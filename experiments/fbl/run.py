"""FBL beside its rivals and the references without which a gain means nothing: a cell per row,
split and seed, kept in cells.jsonl.

    fedlens run generator --out runs/generator   the diffusion model, on public images
    python experiments/fbl/run.py cifar10-0.1 --minutes 8 --seeds 0,1
    python experiments/fbl/run.py cifar10-0.1 --rows "FBL, PCA;FedAvg" --minutes 2
    python experiments/fbl/run.py --table      what is there, into README.md

A cell that is there is not computed again; seed 0 of every row comes first. One process, one
thread. All rows share network, data, batches, rounds and learning rate; a method's own parameter is
the one its paper names for CIFAR-like data. Nothing is tuned on the test images. Generators are
fitted to public images only, which no client holds and nobody is tested on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlens import run
from fedlens.config.files import find_recipe, load_tables
from fedlens.config.recipe import from_tables
from fedlens.core.files import atomic_files
from fedlens.engines.simulator import Simulator
from fedlens.generators.generator import open_store
from fedlens.runs.setup import Setup, make_setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from blocks import fill  # noqa: E402
from cells import Cells, compute, flat_settings, versions  # noqa: E402

CELLS = HERE / "cells.jsonl"
PUBLIC_EPOCHS = 20

# split -> overrides of the recipe
SPLITS: dict[str, dict[str, Any]] = {
    "cifar10-0.1": {},
    "cifar10-0.5": {"data.alpha": 0.5},
    "cifar10-shards4": {"data.partition": "shards", "data.shards": 4},
    "tiny-0.1": {"task.classes": 20},
    "tiny-0.1-noise0.05": {"task.classes": 20, "data.noise": 0.05},
}
PCA = {"name": "Gaussians"}
REAL = {"name": "ReadyImages"}
DIFFUSION = {"name": "SmallDiffusion", "steps": 10, "guidance": 1.0}
REFINED = {
    "name": "SmallDiffusion",
    "steps": 4,
    "guidance": 1.0,
    "strength": 0.5,
    "start": {"name": "Gaussians"},
}
SLOW = 0.005  # the paper's learning rate, 1e-3, over ours with its momentum, 0.02 / (1 - 0.9)
PLAIN = {"sampling": "random", "align": False, "replay": 0.0}  # filling alone: the paper's M1


def fbl(generator: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    return [{"name": "Balance", "generator": generator, **keys}]


# row -> (layers, overrides). "alone": train on images of this generator only, as many as there are
# public ones. "public": train on the public images alone. "from public": start from that model.
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "public images alone": ([], {"public": True}),
    "PCA images alone": ([], {"alone": PCA}),
    "diffusion images alone": ([], {"alone": DIFFUSION}),
    "diffusion from PCA images alone": ([], {"alone": REFINED}),
    "FedAvg": ([], {}),
    "FedAvg, from the public model": ([], {"from public": True}),
    "filling with PCA": (fbl(PCA, **PLAIN), {}),
    "filling with real public images": (fbl(REAL, **PLAIN), {}),
    "FBL, PCA": (fbl(PCA), {}),
    "FBL, PCA, slow shifts": (fbl(PCA, pace=SLOW), {}),
    "FBL, diffusion": (fbl(DIFFUSION), {}),
    "FBL, diffusion from PCA": (fbl(REFINED), {}),
    "FBL, diffusion from PCA, slow shifts": (fbl(REFINED, pace=SLOW), {}),
    "filling with diffusion from PCA": (fbl(REFINED, **PLAIN), {}),
    "FBL, real public images": (fbl(REAL), {}),
    "FBL, PCA, slow shifts, from the public model": (fbl(PCA, pace=SLOW), {"from public": True}),
    "FBL, diffusion from PCA, slow shifts, from the public model": (
        fbl(REFINED, pace=SLOW),
        {"from public": True},
    ),
    "filling with PCA, from the public model": (fbl(PCA, **PLAIN), {"from public": True}),
    "FedProx": ([{"name": "FedProx", "mu": 0.01}], {}),
    "SCAFFOLD": ([{"name": "Scaffold"}], {}),
    "MOON": ([{"name": "Moon", "mu": 1.0}], {}),
    "FedGen": ([{"name": "FedGen", "alpha": 0.1, "beta": 0.1}], {}),
    "FedDyn": ([{"name": "FedDyn", "alpha": 0.01}], {"FedAvg.clip": 10.0}),
    "FedNTD": ([{"name": "FedNTD"}], {}),
    "FedCDA": ([{"name": "FedCDA", "warmup": 5}], {}),
    "FBL (25 %), PCA": (fbl(PCA, unconstrained=0.25), {}),
    "FBL (50 %), PCA": (fbl(PCA, unconstrained=0.5), {}),
    "M2, PCA": (fbl(PCA, align=False, replay=0.0), {}),
    "M3, PCA": (fbl(PCA, drop=0.0, replay=0.0), {}),
    "M4, PCA": (fbl(PCA, replay=0.0), {}),
    "M5, PCA (70 % replay)": (fbl(PCA, replay=0.7), {}),
    "M6, PCA (90 % replay)": (fbl(PCA, replay=0.9), {}),
    "random sampling and alignment, PCA": (fbl(PCA, sampling="random"), {}),
    "FBL, PCA, 30 % cannot generate": (fbl(PCA, weak=0.3), {}),
    "FBL, PCA, on FedProx": ([{"name": "FedProx", "mu": 0.01}, *fbl(PCA)], {}),
    "FBL, PCA, on MOON": ([{"name": "Moon", "mu": 1.0}, *fbl(PCA)], {}),
}


def folders(split: str, work: Path, data: Path) -> tuple[Path, Path]:
    """The folder with train/ and test/, and the public one beside it. The pack's Tiny-ImageNet has
    no public part: 50 of its 150 training images a class become one, by links, and the clients
    share the other 100."""
    if not split.startswith("tiny"):
        return data / "cifar10" / "jpg", data / "cifar10" / "jpg" / "public"
    source, target = data / "tiny-imagenet-20", (work / "tiny").absolute()
    if not target.exists():
        with atomic_files(target.parent) as part:
            link_tiny(source, part / target.name)
    return target, target / "public"


def link_tiny(source: Path, target: Path) -> None:
    """Tiny ImageNet's classes as folders of links: 50 images each are public."""
    labels = dict(
        line.split("\t")[:2]
        for line in (source / "val" / "val_annotations.txt").read_text().splitlines()
    )
    for wnid in (source / "wnids.txt").read_text().split():
        files = sorted((source / "train" / wnid / "images").glob("*.JPEG"))
        tests = sorted(source / "val" / "images" / f for f, w in labels.items() if w == wnid)
        for name, some in (("public", files[:50]), ("train", files[50:]), ("test", tests)):
            (target / name / wnid).mkdir(parents=True, exist_ok=True)
            for file in some:
                (target / name / wnid / file.name).symlink_to(file.absolute())


def setup_of(row: str, split: str, seed: int, where: argparse.Namespace) -> Setup:
    layers, own = ROWS[row]
    root, public = folders(split, where.work, where.data)
    tables = load_tables(find_recipe("fbl"))
    overrides: dict[str, Any] = {
        **SPLITS[split],
        "data.name": "ImageFolder",
        "data.root": str(root),
        "data.size": 32,
    }
    overrides |= {"federation.seed": seed, "federation.workers": 0}
    overrides |= {
        "federation.rounds": where.rounds,
        "federation.evaluate_every": max(1, where.rounds // 8),
    }
    stacked = [*tables["algorithm"][:1], *(_placed(t, public, where) for t in layers)]
    if own.get("public") or own.get("alone"):
        overrides |= {
            "data.training": "public",
            "data.partition": "iid",
            "federation.clients": 1,
            "federation.cohort": 1,
            "federation.rounds": PUBLIC_EPOCHS,
            "FedAvg.epochs": 1,
        }
        overrides = {k: v for k, v in overrides.items() if k != "data.noise"}
    if own.get("from public"):
        overrides |= {"FedAvg.init_from": str(_weights(where, split, seed))}
    overrides |= {k: v for k, v in own.items() if "." in k}
    setup = make_setup(from_tables({**tables, "algorithm": stacked}, split, overrides))
    if own.get("alone"):
        given = from_tables(
            {**tables, "algorithm": [*stacked, _placed(fbl(own["alone"])[0], public, where)]},
            split,
            overrides,
        )
        layer: Any = make_setup(given, setup.federation).algorithm
        counts = dict(enumerate(setup.federation.facts.labels[0]))
        made, fresh = open_store(str(where.work / "made")).images(
            layer.generator, counts, setup.federation.facts.shape, seed, 10**6
        )
        print(f"{fresh} images made for {row}", flush=True)
        labels = torch.cat([torch.full((len(t),), k) for k, t in made.items()])
        held = replace(
            setup.federation.holdings[0], columns={"x": torch.cat(list(made.values())), "y": labels}
        )
        setup = replace(setup, federation=replace(setup.federation, holdings=[held]))
    return setup


def _placed(table: dict[str, Any], public: Path, where: argparse.Namespace) -> dict[str, Any]:
    """A layer whose generator knows where its images or its run are."""
    if "generator" not in table:
        return table

    def told(g: dict[str, Any]) -> dict[str, Any]:
        place = (
            {"folder": str(where.generator)}
            if g["name"] == "SmallDiffusion"
            else {"root": str(public)}
        )
        return {**g, **place, **({"start": told(g["start"])} if "start" in g else {})}

    return {
        "period": where.period,
        "cache": str(where.work / "made"),
        **table,
        "generator": told(table["generator"]),
    }


def _weights(where: argparse.Namespace, split: str, seed: int) -> Path:
    return Path(where.work / f"public-{split.split('-')[0]}-{seed}.safetensors")


def cell(row: str, split: str, seed: int, where: argparse.Namespace) -> dict[str, Any]:
    if ROWS[row][1].get("from public") and not _weights(where, split, seed).exists():
        # its cell may be there, its weights are not kept with the project
        cell("public images alone", split, seed, where)
    setup = setup_of(row, split, seed, where)
    s, curve = setup.settings, []
    cost = {"generated": 0.0, "generating": 0.0, "made": 0.0, "examples": 0.0}
    began, worked = time.perf_counter(), time.process_time()

    def heard(_: Any, r: Any) -> None:
        for key in cost:
            cost[key] += sum(c.get(key, 0.0) for c in r.scalars.values())
        curve.append(
            {
                "round": r.number + 1,
                "training_loss": r.loss,
                "seconds": r.seconds,
                **dict(r.metrics),
            }
        )

    with Simulator(setup.algorithm, setup.federation, workers=0, threads=1) as engine:
        state = run(
            setup.algorithm,
            engine,
            s.rounds,
            cohort=s.cohort,
            seed=seed,
            test=setup.federation.test,
            evaluate_every=s.evaluate_every,
            after_round=heard,
        )
    if ROWS[row][1].get("public"):
        from safetensors.torch import save_file

        where.work.mkdir(parents=True, exist_ok=True)
        save_file(dict(state.trees["model"]), _weights(where, split, seed))
    final = curve[-1]
    done = {
        "row": row,
        "split": split,
        "seed": seed,
        "settings": flat_settings(setup.config.tables()),
        "accuracy": final["accuracy"],
        "worst_class": final.get("accuracy_worst_class"),
        "cost": cost,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "curve": curve,
        "versions": versions(),
    }
    return anonymous(done, where)


def anonymous(done: dict[str, Any], where: argparse.Namespace) -> dict[str, Any]:
    """Cells are kept with the project: no paths of this machine in them."""
    text = json.dumps(done)
    for path, name in (
        (where.work.absolute(), "WORK"),
        (where.generator.absolute(), "GENERATOR"),
        (where.data.absolute(), "DATA"),
        (where.work, "WORK"),
        (where.generator, "GENERATOR"),
        (where.data, "DATA"),
    ):
        text = text.replace(str(path), name)
    found: dict[str, Any] = json.loads(text)
    return found


WHAT = ("last round", "last four", "worst class", "seeds")


def cells_in(path: Path) -> Cells:
    return Cells(path, "split", "row", "seed")


def table(cells: Cells) -> str:
    """The last round, and the mean of the last four evaluations, which wavers less; mean and spread
    over seeds.
    """
    found = cells.read()
    splits = [s for s in SPLITS if any(c["split"] == s for c in found)]
    head = [f"{split if what == 'last round' else ''} {what}" for split in splits for what in WHAT]
    lines = ["| row | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for row in ROWS:
        texts = []
        for split in splits:
            mine = [c for c in found if c["row"] == row and c["split"] == split]
            late = [
                statistics.mean([r["accuracy"] for r in c["curve"] if "accuracy" in r][-4:])
                for c in mine
            ]
            texts += [
                figure([c["accuracy"] for c in mine]),
                figure(late),
                figure([c["worst_class"] for c in mine]),
                str(len(mine) or "-"),
            ]
        if any(t != "-" for t in texts):
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def figure(shares: list[float]) -> str:
    values = [100 * v for v in shares]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("split", nargs="?", choices=list(SPLITS), default="cifar10-0.1")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rows", default=None, help="some of the rows, separated by ;")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--period", type=int, default=5, help="m: rounds until samples are chosen anew"
    )
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDLENS_DATA", "")))
    parser.add_argument(
        "--generator",
        type=Path,
        default=Path("runs/generator"),
        help="a run of the recipe generator",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/fbl"),
        help="generated images, the public model, links",
    )
    parser.add_argument("--out", type=Path, default=CELLS, help="the file of cells")
    parser.add_argument("--table", action="store_true")
    where = parser.parse_args()
    cells = cells_in(where.out)
    if where.table:
        cells.tidy()
        print(table(cells))
        fill(HERE / "README.md", BLOCKS)
        return
    torch.set_num_threads(1)
    jobs = [
        (
            {"split": where.split, "row": row, "seed": seed},
            partial(cell, row, where.split, seed, where),
        )
        for seed in (int(s) for s in where.seeds.split(","))
        for row in (where.rows.split(";") if where.rows else list(ROWS))
    ]
    compute(cells, jobs, where.minutes, told)


def told(done: dict[str, Any]) -> str:
    made = (
        f", {done['cost']['generated']:.0f} made in {done['cost']['generating']:.0f} s"
        if done["cost"]["generated"]
        else ""
    )
    return (
        f"{100 * done['accuracy']:.1f} %, {done['cpu_seconds']:.0f} s CPU, {done['seconds']:.0f}"
        f" s{made}"
    )


BLOCKS = {"table": lambda: table(cells_in(CELLS))}


if __name__ == "__main__":
    main()

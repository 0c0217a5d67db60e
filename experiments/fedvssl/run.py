"""FedVSSL on real video at the size of a CPU: pretrain on JHMDB-21 without labels, then retrieval,
a linear probe and fine-tuning.

    python experiments/fedvssl/run.py --data ../shared/data --minutes 20 \\
        [--seeds 0,1] [--rows "CtP FedAvg;CtP FedU"] [--part 0/2]
    python experiments/fedvssl/run.py --rows "CtP central, equal" size=32 side=41
    python experiments/fedvssl/run.py --table      writes the tables of README.md

A cell is one row with one seed: a pretext task, an algorithm and a split. Finished ones are kept in
cells.jsonl and are not run again. Seed 0 of every row comes first. --finetune adds
fine-tuning, also to finished cells (whose weights, if they are gone, are trained again). No cell is
begun after the budget is used up.
--part 0/2 and --part 1/2 share the cells between two processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Layer, stack
from fedlens.core.federation import Federation
from fedlens.core.rounds import run
from fedlens.data.video.video_set import RetrievalTest, VideoSet
from fedlens.data.video.videos import Videos
from fedlens.engines.simulator import Simulator
from fedlens.layers import BackboneOnly, Distances, FedU, MixedWeights, MovingMean
from fedlens.metrics.retrieval import KS, most_similar, recall
from fedlens.tasks.action import ActionRecognition
from fedlens.tasks.ctp import CtP
from fedlens.tasks.retrieval import embed
from fedlens.tasks.speed import Speed
from fedlens.tasks.vcop import VCOP
from fedlens.tasks.video_clips import clip_batches
from fedlens.tasks.video_ssl import VideoSSL

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import wire  # noqa: E402
from blocks import fill  # noqa: E402
from cells import Cells, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "setup", "row", "seed")
SETTING: dict[str, Any] = {
    "backbone": "r3d10s",
    "frames": 8,
    "size": 56,
    "side": 72,
    "clips": 4,
    "clients": 10,
    "cohort": 3,
    "rounds": 40,
    "epochs": 2,
    "batch": 8,
    "optimizer": "adam",
    "lr": 0.001,
    "weight_decay": 1e-4,
    "clip": 40.0,
    "full": 48,
    "equal": 24,
    # the target the cells were made with; the published one counts the centre in pixels
    "ctp": {"stride": 3, "speed": 8.0, "growth": 0.01, "shift": "sides"},
    "vcop": {"gap": 2},
    "speed": {"strides": (-2, -1, 0, 1, 2)},
    "finetune": {"epochs": 8, "lr": 0.002, "batch": 16, "stride": 2},
}
# epochs after which the long centralised run is tested, to see whether more would help
LOOKS = (
    3,
    6,
    12,
    24,
)


@dataclass(frozen=True)
class Row:
    """pretext None is random weights; epochs makes it centralised: one client that holds
    everything.
    """

    pretext: str | None
    layers: list[Layer] = field(default_factory=list)
    split: str = "4 classes"
    epochs: str | None = None


def fedvssl(alpha: float, beta: int) -> Row:
    return Row("CtP", [Distances(), BackboneOnly(), MixedWeights(alpha), MovingMean(beta)])


ROWS: dict[str, Row] = {
    "random": Row(None),
    "labels": Row(None),
    "CtP central, full": Row("CtP", epochs="full"),
    "CtP FedAvg": Row("CtP", [Distances()]),
    "CtP FedVSSL a=0.9 b=1": fedvssl(0.9, 1),
    "CtP central, equal": Row("CtP", epochs="equal"),
    "CtP FedAvg, IID": Row("CtP", split="iid"),
    "Speed FedAvg": Row("Speed"),
    "Speed central, equal": Row("Speed", epochs="equal"),
    "VCOP FedAvg": Row("VCOP"),
    "VCOP central, equal": Row("VCOP", epochs="equal"),
    "CtP FedVSSL a=0 b=0": fedvssl(0.0, 0),
    "CtP FedVSSL a=1 b=0": fedvssl(1.0, 0),
    "CtP FedVSSL a=0 b=1": fedvssl(0.0, 1),
    "CtP FedVSSL a=1 b=1": fedvssl(1.0, 1),
    "CtP FedVSSL a=0.9 b=0": fedvssl(0.9, 0),
    "CtP Loss": Row("CtP", [MixedWeights(1.0)]),
    "CtP FedU": Row("CtP", [FedU()]),
    "CtP FedAvg, 8 classes": Row("CtP", split="8 classes"),
}


def pretext(name: str | None) -> VideoSSL:
    common = {k: SETTING[k] for k in ("backbone", "frames", "size", "clips")}
    kinds: dict[str, Any] = {"CtP": CtP, "VCOP": VCOP, "Speed": Speed}
    task: VideoSSL = kinds[name or "CtP"](**common, **SETTING[(name or "CtP").lower()])
    return task


def source(data: Path, split: str, cache: str) -> Videos:
    rule: Any = "iid" if split == "iid" else "classes"
    per = 8 if split.startswith("8") else 4
    return Videos(
        root=str(data / "jhmdb21"),
        side=SETTING["side"],
        partition=rule,
        classes_per_client=per,
        cache=cache,
    )


def pretrain(row: Row, federation: Federation, seed: int) -> tuple[Any, dict[str, Any]]:
    """The network, and what training was like."""
    task = pretext(row.pretext)
    common = {k: SETTING[k] for k in ("lr", "optimizer", "weight_decay", "batch", "clip")}
    base = FedAvg(task, seed=seed, epochs=1 if row.epochs else SETTING["epochs"], **common)
    algorithm = stack(base, *row.layers)
    told: dict[str, Any] = {"loss": [], "bytes_up": 0, "distances": []}
    if row.pretext is None:
        return algorithm.result(algorithm.init()), told

    def after(here: Any, r: Any) -> None:
        if row.epochs == "full" and here.done in LOOKS:
            told.setdefault("curve", {})[here.done] = task.evaluate(
                algorithm.result(here.state), federation.test
            )
        told["loss"].append(round(r.loss, 4))
        told["bytes_up"] += r.bytes_up
        spread = {k: v for k, v in r.state.scalars.items() if k.startswith("distance_")}
        if spread:
            told["distances"].append({k: round(v, 5) for k, v in spread.items()})

    admitted = task.admit(federation)
    told["excluded"] = admitted.facts.details["excluded"]
    rounds, cohort = (
        (SETTING[row.epochs], 1) if row.epochs else (SETTING["rounds"], SETTING["cohort"])
    )
    with Simulator(algorithm, admitted, workers=0) as engine:
        state = run(algorithm, engine, rounds, cohort=cohort, seed=seed, after_round=after)
    return algorithm.result(state), told


def averaged(net: Any, videos: VideoSet) -> Tensor:
    """A row for every video: the last map averaged over time, place and clips. What a linear probe
    stands on.
    """
    total: Tensor | None = None
    clips = SETTING["clips"]
    with torch.no_grad():
        for numbers, x in clip_batches(videos, SETTING["frames"], SETTING["size"], clips, 1, 64):
            features = net.features(x)
            total = torch.zeros(len(videos), features.shape[1]) if total is None else total
            total.index_add_(0, torch.tensor(numbers), features / clips)
    assert total is not None
    return total


def linear(train: Tensor, y: Tensor, test: Tensor, y_test: Tensor, decay: float = 1e-3) -> float:
    """Multinomial logistic regression to its optimum, on standardised features: what an SGD probe
    on a frozen backbone approaches.
    """
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    a, b = (train - mean) / std, (test - mean) / std
    weight = torch.zeros(a.shape[1], int(y.max()) + 1, requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(a @ weight + bias, y) + decay * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return float(((b @ weight + bias).argmax(1) == y_test).float().mean())


def supervised(
    weights: dict[str, Tensor], federation: Federation, seed: int, epochs: int
) -> tuple[Any, float]:
    """Trained with labels from these backbone weights: the network, and its accuracy on the test
    videos.
    """
    plan = SETTING["finetune"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.safetensors"
        save_file(
            {n: t.contiguous() for n, t in weights.items() if n.startswith("backbone.")}, path
        )
        task = ActionRecognition(
            classes=21,
            backbone=SETTING["backbone"],
            init=str(path),
            frames=SETTING["frames"],
            stride=plan["stride"],
            size=SETTING["size"],
            clips=SETTING["clips"],
        )
        admitted = task.admit(federation)
        base = FedAvg(
            task,
            lr=plan["lr"],
            optimizer="adam",
            weight_decay=1e-4,
            batch=plan["batch"],
            schedule="cosine",
            seed=seed,
        )
        with Simulator(base, admitted, workers=0) as engine:
            state = run(base, engine, epochs, seed=seed)
        net = base.result(state)
        with torch.no_grad():
            return net, task.evaluate(net, federation.test)["accuracy"]


def downstream(net: Any, search: RetrievalTest) -> dict[str, float]:
    """Retrieval and the linear probe."""
    net.eval()
    y, labels = torch.tensor(search.queries.labels), torch.tensor(search.gallery.labels)
    gallery, queries = (
        embed(net, s, SETTING["frames"], SETTING["size"], SETTING["clips"])
        for s in (search.gallery, search.queries)
    )
    metrics = recall(most_similar(queries, gallery, max(KS))[0], y, labels)
    metrics["probe"] = linear(
        averaged(net, search.gallery), labels, averaged(net, search.queries), y
    )
    return metrics


def pixels(search: RetrievalTest) -> dict[str, float]:
    """The mean frame's pixels, shrunk to size x size, as the feature."""
    size = SETTING["size"]

    def rows(videos: VideoSet) -> Tensor:
        means = [c.read(0, len(c)).float().mean(0, keepdim=True) / 255 for c in videos.clips]
        return torch.stack(
            [F.interpolate(m, size=(size, size), mode="area").flatten() for m in means]
        )

    y, labels = torch.tensor(search.queries.labels), torch.tensor(search.gallery.labels)
    gallery, queries = rows(search.gallery), rows(search.queries)
    return recall(most_similar(queries, gallery, max(KS))[0], y, labels) | {
        "probe": linear(gallery, labels, queries, y)
    }


def cell(name: str, seed: int, data: Path, cache: str, models: Path) -> dict[str, Any]:
    everything = source(data, "iid", cache).federation(1, seed)
    search = everything.test
    assert isinstance(search, RetrievalTest)
    began = time.process_time()
    told: dict[str, Any] = {}
    if name == "pixels":
        metrics, trained = pixels(search), began
    else:
        row = ROWS[name]
        federation = (
            everything
            if row.epochs or not row.pretext
            else source(data, row.split, cache).federation(SETTING["clients"], seed)
        )
        began = time.process_time()
        net, told = pretrain(row, federation, seed)
        if name == "labels":
            net, told["accuracy"] = supervised(net.state_dict(), everything, seed, SETTING["equal"])
        trained = time.process_time()
        save_file(
            {n: t.contiguous() for n, t in net.state_dict().items()},
            models / f"{file_name(name, seed)}.safetensors",
        )
        metrics = downstream(net, search)
    seconds = {
        "pretrain": round(trained - began, 1),
        "downstream": round(time.process_time() - trained, 1),
    }
    return {
        "row": name,
        "seed": seed,
        "metrics": metrics,
        **told,
        "cpu_seconds": seconds,
        "settings": SETTING,
        "versions": versions(),
    }


def tuned(found: dict[str, Any], data: Path, cache: str, models: Path) -> dict[str, Any]:
    """The same cell with fine-tuning."""
    weights = load_file(models / f"{file_name(found['row'], found['seed'])}.safetensors")
    began = time.process_time()
    everything = source(data, "iid", cache).federation(1, found["seed"])
    _, accuracy = supervised(weights, everything, found["seed"], SETTING["finetune"]["epochs"])
    seconds = {**found["cpu_seconds"], "finetune": round(time.process_time() - began, 1)}
    return {**found, "metrics": {**found["metrics"], "finetune": accuracy}, "cpu_seconds": seconds}


def file_name(name: str, seed: int) -> str:
    return f"{name.replace(', ', '-').replace(' ', '-').replace('=', '')}-{seed}"


def main() -> None:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("FEDLENS_DATA", "")),
    )
    parse.add_argument("--minutes", type=float, default=20)
    parse.add_argument("--seeds", default="0,1")
    parse.add_argument("--rows", default="")
    parse.add_argument("--part", default="0/1")
    parse.add_argument(
        "--cache",
        default=str(Path(tempfile.gettempdir()) / "fedlens-jhmdb21"),
        help="folder for decoded frames, 160 MB",
    )
    parse.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "fedlens-fedvssl",
        help="folder for pretrained weights",
    )
    parse.add_argument(
        "--finetune", action="store_true", help="fine-tune every pretrained backbone too"
    )
    parse.add_argument("--table", action="store_true")
    parse.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="size and side, in pixels, other than usual",
    )
    options = parse.parse_args()
    if options.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        return
    other = {k: int(v) for k, _, v in (text.partition("=") for text in options.settings)}
    if unknown := sorted(other.keys() - {"size", "side"}):
        parse.error(f"there is no setting {unknown[0]!r}")
    SETTING.update(other)
    setup = "-".join(f"{k}={v}" for k, v in sorted(other.items()))
    label = {"setup": setup} if setup else {}
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    wanted = [r for r in options.rows.split(";") if r] if options.rows else ["pixels", *ROWS]
    part, parts = (int(n) for n in options.part.split("/"))
    jobs = [(name, int(s)) for s in options.seeds.split(",") for name in wanted][part::parts]
    options.models.mkdir(parents=True, exist_ok=True)
    for name, seed in jobs:
        found = CELLS.find({"row": name, "seed": seed, **label})
        tune = options.finetune and name not in ("pixels", "labels")
        if found and ("finetune" in found["metrics"] or not tune):
            continue
        if time.monotonic() > end:
            print("the budget is used up")
            break
        places = options.data, options.cache, options.models
        if not found or not (options.models / f"{file_name(name, seed)}.safetensors").exists():
            found = cell(name, seed, *places)
        found = tuned(found, *places) if tune else found
        CELLS.append(found | label)
        print(
            name,
            seed,
            found["cpu_seconds"],
            {k: round(v, 4) for k, v in found["metrics"].items()},
            flush=True,
        )


SHOWN = {
    "recall_at_1": "R@1",
    "recall_at_5": "R@5",
    "recall_at_10": "R@10",
    "recall_at_20": "R@20",
    "recall_at_50": "R@50",
    "probe": "probe",
    "finetune": "fine-tune",
}


def table(setup: str | None = None) -> str:
    """Markdown, in percent: mean over the finished seeds, with the spread where there is more than
    one.
    """
    cells = CELLS.read(setup=setup)
    out = [
        f"| | {' | '.join(SHOWN.values())} | loss, last 10 rounds | seeds |",
        "|---" * (len(SHOWN) + 3) + "|",
    ]
    for row in ["pixels", *ROWS]:
        mine = [c for c in cells if c["row"] == row]
        if not mine:
            continue
        values = []
        for key in SHOWN:
            numbers = [100 * c["metrics"][key] for c in mine if key in c["metrics"]]
            spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
            values.append(f"{statistics.mean(numbers):.1f}{spread}" if numbers else "-")
        losses = [last_loss(c) for c in mine if c.get("loss")]
        values.append(f"{statistics.mean(losses):.3f}" if losses else "-")
        out.append(f"| {row} | {' | '.join(values)} | {len(mine)} |")
    return "\n".join(out)


def last_loss(cell: dict[str, Any]) -> float:
    return statistics.mean(cell["loss"][-10:])


def noise() -> str:
    """Rows of seed 0 that were also trained on another kind of processor, where sums round
    otherwise: what such a change alone does.
    """
    again = {c["row"]: c for c in CELLS.read(setup="another-processor", seed=0)}
    twice = [c for c in CELLS.read(setup=None, seed=0) if c["row"] in again]
    pairs = [(here, again[here["row"]]) for here in twice]
    # the same bits: not trained again yet
    pairs = [(here, there) for here, there in pairs if here["loss"] != there["loss"]]
    keys = [k for k in SHOWN if all(k in there["metrics"] for _, there in pairs)]
    gaps = {
        SHOWN[k]: [100 * (here["metrics"][k] - there["metrics"][k]) for here, there in pairs]
        for k in keys
    }
    gaps["loss x 100"] = [100 * (last_loss(here) - last_loss(there)) for here, there in pairs]
    lines: dict[str, Callable[[list[float]], float]] = {
        "mean difference": statistics.mean,
        "mean size of the difference": lambda g: statistics.mean(map(abs, g)),
        "largest": lambda g: max(map(abs, g)),
    }
    out = [f"| {len(pairs)} rows, points | {' | '.join(gaps)} |", "|---" * (len(gaps) + 1) + "|"]
    return "\n".join(
        [
            *out,
            *(
                f"| {name} | {' | '.join(f'{f(g):.1f}' for g in gaps.values())} |"
                for name, f in lines.items()
            ),
        ]
    )


BLOCKS = {
    "table": table,
    "noise": noise,
    "table32": lambda: table("side=41-size=32"),
    "bytes": wire.table,
}


if __name__ == "__main__":
    main()

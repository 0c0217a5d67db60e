"""What a curious server reads out of the five methods' messages, with and without protections.

    python experiments/leakage/run.py [--minutes 12] [--only FedVSR]  fills cells.jsonl
    python experiments/leakage/run.py --table                         the tables, into README.md

Needs $FEDLENS_DATA, the data pack. A cell replays real client steps of a shipped recipe, made
small, attacks them, plain and under protections, and is not computed again; seed 0 of everything
comes first. What attackers set (cells with `chosen`) was set on other images and other clients than
those that are reported.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from blocks import fill  # noqa: E402
from cells import Cell, Cells, compute, flat_settings, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "method", "data", "attack", "seed")
SEEDS = (0, 1)
EVERYONE = (0, 100)
RESULT = "result"  # instead of an attack: what the run ends with
CHOSEN_ON, REPORTED = ("02", "03", "04"), ("01", "05", "08")  # of Set12
CIFAR = {
    "data.root": "cifar10/jpg", "task.model": "cnn", "data.limit": 6000, "data.test_limit": 1000,
    "clients": 30, "cohort": 6, "epochs": 1, "augment": False, "rounds": 4, "evaluate_every": 0,
}  # fmt: skip
FBL = {
    "epochs": 1, "clients": 30, "cohort": 8, "data.limit": 6000, "data.test_limit": 1000,
    "rounds": 4, "evaluate_every": 0, "Balance.cache": "",
}  # fmt: skip
CLIPS = {"clients": 4, "cohort": 4, "data.crop": 48, "rounds": 3, "evaluate_every": 0}
JHMDB = {
    "clients": 4, "cohort": 4, "data.classes_per_client": 6, "task.size": 32, "data.limit": 42,
    "rounds": 2, "evaluate_every": 0, "task.name": "Speed", "task.strides": [-2, -1, 0, 1, 2],
}  # fmt: skip
LSPET = {
    "clients": 6, "data.per_client": 15, "data.test_people": 20, "task.network": "vit-nano",
    "rounds": 3, "evaluate_every": 0,
}  # fmt: skip
# few images, many epochs: a model that learns them by heart, and one that does not, since its
# clients pull it to unlike classes
FIVE = {
    **CIFAR, "task.model": "niid", "data.limit": 500, "clients": 5, "cohort": 5, "rounds": 6,
    "data.test_limit": 2000, "data.holdout": 0.0,
}  # fmt: skip
BY_HEART = {**FIVE, "data.alpha": 100.0, "epochs": 10}
NOT_BY_HEART = {**FIVE, "epochs": 5}


@dataclass(frozen=True)
class Plan:
    """A cell. rounds: that are replayed. whom: which of the clients that were heard. minutes: for
    all rows of the attack; chosen: what the attacker sets is chosen here, so nothing is reported.
    """

    method: str
    data: str
    attack: str
    recipe: str
    overrides: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    whom: tuple[int, int] = (0, 3)
    minutes: float = 1.4
    chosen: bool = False


def scenes(images: Sequence[str], chosen: bool) -> list[Plan]:
    kinds = (("deblur", "complete"), ("deblur-partial", "partial"))
    return [
        Plan(
            "FedDeblur", f"Set12 {name}, {kind} views", "feddeblur", recipe,
            {"data.size": 256, "workers": 0, "image": f"classic/gray_set12/{name}.png",
             "rounds": 100, "evaluate_every": 0},
            12, EVERYONE, 1.4, chosen,
        )
        for recipe, kind in kinds
        for name in images
    ]  # fmt: skip


PLANS = [
    *scenes(REPORTED, False),
    Plan("FedAvg", "CIFAR-10", "labels", "cifar10", CIFAR),
    Plan("FedAvg", "CIFAR-10", "linear", "cifar10", CIFAR),
    Plan("FedAvg", "CIFAR-10", "gradient", "cifar10", CIFAR, minutes=0.8),
    Plan("FedAvg", "CIFAR-10, 5 x 100, by heart", "membership", "cifar10", BY_HEART, 6, EVERYONE),
    Plan("FedAvg", "CIFAR-10, 5 x 100, unlike", "membership", "cifar10", NOT_BY_HEART, 6, EVERYONE),
    Plan("FBL", "CIFAR-10", "labels", "fbl", FBL, whom=EVERYONE),
    Plan("FBL", "CIFAR-10", "counts", "fbl", FBL, whom=EVERYONE),
    Plan("FBL", "CIFAR-10", "gradient", "fbl", FBL, minutes=0.8),
    Plan("RAF", "LSPET", "resolution", "raf-lspet", LSPET, whom=EVERYONE),
    Plan("RAF", "LSPET", "gradient", "raf-lspet", LSPET, minutes=0.8),
    Plan("FedVSR", "SPMCS", "gradient", "fedvsr-small", CLIPS, minutes=0.8),
    Plan("FedVSSL", "JHMDB-21, Speed", "gradient", "fedvssl-jhmdb", JHMDB, minutes=0.8),
    *scenes(CHOSEN_ON, True),
]
# what may be set: of the gradient's search, on clients that are not reported
GRID = [(1e-4, 0.1), (1e-3, 0.1), (1e-2, 0.1), (1e-1, 0.1), (1e-2, 0.03)]
OTHERS = (3, 5)


def cell_of(plan: Plan, seed: int) -> Cell:
    """One attack on one run, plain and (unless settings are chosen here) under protections."""
    from fedlens.audit.attack import Evidence
    from fedlens.audit.audit import ATTACKS, heard_first, run_attack
    from fedlens.audit.evidence import replay
    from fedlens.config import recipe as recipes
    from fedlens.runs.setup import make_setup

    began = time.perf_counter()
    config = recipes.read(plan.recipe, {**plan.overrides, "seed": seed})
    setup = make_setup(config)
    source = replay(setup, plan.rounds)
    heard = heard_first(source.exchanges)
    evidence = Evidence(setup, source.exchanges, heard[slice(*plan.whom)], plan.minutes)
    (attack,) = [a for a in ATTACKS if a.name == plan.attack]
    if why := attack.applies(setup):
        raise ValueError(f"{plan.method}, {plan.attack}: {why}")
    rows = run_attack(attack, evidence, source, not plan.chosen, lambda text: print(" ", text))
    return {
        **identity(plan, seed),
        **({"chosen": True} if plan.chosen else {}),
        "rows": [row_of(r.protection, r.finding) for r in rows],
        "seconds": round(time.perf_counter() - began, 1),
        "settings": flat_settings(config.tables()),
        "versions": versions(),
    }


def row_of(protection: str, found: Any) -> Cell:
    shown = [c for c in found.comparisons if c.scores]
    return {
        "protection": protection,
        "measure": found.measure,
        "score": found.score,
        "baseline": found.baseline,
        "leaks": found.leaks,
        "numbers": dict(found.numbers),
        "each": [round(c.scores["psnr"], 2) for c in shown],
        **{
            name: round(mean(c.scores[name] for c in shown), 4)
            for name in ("ssim", "lpips")
            if shown and all(name in c.scores for c in shown)
        },
        "curve": [[k, round(v, 3)] for k, v in found.curve],
        "seconds": round(found.seconds, 1),
    }


def result_of(plan: Plan, seed: int) -> Cell:
    """What the whole run ends with, plain and under each protection."""
    from fedlens.audit.audit import PLAIN, costs
    from fedlens.audit.evidence import replay
    from fedlens.audit.protections import DEBLURRING, TRAINING
    from fedlens.config import recipe as recipes
    from fedlens.runs.setup import make_setup

    began = time.perf_counter()
    setup = make_setup(recipes.read(plan.recipe, {**plan.overrides, "seed": seed}))
    kinds = TRAINING if setup.algorithm.trains else DEBLURRING
    names = [p.name for p in (PLAIN, *kinds)]
    return {
        **identity(plan, seed, RESULT),
        "results": costs(setup, replay(setup, 1), names, 5.0),
        "seconds": round(time.perf_counter() - began, 1),
    }


def identity(plan: Plan, seed: int, attack: str = "") -> Cell:
    named = {"method": plan.method, "data": plan.data, "attack": attack or plan.attack}
    return {**named, "seed": seed}


def choice_of(smooth: float, pace: float) -> Cell:
    """Two settings of the gradient's search, tried on other clients than those reported."""
    from fedlens.audit.attack import Evidence, Probe
    from fedlens.audit.audit import timed
    from fedlens.audit.evidence import replay
    from fedlens.audit.gradient import GradientInversion
    from fedlens.config import recipe as recipes
    from fedlens.runs.setup import make_setup

    setup = make_setup(recipes.read("cifar10", {**CIFAR, "seed": 0}))
    source = replay(setup, 1)
    heard = sorted(source.exchanges[0].replies)[slice(*OTHERS)]
    evidence = Evidence(setup, source.exchanges, heard, 2.0, Probe(1, 1))
    found = timed(GradientInversion(iterations=300, smooth=smooth, pace=pace), evidence)
    return {
        **choice_identity(smooth, pace),
        "chosen": True,
        "rows": [row_of("worst case", found)],
        "seconds": round(found.seconds, 1),
    }


def choice_identity(smooth: float, pace: float) -> Cell:
    return {
        "method": "settings",
        "data": f"smooth {smooth:g}, pace {pace:g}",
        "attack": "gradient",
        "seed": 0,
    }


# -- tables ----------------------------------------------------------------------------------------


def protected() -> str:
    """Every method and attack under every protection; seeds side by side."""
    lines = [
        "| method | attack, measure | protection | attacker | learned nothing | beyond it"
        " | the run ends with | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, data, attack in kinds():
        cells = CELLS.read(method=method, data=data, attack=attack)
        done = CELLS.find({"method": method, "data": data, "attack": RESULT, "seed": 0})
        results = done["results"] if done else {}
        for rows in zip(*(c["rows"] for c in cells), strict=True):
            first = rows[0]
            lines.append(
                f"| {method}, {data} | {attack}, {first['measure']} | {first['protection']}"
                f" | {sides(r['score'] for r in rows)} | {sides(r['baseline'] for r in rows)}"
                f" | {' / '.join('yes' if r['leaks'] else 'no' for r in rows)}"
                f" | {results.get(first['protection'], '')}"
                f" | {' / '.join(str(r['seconds']) for r in rows)} |"
            )
    return "\n".join(lines)


COLUMNS = (
    "plain", "worst case", "larger batches", "more local steps", "noise 1 %", "noise 10 %",
    "clipping, noise 10 %", "clipping, noise 100 %", "SecureSum",
)  # fmt: skip


def matrix() -> str:
    """A line a method and attack, a column a protection; bold where the attacker is beyond what
    somebody has who learned nothing. Seed 0.
    """
    lines = [
        f"| method, data | attack | learned nothing | {' | '.join(COLUMNS)} |",
        "|" + "---|" * (len(COLUMNS) + 3),
    ]
    for method, data, attack in kinds():
        (cell,) = CELLS.read(method=method, data=data, attack=attack, seed=0)
        rows = {r["protection"]: r for r in cell["rows"]}
        entries = [shown(rows.get(name)) for name in COLUMNS]
        lines.append(
            f"| {method}, {data} | {attack}, {rows['plain']['measure']}"
            f" | {sides([rows['plain']['baseline']])} | {' | '.join(entries)} |"
        )
    return "\n".join(lines)


def shown(row: Cell | None) -> str:
    if row is None:
        return ""
    text = sides([row["score"]])
    return f"**{text}**" if row["leaks"] else text


def kinds() -> list[tuple[str, str, str]]:
    """What was measured and is reported, in the order of the plans."""
    done = [(c["method"], c["data"], c["attack"]) for c in CELLS.read(chosen=None, seed=0)]
    planned = [(p.method, p.data, p.attack) for p in PLANS if not p.chosen]
    return [k for k in planned if k in done]


def missing() -> str:
    planned = [(p.method, p.data, p.attack) for p in PLANS if not p.chosen]
    left = [", ".join(kind) for kind in planned if kind not in kinds()]
    return "Not run: " + "; ".join(left) + "." if left else "Every planned row was run."


def cameras() -> str:
    """FedDeblur, client by client, on the images that are reported and on those it was made on."""
    lines = ["| image | reported | clients | photo, dB, worst to best | field of view, IoU | x_k |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for cell in CELLS.read(method="FedDeblur", attack="feddeblur", seed=0):
        plain = cell["rows"][0]
        numbers = plain["numbers"]
        lines.append(
            f"| {cell['data']} | {'no' if cell.get('chosen') else 'yes'} | {len(plain['each'])}"
            f" | {min(plain['each']):.1f} to {max(plain['each']):.1f}"
            f" | {numbers.get('field of view, IoU', '')}"
            f" | {numbers.get('error of the recovered x_k', '')} |"
        )
    return "\n".join(lines)


def choices() -> str:
    lines = ["| setting | image, dB | learned nothing |", "|---|---|---|"]
    for cell in CELLS.read(method="settings"):
        row = cell["rows"][0]
        lines.append(f"| {cell['data']} | {row['score']:.1f} | {row['baseline']:.1f} |")
    return "\n".join(lines)


def membership() -> str:
    lines = []
    for cell in CELLS.read(attack="membership"):
        for row in cell["rows"]:
            numbers = "; ".join(f"{k}: {v}" for k, v in row["numbers"].items())
            what = f"{cell['data']}, {row['protection']}, seed {cell['seed']}"
            lines.append(f"- {what}: AUC {row['score']:.3f}; {numbers}.")
    return "\n".join(lines) or "Not run."


def sides(values: Any) -> str:
    return " / ".join(f"{v:.3g}" for v in values)


BLOCKS: dict[str, Callable[[], str]] = {
    "matrix": matrix,
    "protected": protected,
    "missing": missing,
    "cameras": cameras,
    "choices": choices,
    "membership": membership,
}
DOCS = {name: BLOCKS[name] for name in ("matrix", "cameras", "membership")}  # docs/privacy.md


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        CELLS.tidy()
        fill(HERE / "README.md", BLOCKS)
        fill(HERE.parents[1] / "docs" / "privacy.md", DOCS)
        return
    jobs: list[tuple[Cell, Callable[[], Cell]]] = []
    for seed in map(int, given.seeds.split(",")):
        for plan in PLANS:
            name = f"{plan.method} {plan.attack} {plan.data}"
            if given.only not in name or (plan.chosen and seed):
                continue
            jobs.append((identity(plan, seed), partial(cell_of, plan, seed)))
        if seed:
            continue
        for plan in {(p.method, p.data): p for p in PLANS if not p.chosen}.values():
            if given.only in f"{plan.method} {RESULT}":
                jobs.append((identity(plan, seed, RESULT), partial(result_of, plan, seed)))
        if given.only in "settings":
            jobs += [(choice_identity(*g), partial(choice_of, *g)) for g in GRID]
    compute(CELLS, jobs, given.minutes, lambda c: f"{c['seconds']} s")


if __name__ == "__main__":
    main()

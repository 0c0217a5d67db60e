"""What a curious server reads out of the five methods' messages, with and without protections:
`python experiments/leakage/run.py [CELL...]`. Data: FEDLENS_DATA, the data pack.

Every cell replays real client steps of a shipped recipe, made small, and attacks them; its rows are
kept in results/CELL.json, and a cell that is there is not run again. `table.py` prints the table.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from fedlens.audit.attack import Evidence
from fedlens.audit.audit import ATTACKS, ROUNDS, run_attack
from fedlens.audit.evidence import replay
from fedlens.config import recipe as recipes
from fedlens.runs.setup import make_setup

HERE = Path(__file__).parent
SCENE = {"data.size": 256, "workers": 0}
GREY = "classic/gray_set12"
CIFAR = {
    "data.root": "cifar10/jpg",
    "task.model": "cnn",
    "clients": 50,
    "cohort": 5,
    "epochs": 1,
    "augment": False,
}
FBL = {"epochs": 1, "clients": 40, "cohort": 8}

# recipe, overrides, rounds, clients, attack
CELLS: dict[str, tuple[str, dict[str, Any], int, int, str]] = {
    "deblur-05": ("deblur", {**SCENE, "image": f"{GREY}/05.png"}, ROUNDS, 10, "feddeblur"),
    "deblur-01": ("deblur", {**SCENE, "image": f"{GREY}/01.png"}, ROUNDS, 4, "feddeblur"),
    "deblur-08": ("deblur", {**SCENE, "image": f"{GREY}/08.png"}, ROUNDS, 4, "feddeblur"),
    "partial-05": ("deblur-partial", {**SCENE, "image": f"{GREY}/05.png"}, ROUNDS, 3, "feddeblur"),
    "fedavg-labels": ("cifar10", CIFAR, 1, 5, "labels"),
    "fedavg-linear": ("cifar10", CIFAR, 1, 1, "linear"),
    "fedavg-gradient": ("cifar10", CIFAR, 1, 1, "gradient"),
    "fbl-labels": ("fbl", FBL, 1, 8, "labels"),
    "fbl-counts": ("fbl", FBL, 1, 8, "counts"),
    "raf-resolution": ("raf", {"clients": 6, "people": 60, "tests": 10}, 1, 6, "resolution"),
    "raf-gradient": ("raf", {"clients": 3, "people": 12, "tests": 10}, 1, 1, "gradient"),
    "fedvsr-gradient": ("fedvsr", {"clips": 4, "clients": 4, "cohort": 3}, 1, 1, "gradient"),
    "fedvssl-gradient": (
        "fedvssl", {"videos": 20, "tests": 10, "clients": 4, "cohort": 3}, 1, 1, "gradient",
    ),
    "membership": (
        "demo", {"rounds": 8, "images": 200, "test_images": 400, "cohort": 5, "epochs": 4}, 8, 10,
        "membership",
    ),
}  # fmt: skip


def run_cell(name: str) -> list[dict[str, Any]]:
    recipe, overrides, rounds, clients, wanted = CELLS[name]
    setup = make_setup(recipes.read(recipe, overrides))
    source = replay(setup, rounds)
    heard = sorted({i for e in source.exchanges for i in e.replies})[:clients]
    evidence = Evidence(setup, source.exchanges, heard, minutes=0.2)
    rows = []
    for attack in ATTACKS:
        if attack.name != wanted or attack.applies(setup):
            continue
        for row in run_attack(attack, evidence, source, True, lambda text: print(name, text)):
            found = row.finding
            rows.append(
                {
                    "cell": name,
                    "stack": setup.stack,
                    "attack": attack.name,
                    "protection": row.protection,
                    "measure": found.measure,
                    "score": found.score,
                    "baseline": found.baseline,
                    "leaks": found.leaks,
                    "numbers": dict(found.numbers),
                    "result": row.cost,
                    "seconds": round(found.seconds, 1),
                }
            )
    return rows


def main(names: list[str]) -> None:
    for name in names or list(CELLS):
        target = HERE / "results" / f"{name}.json"
        if target.exists():
            continue
        began = time.perf_counter()
        rows = run_cell(name)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

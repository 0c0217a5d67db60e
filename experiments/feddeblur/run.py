"""The paper's tables and figures, cell by cell: python experiments/feddeblur/run.py [PREFIX ...] [--seconds N]

A cell is the recipe paper.toml with a few keys changed. What came out is kept in results/NAME.json; a cell that is there is not run again.
`--list` shows the cells, `--table` prints what is there. The images are those of the data pack ($FEDLENS_DATA, or ../shared/data).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedlens import config, job
from fedlens.engines.flaky import Flaky
from fedlens.engines.simulator import Simulator
from fedlens.rounds import Round, run
from fedlens.tasks.deblurring import score

HERE = Path(__file__).resolve().parent
PACK = Path(os.environ.get("FEDLENS_DATA", HERE.parents[2] / "shared" / "data"))
GREY = PACK / "classic" / "gray_set12"
METHODS = ("FedDeblur", "CenDeblur", "FedAvgDeblur", "LocDeblur")
MEASURED = ("objective", "consensus", "change_x", "change_w")
Cell = Callable[[], dict[str, Any]]


def folder_of(names: tuple[str, ...], where: str) -> str:
    """A folder with these images only."""
    target = Path(tempfile.gettempdir()) / f"feddeblur-{where.replace('/', '-')}-{'-'.join(names)}"[:180]
    target.mkdir(exist_ok=True)
    for name in names:
        link = target / f"{name}.png"
        if not link.exists():
            link.symlink_to(PACK / "classic" / where / f"{name}.png")
    return str(target)


def restore(
    algorithm: str = "FedDeblur", curve: int = 0, flaky: dict[str, Any] | None = None, late: int = 0, **keys: Any
) -> dict[str, Any]:
    """Run one cell and say what came out: means, every image, rounds, seconds, and the curve every `curve` rounds."""
    setup = job.prepare(config.read(HERE / "paper.toml", {"image": str(GREY), **keys}, algorithm if algorithm != "FedDeblur" else None))
    s = setup.settings
    points: list[dict[str, float]] = []
    began = time.perf_counter()
    spent = 0.0

    def after(_: Any, r: Round) -> None:
        nonlocal spent
        spent += r.seconds
        if r.metrics:
            points.append({"round": r.number + 1, "seconds": round(time.perf_counter() - began, 3), **r.metrics,
                           **{k: v for k, v in r.state.scalars.items() if k in MEASURED}})  # fmt: skip

    with Simulator(setup.algorithm, setup.federation, workers=0) as simulator:
        engine: Any = Flaky(simulator, **flaky) if flaky else simulator
        state = run(setup.algorithm, engine, s.rounds, cohort=s.cohort, seed=s.seed, late=late, test=setup.federation.test,
                    evaluate_every=curve or s.rounds, after_round=after)  # fmt: skip
    truth = setup.federation.test or {}
    images = {n: score(x, truth[n]) for n, x in setup.algorithm.result(state).items()}
    mean = {m: sum(v[m] for v in images.values()) / len(images) for m in ("psnr", "ssim")}
    base = setup.algorithm.base
    return {"algorithm": algorithm, "keys": {k: v for k, v in keys.items() if k != "image"}, **mean, "rounds": state.round + 1,
            "seconds": round(time.perf_counter() - began, 2), "eta": base.eta, "rho": base.rho, "images": images,
            **({"curve": points} if curve else {})}  # type: ignore[attr-defined]  # fmt: skip


def limit(method: str, partial: bool) -> int:
    """Rounds: enough to see where each method ends, within the time of a shared machine. FedDeblur and CenDeblur stop by themselves when
    views are complete. Without masks LocDeblur and FedAvgDeblur only get worse on partial views: stopping early is to their advantage."""
    if method in METHODS[:2]:
        return 500
    return 60 if partial else 100


def cells() -> dict[str, Cell]:
    out: dict[str, Cell] = {}

    def add(name: str, **keys: Any) -> None:
        out[name] = lambda: restore(**keys)

    colour = folder_of(("barbara", "jetplane", "pepper"), "color")
    one = str(GREY / "01.png")
    three = folder_of(("01", "02", "03"), "gray_set12")
    settings: dict[str, dict[str, Any]] = {
        "n10": {"clients": 10}, "n5": {"clients": 5}, "n3": {"clients": 3},
        "motion": {"observe": "partial", "blur": "motion"}, "synthesis": {"observe": "partial", "blur": "synthesis"},
    }  # fmt: skip
    for name in ("n10", "n5", "n3"):
        for method in METHODS:
            add(f"table1-grey-{name}-{method}", algorithm=method, **settings[name], rounds=limit(method, False))
    add("table1-grey-n10-FedDeblur-fspecial", clients=10, kernels="fspecial", image=three)
    for noise in (0.0, 0.5, 2.0, 3.0):
        for method in METHODS[:2]:
            add(f"noise-{noise:g}-{method}", algorithm=method, clients=10, noise=noise, image=three)
    for p in (2, 4, 6, 8, 10, 3, 5, 7, 9):
        add(f"participation-{p}", clients=10, cohort=p, image=three, curve=50, rounds=300)
    for n in range(1, 11):
        add(f"clients-{n}", clients=n, image=three, rounds=300)
    for seed in (0, 1, 2, 3):  # the paper's shake kernel is unknown: how much does it matter for n = 3?
        add(f"seeds-n3-{seed}", clients=3, image=three, seed=seed)
    for boundary in ("ignore", "taper", "unknown"):
        add(f"boundary-{boundary}", clients=10, image=one, boundary=boundary, kernels="fspecial", rounds=300)
    barbara = str(PACK / "classic" / "color" / "barbara.png")
    for method in ("FedDeblur", "FedAvgDeblur"):
        add(f"table6-{method}", algorithm=method, clients=10, image=barbara, size=256, curve=1, rounds=100)
    jetplane = str(PACK / "classic" / "color" / "jetplane.png")
    for method in ("FedDeblur", "FedGDDeblur"):
        add(f"gd-{method}", algorithm=method, clients=10, image=jetplane, size=256, curve=10, rounds=150, measure_every=9)
    for p in (2, 5, 8):  # Algorithm 6 to the letter, at the rho that suits it best
        add(f"participation-mean-{p}", clients=10, cohort=p, image=three, curve=50, rounds=300, recall=False, rho=0.02)
    for by in (0, 1, 2, 4):
        flaky = {"delay": 0.3, "by": by} if by else None
        add(f"late-{by}", clients=10, image=three, rounds=200, curve=50, flaky=flaky, late=by, recall=True)
    add("late-1-dropped", clients=10, image=three, rounds=200, curve=50, flaky={"delay": 0.3, "by": 1}, late=0, recall=True)
    add("late-1-mean", clients=10, image=three, rounds=200, curve=50, flaky={"delay": 0.3, "by": 1}, late=1, recall=False)
    for name in ("motion", "synthesis"):
        for method in METHODS:
            add(f"table1-grey-{name}-{method}", algorithm=method, **settings[name], rounds=limit(method, True))
    for name, keys in settings.items():
        for method in METHODS[:2]:
            add(f"table2-{name}-{method}", algorithm=method, prior="pnp", image=one, **keys, rounds=200 if "observe" in keys else 40)
    for name, rounds in (("n3", 15), ("motion", 8)):
        for method in METHODS[2:]:
            add(f"table2-{name}-{method}", algorithm=method, prior="pnp", image=one, **settings[name], rounds=rounds)
    for name in ("n10", "n5", "n3", "motion", "synthesis"):
        for method in METHODS:
            rounds = limit(method, "observe" in settings[name])
            add(f"table1-colour-{name}-{method}", algorithm=method, image=colour, **settings[name], rounds=rounds)
    add("oscillation", observe="partial", blur="motion", image=one, curve=1, measure_every=1, rounds=200)
    steps = [round(1.1**k, 4) for k in range(-5, 6)]
    pepper = str(GREY / "03.png")
    out["grid-n5"] = lambda: grid({"clients": 5, "image": pepper, "rounds": 80}, 0.035, 0.005, steps)
    partial = {"observe": "partial", "blur": "synthesis", "image": pepper, "rounds": 250}
    out["grid-synthesis"] = lambda: grid(partial, 0.01, 0.002, steps[::5])
    return out


def grid(keys: dict[str, Any], eta: float, rho: float, steps: list[float]) -> dict[str, Any]:
    rows = [[restore(eta=eta * a, rho=rho * b, **keys)["psnr"] for b in steps] for a in steps]
    return {"eta": [eta * a for a in steps], "rho": [rho * b for b in steps], "psnr": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix", nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no new cell after this many seconds")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    for name, cell in cells().items():
        path = HERE / "results" / f"{name}.json"
        if told.prefix and not any(name.startswith(p) for p in told.prefix):
            continue
        if told.list or told.table:
            found = json.loads(path.read_text()) if path.exists() else {}
            print(name, *(f"{k} {found[k]:.4f}" for k in ("psnr", "ssim", "rounds", "seconds") if isinstance(found.get(k), int | float)))
        elif not path.exists() and time.perf_counter() - began < told.seconds:
            done = cell()
            path.write_text(json.dumps(done, indent=1))
            print(
                name,
                *(f"{k} {done[k]:.4f}" for k in ("psnr", "ssim", "rounds", "seconds") if isinstance(done.get(k), int | float)),
                flush=True,
            )


if __name__ == "__main__":
    main()

"""The paper's tables and figures, cell by cell: python experiments/feddeblur/run.py [PREFIX ...]
[--seconds N]

A cell is the recipe paper.toml with a few keys changed. What came out is kept in cells.jsonl; a
cell that is there is not run again. `--list` shows the cells, `--table` writes the tables of
README.md from what is there. The images are those of the data pack ($FEDLENS_DATA). `--part 1/2`
runs every second cell only, so that two processes share the work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tables
import torch
from tables import METHODS

from fedlens.config import recipe as config
from fedlens.core.rounds import Round, run
from fedlens.deblur.task import score
from fedlens.engines.flaky import Flaky
from fedlens.engines.simulator import Simulator
from fedlens.runs.setup import make_setup

HERE = Path(__file__).resolve().parent
PACK = Path(os.environ.get("FEDLENS_DATA", ""))
GREY = PACK / "classic" / "gray_set12"
# Figure 5 of the paper; its House and Boat were not to be found, two Kodak photos stand in for
# them.
COLOUR = (
    "baboon",
    "barbara",
    "butterfly",
    "jetplane",
    "kodim09_sailboats",
    "kodim24_house",
    "lena",
    "pepper",
)
PNP = ("01", "03")  # the images of Table 2
MEASURED = ("objective", "consensus", "change_x", "change_w")
Cell = Callable[[], dict[str, Any]]


def folder_of(names: tuple[str, ...], where: str) -> str:
    """A folder with these images only."""
    target = (
        Path(tempfile.gettempdir()) / f"feddeblur-{where.replace('/', '-')}-{'-'.join(names)}"[:180]
    )
    target.mkdir(exist_ok=True)
    for name in names:
        link = target / f"{name}.png"
        if not link.exists():
            link.symlink_to(PACK / "classic" / where / f"{name}.png")
    return str(target)


def restore(
    algorithm: str = "FedDeblur",
    curve: int = 0,
    flaky: dict[str, Any] | None = None,
    late: int = 0,
    **keys: Any,
) -> dict[str, Any]:
    """Run one cell and say what came out: means, every image, rounds, seconds, and the curve every
    `curve` rounds.
    """
    setup = make_setup(
        config.read(
            HERE / "paper.toml",
            {"image": str(GREY), **keys},
            algorithm if algorithm != "FedDeblur" else None,
        )
    )
    s = setup.settings
    points: list[dict[str, float]] = []
    began = time.perf_counter()

    def after(_: Any, r: Round) -> None:
        if r.metrics:
            points.append(
                {
                    "round": r.number + 1,
                    "seconds": round(time.perf_counter() - began, 3),
                    **r.metrics,
                    **{k: v for k, v in r.state.scalars.items() if k in MEASURED},
                }
            )

    with Simulator(setup.algorithm, setup.federation, workers=0) as simulator:
        engine: Any = Flaky(simulator, **flaky) if flaky else simulator
        state = run(
            setup.algorithm,
            engine,
            s.rounds,
            cohort=s.cohort,
            seed=s.seed,
            late=late,
            test=setup.federation.test,
            evaluate_every=curve or s.rounds,
            after_round=after,
        )
    truth = setup.federation.test or {}
    images = {n: score(x, truth[n]) for n, x in setup.algorithm.result(state).items()}
    mean = {m: sum(v[m] for v in images.values()) / len(images) for m in ("psnr", "ssim")}
    base = setup.algorithm.base
    return {
        "algorithm": algorithm,
        "keys": {k: v for k, v in keys.items() if k != "image"},
        **mean,
        "rounds": state.round + 1,
        "seconds": round(time.perf_counter() - began, 2),
        "eta": base.eta,
        "rho": base.rho,
        "images": images,
        **({"curve": points} if curve else {}),
    }  # type: ignore[attr-defined]


def limit(method: str, partial: bool) -> int:
    """Rounds: enough to see where each method ends, within the time of a shared machine. FedDeblur
    and CenDeblur stop by themselves when views are complete. Without masks LocDeblur and
    FedAvgDeblur only get worse on partial views: stopping early is to their advantage."""
    if method in METHODS[:2]:
        return 500
    return 60 if partial else 100


def cells() -> dict[str, Cell]:
    out: dict[str, Cell] = {}

    def add(name: str, **keys: Any) -> None:
        # what these cells were run with: a cropped shake kernel keeps the light that is left
        out[name] = lambda: restore(**{"kernels": "authors-dark", **keys})

    colour = folder_of(COLOUR, "color")
    pnp = folder_of(PNP, "gray_set12")
    one = str(GREY / "01.png")
    three = folder_of(("01", "02", "03"), "gray_set12")
    settings: dict[str, dict[str, Any]] = {
        "n10": {"clients": 10},
        "n5": {"clients": 5},
        "n3": {"clients": 3},
        "motion": {"observe": "partial", "blur": "motion"},
        "synthesis": {"observe": "partial", "blur": "synthesis"},
    }
    out |= seeded_cells(settings)
    for name in ("n10", "n5", "n3"):
        for method in METHODS:
            add(
                f"table1-grey-{name}-{method}",
                algorithm=method,
                **settings[name],
                rounds=limit(method, False),
            )
    add("table1-grey-n10-FedDeblur-fspecial", clients=10, kernels="fspecial", image=three)
    for noise in (0.0, 0.5, 2.0, 3.0):
        for method in METHODS[:2]:
            add(f"noise-{noise:g}-{method}", algorithm=method, clients=10, noise=noise, image=three)
    for p in (2, 4, 6, 8, 10, 3, 5, 7, 9):
        add(f"participation-{p}", clients=10, cohort=p, image=three, curve=50, rounds=300)
    for n in range(1, 11):
        add(f"clients-{n}", clients=n, image=three, rounds=300)
    for seed in (
        0,
        1,
        2,
        3,
    ):  # the paper's shake kernel is unknown: how much does it matter for n = 3?
        add(f"seeds-n3-{seed}", clients=3, image=three, seed=seed)
    for boundary in ("ignore", "taper", "unknown"):
        add(
            f"boundary-{boundary}",
            clients=10,
            image=one,
            boundary=boundary,
            kernels="fspecial",
            rounds=300,
        )
    barbara = str(PACK / "classic" / "color" / "barbara.png")
    for method in ("FedDeblur", "FedAvgDeblur"):
        add(
            f"table6-{method}",
            algorithm=method,
            clients=10,
            image=barbara,
            size=256,
            curve=1,
            rounds=100,
        )
    jetplane = str(PACK / "classic" / "color" / "jetplane.png")
    for method in ("FedDeblur", "FedGDDeblur"):
        add(
            f"gd-{method}",
            algorithm=method,
            clients=10,
            image=jetplane,
            size=256,
            curve=10,
            rounds=150,
            measure_every=9,
        )
    for p in (2, 5, 8):  # Algorithm 6 to the letter, at the rho that suits it best
        add(
            f"participation-mean-{p}",
            clients=10,
            cohort=p,
            image=three,
            curve=50,
            rounds=300,
            recall=False,
            rho=0.02,
        )
    for by in (0, 1, 2, 4):
        flaky = {"delay": 0.3, "by": by} if by else None
        add(
            f"late-{by}",
            clients=10,
            image=three,
            rounds=200,
            curve=50,
            flaky=flaky,
            late=by,
            recall=True,
        )
    add(
        "late-1-dropped",
        clients=10,
        image=three,
        rounds=200,
        curve=50,
        flaky={"delay": 0.3, "by": 1},
        late=0,
        recall=True,
    )
    add(
        "late-1-mean",
        clients=10,
        image=three,
        rounds=200,
        curve=50,
        flaky={"delay": 0.3, "by": 1},
        late=1,
        recall=False,
    )
    for name in ("motion", "synthesis"):
        for method in METHODS:
            add(
                f"table1-grey-{name}-{method}",
                algorithm=method,
                **settings[name],
                rounds=limit(method, True),
            )
    for name, keys in settings.items():
        partial = "observe" in keys
        for method, rounds in zip(
            METHODS, (160, 160, 6, 6) if partial else (40, 40, 12, 12), strict=True
        ):
            add(
                f"table2-{name}-{method}",
                algorithm=method,
                prior="pnp",
                image=pnp,
                **keys,
                rounds=rounds,
            )
    for name in ("n10", "n5", "n3", "motion", "synthesis"):
        for method in METHODS:
            rounds = limit(method, "observe" in settings[name])
            if rounds == 500 and "observe" in settings[name]:
                rounds = 300
            add(
                f"table1-colour-{name}-{method}",
                algorithm=method,
                image=colour,
                **settings[name],
                rounds=rounds,
            )
    add(
        "oscillation",
        observe="partial",
        blur="motion",
        image=one,
        curve=1,
        measure_every=1,
        rounds=200,
    )
    steps = [round(1.1**k, 4) for k in range(-5, 6)]
    pepper = str(GREY / "03.png")
    out["grid-n5"] = lambda: grid(
        {"clients": 5, "image": pepper, "rounds": 80}, 0.035, 0.005, steps
    )
    shaken = {"observe": "partial", "blur": "synthesis", "image": pepper, "rounds": 200}
    out["grid-synthesis"] = lambda: grid(
        shaken, 0.01, 0.002, [round(1.1**k, 4) for k in range(-6, 7, 2)]
    )
    return out


def seeded_cells(settings: dict[str, dict[str, Any]]) -> dict[str, Cell]:
    """Tables 1 and 2 with normalised kernels: all twelve images, every seed of kernels and noise,
    every method to its end. FedDeblur and CenDeblur with the published eta and rho; LocDeblur and
    FedAvgDeblur, for which few are published, with the best of a grid on two images that are in no
    table."""
    out: dict[str, Cell] = {}
    for table, prior in (("table1", "tv"), ("table2", "pnp")):
        for seed in tables.SEEDS:
            for setting, keys in settings.items():
                for method in METHODS:
                    ends = {"rounds": 500, "still": 0.02}
                    if prior == "pnp":
                        ends = {"rounds": 160 if "observe" in keys else 60, "still": 0.02}
                    told = {"algorithm": method, "prior": prior, "seed": seed, **keys, **ends}
                    name = f"seeds-{table}-{setting}-{method}-{seed}"
                    out[name] = lambda told=told, at=setting: restore(
                        kernels="authors", **told, **tuned(at, told)
                    )
    return out


def tuned(setting: str, told: dict[str, Any]) -> dict[str, float]:
    """eta and rho of a baseline, found once for each setting and prior; others keep theirs."""
    if told["algorithm"] in METHODS[:2]:
        return {}
    name = f"tuned-{told['prior']}-{setting}-{told['algorithm']}"
    found = tables.read(name)
    if found is None:
        found = tune(told)
        tables.record(name, found)
        tables.results.cache_clear()
    return {"eta": found["eta"], "rho": found["rho"]}


def tune(told: dict[str, Any]) -> dict[str, Any]:
    image = folder_of(("woman", "zebra"), "color")
    # a denoiser on every client in every round is slow: half size and few rounds
    small = {"size": 128, "rounds": 20} if told["prior"] == "pnp" else {"rounds": 100}
    keys = {**told, "image": image, "colour": "grey", "kernels": "authors", "seed": 0, **small}
    first = restore(**keys)
    tried = {f"{first['eta']:.4g} {first['rho']:.4g}": first["psnr"]}
    best = (first["psnr"], first["eta"], first["rho"])
    for a in (0.1, 0.3, 1.0, 3.0, 10.0):
        for b in (0.1, 1.0, 10.0):
            if (a, b) != (1.0, 1.0):
                eta, rho = first["eta"] * a, first["rho"] * b
                psnr = restore(**keys, eta=eta, rho=rho)["psnr"]
                tried[f"{eta:.4g} {rho:.4g}"] = psnr
                best = max(best, (psnr, eta, rho))
    return {"psnr": best[0], "eta": best[1], "rho": best[2], "tried": tried}


def grid(keys: dict[str, Any], eta: float, rho: float, steps: list[float]) -> dict[str, Any]:
    """PSNR over eta and rho, two rows at a time."""
    with ProcessPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rows = list(pool.map(row_of, [(keys, eta * a, [rho * b for b in steps]) for a in steps]))
    return {"eta": [eta * a for a in steps], "rho": [rho * b for b in steps], "psnr": rows}


def row_of(told: tuple[dict[str, Any], float, list[float]]) -> list[float]:
    keys, eta, rhos = told
    return [restore(eta=eta, rho=rho, **keys)["psnr"] for rho in rhos]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix", nargs="*")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no new cell after this many seconds"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th cell, from the K-th on")
    told = parser.parse_args()
    if told.table:
        tables.write()
        return
    torch.set_num_threads(1)
    began = time.perf_counter()
    chosen = {
        n: c
        for n, c in cells().items()
        if not told.prefix or any(n.startswith(p) for p in told.prefix)
    }
    missing = [n for n in chosen if tables.read(n) is None]
    part, parts = map(int, told.part.split("/"))
    if told.list:
        print("\n".join(f"{n}{' (missing)' if n in missing else ''}" for n in chosen))
        return
    for name in missing[part - 1 :: parts]:
        if time.perf_counter() - began > told.seconds:
            break
        done = chosen[name]()
        tables.record(name, done)
        print(
            name,
            *(
                f"{k} {done[k]:.4f}"
                for k in ("psnr", "ssim", "rounds", "seconds")
                if isinstance(done.get(k), int | float)
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

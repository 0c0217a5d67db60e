"""From cells.jsonl to the tables of README.md: python experiments/feddeblur/run.py --table

The paper's numbers are typed here, ours are not. A cell that was not run says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from blocks import fill  # noqa: E402
from cells import Cells, versions  # noqa: E402

CELLS = Cells(HERE / "cells.jsonl", "name")
METHODS = ("FedDeblur", "CenDeblur", "FedAvgDeblur", "LocDeblur")
SEEDS = (0, 1, 2)
SETTINGS = ("n10", "n5", "n3", "motion", "synthesis")
# Tables 1, 2 and 5 of the paper: PSNR and SSIM in the order of METHODS.
PAPER: dict[str, dict[str, Sequence[tuple[float, float]]]] = {
    "table1-grey": {
        "n10": ((40.0935, 0.9780), (40.1004, 0.9780), (39.4586, 0.9745), (33.8958, 0.9363)),
        "n5": ((37.7249, 0.9661), (37.7295, 0.9662), (37.3823, 0.9646), (34.0861, 0.9406)),
        "n3": ((36.3405, 0.9571), (36.3441, 0.9572), (36.2079, 0.9565), (33.3256, 0.9365)),
        "motion": ((33.7048, 0.9317), (33.7041, 0.9317), (23.2071, 0.7298), (23.2771, 0.7359)),
        "synthesis": ((31.4806, 0.9121), (31.6595, 0.9108), (21.1035, 0.6761), (21.5789, 0.6656)),
    },
    "table1-colour": {
        "n10": ((39.8238, 0.9791), (39.8283, 0.9791), (39.1116, 0.9755), (32.7318, 0.9350)),
        "n5": ((37.4406, 0.9675), (37.4436, 0.9676), (37.1558, 0.9655), (33.2227, 0.9370)),
        "n3": ((35.9711, 0.9590), (35.9714, 0.9591), (35.8202, 0.9574), (32.3429, 0.9332)),
        "motion": ((32.8611, 0.9276), (32.8699, 0.9277), (22.5476, 0.7129), (22.6383, 0.7084)),
        "synthesis": ((30.5747, 0.9044), (30.7922, 0.8995), (21.1159, 0.6606), (21.2517, 0.6508)),
    },
    "table2": {
        "n10": ((42.1380, 0.9850), (42.1415, 0.9850), (40.9416, 0.9813), (35.0000, 0.9503)),
        "n5": ((39.7744, 0.9737), (39.7207, 0.9759), (37.9846, 0.9669), (35.6389, 0.9543)),
        "n3": ((38.6532, 0.9714), (38.7273, 0.9711), (37.3461, 0.9618), (34.5894, 0.9493)),
        "motion": ((34.7655, 0.9416), (35.3347, 0.9458), (22.7676, 0.7369), (22.5329, 0.6996)),
        "synthesis": ((31.5206, 0.9124), (32.3711, 0.9164), (21.2241, 0.6491), (20.8160, 0.5974)),
    },
    "noise": {
        "0": ((81.3782, 1.0), (81.2093, 1.0)),
        "0.5": ((44.3863, 0.9898), (44.3857, 0.9899)),
        "2": ((36.7494, 0.9595), (36.7347, 0.9597)),
        "3": ((34.9053, 0.9399), (34.9918, 0.9455)),
    },
}
# Table 6: rounds / seconds to a target, on an RTX 3090.
TARGETS = (
    ("psnr", 35.0),
    ("psnr", 37.0),
    ("psnr", 38.0),
    ("ssim", 0.95),
    ("ssim", 0.97),
    ("ssim", 0.975),
)
PAPER_6 = {
    "FedDeblur": ("12 / 0.32", "14 / 0.37", "20 / 0.53", "12 / 0.32", "15 / 0.40", "42 / 1.11"),
    "FedAvgDeblur": ("64 / 3.41", "82 / 4.35", "-", "65 / 3.46", "84 / 4.45", "-"),
}


@cache
def results() -> dict[str, Any]:
    return {cell["name"]: cell["found"] for cell in CELLS.read()}


def read(name: str) -> Any:
    return results().get(name)


def record(name: str, found: Any) -> None:
    CELLS.append({"name": name, "found": found, "versions": versions()})


def both(found: Any) -> str:
    return f"{found['psnr']:.2f} / {found['ssim']:.4f}" if found else "not run"


def db(name: str) -> str:
    found = read(name)
    return f"{found['psnr']:.2f}" if found else "not run"


def grid_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def beside(table: str, methods: Sequence[str] = METHODS) -> str:
    """Ours and the paper's, method by method, and every difference of more than half a decibel."""
    rows, far = [], []
    for setting, published in PAPER[table].items():
        row = [setting]
        for method, (psnr, ssim) in zip(methods, published, strict=True):
            found = read(f"{table}-{setting}-{method}")
            row += [both(found), f"{psnr:.2f} / {ssim:.4f}"]
            if found and abs(found["psnr"] - psnr) > 0.5:
                far.append(f"{setting} {method} {found['psnr'] - psnr:+.2f}")
        rows.append(row)
    head = ["", *(f"{m} {whose}" for m in methods for whose in ("ours", "paper"))]
    return grid_of(head, rows) + f"\n\nMore than 0.5 dB from the paper: {', '.join(far) or 'none'}."


def over_seeds(table: str, paper: str) -> str:
    """Normalised kernels: the mean over seeds, half the range, and how far that is from the
    paper."""
    rows = []
    for setting, published in PAPER[paper].items():
        row = [setting]
        for method, (psnr, _) in zip(METHODS, published, strict=True):
            cells = [read(f"seeds-{table}-{setting}-{method}-{seed}") for seed in SEEDS]
            found = [c["psnr"] for c in cells if c]
            if not found:
                row.append("not run")
                continue
            mean, half = sum(found) / len(found), (max(found) - min(found)) / 2
            spread = f" ± {half:.2f}" if len(found) > 1 else " (one seed)"
            row.append(f"{mean:.2f}{spread}, {mean - psnr:+.2f}")
        rows.append(row)
    tuned = [
        f"{c['name'].removeprefix('tuned-')} ({c['found']['eta']:.3g}, {c['found']['rho']:.3g})"
        for c in CELLS.read()
        if str(c["name"]).startswith(f"tuned-{'pnp' if table == 'table2' else 'tv'}-")
    ]
    used = f"\n\n(eta, rho) of the baselines: {', '.join(tuned)}." if tuned else ""
    return grid_of(["", *METHODS], rows) + used


def images_of(name: str) -> str:
    found = read(name)
    return f"{', '.join(found['images'])} ({len(found['images'])})" if found else "not run"


def rounds_of(table: str) -> str:
    """How many rounds each cell took."""
    parts = []
    for method in METHODS:
        took = [
            f"{s} {found['rounds']}" for s in SETTINGS if (found := read(f"{table}-{s}-{method}"))
        ]
        parts.append(f"{method} {', '.join(took)}")
    return "Rounds: " + "; ".join(parts) + "."


def table1(kind: str) -> str:
    table = f"table1-{kind}"
    psnr = {
        (s, m): found["psnr"]
        for s in SETTINGS
        for m in METHODS
        if (found := read(f"{table}-{s}-{m}"))
    }
    nan = float("nan")
    apart = max(
        abs(psnr.get((s, "FedDeblur"), nan) - psnr.get((s, "CenDeblur"), nan)) for s in SETTINGS[:3]
    )
    below = min(
        psnr.get((s, "FedDeblur"), nan) - psnr[s, m]
        for s in SETTINGS[3:]
        for m in METHODS[2:]
        if (s, m) in psnr
    )
    return (
        f"Images: {images_of(f'{table}-n10-FedDeblur')}.\n\n{beside(table)}\n\n{rounds_of(table)}"
        f" FedDeblur is within {apart:.3f} dB of CenDeblur for complete views; where they ran,"
        f" FedAvgDeblur and LocDeblur are at least {below:.1f} dB below it for partial ones."
    )


def table2() -> str:
    def setting(name: str) -> str:
        found = read(f"table2-{name}-FedDeblur")
        # partial views: z = x, so that sigma^2 = eta / rho
        n = {"n10": 10, "n5": 5, "n3": 3}.get(name, 1)
        return (
            f"{name} ({(found['eta'] / n / found['rho']) ** 0.5:.2f}, {found['rho']:g})"
            if found
            else f"{name} not run"
        )

    used = ", ".join(setting(s) for s in SETTINGS)
    return (
        f"Images: {images_of('table2-n10-FedDeblur')}. (sigma, rho) of FedDeblur:"
        f" {used}.\n\n{beside('table2')}\n\n{rounds_of('table2')}"
    )


def why_partial() -> str:
    """Half-size scenes that are in no table, each way of using a denoiser: `measure.py
    denoiser`.
    """
    names = {
        "eq5-1.1-0.005": "Eq. 5, sigma 4.9, rho 0.005",
        "eq5-0.3-0.03": "Eq. 5, sigma 1.1, rho 0.03",
        "eq5-0.25-0.001": "Eq. 5, sigma 5.3, rho 0.001",
        "decay": "Eq. 5, sigma 25, rho 0.02 as published, `decay=0.97`",
        "masks": "the same with `masks=true`: as the public code",
        "split-0.25-0.005": "**z = x, sigma 7.1, rho 0.005: the default (sigma 7)**",
        "split-0.25-0.02": "z = x, sigma 3.5, rho 0.02",
        "split-0.6-0.02": "z = x, sigma 5.5, rho 0.02",
        "cen-0.25-0.005": "CenDeblur, sigma 7.1, rho 0.005",
        "cen-0.25-0.045": "CenDeblur, sigma 2.4, rho 0.045",
        "tv": "total variation",
    }
    rows = []
    for name, curves in read("denoiser").items():
        cells = [
            f"{list(c.values())[-1]:.2f} ({max(c.values()):.2f})"
            for c in (curves["woman"], curves["zebra"])
        ]
        rows.append([names[name], *cells, list(curves["woman"])[-1]])
    return grid_of(
        (
            "128 x 128, nine views, motion half as long",
            "woman, end (best)",
            "zebra, end (best)",
            "rounds",
        ),
        rows,
    )


def noise() -> str:
    few, all_of = read("noise-2-FedDeblur")["images"], read("table1-grey-n10-FedDeblur")
    same = sum(all_of["images"][n]["psnr"] for n in few) / len(few)
    return (
        f"Images: {images_of('noise-2-FedDeblur')}.\n\n{beside('noise', METHODS[:2])}\n\nAt noise 1"
        f" FedDeblur has {same:.2f} dB on these images and {all_of['psnr']:.2f} on all twelve, over"
        " which the paper's means are taken."
    )


def line_of(label: str, prefix: str, values: Iterable[int]) -> str:
    values = list(values)
    return grid_of([label, *map(str, values)], [["PSNR", *(db(f"{prefix}-{v}") for v in values)]])


def clients() -> str:
    return f"Images: {images_of('clients-1')}.\n\n" + line_of("clients", "clients", range(1, 11))


def participation() -> str:
    mean = " / ".join(db(f"participation-mean-{p}") for p in (2, 5, 8))
    line = line_of("asked a round, of 10", "participation", range(2, 11))
    return (
        f"Images: {images_of('participation-2')}.\n\n{line}\n\n`recall=false`"
        f" (Algorithm 6 to the letter) at rho = 0.02, for 2 / 5 / 8 of 10: {mean} dB."
    )


def late() -> str:
    used = ", ".join(f"by {k} rounds {db(f'late-{k}')}" for k in (0, 1, 2, 4))
    return (
        f"Late replies (30 % of them are late; 200 rounds; images {images_of('late-0')}): {used}"
        f" dB; thrown away instead of used {db('late-1-dropped')} dB; late by 1 and averaged to the"
        f" letter {db('late-1-mean')} dB."
    )


def table6() -> str:
    rows = []
    for method, published in PAPER_6.items():
        curve = (read(f"table6-{method}") or {"curve": []})["curve"]
        row = []
        for metric, target in TARGETS:
            reached = next((p for p in curve if p[metric] >= target), None)
            row.append(f"{reached['round']} / {reached['seconds']:.2f}" if reached else "-")
        rows += [[method, *row], ["paper (RTX 3090)", *published]]
    return grid_of(["", *(f"{m.upper()} {t:g}" for m, t in TARGETS)], rows)


def descent() -> str:
    ours, theirs = read("gd-FedDeblur"), read("gd-FedGDDeblur")
    first = [
        next(p["psnr"] for p in found["curve"] if p["round"] == 10) for found in (ours, theirs)
    ]
    return (
        f"Jetplane, colour, n = 10: FedDeblur {ours['psnr']:.2f} dB in {ours['rounds']} rounds,"
        f" FedGDDeblur {theirs['psnr']:.2f} dB in {theirs['rounds']}; after 10 rounds"
        f" {first[0]:.2f} against {first[1]:.2f}."
    )


def sensitivity() -> str:
    parts = []
    for name in ("grid-n5", "grid-synthesis"):
        if found := read(name):
            psnr = found["psnr"]
            along = max(max(row) - min(row) for row in psnr)
            flat = [x for row in psnr for x in row]
            parts.append(
                f"{name}: {len(psnr)} x {len(psnr[0])} values, eta {found['eta'][0]:.4g} to"
                f" {found['eta'][-1]:.4g}, rho {found['rho'][0]:.4g} to {found['rho'][-1]:.4g}:"
                f" {min(flat):.2f} to {max(flat):.2f} dB; along rho alone at most {along:.2f} dB."
            )
    return "\n".join(parts) + "\n\n![PSNR over eta and rho](results/grid.png)"


def oscillation() -> None:
    """Figure 13 g of the paper: consensus error, changes of x and w, and the change of PSNR, over
    the rounds.
    """
    pyplot = plotting()
    curve = read("oscillation")["curve"]
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    rounds = [p["round"] for p in curve]
    for name, label in (
        ("consensus", "consensus error"),
        ("change_x", "change of x"),
        ("change_w", "change of w"),
    ):
        first = max(p[name] for p in curve if name in p)
        axes.semilogy(
            [p["round"] for p in curve if name in p],
            [p[name] / first for p in curve if name in p],
            label=label,
        )
    axes.set_xlabel("round")
    axes.set_ylabel("relative to its maximum")
    gain = axes.twinx()
    steps = [abs(b["psnr"] - a["psnr"]) for a, b in pairwise(curve)]
    gain.plot(rounds[1:], steps, color="0.6", linewidth=0.8, label="|change of PSNR|")
    gain.set_ylabel("|change of PSNR| in dB")
    gain.set_ylim(0, 4 * sorted(steps)[-5])
    handles = [*axes.get_legend_handles_labels()[0], *gain.get_legend_handles_labels()[0]]
    axes.legend(
        handles,
        [h.get_label() for h in handles],
        frameon=False,
        ncols=4,
        loc="upper right",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(HERE / "results" / "oscillation.png", dpi=110)
    pyplot.close(figure)


def plotting() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def boundary() -> str:
    return (
        ", ".join(f"{b} {both(read(f'boundary-{b}'))}" for b in ("ignore", "taper", "unknown"))
        + "."
    )


def privacy() -> str:
    found = read("privacy")
    out = []
    for views, rows in found.items():
        names = [n for n in rows[0] if n != "round"]
        table = grid_of(
            ["round", *(str(r["round"]) for r in rows)],
            [[n, *(f"{r[n]:.2f}" for r in rows)] for n in names],
        )
        out.append(f"{views}:\n\n{table}")
    return "\n\n".join(out)


def seeds() -> str:
    return (
        ", ".join(f"seed {s} {db(f'seeds-n3-{s}')}" for s in range(4))
        + f" dB ({images_of('seeds-n3-0')})."
    )


def kernels() -> str:
    """The authors' kernels and MATLAB's, on the images that both ran on."""
    matlab, authors = read("table1-grey-n10-FedDeblur-fspecial"), read("table1-grey-n10-FedDeblur")
    same = [authors["images"][n] for n in matlab["images"]]
    mean = {m: sum(v[m] for v in same) / len(same) for m in ("psnr", "ssim")}
    return (
        f"n = 10, images {', '.join(matlab['images'])}: {both(matlab)} with MATLAB's against"
        f" {both(mean)} with the authors'."
    )


def views() -> str:
    found = read("hand-held views")
    if not found:
        return "not run"
    names = list(found[0]["scores"])
    rows = [
        [f"{v['size'][1]} x {v['size'][0]}, {v['blur']}"]
        + [both(v["scores"][n]) if n in v["scores"] else "-" for n in names]
        + [" ".join(f"{c:.2f}" for c in v["confidence"]), str(v["rounds"])]
        for v in found
    ]
    return grid_of(["", *names, "mean confidence of each view", "rounds"], rows)


def unknown_kernels() -> str:
    rows = [
        [f["image"], f["kernels"], *(f"{f[w]:.2f}" for w in ("photo", "alone", "together")),
         f"{f['seconds_to_prepare']:g}"]
        for f in read("kernels") or ()
    ]  # fmt: skip
    head = ("image", "kernels", "best photo", "best photo alone", "together", "seconds before")
    return grid_of(head, rows) if rows else "not run"


def acceleration() -> str:
    rows: dict[tuple[float, str], dict[str, str]] = {}
    heads: list[str] = []
    for f in read("acceleration") or ():
        head = f"{f['clients']} {f['views']} views"
        heads += [] if head in heads else [head]
        first = next(g["rho"] for g in read("acceleration") if g["clients"] == f["clients"])
        which = "published rho" if f["rho"] == first else "rho of `relax`"
        took = " / ".join("-" if r is None else str(r) for r in f["within"].values())
        rows.setdefault((f["relax"], which), {}).setdefault(head, f"{took} ({f['end']:.2f} dB)")
    lines = [
        [f"relax {relax:g}, {which}", *(found.get(h, "-") for h in heads)]
        for (relax, which), found in rows.items()
    ]
    return grid_of(["", *heads], lines) if lines else "not run"


def memory() -> str:
    return (
        "; ".join(
            f"{m['colour']}: peak {m['peak_gb']} GB, {min(m['seconds'])} s a round"
            for m in read("memory")
        )
        + ", on one core."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "table1-grey": lambda: table1("grey"),
    "table1-colour": lambda: table1("colour"),
    "table2": table2,
    "why-partial": why_partial,
    "noise": noise,
    "clients": clients,
    "participation": participation,
    "late": late,
    "table6": table6,
    "descent": descent,
    "sensitivity": sensitivity,
    "boundary": boundary,
    "privacy": privacy,
    "seeds": seeds,
    "kernels": kernels,
    "seeds-table1": lambda: over_seeds("table1", "table1-grey"),
    "seeds-table2": lambda: over_seeds("table2", "table2"),
    "views": views,
    "unknown-kernels": unknown_kernels,
    "acceleration": acceleration,
    "memory": memory,
}


def write() -> None:
    CELLS.tidy()
    surfaces()
    oscillation()
    fill(HERE / "README.md", BLOCKS)


def surfaces() -> None:
    """The sensitivity grids as pictures, as Figure 17 of the paper has them."""
    import numpy as np

    pyplot = plotting()
    found = {name: g for name in ("grid-n5", "grid-synthesis") if (g := read(name))}
    figure = pyplot.figure(figsize=(5.2 * len(found), 4.2))
    for k, (name, g) in enumerate(found.items(), 1):
        axes: Any = figure.add_subplot(1, len(found), k, projection="3d")
        rho, eta = np.meshgrid(g["rho"], g["eta"])
        axes.plot_surface(
            np.log10(rho),
            np.log10(eta),
            np.array(g["psnr"]),
            cmap="viridis",
            edgecolor="white",
            linewidth=0.3,
        )
        for axis, values in ((axes.xaxis, g["rho"]), (axes.yaxis, g["eta"])):
            chosen = values[:: max(1, len(values) // 3)]
            axis.set_ticks([float(np.log10(v)) for v in chosen], [f"{v:.2g}" for v in chosen])
        axes.set_xlabel("rho")
        axes.set_ylabel("eta")
        axes.set_zlabel("PSNR in dB")
        axes.set_title(
            {"grid-n5": "complete, n = 5", "grid-synthesis": "partial, camera shake"}[name]
        )
        axes.view_init(24, -52)
    figure.tight_layout()
    figure.savefig(HERE / "results" / "grid.png", dpi=110)
    pyplot.close(figure)

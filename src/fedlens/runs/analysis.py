"""What `fedlens analyse` adds to a report, as a picture and as numbers: the loss around the
solution, a metric under perturbed weights, and what was spent until a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.config import recipe as recipes
from fedlens.core.client import generator
from fedlens.core.picture import Picture
from fedlens.runs.folder import read_records
from fedlens.runs.landscape import (
    FinishedRun,
    filter_normalised,
    loss_line,
    loss_plane,
    perturbed,
)
from fedlens.runs.table import spent_until

STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def landscape_picture(
    runs: Sequence[FinishedRun], names: Sequence[str], points: int, span: float, seed: int
) -> tuple[Picture, dict[str, Any]]:
    """One direction for all runs: the same random numbers, each normalised by the run's own
    filters.
    """
    steps = torch.linspace(-span, span, points).tolist()
    curves = {}
    for run, name in zip(runs, names, strict=True):
        weights = run.movable()
        curves[name] = loss_line(
            run.loss(), weights, filter_normalised(weights, generator(seed, 0x1A)), steps
        )
    picture = plot_image(
        lambda axes: _lines(axes, steps, curves, "step along a filter-normalised direction", "loss")
    )
    return Picture("Loss landscape, one direction", [picture], [", ".join(names)]), {
        "steps": steps,
        "loss": curves,
    }


def surface_picture(
    runs: Sequence[FinishedRun], names: Sequence[str], points: int, span: float, seed: int
) -> tuple[Picture, dict[str, Any]]:
    steps = torch.linspace(-span, span, points).tolist()
    planes = {}
    for run, name in zip(runs, names, strict=True):
        weights, rng = run.movable(), generator(seed, 0x1A)
        planes[name] = loss_plane(
            run.loss(),
            weights,
            filter_normalised(weights, rng),
            filter_normalised(weights, rng),
            steps,
        )
    pictures = [plot_image(partial(_contours, steps=steps, z=z)) for z in planes.values()]
    numbers = {"steps": steps, "loss": {n: z.tolist() for n, z in planes.items()}}
    return Picture("Loss landscape, two directions", pictures, list(names)), numbers


def perturbation_picture(
    runs: Sequence[FinishedRun], names: Sequence[str], draws: int, metric: str | None, seed: int
) -> tuple[Picture, dict[str, Any]]:
    curves: dict[str, list[float]] = {}
    shown = metric
    for run, name in zip(runs, names, strict=True):
        if run.setup.federation.test is None:
            raise ValueError(
                f"{run.folder} has nothing to test on, so a perturbation cannot be measured"
            )
        weights = run.movable()
        rows = []
        for k in STRENGTHS:
            found = [
                run.metrics(perturbed(weights, k, generator(seed, 0x9E, d)))
                for d in range(draws if k else 1)
            ]
            shown = shown or next(iter(found[0]), None)
            if shown is None or shown not in found[0]:
                raise ValueError(
                    f"{run.folder} has no metric {shown!r} on the server:"
                    f" {', '.join(found[0]) or 'none at all'}"
                )
            rows.append(sum(f[shown] for f in found) / len(found))
        curves[name] = rows
    picture = plot_image(
        lambda axes: _lines(axes, STRENGTHS, curves, "strength of the perturbation", str(shown))
    )
    caption = f"{shown} when k N(0, 1) is added to every weight"
    return Picture(caption, [picture], [", ".join(names)]), {
        "strengths": STRENGTHS,
        "metric": shown,
        "values": curves,
        "draws": draws,
    }


def target_picture(
    folders: Sequence[Path], names: Sequence[str], value: float, metric: str | None
) -> tuple[Picture, dict[str, Any]]:
    """From the lines of metrics.jsonl alone."""
    out: dict[str, Any] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for folder, name in zip(folders, names, strict=True):
        records = read_records(folder / "metrics.jsonl")
        measured = [r for r in records if r["metrics"]]
        if not measured:
            raise ValueError(f"{folder} has no metrics over its rounds: run it with evaluate_every")
        metric = metric or next(iter(measured[0]["metrics"]))
        if metric not in measured[0]["metrics"]:
            raise ValueError(
                f"{folder} has no metric {metric!r}: {', '.join(measured[0]['metrics'])}"
            )
        epochs = next(
            (float(t.get("epochs", 1)) for t in recipes.read(folder).tables()["algorithm"]), 1.0
        )
        out[name] = spent_until(records, metric, value, epochs)
        points = [
            (r["round"] + 1, r["metrics"][metric])
            for r in measured
            if r["metrics"].get(metric) is not None
        ]
        curves[name] = [float(x) for x, _ in points], [y for _, y in points]

    def paint(axes: Any) -> None:
        for name, (x, y) in curves.items():
            axes.plot(x, y, marker="o", markersize=3, label=name)
        axes.axhline(value, color="#888888", linestyle=":", linewidth=1)
        axes.set(xlabel="round", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)  # there is no round 0.96
        axes.legend(frameon=False)

    facts = {n: spent_text(found) for n, found in out.items()}
    return Picture(
        f"Spent until {metric} is {value:g}", [plot_image(paint)], [", ".join(names)], facts=facts
    ), {
        "metric": metric,
        "value": value,
        "spent": out,
    }


def spent_text(spent: Mapping[str, float] | None) -> str:
    if spent is None:
        return "never reached"
    return (
        f"{spent['rounds']:.0f} rounds, {spent['bytes'] / 1e6:.1f} MB, {spent['examples']:.0f}"
        f" examples, {spent['seconds']:.0f} s"
    )


def plot_image(paint: Callable[[Any], None]) -> Tensor:
    """(3, H, W) of what matplotlib drew."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    paint(axes)
    canvas.draw()
    return (
        torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy()).permute(2, 0, 1).float()
        / 255
    )


def _lines(
    axes: Any, x: Sequence[float], curves: Mapping[str, Sequence[float]], across: str, up: str
) -> None:
    for name, y in curves.items():
        axes.plot(x, y, marker="o", markersize=3, label=name)
    axes.set(xlabel=across, ylabel=up)
    axes.legend(frameon=False)


def _contours(axes: Any, steps: Sequence[float], z: Tensor) -> None:
    filled = axes.contourf(
        steps,
        steps,
        z.log().numpy() if bool((z > 0).all()) else z.numpy(),
        levels=18,
        cmap="viridis",
    )
    axes.plot(0, 0, marker="+", color="white")
    axes.set(xlabel="first direction", ylabel="second direction", aspect="equal")
    axes.figure.colorbar(filled, ax=axes, label="log loss" if bool((z > 0).all()) else "loss")

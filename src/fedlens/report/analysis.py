"""What a finished run is like around its solution, and what it cost to get there (FedVSSL, section
4.3): the loss landscape along filter-normalised directions (Li et al., 2018), a metric under
perturbed weights, and rounds, bytes and compute to a target.

A direction is Gaussian; each filter of it (first axis of a weight with two dimensions or more) gets
the norm of the filter it will be added to, and biases and normalisation layers stay where they are.
A perturbation of strength k adds k N(0, 1) to every weight, as the paper says, whatever its size.
Both leave the head alone where the model has a backbone: the paper's figures are of f(theta^b).

Where heads are private (BackboneOnly) the loss is that of a few clients, each with its own head on
its own data; their heads come from the run's checkpoint. Batches are the same for every point,
without augmentation, and BatchNorm uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from fedlens.config import recipe as recipes
from fedlens.core.client import Batch, Data, generator
from fedlens.core.memory import NEVER, read_record
from fedlens.core.picture import Picture
from fedlens.core.training import Learner
from fedlens.core.tree import Tree
from fedlens.models.weights import read_weights
from fedlens.runs import job
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.folder import read_records

Loss = Callable[[Mapping[str, Tensor]], float]
STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


# -- pure ------------------------------------------------------------------------------------------


def filter_normalised(weights: Mapping[str, Tensor], rng: Generator) -> Tree:
    """A random direction whose filters are as long as the weights' own."""
    out: Tree = {}
    for name, w in weights.items():
        if w.dim() < 2:
            out[name] = torch.zeros_like(w)
            continue
        d = torch.randn(w.shape, generator=rng, dtype=torch.float32).to(w.dtype)
        scale = w.flatten(1).norm(dim=1) / d.flatten(1).norm(dim=1).clamp_min(1e-12)
        out[name] = d * scale.view(-1, *[1] * (w.dim() - 1))
    return out


def line(
    loss: Loss,
    weights: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    steps: Sequence[float],
) -> list[float]:
    """The loss at weights + step * direction."""
    return [loss({n: w + a * direction[n] for n, w in weights.items()}) for a in steps]


def plane(
    loss: Loss,
    weights: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    two: Mapping[str, Tensor],
    steps: Sequence[float],
) -> Tensor:
    """Rows go along the second direction, columns along the first."""
    rows = [line(loss, {n: w + b * two[n] for n, w in weights.items()}, one, steps) for b in steps]
    return torch.tensor(rows)


def perturbed(weights: Mapping[str, Tensor], strength: float, rng: Generator) -> Tree:
    return {
        n: w + strength * torch.randn(w.shape, generator=rng).to(w.dtype)
        for n, w in weights.items()
    }


def to_target(
    records: Sequence[Mapping[str, Any]], metric: str, value: float, epochs: float = 1.0
) -> dict[str, float] | None:
    """What had been spent when the metric was first there: rounds, bytes (down and up), examples
    trained on, seconds. None if it never was."""
    spent = {"rounds": 0.0, "bytes": 0.0, "examples": 0.0, "seconds": 0.0}
    for r in records:
        spent["rounds"] = r["round"] + 1.0
        spent["bytes"] += r["bytes_down"] + r["bytes_up"]
        spent["examples"] += epochs * sum(c.get("examples", 0.0) for c in r["clients"].values())
        spent["seconds"] += r["seconds"]
        found = r["metrics"].get(metric)
        if found is not None and (found <= value if metric.endswith("loss") else found >= value):
            return spent
    return None


# -- of a run folder -------------------------------------------------------------------------------


@dataclass
class Finished:
    """A finished learning run: its network, its weights, and something to measure them on."""

    folder: Path
    setup: job.Setup
    weights: Tree
    heads: Mapping[int, Tree]

    @staticmethod
    def read(folder: Path) -> Finished:
        setup = job.prepare(recipes.read(folder))
        if not isinstance(setup.algorithm.base, Learner):
            raise ValueError(
                f"{folder} did not learn a network: {type(setup.algorithm.base).__name__} has no"
                " loss landscape"
            )
        if not (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} is not finished: it has no model.safetensors")
        return Finished(
            folder, setup, read_weights(folder / "model.safetensors"), private_heads(folder)
        )

    @property
    def base(self) -> Learner:
        base = self.setup.algorithm.base
        assert isinstance(base, Learner)
        return base

    def movable(self) -> Tree:
        """Parameters that are looked around: those of the backbone, or all of a model that has
        none.
        """
        own = {
            n: t
            for n, t in self.weights.items()
            if n in {n for n, _ in self.base.resident.named_parameters()}
        }
        backbone = {n: t for n, t in own.items() if n.startswith("backbone.")}
        return backbone or own

    def loss(self, clients: int = 4, examples: int = 16) -> Loss:
        """Mean loss over a few clients' examples, with their own heads where heads are private."""
        base, task = self.base, self.base.task
        whole = set(base.resident.state_dict())
        private = bool(whole - set(self.weights))
        if private and not self.heads:
            raise ValueError(
                f"{self.folder} keeps heads with its clients and has no checkpoint of them: run it"
                " with checkpoint_every=1"
            )
        ids = sorted(self.heads) if private else list(range(len(self.setup.federation)))
        held = {i: self.setup.federation.holdings[i] for i in ids[:clients]}
        batches: dict[int, Batch] = {
            i: h.batch(torch.arange(min(examples, len(h))))
            for i, h in held.items()
            if isinstance(h, Data) and len(h)
        }
        if not batches:
            raise ValueError(f"{self.folder}: the data of its clients is not here")

        def measure(weights: Mapping[str, Tensor]) -> float:
            total = 0.0
            for i, batch in batches.items():
                model = base.load(
                    {**self.weights, **(self.heads[i] if private else {}), **weights}
                ).eval()
                placed = {k: v.to(base.place) for k, v in batch.items()}
                with torch.no_grad():
                    total += float(task.loss(task.forward(model, placed), placed))
            return total / len(batches)

        return measure

    def metrics(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        model = self.base.load({**self.weights, **weights}).eval()
        with torch.no_grad():
            return self.base.task.evaluate(model, self.setup.federation.test)


def private_heads(folder: Path) -> dict[int, Tree]:
    """What clients keep to themselves, from the run's checkpoint. In a simulation it lies here; at
    real sites it does not.
    """
    if not (folder / "checkpoint").is_dir():
        return {}
    found = Checkpoint(folder / "checkpoint").load()
    if found is None:
        return {}
    progress, files = found
    kept = {i: read_record(path).settle(progress.heard.get(i, NEVER)) for i, path in files.items()}
    return {i: k["private"] for i, k in kept.items() if "private" in k}


# -- what the command draws ------------------------------------------------------------------------


def landscape(
    runs: Sequence[Finished], names: Sequence[str], points: int, span: float, seed: int
) -> tuple[Picture, dict[str, Any]]:
    """One direction for all runs: the same random numbers, each normalised by the run's own
    filters.
    """
    steps = torch.linspace(-span, span, points).tolist()
    curves = {}
    for run, name in zip(runs, names, strict=True):
        weights = run.movable()
        curves[name] = line(
            run.loss(), weights, filter_normalised(weights, generator(seed, 0x1A)), steps
        )
    picture = drawn(
        lambda axes: _lines(axes, steps, curves, "step along a filter-normalised direction", "loss")
    )
    return Picture("Loss landscape, one direction", [picture], [", ".join(names)]), {
        "steps": steps,
        "loss": curves,
    }


def surface(
    runs: Sequence[Finished], names: Sequence[str], points: int, span: float, seed: int
) -> tuple[Picture, dict[str, Any]]:
    steps = torch.linspace(-span, span, points).tolist()
    planes = {}
    for run, name in zip(runs, names, strict=True):
        weights, rng = run.movable(), generator(seed, 0x1A)
        planes[name] = plane(
            run.loss(),
            weights,
            filter_normalised(weights, rng),
            filter_normalised(weights, rng),
            steps,
        )
    pictures = [drawn(partial(_contours, steps=steps, z=z)) for z in planes.values()]
    numbers = {"steps": steps, "loss": {n: z.tolist() for n, z in planes.items()}}
    return Picture("Loss landscape, two directions", pictures, list(names)), numbers


def perturbation(
    runs: Sequence[Finished], names: Sequence[str], draws: int, metric: str | None, seed: int
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
    picture = drawn(
        lambda axes: _lines(axes, STRENGTHS, curves, "strength of the perturbation", str(shown))
    )
    caption = f"{shown} when k N(0, 1) is added to every weight"
    return Picture(caption, [picture], [", ".join(names)]), {
        "strengths": STRENGTHS,
        "metric": shown,
        "values": curves,
        "draws": draws,
    }


def target(
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
        out[name] = to_target(records, metric, value, epochs)
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

    facts = {n: said(found) for n, found in out.items()}
    return Picture(
        f"Spent until {metric} is {value:g}", [drawn(paint)], [", ".join(names)], facts=facts
    ), {
        "metric": metric,
        "value": value,
        "spent": out,
    }


def said(spent: Mapping[str, float] | None) -> str:
    if spent is None:
        return "never reached"
    return (
        f"{spent['rounds']:.0f} rounds, {spent['bytes'] / 1e6:.1f} MB, {spent['examples']:.0f}"
        f" examples, {spent['seconds']:.0f} s"
    )


def drawn(paint: Callable[[Any], None]) -> Tensor:
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

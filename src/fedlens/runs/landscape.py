"""How the loss of a finished run looks around its solution (FedVSSL, section 4.3): along
filter-normalised directions (Li et al., 2018) and under perturbed weights.

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
from pathlib import Path

import torch
from torch import Generator, Tensor

from fedlens.config import recipe as recipes
from fedlens.core.client import Batch, Data
from fedlens.core.training import Learner
from fedlens.core.tree import Tree
from fedlens.core.weights import read_weights
from fedlens.runs.personal import Ended
from fedlens.runs.setup import Setup, make_setup

LossOfWeights = Callable[[Mapping[str, Tensor]], float]


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


def loss_line(
    loss: LossOfWeights,
    weights: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    steps: Sequence[float],
) -> list[float]:
    """The loss at weights + step * direction."""
    return [loss({n: w + a * direction[n] for n, w in weights.items()}) for a in steps]


def loss_plane(
    loss: LossOfWeights,
    weights: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    two: Mapping[str, Tensor],
    steps: Sequence[float],
) -> Tensor:
    """Rows go along the second direction, columns along the first."""
    rows = [
        loss_line(loss, {n: w + b * two[n] for n, w in weights.items()}, one, steps) for b in steps
    ]
    return torch.tensor(rows)


def perturbed(weights: Mapping[str, Tensor], strength: float, rng: Generator) -> Tree:
    return {
        n: w + strength * torch.randn(w.shape, generator=rng).to(w.dtype)
        for n, w in weights.items()
    }


@dataclass
class FinishedRun:
    """A finished learning run: its network, its weights, and something to measure them on."""

    folder: Path
    setup: Setup
    weights: Tree
    heads: Mapping[int, Tree]

    @staticmethod
    def read(folder: Path) -> FinishedRun:
        setup = make_setup(recipes.read(folder))
        if not isinstance(setup.algorithm.base, Learner):
            raise ValueError(
                f"{folder} did not learn a network: {type(setup.algorithm.base).__name__} has no"
                " loss landscape"
            )
        if not (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} is not finished: it has no model.safetensors")
        return FinishedRun(
            folder,
            setup,
            read_weights(folder / "model.safetensors"),
            Ended.read(folder).own_weights(setup.algorithm),
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

    def loss(self, clients: int = 4, examples: int = 16) -> LossOfWeights:
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

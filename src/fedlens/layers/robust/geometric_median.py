"""Geometric median (RFA; Pillutla et al., 2022): the point with the smallest sum of weighted
distances to all updates.

Smoothed Weiszfeld iteration: z <- sum w_i u_i / max(nu, |z - u_i|) over the sum of these factors,
starting from the weighted mean. The paper runs a few iterations with nu = 1e-6; here until the step
is below `tolerance` of the updates' spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedlens.core.limits import Count, NotNegative, Positive
from fedlens.core.tree import Tree
from fedlens.layers.robust.merge import Robust, flatten


@dataclass
class GeometricMedian(Robust):
    """weights: "uniform", or "examples" as in the paper (a liar can then claim many). iterations,
    tolerance, nu: of Weiszfeld's iteration."""

    weights: Literal["uniform", "examples"] = "uniform"
    iterations: Count = 100
    tolerance: NotNegative = 1e-6
    nu: Positive = 1e-6

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        rows = torch.stack([flatten(t) for t in deltas])
        w = torch.tensor(
            weights if self.weights == "examples" else [1.0] * len(deltas), dtype=torch.float64
        )
        z = (w[:, None] * rows).sum(0) / w.sum()
        for _ in range(self.iterations):
            gaps = (rows - z).norm(dim=1)
            pull = w / gaps.clamp_min(self.nu)
            new = (pull[:, None] * rows).sum(0) / pull.sum()
            done = (new - z).norm() <= self.tolerance * gaps.mean().clamp_min(1e-30)
            z = new
            if done:
                break
        return unflatten(z, deltas[0])


def unflatten(vector: torch.Tensor, like: Tree) -> Tree:
    pieces = torch.split(vector, [t.numel() for t in like.values()])
    kinds = [t.dtype if t.is_floating_point() else torch.float64 for t in like.values()]
    return {
        n: p.reshape(t.shape).to(k)
        for (n, t), p, k in zip(like.items(), pieces, kinds, strict=True)
    }

r"""Geometric median (RFA; Pillutla et al., 2022): the point with the smallest sum of weighted
distances to all updates.

Smoothed Weiszfeld iteration: z <- sum w_i u_i / max(nu, |z - u_i|) over the sum of these factors.

Deviations: the paper starts from the weighted mean and runs a few iterations with nu = 1e-6. One
liar at 1e8 moves that mean by 1e7, and from there each iteration only gets some part of the way. So
it starts from the coordinate-wise median, which a minority cannot move far, and runs until the
gradient of the objective, sum w_i (z - u_i) / max(nu, |z - u_i|), has shrunk to `tolerance` times
the sum of weights: a measure in which a liar counts with its weight, however far away it is. nu is
a share of the median distance to the start, not a number of its own: updates of 1e-9 have a
geometric median too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedlens.core.limits import Count, NotNegative, Positive
from fedlens.core.replies import Weightless
from fedlens.core.tree import Tree
from fedlens.layers.robust.median import median
from fedlens.layers.robust.merge import Robust, flatten


@dataclass
class GeometricMedian(Robust):
    """
    Args:
        weights: "uniform", or "examples" as in the paper (a liar can then claim many, up to
            `federation.max_weight`).
        iterations: of Weiszfeld's algorithm, at most.
        tolerance: length of the objective's gradient, as a share of the sum of weights, at which it
            ends.
        nu: smallest distance that it divides by, as a share of the median distance.
    """

    weights: Literal["uniform", "examples"] = "uniform"
    iterations: Count = 1000
    tolerance: NotNegative = 1e-6
    nu: Positive = 1e-6

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        rows = torch.stack([flatten(t) for t in deltas])
        w = torch.tensor(
            weights if self.weights == "examples" else [1.0] * len(deltas), dtype=torch.float64
        )
        if not float(w.sum()) > 0:
            raise Weightless("the weights of all updates sum to zero")
        w /= w.sum()
        z = flatten(median(deltas))
        smoothing = self.nu * float((rows - z).norm(dim=1).median())
        for _ in range(self.iterations):
            gaps = (rows - z).norm(dim=1).clamp_min(max(smoothing, 1e-300))
            nearest = gaps.min()
            pull = w * (nearest / gaps)  # in units of the largest, so that nothing overflows
            new = (pull @ rows) / pull.sum()
            slope = float((new - z).norm() * pull.sum() / nearest)
            z = new
            if slope <= self.tolerance:
                break
        return unflatten(z, deltas[0])


def unflatten(vector: torch.Tensor, like: Tree) -> Tree:
    pieces = torch.split(vector, [t.numel() for t in like.values()])
    kinds = [t.dtype if t.is_floating_point() else torch.float64 for t in like.values()]
    return {
        n: p.reshape(t.shape).to(k)
        for (n, t), p, k in zip(like.items(), pieces, kinds, strict=True)
    }

"""Bulyan (El Mhamdi et al., 2018): pick n - 2f updates by repeated Krum, then average, in every
coordinate, those nearest the median.

theta = n - 2f updates are chosen one by one, each by Krum among what is left. In every coordinate
the mean of the theta - 2f values nearest the chosen ones' median is the result. The guarantee needs
n >= 4f + 3; a round that lost too many replies falls back to the coordinate-wise median, which
holds against any minority.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core.limits import Natural
from fedlens.core.tree import Tree
from fedlens.layers.robust.krum import scores
from fedlens.layers.robust.median import by_rows, median, middle
from fedlens.layers.robust.merge import Robust, squared_distances


@dataclass
class Bulyan(Robust):
    """
    Args:
        liars: how many clients may lie (f); a round needs 4 * liars + 3 replies, one with fewer
            takes the median.
    """

    liars: Natural = 1

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        n, f = len(deltas), self.liars
        if n < 4 * f + 3:
            return median(deltas)
        chosen = chain_of_krum(squared_distances(deltas), f, n - 2 * f)

        def near(rows: list[Tensor]) -> Tensor:
            values = torch.stack(rows)
            gap = (values - middle([r.clone() for r in rows])).abs()
            return values.gather(0, gap.argsort(dim=0, stable=True)[: n - 4 * f]).mean(0)

        return by_rows([deltas[i] for i in chosen], near)


def chain_of_krum(distances: Tensor, liars: int, count: int) -> list[int]:
    left = list(range(len(distances)))
    chosen = []
    for _ in range(count):
        # With one update left there is no neighbour to measure: it is the choice.
        best = int(scores(distances[left][:, left], liars).argmin()) if len(left) > 1 else 0
        chosen.append(left.pop(best))
    return chosen

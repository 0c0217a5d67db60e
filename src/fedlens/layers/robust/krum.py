"""Krum and Multi-Krum (Blanchard et al., 2017): trust the update whose neighbours are nearest.

score(i) = sum of the squared distances to its n - f - 2 nearest neighbours. Krum takes the update
with the smallest score, Multi-Krum the weighted mean of the m smallest. Krum's guarantee needs n >=
2f + 3; with fewer the number of neighbours is at least one, as in Flower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.core.limits import Count, Natural
from fedlens.core.tree import Tree
from fedlens.layers.robust.merge import Robust, squared_distances, weighted_mean


@dataclass
class Krum(Robust):
    """
    Args:
        liars: how many clients may lie (f).
        keep: how many updates are averaged; 1 is Krum, more is Multi-Krum.
    """

    liars: Natural = 1
    keep: Count = 1
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"liars": (0, 2, 3)}

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        order = torch.argsort(scores(squared_distances(deltas), self.liars), stable=True)[
            : self.keep
        ].tolist()
        if self.keep == 1:
            return dict(deltas[order[0]])
        return weighted_mean([deltas[i] for i in order], [weights[i] for i in order])


@dataclass
class MultiKrum(Krum):
    """Krum that averages the `keep` best updates.

    Args:
        keep: how many updates are averaged.
    """

    keep: Count = 3


def scores(distances: Tensor, liars: int) -> Tensor:
    """The diagonal is a distance of zero to oneself: it sorts first and is left out."""
    near = max(1, len(distances) - liars - 2)
    own = distances.clone().fill_diagonal_(-1)
    return own.sort(dim=1).values[:, 1 : near + 1].sum(1)

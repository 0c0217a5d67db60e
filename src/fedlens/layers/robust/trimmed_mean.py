"""Trimmed mean (Yin et al., 2018): in every coordinate, drop the largest and the smallest share of
the clients, average the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.core.limits import Minority
from fedlens.core.tree import Tree
from fedlens.layers.robust.median import by_rows, sort_rows
from fedlens.layers.robust.merge import Robust


@dataclass
class TrimmedMean(Robust):
    """
    Args:
        share: dropped at each end, below one half; floor(share * n) clients.
    """

    share: Minority = 0.2
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"share": (0.1, 0.3, 0.4)}

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        cut = int(self.share * len(deltas))

        def trimmed(rows: list[Tensor]) -> Tensor:
            sort_rows(rows)
            return torch.stack(rows[cut : len(rows) - cut]).mean(0)

        return by_rows(deltas, trimmed)

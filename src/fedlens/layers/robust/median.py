"""Coordinate-wise median (Yin et al., 2018): half of the clients may lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core.tree import Tree
from fedlens.layers.robust.merge import Robust

# elements sorted at a time: every row is used many times, so all of them stay in the second-level
# cache
_CHUNK = 1 << 15

RowMerge = Callable[[list[Tensor]], Tensor]


@dataclass
class Median(Robust):
    """Every coordinate of the update is the median over the clients; weights are ignored."""

    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree:
        return median(deltas)


def median(trees: Sequence[Tree]) -> Tree:
    return by_rows(trees, middle)


def by_rows(trees: Sequence[Tree], merge: RowMerge) -> Tree:
    """One coordinate-wise rule over whole trees, chunk by chunk, so that a sorting network over
    whole vectors stays in the cache.
    """
    out: Tree = {}
    for name, first in trees[0].items():
        kind = first.dtype if first.is_floating_point() else torch.float64
        flat = [t[name].reshape(-1) for t in trees]
        total = torch.empty(first.numel(), dtype=kind)
        for low in range(0, first.numel(), _CHUNK):
            total[low : low + _CHUNK] = merge(
                [t[low : low + _CHUNK].to(kind, copy=True) for t in flat]
            )
        out[name] = total.reshape(first.shape)
    return out


def middle(rows: list[Tensor]) -> Tensor:
    """Elementwise median of equally long vectors."""
    n = len(rows)
    sort_rows(rows)
    return rows[n // 2] if n % 2 else (rows[n // 2 - 1] + rows[n // 2]) / 2


def sort_rows(rows: list[Tensor]) -> None:
    """Batcher's odd-even merge sort, in place: only minima and maxima of whole vectors."""
    for i, j in comparators(len(rows)):
        low = torch.minimum(rows[i], rows[j])
        torch.maximum(rows[i], rows[j], out=rows[j])
        rows[i] = low


def comparators(n: int) -> list[tuple[int, int]]:
    """Pairs (i < j) to compare and swap so that any n values end up sorted."""
    pairs: list[tuple[int, int]] = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs

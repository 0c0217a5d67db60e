"""Coordinate-wise median (Yin et al., 2018): half of the clients may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Layer, Needs, Stage
from fedlens.message import Message
from fedlens.replies import CHUNK, Replies
from fedlens.tree import Tree


@dataclass
class Median(Layer):
    """Every coordinate of the update is the median over the clients; weights are ignored."""

    stage: ClassVar[Stage] = "merge"
    own_needs: ClassVar[Needs] = "replies"

    def server_step(self, state: Message, replies: Replies) -> Message:
        singles = [r.trees["delta"] for r in replies]
        return self.inner.server_step(state, replies.put(delta=median(singles)))


def median(trees: Sequence[Tree]) -> Tree:
    """Chunk by chunk, so that a sorting network over whole vectors stays in the cache."""
    out: Tree = {}
    for name, first in trees[0].items():
        kind = first.dtype if first.is_floating_point() else torch.float64
        flat = [t[name].reshape(-1) for t in trees]
        total = torch.empty(first.numel(), dtype=kind)
        for low in range(0, first.numel(), CHUNK):
            total[low : low + CHUNK] = middle([t[low : low + CHUNK].to(kind, copy=True) for t in flat])
        out[name] = total.reshape(first.shape)
    return out


def middle(rows: list[Tensor]) -> Tensor:
    """Elementwise median of equally long vectors by Batcher's odd-even merge sort: only minima and maxima of whole vectors."""
    n = len(rows)
    for i, j in comparators(n):
        low = torch.minimum(rows[i], rows[j])
        torch.maximum(rows[i], rows[j], out=rows[j])
        rows[i] = low
    return rows[n // 2] if n % 2 else (rows[n // 2 - 1] + rows[n // 2]) / 2


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

"""What the robust aggregators share: they look at every single update and make one of them.

They decide who counts, so they need single replies and cannot stand behind secure aggregation; a
stack can hold one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.core.algorithm import Layer, Stage
from fedlens.core.message import MEAN, Message
from fedlens.core.replies import Needs, Replies, Weightless
from fedlens.core.tree import Tree


class Robust(Layer):
    """Abstract: how many updates become one. `weights` are what FedAvg would use; most rules ignore
    them, because a liar can state any.
    """

    stage: ClassVar[Stage] = "merge"
    own_needs: ClassVar[Needs] = "replies"
    merges: ClassVar[bool] = True

    @abstractmethod
    def merge(self, deltas: Sequence[Tree], weights: Sequence[float]) -> Tree: ...

    def server_step(self, state: Message, replies: Replies) -> Message:
        singles = list(replies)
        weights = [r.weights.get("delta", {}).get(MEAN, 1.0) for r in singles]
        merged = self.merge([r.trees["delta"] for r in singles], weights)
        return self.inner.server_step(state, replies.put(delta=merged))


def flatten(tree: Tree) -> Tensor:
    """One float64 vector: distances between nearly equal updates would drown in float32."""
    return torch.cat([t.reshape(-1).double() for t in tree.values()])


def squared_distances(trees: Sequence[Tree]) -> Tensor:
    """All pairs, by differences and not by the expansion |a|^2 + |b|^2 - 2ab, which cancels."""
    n = len(trees)
    out = torch.zeros(n, n, dtype=torch.float64)
    for name in trees[0]:
        rows = [t[name].reshape(-1).double() for t in trees]
        for i in range(n):
            for j in range(i):
                out[i, j] += (rows[i] - rows[j]).square().sum()
    return out + out.T


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    total = sum(weights)
    if total <= 0:
        raise Weightless("the weights of the chosen updates sum to zero")
    out: Tree = {}
    for name, first in trees[0].items():
        kind = first.dtype if first.is_floating_point() else torch.float64
        mean = sum(
            ((t[name].double() * (w / total)) for t, w in zip(trees, weights, strict=True)),
            torch.zeros((), dtype=torch.float64),
        )
        out[name] = mean.to(kind)
    return out

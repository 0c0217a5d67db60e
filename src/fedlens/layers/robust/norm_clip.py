"""Norm clipping (Sun et al., 2019): no update may be longer than a bound, so that nobody can shout
the others down.

u_i <- u_i min(1, C / |u_i|), over trained parameters. On the server it also holds against liars and
needs single replies; there buffers (BatchNorm statistics) are clipped too, at the round's median
length of them: a client could ruin a network by its statistics alone. On the clients it needs only
sums and works behind secure aggregation, but trusts them, and buffers pass as they are. The other
robust rules may stand inside it: they then see the clipped updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedlens.algorithms.fedavg import FedAvg
from fedlens.core import tree
from fedlens.core.algorithm import Layer, StackError, Stage
from fedlens.core.client import Client
from fedlens.core.limits import NotNegative
from fedlens.core.message import Message
from fedlens.core.replies import Needs, Replies
from fedlens.core.tree import Tree


@dataclass
class NormClip(Layer):
    """
    Args:
        bound: C; 0 takes the median length of the round (on the server only).
        where: who clips.
    """

    bound: NotNegative = 0.0
    where: Literal["server", "client"] = "server"
    stage: ClassVar[Stage] = "merge"
    post_processes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.where == "client" and self.bound == 0:
            raise StackError(
                "NormClip on the clients needs a positive bound: only the server can see the"
                " others' lengths"
            )

    @property
    def own_needs(self) -> Needs:  # type: ignore[override]
        return "replies" if self.where == "server" else "sums"

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        return self._clipped(reply, self.bound) if self.where == "client" else reply

    def server_step(self, state: Message, replies: Replies) -> Message:
        if self.where == "client":
            return self.inner.server_step(state, replies)
        deltas = [r.trees["delta"] for r in replies]
        bound = self.bound or _middle([tree.norm(self._counted(d)) for d in deltas])
        most = _middle([tree.norm(self._buffers(d)) for d in deltas])
        singles = {p: self._clipped(r, bound, most) for p, r in replies.singles.items()}
        sums = {key: total for key, total in replies.sums.items() if key[0] != "delta"}
        clipped = replace(replies, sums=sums, singles=singles)
        return self.inner.server_step(state, clipped)

    def _clipped(self, reply: Message, bound: float, most: float = math.inf) -> Message:
        """most: the same for buffers."""
        delta = dict(reply.trees["delta"])
        for part, limit in ((self._counted(delta), bound), (self._buffers(delta), most)):
            length = tree.norm(part)
            if length > limit:
                delta |= tree.scale(part, limit / length)
        return reply.put(delta=delta)

    def _counted(self, delta: Tree) -> Tree:
        base = self.inner.base
        names = base.parameter_names if isinstance(base, FedAvg) else delta.keys()
        return {n: t for n, t in delta.items() if n in names}

    def _buffers(self, delta: Tree) -> Tree:
        counted = self._counted(delta)
        return {n: t for n, t in delta.items() if n not in counted and t.is_floating_point()}


def _middle(lengths: Sequence[float]) -> float:
    """The median."""
    ranked = sorted(lengths)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2

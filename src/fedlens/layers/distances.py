"""Distances (FedVSSL, Figure 5): how far clients move, backbone and head apart. It only looks on.

Every client says the L2 norm of what its training changed; the state notes mean and standard
deviation over the round's clients, and the report draws them. Put it before BackboneOnly in the
stack, or there is no head left to look at.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies


@dataclass
class Distances(Layer):
    """backbone: first token of the names that count as backbone; all else is the head. Buffers are
    left out.
    """

    backbone: str = "backbone"

    def check(self, inner: Algorithm) -> None:
        if any(isinstance(p, Layer) and p.stage != "learn" for p in inner.parts()):
            raise StackError(
                "Distances looks at what training changed: put it right after the base, before what"
                " is kept back or merged"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        moved = {
            n: t
            for n, t in reply.trees["delta"].items()
            if t.is_floating_point() and ".running_" not in n
        }
        parts = {"backbone": {n: t for n, t in moved.items() if n.split(".")[0] == self.backbone}}
        parts["head"] = {n: t for n, t in moved.items() if n not in parts["backbone"]}
        return reply.note(
            **{f"distance_{name}": tree.norm(part) for name, part in parts.items() if part}
        )

    def server_step(self, state: Message, replies: Replies) -> Message:
        noted: dict[str, float] = {}
        for name in ("distance_backbone", "distance_head"):
            if values := replies.values(name):
                noted |= {
                    name: statistics.fmean(values),
                    f"{name}_spread": statistics.pstdev(values),
                }
        return self.inner.server_step(state.note(**noted), replies)

"""Distances (FedVSSL, Figure 5): how far clients move, backbone and head apart. It only looks on.

Every client says the L2 norm of what its training changed; the state notes mean and standard
deviation over the round's clients, and the report draws them. Put it before BackboneOnly in the
stack, or there is no head left to look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies, Scalar


@dataclass
class Distances(Layer):
    """
    Args:
        backbone: first token of the names that count as backbone; all else is the head.

    Buffers are left out.
    """

    backbone: str = "backbone"
    reports: ClassVar[Mapping[str, Scalar]] = {
        f"{square}distance_{part}": Scalar("mean")
        for square in ("", "squared_")
        for part in ("backbone", "head")
    }

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
        for name, part in parts.items():
            if part:
                moved_by = tree.norm(part)
                squared = {f"squared_distance_{name}": moved_by**2}
                reply = reply.note(**{f"distance_{name}": moved_by}, **squared)
        return reply

    def server_step(self, state: Message, replies: Replies) -> Message:
        noted: dict[str, float] = {}
        for name in ("distance_backbone", "distance_head"):
            mean, square = replies.average(name), replies.average(f"squared_{name}")
            if mean is not None and square is not None:
                noted |= {name: mean, f"{name}_spread": math.sqrt(max(0.0, square - mean**2))}
        return self.inner.server_step(state.note(**noted), replies)

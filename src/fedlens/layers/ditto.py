"""Ditto (Li et al., 2021): beside the common model every client trains one of its own that may not
go far from it.

Client, Algorithm 1: the common model w takes its step as if Ditto were not there; then the personal
v_k takes as much local work on F_k(v) + lam / 2 |v - w|^2 with the received w. Only w's update
travels, so the common model has the same bits as without Ditto. lam = 0 is training alone, a large
lam is the common model.

Layers inside Ditto change only how w is trained, layers outside it change both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedlens.core import tree
from fedlens.core.client import Client
from fedlens.core.limits import NotNegative
from fedlens.core.message import Message
from fedlens.layers.fedprox import squared_distance
from fedlens.layers.personal import OwnModel


@dataclass
class Ditto(OwnModel):
    """
    Args:
        lam: strength; 0.05 to 2 in the paper.

    A client's own model starts as the first one it receives.
    """

    lam: NotNegative = 0.1
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"lam": (0.01, 0.5, 2.0)}

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        own = client.memory.get(self.kept, received)
        reply = self.inner.client_step(message, client)
        near = client.pull(lambda model: self.lam / 2 * squared_distance(model, received))
        personal = self.fedavg.client_step(message.put(model=own), near)
        client.memory[self.kept] = tree.add(own, personal.trees["delta"])
        return reply

"""FedRep (Collins et al., 2021): a common representation, learned under heads that are personal and
fitted first.

Client, Algorithm 1: with the received body phi held still, the head h_i takes `times` stretches of
local work; then phi takes one with h_i held still. phi travels, h_i stays. FedPer with the two
steps one after the other instead of together.

A stretch is FedAvg's `epochs` or `steps` with a fresh optimiser. BatchNorm's running statistics
belong to the body and move in both, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedlens.core import tree
from fedlens.core.client import Client
from fedlens.core.limits import Count
from fedlens.core.message import Message
from fedlens.layers.private import Private, fits_any


@dataclass
class FedRep(Private):
    """
    Args:
        own: patterns of the names that stay with each client.
        times: how much longer the head trains than the body (10 epochs to 1 in the paper).
    """

    advice: ClassVar[str] = "; say which one stays, such as FedRep.own={last}.*"
    personal: ClassVar[bool] = True
    post_processes: ClassVar[bool] = False  # it trains several times
    own: tuple[str, ...] = ("head.*",)
    times: Count = 1

    def is_private(self, name: str) -> bool:
        return fits_any(name, self.own)

    def train(self, message: Message, client: Client) -> Message:
        start = message.trees["model"]
        model = start
        stretches = [client.hold(lambda name: not self.is_private(name))] * self.times
        for stretch in [*stretches, client.hold(self.is_private)]:
            reply = self.inner.client_step(message.put(model=model), stretch)
            model = tree.add(model, reply.trees["delta"])
        return reply.put(delta=tree.subtract(model, start))

"""Fine-tuning after training: in the last rounds of a run the common model no longer changes, and
every client that is asked trains it further on its own data and keeps the result.

The simplest personal model there is, and the one to beat (Collins et al., 2022). What is learned in
those rounds does not travel: replies hold zeros. With `rounds` as many as the run has, every client
learns alone from the first model, which is the other thing to beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedlens.core import tree
from fedlens.core.client import Client
from fedlens.core.limits import Count
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.layers.personal import OwnModel


@dataclass
class FineTune(OwnModel):
    """
    Args:
        rounds: how many at the end, each with FedAvg's local work.

    Where only some clients are asked in a round, the others keep the common model.
    """

    rounds: Count = 1

    @property
    def paced_by(self) -> str:
        return f"rounds={self.rounds} at the end"

    def client_step(self, message: Message, client: Client) -> Message:
        if not self._at_the_end(message):
            return self.inner.client_step(message, client)
        own = client.memory.get(self.kept) or message.trees["model"]
        reply = self.inner.client_step(message.put(model=own), client)
        delta = reply.trees["delta"]
        client.memory[self.kept] = tree.add(own, delta)
        return reply.put(delta=tree.zeros_like(delta))

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state if self._at_the_end(state) else self.inner.server_step(state, replies)

    def _at_the_end(self, message: Message) -> bool:
        return message.round >= message.header.rounds - self.rounds

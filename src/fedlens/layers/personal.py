"""A whole model of one's own: what Ditto, PFedMe and FineTune share. It lies in the client's
memory, never travels, and is what the client is evaluated with; who has none yet uses the
common one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.message import Message
from fedlens.core.tree import Tree


class OwnModel(TrainingLayer):
    """Abstract: `client_step` writes `client.memory[self.kept]`."""

    whole: ClassVar[bool] = True
    personal: ClassVar[bool] = True

    @property
    def kept(self) -> str:
        """The model's name in the client's memory."""
        return type(self).__name__.lower()

    def private_weights(self, memory: Mapping[str, Tree]) -> Tree:
        return memory.get(self.kept) or self.inner.private_weights(memory)

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        own = memory.get(self.kept)
        return self.inner.evaluate(message.put(model=own) if own else message, data, memory)

r"""MovingMean (FedVSSL, Eq. 2): the broadcast model is the mean of the new one and the last beta
broadcast ones.

The public code knows beta in {0, 1} only; with beta = 1 it averages with the already averaged
global, an exponential mean with factor 1/2. A ring of the last beta *broadcast* globals is the
reading that agrees with it and extends to any beta (Algorithm 1, line 10, uses the unaveraged ones
instead). The first round has nothing to average with; the initial model does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedlens.core import tree
from fedlens.core.algorithm import Layer, Stage
from fedlens.core.limits import Natural
from fedlens.core.message import Message
from fedlens.core.replies import Replies


@dataclass
class MovingMean(Layer):
    """
    Args:
        beta: how many earlier globals take part; 0 switches it off.
    """

    beta: Natural = 1
    stage: ClassVar[Stage] = "merge"
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"beta": (0, 2, 4)}

    def server_step(self, state: Message, replies: Replies) -> Message:
        new = self.inner.server_step(state, replies)
        past = [state.trees[k] for k in self._slots if k in state.trees]
        model = new.trees["model"]
        if past:
            total = tree.scale(model, 1.0)
            for old in past:
                total = tree.add(total, old)
            model = tree.cast(tree.scale(total, 1 / (1 + len(past))), like=model)
        kept = dict(zip(self._slots, [model, *past], strict=False))
        return new.put(model=model, **kept)

    @property
    def _slots(self) -> list[str]:
        return [f"past_{k}" for k in range(self.beta)]

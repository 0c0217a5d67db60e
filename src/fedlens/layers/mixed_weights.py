r"""MixedWeights (FedVSSL, Eq. 3): W = alpha * mean weighted by exp(-L_m) + (1 - alpha) * mean
weighted by samples.

As both weightings sum to one this is theta + Delta with Delta = mean(theta_m - theta): the paper's
minus sign is a slip, the public code averages weights. alpha = 0 is FedAvg, alpha = 1 the paper's
"Loss" row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedlens.core.algorithm import Layer, Stage, mixed_shares
from fedlens.core.client import Client
from fedlens.core.limits import Share
from fedlens.core.message import Message
from fedlens.core.replies import Heard, Replies


@dataclass
class MixedWeights(Layer):
    """
    Args:
        alpha: share of the loss-based weights.
    """

    alpha: Share = 0.9
    stage: ClassVar[Stage] = "merge"
    merges: ClassVar[bool] = True
    weighs: ClassVar[Mapping[str, tuple[str, ...]]] = {"delta": ("loss", "examples")}
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"alpha": (0.0, 0.5, 1.0)}

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        return reply.weigh(
            "delta", loss=math.exp(-reply.scalars["loss"]), examples=reply.scalars["examples"]
        )

    def shares(self, heard: Mapping[int, Heard], state: Message) -> Mapping[int, float]:
        return mixed_shares(heard, "examples", "loss", self.alpha)

    def server_step(self, state: Message, replies: Replies) -> Message:
        merged = replies.blend("delta", "examples", "loss", self.alpha, self.needs)
        return self.inner.server_step(state.note(mix=self.alpha), replies.put(delta=merged))

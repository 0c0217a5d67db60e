r"""LossAware (FedVSR, Eqs. 16-21): clients with a small loss count more, gated by how unequal the
losses are.

With I_i = L_i^-a, u = 1/n and l_i = I_i / sum I: the Hellinger distance H between u and l gives m =
0 below tau and (H - tau) / (1 - tau) above it, and the new model is (1 - m) sum u_i W_i + m sum l_i
W_i. All of it follows from sums, H^2 = 1 - sum(sqrt I) / sqrt(n sum I), so no single reply is
needed. Engines do tell the server of every client its scalars and weights (`Heard`), for curves
and tables; `SecureSum` hides those too, and the same model follows from the masked sums alone.

Where paper and code disagree: the exponent decays as a = 1 - t/T in the public code (t from 1, so
the last round is uniform), which is the default. The paper's alpha <- alpha^(1 - t/T) with alpha_0
= 1 stays 1: decay="paper". The number of examples is ignored, as in the code.
`greedy` is the ablation F-GLA: a = 1 in every round and no gate, m = 1.

Two sums cost up to 1.7 times the plain mean when the gate is open, since nobody knows m before the
last loss is in. A server that holds all replies anyway can have it for the price of the plain mean:
by = "replies" waits for them, then makes one mean with the final weights. It is the same mean up to
rounding, the same bits on every engine, and cannot stand behind secure aggregation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedlens.core.algorithm import Layer, Stage, mixed_shares
from fedlens.core.client import Client
from fedlens.core.limits import Fraction
from fedlens.core.message import Message
from fedlens.core.replies import Heard, Needs, Replies
from fedlens.core.tree import Tree


@dataclass
class LossAware(Layer):
    """
    Args:
        tau: gate.
        decay: "linear" (public code) or "paper".
        greedy: inverse-loss weights in every round, no gate.
        by: two sums of the replies, or one mean of the replies themselves.
    """

    tau: Fraction = 0.05
    decay: Literal["linear", "paper"] = "linear"
    greedy: bool = False
    by: Literal["sums", "replies"] = "sums"
    stage: ClassVar[Stage] = "merge"
    merges: ClassVar[bool] = True
    weighs: ClassVar[Mapping[str, tuple[str, ...]]] = {"delta": ("uniform", "loss")}
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"tau": (0.0, 0.1, 0.2)}

    @property
    def own_needs(self) -> Needs:  # type: ignore[override]
        return self.by

    @property
    def paced_by(self) -> str | None:
        """See `runs.folder.check_rounds`."""
        return None if self.greedy or self.decay == "paper" else "decay=linear"

    def exponent(self, message: Message) -> float:
        if self.paced_by is None:
            return 1.0
        return 1 - (message.round + 1) / max(1, message.header.rounds)

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        importance = max(reply.scalars["loss"], 1e-12) ** -self.exponent(message)
        # a loss of almost nothing would claim a weight that no server takes
        importance = min(importance, message.header.max_weight)
        sums = {
            "value": torch.tensor(importance, dtype=torch.float64),
            "root": torch.tensor(math.sqrt(importance), dtype=torch.float64),
        }
        return reply.weigh("delta", uniform=1.0, loss=importance).put(importance=sums)

    def shares(self, heard: Mapping[int, Heard], state: Message) -> Mapping[int, float]:
        return mixed_shares(heard, "uniform", "loss", state.scalars["mix"])

    def expects(self, message: Message) -> Mapping[str, Tree]:
        scalar = torch.zeros((), dtype=torch.float64)
        return {**self.inner.expects(message), "importance": {"value": scalar, "root": scalar}}

    def server_step(self, state: Message, replies: Replies) -> Message:
        mean = replies.mean("importance")
        m = 1.0 if self.greedy else gate(float(mean["root"]), float(mean["value"]), self.tau)
        merged = replies.blend("delta", "uniform", "loss", m, self.needs)
        return self.inner.server_step(state.note(mix=m), replies.put(delta=merged))


def gate(mean_root: float, mean_value: float, tau: float) -> float:
    """m from mean sqrt(I) and mean I: H^2 = 1 - mean sqrt(I) / sqrt(mean I). Both are positive, and
    H between 0 and 1, whatever the importances are; what a liar makes of them counts as alike.
    """
    if not (mean_root > 0 and mean_value > 0):
        return 0.0
    hellinger = math.sqrt(min(1.0, max(0.0, 1 - mean_root / math.sqrt(mean_value))))
    return 0.0 if hellinger < tau else (hellinger - tau) / (1 - tau)

"""UploadFailures (FedVSR, section 5.3.2): in every round a fixed share of the replies is thrown
away, whoever sent them.

Exactly round(share * replies) of them, chosen by the seed and the round; at least one stays. This
is the paper's study, for methods whose clients remember nothing. Where clients keep a memory, lost
replies must be lost on the way: that is `engines.flaky.Flaky`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedlens.core.algorithm import Layer, Stage, server_rng
from fedlens.core.limits import Fraction
from fedlens.core.message import Message
from fedlens.core.replies import Needs, Replies


@dataclass
class UploadFailures(Layer):
    """
    Args:
        share: of the replies that do not arrive, 0 to 1.
    """

    share: Fraction = 0.25
    stage: ClassVar[Stage] = "wire"
    own_needs: ClassVar[Needs] = "replies"

    def server_step(self, state: Message, replies: Replies) -> Message:
        n = len(replies)
        lost = min(round(self.share * n), n - 1)
        order = torch.randperm(n, generator=server_rng(state, "UploadFailures")).tolist()
        kept = {sorted(replies.singles)[k] for k in order[lost:]}
        singles = {p: m for p, m in replies.singles.items() if p in kept}
        senders = {m.sender for m in singles.values()}
        heard = {s: h for s, h in replies.heard.items() if s in senders}
        arrived = replace(replies, heard=heard, sums={}, singles=singles)
        return self.inner.server_step(state, arrived)

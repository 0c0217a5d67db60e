"""FedU's divergence-aware predictor update (Zhuang et al., ICCV 2021): the head is shared, but a
client that has drifted keeps its own.

After local training a client remembers its head and how far its backbone moved: d = mean over the
convolutions' weights of the L2 distance between what was received and what came out. Next time it
takes the global head if d < mu, else its own. What it sends is the difference to the global model
in either case, so that the server averages local models as always. mu = 0.4 as in the public code
(0.3 is left over in FedVSSL's). That code measures parameters with "conv" in their name; here every
convolution counts, shortcuts too.

FedU also has an exponential-mean target network; that belongs to its contrastive task and not to
aggregation, and is not part of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, StackError, Stage
from fedlens.core.client import Client
from fedlens.core.limits import NotNegative
from fedlens.core.message import Message
from fedlens.core.replies import Scalar
from fedlens.core.tree import Tree


@dataclass
class FedU(TrainingLayer):
    """
    Args:
        mu: how far a backbone may move before its client keeps its own head.
        backbone: first token of the names that are not the head.
    """

    mu: NotNegative = 0.4
    backbone: str = "backbone"
    stage: ClassVar[Stage] = "share"
    keeps_private: ClassVar[bool] = True
    reports: ClassVar[Mapping[str, Scalar]] = {"kept_head": Scalar("mean")}
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"mu": (0.1, 0.2, 0.8)}

    def check(self, inner: Algorithm) -> None:
        self.under(inner)
        if other := next(
            (p for p in inner.parts() if isinstance(p, Layer) and p.keeps_private), None
        ):
            raise StackError(
                f"FedU chooses between the global and a local head, but with {type(other).__name__}"
                " there is no global one"
            )

    def init(self) -> Message:
        state = self.inner.init()
        names = state.trees["model"]
        if not any(self.is_head(n) for n in names) or all(self.is_head(n) for n in names):
            raise StackError(
                "FedU needs a backbone and a head: the model consists of"
                f" {', '.join(sorted({n.split('.')[0] for n in names}))}"
            )
        return state

    def is_head(self, name: str) -> bool:
        return name.split(".")[0] != self.backbone

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        head = {n: t for n, t in received.items() if self.is_head(n)}
        own = client.memory.get("fedu_head")
        drifted = own is not None and float(client.memory["fedu"]["distance"]) >= self.mu
        used: Tree = own if drifted and own is not None else head
        reply = self.inner.client_step(message.put(model={**received, **used}), client)
        delta = reply.trees["delta"]
        client.memory["fedu"] = {
            "distance": torch.tensor(self.distance(delta), dtype=torch.float64)
        }
        client.memory["fedu_head"] = {n: t + delta[n] for n, t in used.items()}
        if drifted:
            delta = {**delta, **tree.subtract(client.memory["fedu_head"], head)}
        return reply.put(delta=delta).note(kept_head=float(drifted))

    def distance(self, delta: Mapping[str, torch.Tensor]) -> float:
        """Convolutions are what has three dimensions or more; a backbone without any is measured
        over its matrices.
        """
        moved = {n: t for n, t in delta.items() if not self.is_head(n)}
        weights = [t for t in moved.values() if t.dim() > 2] or [
            t for t in moved.values() if t.dim() > 1
        ]
        return float(torch.stack([t.double().norm() for t in weights]).mean()) if weights else 0.0

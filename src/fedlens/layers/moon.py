r"""MOON (Li et al., 2021): features should look like the global model's and unlike the previous
local model's.

Eq. 3: loss += mu * -log( e^{sim(z, z_glob)/tau} / (e^{sim(z, z_glob)/tau} + e^{sim(z, z_prev)/tau})
), sim = cosine, z the features in front of the head. The previous local model stays in the client's
memory.

Deviations: no projection head unless the model has one (task.projection=256), so that all methods
share one network; the paper puts its classifier on a 256-d projection. A client without a previous
model trains plainly in its first round: with z_prev = z_glob the term is the constant log 2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.algorithms.fedavg import FedAvg, TrainingLayer
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Batch, Client, Output
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message


@dataclass
class Moon(TrainingLayer):
    """
    Args:
        mu: strength (5 on CIFAR-10 in the paper, 1 elsewhere).
        tau: temperature.
    """

    mu: NotNegative = 1.0
    tau: Positive = 0.5
    whole: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"mu": (0.1, 5.0, 10.0)}

    def check(self, inner: Algorithm) -> None:
        if not hasattr(self.under(inner).resident, "features"):
            raise StackError(
                "Moon compares features, but the model has no split into features and head"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        received, base = message.trees["model"], self.fedavg
        if "moon" in client.memory:
            teachers = [frozen(base, received), frozen(base, client.memory["moon"])]
            client = client.plus(
                lambda model, batch, output: self.mu * self._contrast(teachers, batch, output)
            )
        reply = self.inner.client_step(message, client)
        client.memory["moon"] = {n: t + reply.trees["delta"][n] for n, t in received.items()}
        return reply

    def _contrast(self, teachers: list[nn.Module], batch: Batch, output: Output) -> Tensor:
        assert output.features is not None
        with torch.no_grad():
            near, far = (teacher.features(batch["x"]) for teacher in teachers)  # type: ignore[operator]
        return contrast(output.features, near, far, self.tau)


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """-log softmax of the two similarities, mean over the batch."""
    flat = [t.flatten(1) for t in (z, near, far)]
    logits = (
        torch.stack(
            [F.cosine_similarity(flat[0], flat[1]), F.cosine_similarity(flat[0], flat[2])], 1
        )
        / tau
    )
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def frozen(base: FedAvg, weights: Mapping[str, Tensor]) -> nn.Module:
    """A second network with these weights that only looks: evaluation mode, no gradients."""
    model = copy.deepcopy(base.resident)
    current = model.state_dict()
    with torch.no_grad():
        for name, t in weights.items():
            current[name].copy_(t)
    return model.eval().requires_grad_(False)

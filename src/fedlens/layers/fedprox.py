"""FedProx (Li et al., 2020): mu / 2 ||w - w_global||^2 keeps local training near the received
model.

The term pulls, it does not count in the reported loss. Only named parameters are held, not buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client
from fedlens.core.limits import NotNegative
from fedlens.core.message import Message


@dataclass
class FedProx(Layer):
    """
    Args:
        mu: strength; 0.001 to 1 in the literature.
    """

    mu: NotNegative = 0.01
    steers: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"mu": (0.001, 0.1, 1.0)}

    def check(self, inner: Algorithm) -> None:
        from fedlens.layers.fednova import FedNova

        if any(isinstance(part, FedNova) for part in inner.parts()):
            raise StackError(
                "FedNova must know how FedProx bends the local steps: put FedProx before FedNova in"
                " the stack"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        return self.inner.client_step(
            message, client.pull(lambda model: self.mu / 2 * squared_distance(model, received))
        )


def squared_distance(model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """||w - anchor||^2 over the parameters that the anchor names."""
    pairs = [
        (p, anchor[n].to(p.device))
        for n, p in model.named_parameters()
        if n in anchor and p.requires_grad
    ]
    gaps = torch._foreach_sub([p for p, _ in pairs], [a for _, a in pairs])
    return torch.stack([g.square().sum() for g in gaps]).sum()

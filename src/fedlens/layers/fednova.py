r"""FedNova (Wang et al., 2020): clients that made more local steps must not count more in the
direction.

Client: d_i = (y_i - x) / |a_i|_1, where a_i are the coefficients of the local gradients in the
update (Eq. 5). Server: x += tau_eff sum p_i d_i with tau_eff = sum p_i |a_i|_1 (Eq. 7) and p_i
FedAvg's weights. For plain SGD |a_i|_1 is the number of steps.

|a|_1 is computed as the response of the local optimiser to gradients that are all one: that covers
momentum, weight decay and FedProx, also together, where the public code approximates. It is
undefined for Adam, which is refused. Buffers are averaged plainly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies, Scalar
from fedlens.layers.fedprox import FedProx


@dataclass
class FedNova(TrainingLayer):
    """A client's update counts per local step it made. No keys: everything follows from the local
    optimiser.
    """

    of_mean: ClassVar[bool] = True

    def check(self, inner: Algorithm) -> None:
        base = self.under(inner)
        if odd := next(
            (
                type(p).__name__
                for p in inner.parts()
                if isinstance(p, Layer) and p.steers and not isinstance(p, FedProx)
            ),
            None,
        ):
            raise StackError(
                f"FedNova rescales the updates that {odd}'s memory is made of: keep one of them"
            )
        if base.optimizer != "sgd":
            raise StackError(
                f"FedNova holds for SGD (with or without momentum), not for {base.optimizer}"
            )

    @property
    def reports(self) -> Mapping[str, Scalar]:  # type: ignore[override]
        weight = "examples" if self.fedavg.weights == "examples" else None
        return {"local_size": Scalar("mean", weight)}

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        base = self.fedavg
        mu = sum(p.mu for p in self.inner.parts() if isinstance(p, FedProx)) + base.weight_decay
        size = response(int(reply.scalars["steps"]), base.lr_at(message), base.momentum, mu)
        delta = {
            n: t / size if n in base.parameter_names else t for n, t in reply.trees["delta"].items()
        }
        return reply.put(delta=delta).note(local_size=size)

    def server_step(self, state: Message, replies: Replies) -> Message:
        base = self.fedavg
        effective = replies.average("local_size")
        assert effective is not None  # every reply has one
        delta = {
            n: t * effective if n in base.parameter_names else t
            for n, t in replies.mean("delta").items()
        }
        return self.inner.server_step(
            state.note(effective_steps=effective), replies.put(delta=delta)
        )


def response(steps: int, lr: float, momentum: float, mu: float) -> float:
    """How far (in units of lr) the optimiser goes when every gradient is one: v <- rho v + 1 - lr
    mu A, A <- A + v.
    """
    v = travelled = 0.0
    for _ in range(steps):
        v = momentum * v + 1 - lr * mu * travelled
        travelled += v
    return travelled

r"""FedDyn (Acar et al., 2021): a dynamic regulariser makes local optima agree with the global one.

Client, Eq. 1: y_i = argmin L_i(w) - <g_i, w> + alpha / 2 |w - x|^2, then g_i <- g_i - alpha (y_i -
x), which is the local gradient at y_i. Server: h <- h - alpha / N sum over the heard (y_i - x);  x
<- mean of the heard y_i - h / alpha. N counts all clients.

Both terms pull, neither is loss. Clients count alike, as in the paper; the public code also scales
alpha by mean n / n_i, which no single client can know: left out. That code clips gradients to norm
10 and so should a recipe (FedAvg's clip). h and g_i exist for trained parameters only, buffers are
averaged: with BatchNorm the method is known to do badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Client
from fedlens.core.limits import Positive
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.layers.fednova import FedNova
from fedlens.layers.fedprox import squared_distance
from fedlens.layers.scaffold import linear


@dataclass
class FedDyn(TrainingLayer):
    """alpha: strength; 0.01 on CIFAR in the paper. g_i lives in the client's memory, h in the
    state.
    """

    alpha: Positive = 0.01
    steers: ClassVar[bool] = True
    of_mean: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"alpha": (0.001, 0.1, 1.0)}

    def check(self, inner: Algorithm) -> None:
        base = self.under(inner)
        if any(isinstance(p, FedNova) for p in inner.parts()):
            raise StackError(
                "FedDyn's memory needs the updates as they are, FedNova rescales them: keep one of"
                " them"
            )
        if base.server_lr != 1:
            raise StackError(
                "FedDyn replaces the model by the mean of the local ones: server_lr must be 1"
            )

    def init(self) -> Message:
        state = self.inner.init()
        names = self.fedavg.parameter_names
        return state.put(
            h={n: torch.zeros_like(t) for n, t in state.trees["model"].items() if n in names}
        )

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        names = self.fedavg.parameter_names & received.keys()
        g = client.memory.get("feddyn") or {n: torch.zeros_like(received[n]) for n in sorted(names)}
        minus = tree.scale(g, -1)
        pulled = client.pull(
            lambda model: linear(model, minus) + self.alpha / 2 * squared_distance(model, received)
        )
        reply = self.inner.client_step(message, pulled)
        client.memory["feddyn"] = {
            n: t - self.alpha * reply.trees["delta"][n] for n, t in g.items()
        }
        return reply.weigh("delta", 1.0)

    def server_step(self, state: Message, replies: Replies) -> Message:
        share = len(replies) / state.header.population
        mean = replies.mean("delta")
        h = {n: t - self.alpha * share * mean[n] for n, t in state.trees["h"].items()}
        new = self.inner.server_step(state, replies)
        model = new.trees["model"]
        return new.put(
            h=h, model={n: t - h[n] / self.alpha if n in h else t for n, t in model.items()}
        )

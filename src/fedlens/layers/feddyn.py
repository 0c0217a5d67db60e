r"""FedDyn (Acar et al., 2021): a dynamic regulariser makes local optima agree with the global one.

Client, Eq. 1: y_i = argmin L_i(w) - <g_i, w> + alpha / 2 |w - x|^2, then g_i <- g_i - alpha (y_i -
x), which is the local gradient at y_i. Server: h <- h - alpha / N sum over the heard (y_i - x);  x
<- mean of the heard y_i - h / alpha. N counts all clients.

Both terms pull, neither is loss. Clients count alike, as in the paper. `by_size` is the public
code's strength for each client, alpha_i = alpha * mean n / n_i: the mean goes down with the model,
and comes from the federation's facts or, where they do not say it, from those heard in the round
before. The server's half stays as it is: -h / alpha is the mean over all clients of the sum of
(y_i - x), whatever alpha_i was.

Two models can be tested and saved. x, the one that goes out ("cloud" in the public code), swings
more than the mean of the heard y_i, which is x + h / alpha and what the public code prints as
"sel"; for `report="heard"` h goes down too, since clients test as well. Its third, the mean of
everyone's last model, would need a second upload and is not offered.

The public code clips gradients to norm 10 and so should a recipe (FedAvg's clip); there alpha / 2
|w|^2 is the optimiser's weight decay and not clipped. h and g_i exist for trained parameters only,
buffers are averaged: with BatchNorm the method is known to do badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Client
from fedlens.core.facts import Facts
from fedlens.core.limits import Positive
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.layers.fednova import FedNova
from fedlens.layers.fedprox import squared_distance


@dataclass
class FedDyn(TrainingLayer):
    """
    Args:
        alpha: strength; 0.01 on CIFAR in the paper.
        by_size: a client's alpha is that times mean n / n_i.
        report: which model is tested and saved, the one that goes out or the mean of the heard.

    g_i lives in the client's memory, h in the state.
    """

    alpha: Positive = 0.01
    by_size: bool = False
    report: Literal["cloud", "heard"] = "cloud"
    _mean_size: float | None = field(default=None, init=False, repr=False, compare=False)
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

    def given(self, facts: Facts) -> Algorithm:
        layer = super().given(facts)
        assert isinstance(layer, FedDyn)
        if self.by_size and facts.labels:
            layer._mean_size = sum(map(sum, facts.labels)) / len(facts.labels)
        return layer

    def broadcast(self, state: Message) -> Message:
        message = self.inner.broadcast(state)
        if self.report == "heard":
            message = message.put(h=state.trees["h"])
        if self.by_size:
            known = self._mean_size or state.scalars.get("mean_size", 0.0)
            message = message.note(mean_size=known)
        return message

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        return self.inner.evaluate(self._reported(message), data, memory)

    def result(self, state: Message) -> Any:
        return self.inner.result(self._reported(state))

    def _reported(self, message: Message) -> Message:
        if self.report == "cloud":
            return message
        h, model = message.trees["h"], message.trees["model"]
        return message.put(
            model={n: t + h[n] / self.alpha if n in h else t for n, t in model.items()}
        )

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        names = self.fedavg.parameter_names & received.keys()
        g = client.memory.get("feddyn") or {n: torch.zeros_like(received[n]) for n in sorted(names)}
        minus = tree.scale(g, -1)
        mean_size = message.scalars.get("mean_size", 0.0)
        alpha = self.alpha * (mean_size / len(client.data) if mean_size else 1.0)
        pulled = client.pull(
            lambda model: linear(model, minus) + alpha / 2 * squared_distance(model, received)
        )
        reply = self.inner.client_step(message, pulled)
        client.memory["feddyn"] = {n: t - alpha * reply.trees["delta"][n] for n, t in g.items()}
        return reply.weigh("delta", 1.0)

    def server_step(self, state: Message, replies: Replies) -> Message:
        share = len(replies) / state.header.population
        mean = replies.mean("delta")
        h = {n: t - self.alpha * share * mean[n] for n, t in state.trees["h"].items()}
        new = self.inner.server_step(state, replies)
        if self.by_size:
            new = new.note(mean_size=replies.total("examples") / len(replies))
        model = new.trees["model"]
        return new.put(
            h=h, model={n: t - h[n] / self.alpha if n in h else t for n, t in model.items()}
        )


def linear(model: nn.Module, direction: Mapping[str, Tensor]) -> Tensor:
    """<direction, w>, whose gradient is the direction itself."""
    named = [
        (p, direction[n].to(p.device))
        for n, p in model.named_parameters()
        if n in direction and p.requires_grad
    ]
    return torch.stack([(p * d).sum() for p, d in named]).sum()

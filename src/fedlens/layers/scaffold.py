r"""SCAFFOLD (Karimireddy et al., 2020): control variates c (server) and c_i (client) correct the
drift of local training.

Client, Eq. 3: y <- y - lr (g_i(y) - c_i + c), which is the gradient of the linear term <c - c_i,
y>; it pulls, it is not loss. Option II, Eq. 4: c_i+ = c_i - c + (x - y) / sum(lr). Option I: c_i+ =
g_i(x), the gradient at the received model over all local data. Server, Eq. 5: x += mean dx (by
samples, as FedAvg), c += |S|/N mean dc (every client alike).

Deviations: the sum of the learning rates that were used replaces K lr, so that schedules and
unequal local steps stay right. Option II identifies (x - y) / sum(lr) with a mean gradient, which
holds for plain SGD only. With momentum, Adam, clipping, weight decay or another pull in the
objective it does not: option "auto" then takes option I. Control variates start at zero and exist
for named parameters only (buffers go by FedAvg). A parameter with a learning-rate factor of its own
is divided by that multiple of the sum; one that was frozen in this round has shown no gradient and
keeps its c_i. The usual public implementations start control variates from network weights, which
is a bug.

Where clients hold one or two classes (CIFAR-10, Dirichlet 0.1, 16 steps of 0.1) it does not learn
and may overflow: c - c_i is right only at the model that was sent out, and held fixed it carries
clients off. There lr * steps up to about 0.2 was as good as FedAvg in a round; so were 80 steps,
the same number for all (FedAvg's `steps`, not `epochs`), with option II. See experiments/baselines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedlens.algorithms.fedavg import FedAvg, TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.layers.fednova import FedNova


@dataclass
class Scaffold(TrainingLayer):
    """option: "I", "II" or "auto" (II where it is valid). c_i lives in the client's memory, c in
    the state.
    """

    option: Literal["auto", "I", "II"] = "auto"
    steers: ClassVar[bool] = True

    def check(self, inner: Algorithm) -> None:
        base = self.under(inner)
        if any(isinstance(part, FedNova) for part in inner.parts()):
            raise StackError(
                "Scaffold's memory needs the updates as they are, FedNova rescales them: keep one"
                " of them"
            )
        if self.option == "II" and (not plain_sgd(base) or steered(inner)):
            raise StackError(
                "Scaffold option II holds for plain SGD only (no momentum, Adam, clipping, weight"
                " decay or other pull): use option I"
            )

    def init(self) -> Message:
        state = self.inner.init()
        names = self.fedavg.parameter_names
        return state.put(
            control={n: torch.zeros_like(t) for n, t in state.trees["model"].items() if n in names}
        )

    def broadcast(self, state: Message) -> Message:
        return self.inner.broadcast(state).put(control=state.trees["control"])

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return {**self.inner.expects(message), "control": message.trees["control"]}

    def client_step(self, message: Message, client: Client) -> Message:
        c = message.trees["control"]
        c_i = client.memory.get("control") or tree.zeros_like(c)
        correction = tree.subtract(c, c_i)
        gradient = None if self._second(client) else self.fedavg.gradient(message, client)
        reply = self.inner.client_step(
            message, client.pull(lambda model: linear(model, correction))
        )
        if gradient is None:
            rates = {n: self.fedavg.factor(n, message) * reply.scalars["lr_sum"] for n in c}
            delta = reply.trees["delta"]
            # delta = y - x, so x - y = -delta
            new = {n: c_i[n] - c[n] - delta[n] / rates[n] if rates[n] else c_i[n] for n in c}
        else:
            new = {n: gradient[n] if self.fedavg.factor(n, message) else c_i[n] for n in c}
        client.memory["control"] = new
        return reply.put(control=tree.subtract(new, c_i)).weigh("control", 1.0)

    def server_step(self, state: Message, replies: Replies) -> Message:
        state = self.inner.server_step(state, replies)
        share = replies.weight("control") / state.header.population
        moved = tree.add(state.trees["control"], tree.scale(replies.mean("control"), share))
        return state.put(control=moved)

    def _second(self, client: Client) -> bool:
        """Layers further out have left their pulls with the client, those further in are parts of
        `inner`.
        """
        alone = not client.pulls and not steered(self.inner)
        return self.option == "II" or (self.option == "auto" and plain_sgd(self.fedavg) and alone)


def plain_sgd(base: FedAvg) -> bool:
    return base.optimizer == "sgd" and not base.momentum and not base.weight_decay and not base.clip


def steered(algorithm: Algorithm) -> bool:
    return any(isinstance(part, Layer) and part.steers for part in algorithm.parts())


def linear(model: nn.Module, direction: Mapping[str, Tensor]) -> Tensor:
    """<direction, w>, whose gradient is the direction itself."""
    named = [
        (p, direction[n].to(p.device))
        for n, p in model.named_parameters()
        if n in direction and p.requires_grad
    ]
    return torch.stack([(p * d).sum() for p, d in named]).sum()

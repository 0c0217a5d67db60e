r"""SCAFFOLD (Karimireddy et al., 2020): control variates c (server) and c_i (client) correct the
drift of local training.

Client, Eq. 3: y <- y - lr (g_i(y) - c_i + c). The correction c - c_i is taken after the optimiser's
step, outside momentum, clipping and weight decay, as public implementations (NIID-Bench) do; with
plain SGD that is Eq. 3. Option II, Eq. 4: c_i+ = c_i - c + (x - y) / sum(lr), which is the mean of
what the optimiser did to the weights per unit of the learning rate: the mean gradient for plain
SGD, about 1 / (1 - momentum) of it with momentum, and with whatever else steers (weight decay, a
pull, Adam's scaling) in it. c is the mean of the same quantity, so the correction fits the steps
in every case. Option I: c_i+ = g_i(x), the gradient at the received model over all local data; its
correction is in plain gradients and therefore too small beside momentum. Server, Eq. 5: x += mean
dx (by samples, as FedAvg), c += |S|/N mean dc (every client alike).

Deviations: the sum of the learning rates that were used replaces K lr, so that schedules and
unequal local steps stay right. Control variates start at zero and exist for named parameters only
(buffers go by FedAvg); the usual public implementations start them from network weights, which is a
bug. A parameter with a learning-rate factor of its own is divided by that multiple of the sum; one
that was frozen in this round has shown no gradient and keeps its c_i.

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

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.layers.fednova import FedNova


@dataclass
class Scaffold(TrainingLayer):
    """
    Args:
        option: "II" (the mean local update; what people run) or "I" (the gradient at the received
            model, a second pass over the data).

    c_i lives in the client's memory, c in the state.
    """

    option: Literal["II", "I"] = "II"
    steers: ClassVar[bool] = True

    def check(self, inner: Algorithm) -> None:
        self.under(inner)
        if any(isinstance(part, FedNova) for part in inner.parts()):
            raise StackError(
                "Scaffold's memory needs the updates as they are, FedNova rescales them: keep one"
                " of them"
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
        gradient = None if self.option == "II" else self.fedavg.gradient(message, client)
        reply = self.inner.client_step(message, client.drift(correction))
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

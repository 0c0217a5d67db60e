"""pFedMe (Dinh et al., 2020): what is averaged are the centres of Moreau envelopes; the personal
model is the proximal point around its client's centre.

Client, Algorithm 1, from the received w: theta takes K gradient steps on f_i(theta) + lam / 2
|theta - w|^2, then w <- w - eta lam (w - theta), and so on through FedAvg's local work; theta goes
on where it was, as in the authors' code. w travels, theta is the client's own model. Server:
FedAvg's, with the paper's beta as `server_lr`.

Two differences from the authors' code: each of the K steps has its own mini-batch, not K times the
same one, so that the local work is FedAvg's; and a stretch that ends before K steps still moves w.
Buffers are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Client
from fedlens.core.limits import Count, Positive
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.layers.fedprox import squared_distance
from fedlens.layers.personal import OwnModel


@dataclass
class PFedMe(OwnModel):
    """
    Args:
        lam: how near theta stays to w (15 in the paper).
        eta: w's learning rate; eta lam is the share of the way to theta that w goes.
        steps: K.
    """

    lam: Positive = 15.0
    eta: Positive = 0.02
    steps: Count = 5
    steers: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"lam": (1.0, 5.0, 30.0)}

    def check(self, inner: Algorithm) -> None:
        self.under(inner)
        if self.eta * self.lam > 1:
            raise StackError(
                f"PFedMe would move w past theta: eta * lam is {self.eta * self.lam:g} and may be 1"
                " at most"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        names = self.fedavg.parameter_names & received.keys()
        centre = {n: received[n].clone() for n in received if n in names}
        done = 0

        def envelope(model: nn.Module) -> Tensor:
            nonlocal done
            if done and done % self.steps == 0:
                self._follow(centre, dict(model.named_parameters()))
            done += 1
            return self.lam / 2 * squared_distance(model, centre)

        reply = self.inner.client_step(message, client.pull(envelope))
        delta = reply.trees["delta"]
        theta = tree.add(received, delta)
        self._follow(centre, theta)
        client.memory[self.kept] = theta
        moved = {n: t - received[n] for n, t in centre.items()}
        return reply.put(delta={n: moved.get(n, t) for n, t in delta.items()})

    def _follow(self, centre: Tree, theta: Mapping[str, Tensor]) -> None:
        """w <- w - eta lam (w - theta), in place."""
        for name, w in centre.items():
            w += self.eta * self.lam * (theta[name].detach().to(w.device) - w)

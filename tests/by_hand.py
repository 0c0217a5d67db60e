"""A problem whose rounds can be worked out on paper: the model is a vector w that starts at zero, a
client's images are targets y, and the loss is 1/2 |w - y|^2. The gradient is w - mean y; with
learning rate 1 one step lands exactly on the client's mean target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlens import Algorithm, Batch, Federation, Message, Output
from fedlens.algorithms import FedAvg
from fedlens.core.replies import Replies, gather
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback


class Point(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


class Target(LearningTask):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def model(self) -> nn.Module:
        return Point(self.size)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 0.5 * (output.prediction - batch["y"]).square().sum(1).mean()

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        return {"w": float(result.w[0])}


def targets(*rows: float | Sequence[float]) -> Tensors:
    y = torch.tensor(
        [r if isinstance(r, (list, tuple)) else [r] for r in rows], dtype=torch.float64
    )
    return Tensors({"x": torch.zeros(len(y), 1), "y": y})


def federation(*clients: float | Sequence[float] | Tensors) -> Federation:
    """A number or a vector stands for a client with that one target."""
    return Federation([c if isinstance(c, Tensors) else targets(c) for c in clients])


def fedavg(size: int = 1, **options: Any) -> FedAvg:
    return FedAvg(Target(size), **{"lr": 1.0, "batch": 1000, "device": "cpu", **options})


class Rounds:
    """Plays rounds one by one, through the byte-level engine."""

    def __init__(
        self, algorithm: Algorithm, holdings: Federation, rounds: int = 100, seed: int = 0
    ) -> None:
        self.algorithm, self.engine = algorithm, Loopback(algorithm, holdings)
        self.state = algorithm.init()
        self.known = {"rounds": rounds, "seed": seed, "population": len(holdings)}
        self.number, self.heard = 0, dict[int, int]()
        self.replies = Replies()

    def play(self, *asked: int) -> Message:
        ids = sorted(asked) or list(self.engine.ids())
        state = self.state.with_header(round=self.number, **self.known)
        message = self.algorithm.broadcast(state).with_header(state.header, cohort=len(ids))
        self.replies, lost = gather(self.engine.exchange(message, ids, self.heard), ids)
        assert not lost, lost
        self.heard.update(dict.fromkeys(ids, self.number))
        mine = self.replies.limited_to(self.algorithm.needs, self.algorithm.declared())
        self.state = self.algorithm.server_step(state, mine)
        self.number += 1
        return self.state

    @property
    def w(self) -> list[float]:
        found: list[float] = self.state.trees["model"]["w"].tolist()
        return found

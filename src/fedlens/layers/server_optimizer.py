"""Server optimisers: the mean update d as a pseudo-gradient. FedAvgM (Hsu et al., 2019),
FedAdagrad, FedAdam, FedYogi (Reddi et al., 2021).

FedAvgM:  m <- beta m + d, x += lr m.
Others (Algorithm 2 of FedOpt):  m <- beta_1 m + (1 - beta_1) d;  x += lr m / (sqrt(v) + tau), with
    Adagrad  v <- v + d^2
    Adam     v <- beta_2 v + (1 - beta_2) d^2
    Yogi     v <- v - (1 - beta_2) d^2 sign(v - d^2)

Two readings differ between paper and Flower. bias="fedopt": v starts at tau^2 and nothing is
corrected. bias="flower": v starts at zero and Adam's step is multiplied by sqrt(1 - beta_2^(t+1)) /
(1 - beta_1^(t+1)) with Flower's t, which counts rounds from 1; Yogi and Adagrad are not corrected
there either. Only trained parameters are adapted; buffers take the plain mean, which would
otherwise leave their range.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, StackError, Stage
from fedlens.core.limits import Fraction, Positive
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.layers.feddyn import FedDyn


class ServerOptimizer(TrainingLayer):
    """Abstract: what becomes of the mean update."""

    stage: ClassVar[Stage] = "merge"
    of_mean: ClassVar[bool] = True

    def check(self, inner: Algorithm) -> None:
        self.under(inner)
        if any(isinstance(p, FedDyn) for p in inner.parts()):
            raise StackError(
                f"FedDyn has a server step of its own: {type(self).__name__} cannot change its mean"
            )
        if other := next((p for p in inner.parts() if isinstance(p, ServerOptimizer)), None):
            raise StackError(
                f"{type(self).__name__} and {type(other).__name__} both optimise on the server:"
                " keep one of them"
            )

    def server_step(self, state: Message, replies: Replies) -> Message:
        mean = replies.mean("delta")
        gradient = {n: t for n, t in mean.items() if n in self.fedavg.parameter_names}
        step, kept = self.step(state, gradient)
        return self.inner.server_step(state, replies.put(delta={**mean, **step})).put(**kept)

    @abstractmethod
    def step(self, state: Message, gradient: Tree) -> tuple[Tree, dict[str, Tree]]:
        """What is added to the parameters, and what the state keeps."""


@dataclass
class FedAvgM(ServerOptimizer):
    """Momentum on the server (Hsu et al., 2019).

    Args:
        lr: server learning rate.
        beta: momentum.
    """

    lr: Positive = 1.0
    beta: Fraction = 0.9
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"beta": (0.5, 0.7, 0.95)}

    def step(self, state: Message, gradient: Tree) -> tuple[Tree, dict[str, Tree]]:
        m = state.trees.get("momentum")
        new = gradient if m is None else {n: self.beta * m[n] + d for n, d in gradient.items()}
        return {n: self.lr * t for n, t in new.items()}, {"momentum": new}


@dataclass
class _Adaptive(ServerOptimizer):
    """Abstract: a step scaled by the second moment.

    Args:
        lr: server learning rate.
        beta_1: of the first moment.
        beta_2: of the second moment.
        tau: how adaptive; added to the root of the second moment.
        bias: "fedopt" or "flower".
    """

    lr: Positive = 0.01
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.99
    tau: Positive = 0.001
    bias: Literal["fedopt", "flower"] = "fedopt"
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"lr": (0.001, 0.03, 0.1)}

    def step(self, state: Message, gradient: Tree) -> tuple[Tree, dict[str, Tree]]:
        start = self.tau**2 if self.bias == "fedopt" else 0.0
        m = state.trees.get("momentum") or {n: torch.zeros_like(d) for n, d in gradient.items()}
        v = state.trees.get("variance") or {
            n: torch.full_like(d, start) for n, d in gradient.items()
        }
        m = {n: self.beta_1 * m[n] + (1 - self.beta_1) * d for n, d in gradient.items()}
        v = {n: self.second(v[n], d.square()) for n, d in gradient.items()}
        lr = self.lr * self.correction(state.round)
        return {n: lr * m[n] / (v[n].sqrt() + self.tau) for n in gradient}, {
            "momentum": m,
            "variance": v,
        }

    @abstractmethod
    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor: ...

    def correction(self, number: int) -> float:
        return 1.0


@dataclass
class FedAdagrad(_Adaptive):
    """Adagrad on the server (Reddi et al., 2021).

    Args:
        lr: server learning rate.
        beta_1: of the first moment (0 in the paper).
        tau: how adaptive.
        bias: "fedopt" or "flower".
    """

    beta_1: Fraction = 0.0

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v + square


@dataclass
class FedAdam(_Adaptive):
    """Adam on the server (Reddi et al., 2021).

    Args:
        lr: server learning rate.
        beta_1: of the first moment.
        beta_2: of the second moment.
        tau: how adaptive; added to the root of the second moment.
        bias: "fedopt" (none) or "flower".
    """

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * square

    def correction(self, number: int) -> float:
        if self.bias == "fedopt":
            return 1.0
        t = number + 2  # Flower's first round is 1, and it adds one more
        return float((1 - self.beta_2**t) ** 0.5 / (1 - self.beta_1**t))


@dataclass
class FedYogi(_Adaptive):
    """Yogi on the server (Reddi et al., 2021).

    Args:
        lr: server learning rate.
        beta_1: of the first moment.
        beta_2: of the second moment.
        tau: how adaptive; added to the root of the second moment.
        bias: v starts at tau^2 ("fedopt") or 0 ("flower").
    """

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.beta_2) * square * (v - square).sign()

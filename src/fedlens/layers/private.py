"""Parts of the model that stay on the client: BackboneOnly (FedVSSL), FedPer (Arivazhagan et al.,
2019), LGFedAvg (Liang et al., 2020) and FedBN (Li et al., 2021).

The layer owns `init`, so that nothing outside it ever sees a private array and private arrays
really do not travel. A client keeps its own in memory from round to round; one that is asked for
the first time starts from the common initialisation, which it builds itself from the recipe's seed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, Layer, StackError, Stage
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.tree import Tree


class Private(TrainingLayer):
    """Abstract: which names stay at home."""

    stage: ClassVar[Stage] = "share"
    keeps_private: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True
    # how to say what travels, where that can be set; {first} and {last} are parts of the model
    advice: ClassVar[str] = ""
    _start: Tree | None = None

    @abstractmethod
    def is_private(self, name: str) -> bool: ...

    def private_weights(self, memory: Mapping[str, Tree]) -> Tree:
        return memory.get("private", {})

    def check(self, inner: Algorithm) -> None:
        self.under(inner)
        if other := next(
            (p for p in inner.parts() if isinstance(p, Layer) and p.keeps_private), None
        ):
            raise StackError(
                f"{type(self).__name__} and {type(other).__name__} both decide what stays with a"
                " client: keep one of them"
            )

    def init(self) -> Message:
        state = self.inner.init()
        whole = state.trees["model"]
        self._start = {n: t for n, t in whole.items() if self.is_private(n)}
        if not self._start or len(self._start) == len(whole):
            what = "nothing" if not self._start else "everything"
            parts = list(dict.fromkeys(n.split(".")[0] for n in whole))
            advice = self.advice.format(first=parts[0], last=parts[-1]) if len(parts) > 1 else ""
            raise StackError(
                f"{type(self).__name__} would keep {what} private: the model consists of"
                f" {', '.join(sorted(parts))}{advice}"
            )
        return state.put(model={n: t for n, t in whole.items() if n not in self._start})

    def client_step(self, message: Message, client: Client) -> Message:
        own = client.memory.get("private") or self._first()
        reply = self.train(message.put(model={**message.trees["model"], **own}), client)
        delta = reply.trees["delta"]
        client.memory["private"] = {n: t + delta[n] for n, t in own.items()}
        return reply.put(delta={n: t for n, t in delta.items() if n not in own})

    def train(self, message: Message, client: Client) -> Message:
        """The local work on the whole model."""
        return self.inner.client_step(message, client)

    def result(self, state: Message) -> Any:
        """With the private part as everybody began with it."""
        return self.inner.result(state.put(model={**self._first(), **state.trees["model"]}))

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        """With a client's own part. The server has none, so it can evaluate only what needs no
        head; else personal metrics are all there is."""
        if "private" not in memory and self.fedavg.task.needs_head(data):
            return {}
        own = memory.get("private") or self._first()
        return self.inner.evaluate(
            message.put(model={**message.trees["model"], **own}), data, memory
        )

    def _first(self) -> Tree:
        if self._start is None:
            self.init()
        assert self._start is not None
        return self._start


@dataclass
class BackboneOnly(Private):
    """Only the backbone travels; everything else stays with each client.

    Args:
        backbone: the first part of the names that travel.
    """

    advice: ClassVar[str] = "; say which one travels, such as BackboneOnly.backbone={first}"
    backbone: str = "backbone"

    def is_private(self, name: str) -> bool:
        return name.split(".")[0] != self.backbone


@dataclass
class FedPer(Private):
    """The last layers are personal, the base below them is common; both train together.

    Args:
        own: patterns of the names that stay with each client.
    """

    advice: ClassVar[str] = "; say which one stays, such as FedPer.own={last}.*"
    personal: ClassVar[bool] = True
    own: tuple[str, ...] = ("head.*",)

    def is_private(self, name: str) -> bool:
        return fits_any(name, self.own)


@dataclass
class LGFedAvg(Private):
    """The other way round: every client has a representation of its own, and the head on top of it
    is common.

    Args:
        common: patterns of the names that travel.
    """

    advice: ClassVar[str] = "; say which one travels, such as LGFedAvg.common={last}.*"
    personal: ClassVar[bool] = True
    common: tuple[str, ...] = ("head.*",)

    def is_private(self, name: str) -> bool:
        return not fits_any(name, self.common)


def fits_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class FedBN(Private):
    """Normalisation layers stay at home: weights, biases and running statistics of every
    BatchNorm.
    """

    _names: set[str] | None = field(default=None, init=False, repr=False)

    def is_private(self, name: str) -> bool:
        if self._names is None:
            norms = [
                m
                for m, module in self.fedavg.resident.named_modules()
                if isinstance(module, nn.modules.batchnorm._BatchNorm)
            ]
            self._names = {
                f"{m}.{p}"
                for m in norms
                for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
            }
        return name in self._names

"""Low-rank adapters (LoRA, Hu et al., 2022): the network is frozen as it begins, and beside its
weights W small matrices learn, W + alpha / rank * up @ down. They and the head are all that
travels.

up starts at 0, so the first model is the one begun with. A convolution's weight counts as a matrix
with a row for each output channel. A layer whose matrices would be no smaller than its weight has
none.

What is frozen never travels: every client builds it from the recipe, that is from the seed and the
file that `task.init` or `task.pretrained` names. The message carries its digest, and a client that
has other weights refuses to train on them. What a run saves is the merged network, without a trace
of adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, Layer, StackError, Stage
from fedlens.core.client import Client, generator
from fedlens.core.limits import Count, Positive
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.layers.private import fits_any

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
ORIGINAL, ADDED = ".parametrizations.weight.original", ".parametrizations.weight.0."


class LowRank(nn.Module):
    """What is added to one weight."""

    def __init__(self, shape: torch.Size, rank: int, scale: float, rng: torch.Generator) -> None:
        super().__init__()
        into = shape[1:].numel()
        down = torch.randn(rank, into, generator=rng) / into**0.5
        self.down, self.up = nn.Parameter(down), nn.Parameter(torch.zeros(shape[0], rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down).view_as(weight)


@dataclass(frozen=True)
class Attach:
    """Freezes a network and gives it adapters; an object, so that it can be sent to a worker."""

    rank: int
    scale: float
    modules: tuple[str, ...]
    also: tuple[str, ...]
    seed: int

    def __call__(self, model: nn.Module) -> nn.Module:
        rng = generator(self.seed, 0x10A)
        for name, p in model.named_parameters():
            p.requires_grad_(fits_any(name, self.also))
        chosen = [(n, m) for n, m in model.named_modules() if self._wanted(n, m)]
        if not chosen:
            kinds = sorted({n.split(".")[0] for n, _ in model.named_parameters()})
            raise StackError(
                f"Adapters finds no layer to adapt with rank {self.rank}: the model consists of"
                f" {', '.join(kinds)}"
            )
        for _, module in chosen:
            weight: Any = module.weight
            low = LowRank(weight.shape, self.rank, self.scale, rng).to(weight.device, weight.dtype)
            parametrize.register_parametrization(module, "weight", low)
        return model

    def _wanted(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, MATRICES) or not fits_any(name, self.modules):
            return False
        if fits_any(f"{name}.weight", self.also):
            return False
        shape = module.weight.shape
        return self.rank * (shape[0] + shape[1:].numel()) < shape.numel()


@dataclass
class Adapters(TrainingLayer):
    """
    Args:
        rank: of what is added.
        alpha: its scale is alpha / rank; None for a scale of 1.
        modules: patterns of the names of the layers that get one.
        also: patterns of the parameters that learn and travel as they are.
    """

    rank: Count = 4
    alpha: Positive | None = None
    modules: tuple[str, ...] = ("*",)
    also: tuple[str, ...] = ("head.*",)
    stage: ClassVar[Stage] = "share"
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"rank": (2, 8, 16)}
    _fixed: Tree | None = field(default=None, init=False, repr=False, compare=False)
    _digest: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def around(self, inner: Algorithm) -> Layer:
        base = self.under(inner)
        if base is not inner:
            raise StackError("Adapters changes the network itself: put it right after FedAvg")
        scale = 1.0 if self.alpha is None else self.alpha / self.rank
        attach = Attach(self.rank, scale, self.modules, self.also, base.seed)
        return super().around(base.wrapped(attach))

    def init(self) -> Message:
        state = self.inner.init()
        whole = state.trees["model"]
        self._fixed = {n: t for n, t in whole.items() if not self.travels(n)}
        self._digest = digest(self._fixed)
        moving = {n: t for n, t in whole.items() if n not in self._fixed}
        return state.put(model=moving, fixed={"sha256": self._digest})

    def travels(self, name: str) -> bool:
        return ADDED in name or fits_any(name, self.also)

    def broadcast(self, state: Message) -> Message:
        return self.inner.broadcast(state).put(fixed=state.trees["fixed"])

    def client_step(self, message: Message, client: Client) -> Message:
        fixed = self.fixed
        assert self._digest is not None
        if not torch.equal(message.trees["fixed"]["sha256"], self._digest):
            raise ValueError(
                "the frozen weights here are not the server's: every site needs the same"
                " task.pretrained or task.init"
            )
        reply = self.inner.client_step(self._whole(message), client)
        delta = reply.trees["delta"]
        return reply.put(delta={n: t for n, t in delta.items() if n not in fixed})

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        return self.inner.evaluate(self._whole(message), data, memory)

    def result(self, state: Message) -> Any:
        return self.inner.result(self._whole(state))

    def as_saved(self, state: Message) -> Message:
        """The merged network, by the names it has without adapters; of what a layer further out
        keeps with the clients, nothing.
        """
        whole = self._whole(state).trees["model"]
        model = self.fedavg.load(whole)
        merged: Tree = {}
        for name, t in model.state_dict().items():
            if name.endswith(ORIGINAL):
                plain = name.removesuffix(ORIGINAL)
                weight: Any = model.get_submodule(plain).weight
                merged[f"{plain}.weight"] = weight.detach().cpu().clone()
            elif ADDED not in name and name in whole:
                merged[name] = t.cpu().clone()
        return state.put(model=merged)

    @property
    def fixed(self) -> Tree:
        """The frozen part, as everybody builds it."""
        if self._fixed is None:
            self.init()
        assert self._fixed is not None
        return self._fixed

    def _whole(self, message: Message) -> Message:
        return message.put(model={**self.fixed, **message.trees["model"]})


def digest(weights: Mapping[str, Tensor]) -> Tensor:
    """The sha256 of names and bytes, as an array."""
    found = hashlib.sha256()
    for name, t in sorted(weights.items()):
        found.update(name.encode())
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)

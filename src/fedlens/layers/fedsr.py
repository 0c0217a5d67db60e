r"""FedSR (Yang et al., 2025), a rival of FedVSR: a contrastive term on shallow features, and
layer-wise aggregation.

No code was published by its authors. This follows what the FedVSR authors made of it for their
Table 3:

- Client: z_i, the features of one layer for sample i, averaged over the picture, are drawn to the
  received model's features of the same sample and pushed away from its features of the others:
  lambda * InfoNCE with temperature tau. A hook takes the features, so any model will do.
- Server: each tensor is averaged with weights of its own, softmax over the clients of cos(client's
  tensor, previous global tensor).

Deviations: no projection head (theirs is a random 512 -> 256 one that is never shared). The loss
counts as training loss, as there. A batch of one frame has no others to be pushed away from and
gives zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, StackError, Stage
from fedlens.core.client import Batch, Client, Output
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message
from fedlens.core.replies import Needs, Replies
from fedlens.core.tree import Tree


@dataclass
class FedSR(TrainingLayer):
    """
    Args:
        layer: whose features are compared.
        weight: lambda.
        tau: temperature.
    """

    layer: str = "conv_first"
    weight: NotNegative = 0.1
    tau: Positive = 0.07
    stage: ClassVar[Stage] = "merge"
    own_needs: ClassVar[Needs] = "replies"

    def check(self, inner: Algorithm) -> None:
        model = self.under(inner).resident
        names = [n for n, _ in model.named_modules() if n]
        if self.layer not in names:
            some = ", ".join(n for n in names if "." not in n)
            raise StackError(
                f"FedSR looks at the layer {self.layer!r}, which {type(model).__name__} does not"
                f" have (it has {some})"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        model = self.fedavg.load(message.trees["model"])
        frozen = copy.deepcopy(model).eval().requires_grad_(False)
        with features_of(model.get_submodule(self.layer)) as seen:

            def term(_: nn.Module, batch: Batch, output: Output) -> Tensor:
                anchor = shallow(
                    lambda: self.fedavg.task.forward(frozen, batch),
                    frozen.get_submodule(self.layer),
                )
                return self.weight * info_nce(pooled(seen[-1]), pooled(anchor), self.tau)

            return self.inner.client_step(message, client.plus(term))

    def server_step(self, state: Message, replies: Replies) -> Message:
        deltas = [r.trees["delta"] for r in replies]
        return self.inner.server_step(
            state, replies.put(delta=layer_wise(deltas, state.trees["model"]))
        )


@contextmanager
def features_of(layer: nn.Module) -> Iterator[list[Any]]:
    """A list whose last entry is what the layer gave most recently."""
    seen: list[Any] = []

    def look(_: nn.Module, __: Any, out: Any) -> None:
        seen[:] = [out]

    hook = layer.register_forward_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


class _Enough(Exception):
    """Raised by a hook: what comes after the layer need not be computed."""


def shallow(forward: Callable[[], Any], layer: nn.Module) -> Tensor:
    """What the layer gives in a forward pass; the pass ends there. As in training, because a
    network may take its frames one by one where no gradient is wanted; nothing needs one here.
    """
    found: list[Tensor] = []

    def stop(_: nn.Module, __: Any, out: Tensor) -> None:
        found.append(out)
        raise _Enough

    hook = layer.register_forward_hook(stop)
    try:
        with torch.enable_grad():
            forward()
    except _Enough:
        pass
    finally:
        hook.remove()
    return found[0].detach()


def pooled(features: Tensor) -> Tensor:
    """(N, C, ...) averaged to unit vectors (N, C)."""
    flat = features.flatten(2).mean(2) if features.dim() > 2 else features
    return F.normalize(flat, dim=1)


def info_nce(z: Tensor, anchor: Tensor, tau: float) -> Tensor:
    """-log of the softmax share of a sample's own anchor among all anchors."""
    return F.cross_entropy(z @ anchor.T / tau, torch.arange(len(z), device=z.device))


def layer_wise(deltas: Sequence[Tree], model: Mapping[str, Tensor]) -> Tree:
    """Each tensor's mean with softmax weights over cos(model + delta, model)."""
    out: Tree = {}
    for name, old in model.items():
        before = old.reshape(-1).double()
        own = torch.stack([d[name].reshape(-1).double() for d in deltas])
        weights = torch.softmax(F.cosine_similarity(own + before, before[None], dim=1), 0)
        mean = (weights[:, None] * own).sum(0).reshape(old.shape)
        out[name] = mean.to(old.dtype) if old.is_floating_point() else mean
    return out

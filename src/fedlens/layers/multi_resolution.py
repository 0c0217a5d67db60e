r"""MultiResolution (RAF, Lim et al.): a model's answer at a lower resolution learns from its own
answer one level higher.

A client's native input is level 0; every size of the list that is smaller is a level below it (Eq.
2). The task loss looks at level 0 only (Eq. 4). Distillation, Eq. 5: sum over i >= 1 of distance(U
y_i, sg y_{i-1}), where sg stops the gradient, so that only the lower level learns, and U is a fixed
linear upsampling. Eq. 6: task + alpha * distillation + gamma / 2 * ||w||^2. A client that already
has the lowest resolution trains plainly.

The layer knows nothing of what is predicted. It asks the task for the lower view
(`LearningTask.lower`) and for the distance (`LearningTask.distance`), and upsamples whatever is a
map (N, C, H, W): heat maps, class maps, depth, images, frame by frame also clips (B, T, C, H, W). A
prediction without a grid (class scores) is compared as it is.

What the paper leaves open, and what is done here:

- Eqs. 4-5 are sums over pixels, public pose code takes means. alpha = 1 means something only if
  both terms use the same one: the distance has the reduction of the task's loss.
- U is bilinear with pixel centres; corners=True aligns corner pixels instead, as unbiased
  coordinates (UDP) would have it. - gamma: a loss term of 0.01 ||w||^2 / 2 beside a mean-reduced
  loss of about 0.001 would be all that is left to learn, and inside AdamW an L2 term is not weight
  decay. So gamma is 0 here and the recipes set FedAvg's weight_decay = 0.01; gamma > 0 is the
  equation to the letter.
- statistics: whether BatchNorm's running statistics follow the lower levels too ("all", what a
  straightforward program does) or only the native one ("native"). In either case a level is
  normalised by its own batch.
- Visibility weights apply to the task loss only, as Eq. 5 has none.
- Algorithm 1, line 16 starts each step from w instead of w_k, which would undo the step before:
  read as a slip. Its mean is 1/N, the text's is weighted: FedAvg's `weights` says which.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Batch, Client, Output
from fedlens.core.facts import Facts
from fedlens.core.limits import NotNegative
from fedlens.core.message import Message

Size = tuple[int, int]


@dataclass
class MultiResolution(TrainingLayer):
    """
    Args:
        sizes: (height, width) of the levels, in any order.
        alpha: weight of the distillation.
        gamma: weight of the L2 term.
        statistics: what BatchNorm's running statistics follow.
        corners: align corner pixels when upsampling.
    """

    sizes: tuple[tuple[int, int], ...] = ()
    alpha: NotNegative = 1.0
    gamma: NotNegative = 0.0
    statistics: Literal["all", "native"] = "all"
    corners: bool = False

    def check(self, inner: Algorithm) -> None:
        multiple = self.under(inner).task.multiple
        if not self.sizes:
            raise StackError(
                "MultiResolution needs the sizes of its levels, for example sizes = [[64, 48], [48,"
                " 36], [32, 24]]"
            )
        self.sizes = tuple(sorted({(int(h), int(w)) for h, w in self.sizes}, reverse=True))
        for higher, lower in zip(self.sizes, self.sizes[1:]):
            if not is_below(lower, higher):
                raise StackError(
                    f"MultiResolution: {_name(lower)} is not below {_name(higher)} in both"
                    " directions"
                )
        for size in self.sizes:
            if min(size) < 1 or any(side % multiple for side in size):
                raise StackError(
                    f"MultiResolution: {_name(size)} does not fit the model, whose inputs are"
                    f" multiples of {multiple}"
                )

    def given(self, facts: Facts) -> Algorithm:
        """Levels that are below nobody's own resolution train nothing: refused where that is so of
        all, warned about where it is so of some.
        """
        found = super().given(facts)
        own = facts.resolutions
        if not own:
            return found
        idle = [s for s in self.sizes if not any(is_below(s, size) for size in own)]
        if len(idle) == len(self.sizes):
            raise StackError(
                "MultiResolution would train nothing: none of its levels"
                f" ({', '.join(map(_name, idle))}) is below a client's own resolution, the highest"
                f" of which is {_name(max(own))}"
            )
        above = [size for size in idle if size not in own]
        if above:
            warnings.warn(
                f"MultiResolution: {', '.join(map(_name, above))} of its levels train nothing, no"
                f" client's own resolution is above (the highest is {_name(max(own))})",
                stacklevel=2,
            )
        return found

    def client_step(self, message: Message, client: Client) -> Message:
        client = client.plus(self.distil)
        if self.gamma:
            client = client.pull(lambda model: self.gamma / 2 * squared_norm(model))
        return self.inner.client_step(message, client)

    def distil(self, model: nn.Module, batch: Batch, output: Output) -> Tensor:
        """alpha times Eq. 5. The native prediction is the one the task loss has already paid
        for.
        """
        base = self.fedavg
        teacher = output.prediction
        total = teacher.new_zeros(())
        with frozen_statistics(model) if self.statistics == "native" else nullcontext():
            for size in self.levels(batch):
                student = base.task.forward(model, base.task.lower(batch, size)).prediction
                target = teacher.detach()
                total = total + base.task.distance(match(student, target, self.corners), target)
                teacher = student
        scaled: Tensor = self.alpha * total
        return scaled

    def levels(self, batch: Batch) -> list[Size]:
        """The sizes below the native one, highest first."""
        height, width = batch["x"].shape[-2:]
        return [size for size in self.sizes if is_below(size, (height, width))]


def is_below(a: Size, b: Size) -> bool:
    return a[0] < b[0] and a[1] < b[1]


def match(prediction: Tensor, like: Tensor, corners: bool = False) -> Tensor:
    """U of Eq. 5: a map becomes as large as the other; what is not a map stays as it is."""
    if prediction.dim() not in (4, 5) or prediction.shape == like.shape:
        return prediction
    maps = prediction.reshape(-1, *prediction.shape[-3:])
    return F.interpolate(
        maps, size=like.shape[-2:], mode="bilinear", align_corners=corners
    ).reshape(like.shape)


def squared_norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters() if p.requires_grad]).sum()


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm still normalises by the batch at hand, but what it remembers stays as it was."""
    norms: list[Any] = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True


def _name(size: Size) -> str:
    return f"{size[0]}x{size[1]}"

"""Data in memory: the quickest way to a batch, and the way to bring your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedlens.core.client import Batch
from fedlens.core.datasets import Listed as Listed

Augment = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True)
class Tensors:
    """Columns of equal length, as a client's data.

    Args:
        columns: tensors by name. `x` may be uint8 images: they become floats in [0, 1] when a batch
            is drawn.
        augment: a function of images and a random generator; it sees training batches only.
        mean: subtracted from `x`.
        std: divides `x` afterwards.
    """

    columns: Batch
    augment: Augment | None = None
    mean: Tensor | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {k: len(v) for k, v in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns differ in length: {sizes}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        out = {k: v[index] for k, v in self.columns.items()}
        x = out["x"]
        if x.dtype == torch.uint8:
            x = x.float() / 255
        if rng is not None and self.augment is not None:
            x = self.augment(x, rng)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        out["x"] = x
        return out

    def subset(self, index: Sequence[int] | Tensor) -> Tensors:
        chosen = torch.as_tensor(index, dtype=torch.long)
        return replace(self, columns={k: v[chosen] for k, v in self.columns.items()})

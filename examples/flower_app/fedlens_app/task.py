"""Your part: what is learned, from what. Two small classes of made-up images here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedlens import Algorithm, Batch, Output, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.layers import Scaffold


class Stripes(LearningTask):
    """Are the stripes vertical or horizontal?"""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)
        )

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: Any, data: Tensors) -> dict[str, float]:
        batch = data.batch(torch.arange(len(data)))
        return {"accuracy": float((result(batch["x"]).argmax(1) == batch["y"]).float().mean())}


def data_of(client: int, count: int = 128) -> Tensors:
    rng = torch.Generator().manual_seed(client)
    y = torch.randint(2, (count,), generator=rng)
    wave = torch.sin(torch.arange(16) * (0.8 + 0.2 * client)).expand(count, 1, 16, 16)
    x = torch.where(y[:, None, None, None] == 0, wave, wave.transpose(2, 3)) + 0.3 * torch.randn(
        count, 1, 16, 16, generator=rng
    )
    return Tensors({"x": x, "y": y})


def algorithm() -> Algorithm:
    return stack(FedAvg(Stripes(), lr=0.1, batch=16), Scaffold())

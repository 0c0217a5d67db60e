"""A problem that was also given to the public code of several methods: two inputs, two classes, two
clients with four and six examples. Full batches, so that the order of examples does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens import Batch, Federation, Output
from fedlens.algorithms import FedAvg
from fedlens.core.facts import Facts
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors

ONE = Tensors(
    {"x": torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 2]]), "y": torch.tensor([0, 1, 0, 1])}
)
OTHER = Tensors(
    {
        "x": torch.tensor([[2.0, 1], [0, -1], [1, -1], [-1, 0], [0.5, 0.5], [3, 1]]),
        "y": torch.tensor([1, 0, 1, 1, 0, 1]),
    }
)
TWO = Federation([ONE, OTHER], facts=Facts(classes=("a", "b"), labels=((2, 2), (2, 4))))


def fixed(layer: nn.Linear, weight: list[list[float]], bias: list[float]) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


def last() -> nn.Linear:
    return fixed(nn.Linear(2, 2), [[0.1, -0.2], [0.3, 0.0]], [0.0, 0.1])


class WithBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = fixed(nn.Linear(2, 2), [[0.5, -0.3], [0.2, 0.4]], [0.1, -0.1])
        self.head = last()

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class TwoClasses(LearningTask):
    """body: with one hidden layer, whose outputs are the features."""

    def __init__(self, body: bool = False) -> None:
        self.body = body

    def model(self) -> nn.Module:
        return WithBody() if self.body else last()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {"loss": float(F.cross_entropy(result(data.columns["x"]), data.columns["y"]))}


def two_classes(body: bool = False, **options: Any) -> FedAvg:
    common = {"lr": 0.1, "weight_decay": 0.01, "epochs": 3, "batch": 100, "device": "cpu"}
    return FedAvg(TwoClasses(body), **{**common, **options})

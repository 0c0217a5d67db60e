"""Small things to run everywhere: those of `fedlens.testing` by short names, and a few more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlens import Batch, Data, Federation, Lost, Message, Output
from fedlens.core.log import Log
from fedlens.core.rounds import Engine
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.generators import ImageGenerator
from fedlens.runs.engines import MakeEngine, make_engine
from fedlens.runs.setup import Setup
from fedlens.testing import SmallNet as Net
from fedlens.testing import SmallTask as Toy
from fedlens.testing import arrays_of as flat
from fedlens.testing import same_bits, small_federation
from fedlens.testing import small_data as make_data

__all__ = ["Net", "Toy", "flat", "make_data", "same_bits"]


def drawing_as(real: Path) -> MakeEngine:
    """The simulator, asking those whom the server of a run over Flower asked: it is handed the
    secret in that run's folder."""
    secret = json.loads((real / "flower.json").read_text())["cohort_seed"]

    def make(setup: Setup, folder: Path, log: Log) -> Engine:
        engine = make_engine("simulator", setup, folder, log)
        engine.cohort_seed = secret  # type: ignore[attr-defined]
        return engine

    return make


class Replay(Loopback):
    """The loopback, in which each round hears just those that a real deployment heard; then it is
    interrupted."""

    heard: list[list[int]]

    def exchange(self, message: Message, ids: Any, heard: Any) -> Iterator[Any]:
        if message.round >= len(self.heard):
            raise KeyboardInterrupt
        present = self.heard[message.round]
        for reply in super().exchange(message, ids, heard):
            yield reply if reply.sender in present else Lost(reply.sender, "was not heard")


def toy_federation(clients: int = 6, seed: int = 0) -> Federation:
    return small_federation(clients, seed)


@dataclass
class Blobs(ImageGenerator):
    """Generates for the toy: the first two numbers say the class, as they do in `make_data`, but
    further out.
    """

    far: float = 2.0

    def generate(self, label: int, n: int, rng: torch.Generator) -> Tensor:
        x = torch.randn(n, 8, generator=rng)
        signs = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0]])[label]
        x[:, :2] = self.far * signs * x[:, :2].abs()
        return x


class GroupNet(nn.Module):
    """The toy's network without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(2, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.backbone(x)
        return found


class GroupToy(Toy):
    def model(self) -> nn.Module:
        return GroupNet()


class Frames(nn.Module):
    """Clips (B, T, 3, H, W) or pictures (N, 3, H, W) of any size to the same, frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(-1, *x.shape[-3:])).reshape(x.shape)  # type: ignore[no-any-return]


class Denoise(LearningTask):
    """Something dense: a map comes out, not a label."""

    def model(self) -> nn.Module:
        return Frames()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(output.prediction, batch["y"])

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        batch = data.batch(torch.arange(len(data)))
        return {"loss": float(self.loss(self.forward(result, batch), batch))}


def dense_federation(*shape: int, clients: int = 7) -> Federation:
    """Clean maps of the given shape behind noise."""
    rng = torch.Generator().manual_seed(1)

    def some(n: int) -> Tensors:
        y = torch.rand(n, *shape, generator=rng)
        return Tensors({"x": y + 0.3 * torch.randn(y.shape, generator=rng), "y": y})

    return Federation([some(9 + i) for i in range(clients)], test=some(4))


def save_png(path: Path, pixels: Tensor) -> None:
    """uint8 (3, H, W)."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)

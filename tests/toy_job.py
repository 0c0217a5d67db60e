"""The toy task as a recipe: everything a job needs, without data or a real model."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn
from toy import GroupToy, Toy, toy_federation

from fedlens import Client, Facts, Federation, Message
from fedlens.algorithms import FedAvg
from fedlens.data.source import DataError, Source

RECIPE = """
about = "toy"
[task]
name = "toy_job:Slow"
[data]
name = "toy_job:ToySource"
[federation]
clients = 6
rounds = 4
workers = 0
[[algorithm]]
name = "FedAvg"
lr = 0.1
batch = 8
[[algorithm]]
name = "Scaffold"
"""


class ToySource(Source):
    """extra: clients more than asked for. broken: as if the files were."""

    def __init__(self, extra: int = 0, broken: bool = False) -> None:
        self.extra, self.broken = extra, broken

    def federation(self, clients: int, seed: int) -> Federation:
        if self.broken:
            raise DataError("images.bin ends after 12 of 100 bytes")
        made = toy_federation(clients + self.extra, seed)
        counts = [tuple(int((h.columns["y"] == c).sum()) for c in range(3)) for h in made.holdings]
        return Federation(made.holdings, made.held_out, made.test, Facts(labels=tuple(counts)))


class Slow(Toy):
    """Takes `pause` seconds for every batch."""

    def __init__(self, pause: float = 0.0, level: int = 3) -> None:
        self.pause, self.level = pause, level

    def loss(self, output, batch):  # type: ignore[no-untyped-def]
        if self.pause:
            time.sleep(self.pause)
        return super().loss(output, batch)


class Unheard(FedAvg):
    """Nobody can work, the first client for a reason of its own."""

    def client_step(self, message: Message, client: Client) -> Message:
        raise RuntimeError("the cable is out" if client.id else "the disk is full of cats")


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "toy.toml"
    path.write_text(text)
    return path


class Noisy(Slow):
    """Without BatchNorm, for stacks with differential privacy."""

    def model(self) -> nn.Module:
        return GroupToy().model()

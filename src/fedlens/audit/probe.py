"""What one client sends if it holds these examples and works so long: the real stack answers, on a
few of a client's real examples, so that a page can show where leakage begins and ends.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedlens.algorithms.fedavg import FedAvg
from fedlens.audit.attack import Evidence, summed
from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.answer import answer
from fedlens.core.client import Batch, Data
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.engines.recorder import Exchange
from fedlens.runs.setup import Setup


@dataclass(frozen=True)
class Probe:
    """A row of the page. examples, steps: how many of a client's examples, in one batch, and how
    many local steps on them; 0 is as the run has it. noise: on every number, relative to the
    message. together: the server sees the sum over the clients only.
    """

    name: str
    about: str
    examples: int = 0
    steps: int = 0
    noise: float = 0.0
    together: bool = False


WORST = Probe("worst case", "a client with one image, one local step", 1, 1)
PROBES = (
    WORST,
    Probe("larger batch", "four images, one local step", 4, 1),
    Probe("more local steps", "one image, five local steps", 1, 5),
    Probe("noise 1 %", "worst case, noise of 1 % on every number", 1, 1, 0.01),
    Probe("noise 10 %", "worst case, noise of 10 % on every number", 1, 1, 0.1),
    Probe(
        "SecureSum", "worst case, but only the sum over all clients is seen", 1, 1, together=True
    ),
)


@dataclass(frozen=True)
class Caught:
    """What a server has of one client: the broadcast, the client's delta, and what it knows of the
    local work. truth: the batch, for scores only.
    """

    down: Message
    delta: Tree
    truth: Batch
    examples: int
    steps: int
    lr: float


@dataclass(frozen=True)
class Few:
    """Some of a client's examples, never augmented."""

    data: Data
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        return self.data.batch(self.index[index])


def fedavg_of(setup: Setup) -> FedAvg | None:
    base = setup.algorithm.base
    return base if isinstance(base, FedAvg) else None


def labelled(setup: Setup) -> str:
    """Empty where clients learn to tell classes apart by one linear head, otherwise why not."""
    base = fedavg_of(setup)
    if base is None:
        return f"{type(setup.algorithm.base).__name__} trains no network"
    head = getattr(base.resident, "head", None)
    if not isinstance(head, nn.Linear) or head.bias is None:
        return f"{type(base.resident).__name__} has no linear head with a bias"
    held = next((h for h in setup.federation.holdings if h is not None and len(h)), None)
    if held is None:
        return "the clients' data is not here"
    y = held.batch(torch.arange(1)).get("y")
    if y is None or y.dim() != 1 or y.is_floating_point():
        return f"{type(setup.task).__name__} has no classes"
    return ""


def catch(evidence: Evidence, client: int, probe: Probe | None, number: int = 0) -> Caught:
    """The delta of a client in exchange `number`: what was sent, or what a probe sends."""
    setup, exchange = evidence.setup, evidence.exchanges[number]
    base = fedavg_of(setup)
    assert base is not None
    data = setup.federation.holdings[client]
    if probe is None:
        reply = exchange.replies[client]
        examples = len(data)
        whole, rest = divmod(examples, base.batch)  # a last batch of one joins the one before it
        steps = base.steps or base.epochs * max(1, whole + (rest > 1))
        truth = data.batch(torch.arange(min(examples, 8)))
    else:
        examples, steps = min(probe.examples, len(data)), probe.steps
        reply = _probed(setup, exchange.down, client, probe)
        if probe.together:
            others = {i: _probed(setup, exchange.down, i, probe) for i in exchange.replies}
            reply = summed([Exchange(exchange.down, {**others, client: reply})])[0].replies[client]
        truth = data.batch(torch.arange(examples))
    delta = dict(reply.trees["delta"])
    if probe is not None and probe.noise:
        delta = _noisy(delta, probe.noise, client)
    return Caught(exchange.down, delta, truth, examples, steps, base.lr_at(exchange.down))


def _probed(setup: Setup, down: Message, client: int, probe: Probe) -> Message:
    data = setup.federation.holdings[client]
    few = Few(data, torch.arange(min(probe.examples, len(data))))
    holdings = {i: few if i == client else h for i, h in enumerate(setup.federation.holdings)}
    federation = replace(setup.federation, holdings=[holdings[i] for i in range(len(holdings))])
    algorithm = working(setup.algorithm, steps=probe.steps, batch=max(1, len(few)))
    return answer(algorithm, down, client, federation, Memory())


def working(algorithm: Algorithm, **changes: Any) -> Algorithm:
    """The same stack on a FedAvg with other settings."""
    if isinstance(algorithm, Layer):
        layer = copy.copy(algorithm)
        layer.inner = working(algorithm.inner, **changes)
        return layer
    base = copy.copy(algorithm)
    for name, value in changes.items():
        setattr(base, name, value)
    return base


def _noisy(delta: Mapping[str, Tensor], noise: float, client: int) -> Tree:
    rng = torch.Generator().manual_seed(client)
    numbers = torch.cat([t.double().reshape(-1) for t in delta.values() if t.is_floating_point()])
    level = noise * float(numbers.square().mean().sqrt())
    return {
        n: t + level * torch.randn(t.shape, generator=rng).to(t.dtype)
        if t.is_floating_point()
        else t
        for n, t in delta.items()
    }


def others(setup: Setup, like: Tensor, most: int = 500) -> Tensor:
    """Images that have nothing to do with the clients': the server's test set, where it is of this
    shape; otherwise flat grey.
    """
    test = setup.federation.test
    if isinstance(test, Data) and len(test):
        step = max(1, len(test) // most)
        found = [test.batch(torch.tensor([i]))["x"] for i in range(0, len(test), step)][:most]
        same = [x[0] for x in found if x.shape[1:] == like.shape]
        if same:
            return torch.stack(same)
    return torch.full((1, *like.shape), 0.5)


def flat_image(x: Tensor) -> Tensor:
    """(C, H, W) of an example: of a clip its first frame."""
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[-3:])[0]


def parameters_of(base: FedAvg, delta: Mapping[str, Tensor]) -> Sequence[str]:
    """The trained parameters that a delta holds, in the model's order."""
    return [
        n for n, _ in base.resident.named_parameters() if n in delta and n in base.parameter_names
    ]

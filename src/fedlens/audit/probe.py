"""What one client sends if it holds these examples and works so long: the real stack answers, on a
few of a client's real examples, so that a page can show where leakage begins and ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate

from fedlens.algorithms.fedavg import FedAvg
from fedlens.audit.attack import Comparison, Evidence, Probe, nearest, score_images, summed
from fedlens.audit.noise import clip_and_blur
from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.answer import answer
from fedlens.core.client import Batch, Data, generator
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.engines.recorder import Exchange
from fedlens.runs.setup import Setup


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


def first_heard(evidence: Evidence, client: int) -> int:
    """The number of the first exchange in which this client was heard, 0 if it never was."""
    return next((k for k, e in enumerate(evidence.exchanges) if client in e.replies), 0)


def catch(evidence: Evidence, client: int, number: int | None = None) -> Caught:
    """The delta of a client in exchange `number`, or else the first in which it was heard: what was
    sent, or what a probe sends.
    """
    number = first_heard(evidence, client) if number is None else number
    setup, exchange, probe = evidence.setup, evidence.exchanges[number], evidence.probe
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
        truth = _first(data, probe.examples)
        if probe.together:  # one batch of everybody's examples, so far as one step goes
            everyone = sorted({client, *exchange.replies})
            sent = {i: _probed(setup, exchange.down, i, probe) for i in everyone}
            reply = summed([Exchange(exchange.down, sent)])[0].replies[client]
            parts = [_first(setup.federation.holdings[i], probe.examples) for i in everyone]
            alike = [p for p in parts if p["x"].shape[1:] == truth["x"].shape[1:]]  # not of RAF
            truth = {name: torch.cat([part[name] for part in alike]) for name in truth}
            examples = len(truth["x"])
    delta = dict(reply.trees["delta"])
    if probe is not None and probe.noise:
        rng = generator(client, number, 0xD9)
        delta = clip_and_blur(delta, math.inf, probe.noise, rng, base.parameter_names)
    return Caught(exchange.down, delta, truth, examples, steps, base.lr_at(exchange.down))


def some_rounds(evidence: Evidence, most: int = 4) -> list[tuple[int, int]]:
    """(exchange, client) of up to so many rounds, first and last among them; none where there is
    one round only. The client is the first attacked one that was heard.
    """
    heard = [
        (k, next((c for c in evidence.clients if c in e.replies), -1))
        for k, e in enumerate(evidence.exchanges)
    ]
    heard = [(k, c) for k, c in heard if c >= 0]
    if len(heard) < 2:
        return []
    places = torch.linspace(0, len(heard) - 1, min(most, len(heard))).round().long()
    return [heard[int(i)] for i in places]


def _first(data: Data, examples: int) -> Batch:
    return data.batch(torch.arange(min(examples, len(data))))


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


def compare_best(
    setup: Setup, client: int, guesses: Sequence[Tensor], truths: Tensor
) -> Comparison:
    """The pair of a guess and a real image that fits best: which is which is unknown."""
    flat = [(flat_image(g), flat_image(t)) for g in guesses for t in truths]
    guess, truth = min(flat, key=lambda pair: float((pair[0] - pair[1]).square().mean()))
    unrelated = without_message(setup, truth)
    low, high = pixel_range(setup)
    guess, truth, unrelated = ((x - low) / (high - low) for x in (guess, truth, unrelated))
    return Comparison(
        f"client {client}", guess, truth, unrelated, score_images(guess, truth),
        score_images(unrelated, truth),
    )  # fmt: skip


def pixel_range(setup: Setup) -> tuple[Tensor, Tensor]:
    """The least and the largest pixel of each channel that a network is fed with, by the server's
    own images: 0 and 1, unless they are normalised before (people, in RAF).
    """
    test = setup.federation.test
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    if not (isinstance(test, Data) and len(test)):
        return zero, one
    x = test.batch(torch.arange(min(50, len(test))))["x"]
    if float(x.min()) >= 0 and float(x.max()) <= 1:
        return zero, one
    channels = x.transpose(0, -3).flatten(1)
    return channels.amin(1)[:, None, None], channels.amax(1)[:, None, None]


def without_message(setup: Setup, truth: Tensor) -> Tensor:
    """The best that somebody could show who has no message: the nearest unrelated image, the mean
    of them all, or one flat colour, which only the truth could tell.
    """
    known = others(setup, truth)
    flat = truth.mean((-2, -1), keepdim=True).expand_as(truth)
    return nearest(truth, torch.cat([known, known.mean(0, keepdim=True), flat[None]]))


def others(setup: Setup, like: Tensor, most: int = 500) -> Tensor:
    """Images that have nothing to do with the clients': the server's test set, in this size; flat
    grey where there is none.
    """
    test = setup.federation.test
    if not (isinstance(test, Data) and len(test)):
        return torch.full((1, *like.shape), 0.5)
    step = max(1, len(test) // most)
    images = [flat_image(test.batch(torch.tensor([i]))["x"][0]) for i in range(0, len(test), step)]
    return torch.stack([_sized(x, like) for x in images[:most]])


def _sized(image: Tensor, like: Tensor) -> Tensor:
    """An image's middle, of this shape."""
    if image.shape == like.shape:
        return image
    tall, wide = like.shape[-2:]
    scale = max(tall / image.shape[-2], wide / image.shape[-1])
    size = [max(tall, round(image.shape[-2] * scale)), max(wide, round(image.shape[-1] * scale))]
    larger = interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    return larger[: len(like), top : top + tall, left : left + wide]


def flat_image(x: Tensor) -> Tensor:
    """(C, H, W) of an example: of a clip, (T, C, H, W) or (C, T, H, W), its first frame."""
    if x.dim() == 4 and x.shape[0] in (1, 3) and x.shape[1] not in (1, 3):
        return x[:, 0]
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[-3:])[0]


def parameters_of(base: FedAvg, delta: Mapping[str, Tensor]) -> Sequence[str]:
    """The trained parameters that a delta holds, in the model's order."""
    return [
        n for n, _ in base.resident.named_parameters() if n in delta and n in base.parameter_names
    ]

"""What differential privacy does to a reply, without its accounting: it is clipped to a norm and
gets Gaussian noise. Seeded: for audits and experiments only, since whoever has the seed can
subtract the noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedlens.algorithms.fedavg import FedAvg
from fedlens.core import tree
from fedlens.core.algorithm import Layer
from fedlens.core.client import Client, generator
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message
from fedlens.core.tree import Tree

SENT = ("delta", "w", "dw")  # trees that speak of a client's data


class ClipAndNoise(Layer):
    """noise: standard deviation of a number, as a share of the root mean square of what is left
    after clipping. bound: the largest norm of a tree. Of d numbers, the noise multiplier z of
    differential privacy is a share of z sqrt(d). BatchNorm statistics pass as they are.
    """

    stage = "wire"

    def __init__(self, noise: NotNegative = 0.1, bound: Positive = math.inf) -> None:
        self.noise, self.bound = noise, bound

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        rng = generator(message.header.seed, message.round, client.id, 0xD9)
        base = self.inner.base
        trained = base.parameter_names if isinstance(base, FedAvg) else None
        # FedDeblur sends w, of which all but w - x is known
        known = {"w": message.trees.get("x", {})}
        trees = {
            name: _moved(sent, known.get(name, {}), self.bound, self.noise, rng, trained)
            if name in SENT
            else sent
            for name, sent in reply.trees.items()
        }
        return replace(reply, trees=trees, _derived={})


def _moved(
    sent: Tree,
    known: Mapping[str, Tensor],
    bound: float,
    noise: float,
    rng: torch.Generator,
    names: Collection[str] | None,
) -> Tree:
    """What differs from the known is clipped and blurred."""
    news = {k: t - known[k] if k in known else t for k, t in sent.items()}
    blurred = clip_and_blur(news, bound, noise, rng, names)
    return {k: t + known[k] if k in known else t for k, t in blurred.items()}


def clip_and_blur(
    sent: Mapping[str, Tensor],
    bound: float,
    noise: float,
    rng: torch.Generator,
    names: Collection[str] | None = None,
) -> Tree:
    """names: what counts; None is every real number."""
    counted = {
        k: t for k, t in sent.items() if t.is_floating_point() and (names is None or k in names)
    }
    length = tree.norm(counted)
    scale = min(1.0, bound / max(length, 1e-30))
    level = noise * scale * length / math.sqrt(max(1, sum(t.numel() for t in counted.values())))

    def blurred(t: Tensor) -> Tensor:
        added = torch.randn(t.shape, generator=rng, dtype=torch.float64)
        return (t.double() * scale + level * added).to(t.dtype)

    return {k: blurred(t) if k in counted else t for k, t in sent.items()}

"""The mean of w that consensus ADMM needs, when not everyone answers or not everyone sees
everything: both halves of each way.

Of those who answered (Algorithm 6 of the FedDeblur paper) it is `replies.mean("w")`. But w_k - x =
lambda_k / rho does not vanish at the solution, only its mean over all clients does, and with the
published rho it is hundreds of grey levels: a mean over some of them throws x about, and at rho =
5e-4 the run diverges for every cohort below 10.

So of everyone who was ever heard, each with the w last heard of it (`since_last`, `mean_of_last`):
a client sends w less that one, the server adds it to a running total, and needs no single replies
for it. With everyone present this is the mean of w again.

Or by pixel, of those who saw it (`in_view`, `mean_in_view`), which is what the authors' public code
does for denoisers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree, add, scale, subtract
from fedlens.deblur import spectrum
from fedlens.deblur.observation import Observation


def since_last(w: Tree, client: Client) -> Message:
    """w less the last w that the server heard, which is what the server still counts this client
    with.
    """
    last = client.memory.get("last w")
    client.memory["last w"] = w
    return Message({"dw": subtract(w, last) if last else w}, {"first": 0.0 if last else 1.0})


def mean_of_last(state: Message, replies: Replies) -> tuple[Message, Tree]:
    """The mean, and the state with the new total."""
    # at least who adds something now and at most everybody, however often somebody says it is new
    met = min(
        max(state.scalars.get("met", 0.0) + replies.total("first"), replies.weight("dw")),
        float(state.header.population),
    )
    moved = scale(replies.mean("dw"), replies.weight("dw"))
    total = add(state.trees["total"], moved) if "total" in state.trees else moved
    return state.put(total=total).note(met=met), scale(total, 1 / met)


def in_view(w: Tree, views: Mapping[str, Observation]) -> Message:
    """w where the client looked, and where that was, which is then no secret any more."""
    seen = {n: views[n].mask(x.dtype) for n, x in w.items()}
    cut = {
        n: spectrum.forward(spectrum.backward(x, views[n].width) * seen[n]) for n, x in w.items()
    }
    return Message({"w": cut, "seen": seen})


def mean_in_view(state: Message, replies: Replies) -> Tree:
    old = state.trees["image"]
    sums = {n: spectrum.backward(x, old[n].shape[-1]) for n, x in replies.mean("w").items()}
    return {n: spectrum.forward(x) for n, x in by_pixel(sums, replies.mean("seen"), old).items()}


def by_pixel(images: Tree, seen: Tree, old: Tree) -> Tree:
    """Means of masked images and of their masks: each pixel over those who saw it, as it was where
    nobody did.
    """
    return {
        n: torch.where(seen[n] > 0, x / seen[n].clamp_min(1e-9), old[n]) for n, x in images.items()
    }

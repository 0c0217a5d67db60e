"""A reply as what it adds to a sum, and a sum as what an algorithm reads of replies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedlens.core.client import Client, generator
from fedlens.core.message import MEAN, Message
from fedlens.core.replies import Heard, Replies, Scalar, Sum
from fedlens.trust.fixed_point import (
    BROKEN,
    SATURATED,
    TYPES,
    WRITERS,
    Layout,
    declared_sums,
    to_mean,
    to_whole,
    weight_key,
)
from fedlens.trust.masking import Tampered


def to_numbers(
    layout: Layout,
    declared: Mapping[str, Scalar],
    message: Message,
    client: Client,
    reply: Message,
) -> tuple[dict[str, float], dict[int, Tensor]]:
    """A reply as whole numbers: few by name, tensors in flat arrays. One with NaN or Inf, or a
    weight that is none, adds nothing, and its client has learned nothing: the others must not see
    whose it was.
    """
    if not _is_sound(layout, message, reply):
        return _nothing(layout, client)
    values = dict.fromkeys(layout.names, 0.0)
    flats = {bits: torch.empty(n, dtype=TYPES[bits]) for bits, n in layout.widths().items()}
    rng = generator(message.header.seed, message.round, client.id, 0x16)
    for slot in layout.slots:
        key = weight_key(slot.tree, slot.weight)
        weight = _weight(reply, slot.tree, slot.weight)
        weight = math.ldexp(weight, -layout.units[key])
        peak, clipped = to_whole(
            reply.trees[slot.tree][slot.name],
            weight,
            slot,
            layout.clients,
            flats[slot.bits][slot.start : slot.start + slot.numel],
            rng if slot.bits == 16 else None,
        )
        if not peak < float("inf"):
            return _nothing(layout, client)
        values[f"moment {slot.key}"] = peak * peak  # inf where ** would raise
        values[key] = weight
        values[SATURATED] += clipped
    values[WRITERS] = float(bool(getattr(client.memory, "written", {})))
    for name, scalar in declared_sums(declared).items():
        if math.isfinite(reply.scalars.get(name, math.nan)):
            by = scalar.weight if scalar.read == "mean" else None
            count = reply.scalars.get(by, 1.0) if by else 1.0
            if not math.isfinite(count):
                continue
            values[f"value {name}"] = reply.scalars[name] * count
            values[f"count {name}"] = count
    return values, flats


def _is_sound(layout: Layout, message: Message, reply: Message) -> bool:
    weights = {_weight(reply, slot.tree, slot.weight) for slot in layout.slots}
    return all(0 <= weight <= message.header.max_weight for weight in weights)


def _nothing(layout: Layout, client: Client) -> tuple[dict[str, float], dict[int, Tensor]]:
    getattr(client.memory, "written", {}).clear()
    flats = {bits: torch.zeros(n, dtype=TYPES[bits]) for bits, n in layout.widths().items()}
    return {**dict.fromkeys(layout.names, 0.0), BROKEN: 1.0}, flats


def _weight(reply: Message, tree: str, name: str) -> float:
    weights = reply.weights.get(tree) or {MEAN: 1.0}
    if name not in weights:
        raise ValueError(
            f"the tree {tree!r} has no weight {name!r}: its layer must say so in weighs"
        )
    return float(weights[name])


def check_totals(layout: Layout, message: Message, totals: Mapping[str, float], heard: int) -> None:
    """Under a mask a client may add what it likes; what honest ones cannot come to is not
    used.
    """
    most = heard * message.header.max_weight * (1 + 1e-9)
    for name, value in totals.items():
        if name.startswith(("moment ", "count ")) and value < 0:
            raise Tampered("what was added up is impossible")
        if name in layout.units and not 0 <= math.ldexp(value, layout.units[name]) <= most:
            raise Tampered("the sum of the weights is impossible")
    few = all(0 <= totals[name] <= heard for name in (WRITERS, BROKEN))
    if not few or totals[SATURATED] < 0:
        raise Tampered("what was added up is impossible")


def to_replies(
    layout: Layout,
    totals: Mapping[str, float],
    flats: Mapping[int, Tensor],
    heard: Mapping[int, Heard],
    least: int,
) -> Replies:
    """What the inner algorithm sees: ordinary means and totals, of which a scalar that fewer than
    `least` clients have is left out: it would be theirs.
    """
    sums: dict[tuple[str, str], Sum] = {}
    for slot in layout.slots:
        group = weight_key(slot.tree, slot.weight)
        weight = totals[group]
        total = flats[slot.bits][slot.start : slot.start + slot.numel]
        mean = to_mean(total, slot, layout.clients, weight)
        whole = Sum({}, math.ldexp(weight, layout.units[group]))
        sums.setdefault((slot.tree, slot.weight), whole).tree[slot.name] = mean
    scalars = [n.removeprefix("value ") for n in layout.names if n.startswith("value ")]
    found = {n: (totals[f"value {n}"], totals[f"count {n}"]) for n in scalars}
    found = {n: both for n, both in found.items() if both[1] and both[1] >= least}
    hidden = {i: Heard(i, h.round, {}, h.bytes, {}) for i, h in heard.items()}
    return Replies(hidden, sums, totals=found)

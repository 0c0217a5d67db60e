"""Fixed point: what a reply adds to a sum as whole numbers, and the sum as numbers again.

Masks cancel exactly, so what they hide must be added exactly: whole numbers modulo 2^bits. An entry
x of a tensor with the bound B = 2^e becomes round(x 2^(bits - 1 - l - e)), clipped to what n
clients can add without a wrap, 2^l > n. With 20 clients and 32 bits that leaves 26 bits and a sign
for values up to B, two more than float32 has.

Bounds are powers of two, one a tensor, from the second moment over the clients of each tensor's
largest entry, which is itself summed under the mask: B >= 16 sqrt(1/n sum_k max|x_k|^2) of the
round before. Not from the last aggregate: the differences that SCAFFOLD or FedDeblur add up go to
zero while single ones do not. A bound rises to no more than 16 times itself in a round, because one
client may lie about its peak, and under a bound out of all proportion everything rounds to nothing.
It falls to no less than half where clients remember, where clipping costs the round, else to no
less than 2^-12; and to no less than 2^-12 of the largest one in its tree: what is so small is noise
(a bias before BatchNorm), and may be a thousand times as large the next time. Where no bound is
known yet, and for float64 and integers, a tensor takes 64 bits and a bound that is out of reach.

What counts in a sum is a weight times a tensor, and weights have sizes of their own: FedVSSL's
exp(-loss) is 4e-11 at a loss of 24. So a weight is counted in units of a power of two that follows
its mean of the round before, which changes no mean. A first round whose weights turn out to be far
below 1 was added too coarsely; it is skipped, and the next one knows the unit (`too_coarse`).

Few numbers, such as weights, losses and moments, need no bound: they are added modulo 2^128 in
units of 2^-56. A 128-bit number travels as four of 32 bits in arrays of 64, which engines add
without knowing (the sums of n < 2^31 parts do not wrap); carries are counted at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.core.replies import Scalar
from fedlens.core.tree import Tree

UNIT = 56  # few numbers are multiples of 2^-UNIT
WIDE = 128
# of a tensor about which nothing is known: 64 bits then still resolve it finer than float32
FIRST_BOUND = 32
LEAST_BOUND, MOST_BOUND = -40, 60
_SLACK = 16.0
FALL = 12  # powers of two by which a tensor's bound may be below its tree's largest, or its last
RISE = 4  # by which it may be above its last
DRIFT = 6  # powers of two that a mean weight may be away from its unit
MOST_UNIT = 256
COARSE = 2.0**-8  # a mean weight below this leaves a tensor of unknown size too few bits
FINE_SHARE = 16  # units in the deviation of a client's noise: rounding then takes nothing from it
TYPES = {16: torch.int16, 32: torch.int32, 64: torch.int64}
MASKED = "masked"  # the tree of a reply
SATURATED, WRITERS, BROKEN = "saturated", "writers", "broken"


class Slot(NamedTuple):
    """A tensor's place: in the flat array of its width, from `start` on, with the bound 2^bound."""

    tree: str
    weight: str
    name: str
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    start: int
    bound: int

    @property
    def key(self) -> str:
        return f"{self.tree}/{self.weight}/{self.name}"

    @property
    def numel(self) -> int:
        """Of a complex tensor, real and imaginary parts."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)


def scale_of(bits: int, bound: int, clients: int) -> int:
    """A value times 2^this is a whole number below 2^(bits - 1) / clients."""
    return bits - 1 - clients.bit_length() - bound


def unit_of(clients: int) -> float:
    """What the entries of a tensor of unknown size are rounded to."""
    return math.ldexp(1.0, -scale_of(64, FIRST_BOUND, clients))


@dataclass(frozen=True)
class Layout:
    """Where everything in a reply goes; client and server make it from the same message.

    slots: tensors. names: of the few numbers, in their order: a weight's sum, a tensor's moment, a
    scalar's value and weight, how many entries were clipped, how many clients wrote to their memory
    and how many had nothing that could be added. clients: how many may add. units: the exponent in
    which each weight is counted.
    """

    slots: Sequence[Slot]
    names: Sequence[str]
    clients: int
    units: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(
        expected: Mapping[str, Tree],
        weighing: Mapping[str, Sequence[str]],
        scalars: Sequence[str],
        bounds: Mapping[str, int],
        clients: int,
        ring: int,
    ) -> Layout:
        slots: list[Slot] = []
        at = dict.fromkeys(TYPES, 0)
        numbers = [SATURATED, WRITERS, BROKEN]
        units: dict[str, int] = {}
        for tree, arrays in expected.items():
            for weight in weighing.get(tree, ("mean",)):
                numbers.append(weight_key(tree, weight))
                units[numbers[-1]] = bounds.get(numbers[-1], 0)
                for name, t in arrays.items():
                    known = bounds.get(f"{tree}/{weight}/{name}")
                    bits = bits_of(t, known is not None, ring)
                    bound = FIRST_BOUND if known is None else known
                    slot = Slot(tree, weight, name, t.shape, t.dtype, bits, at[bits], bound)
                    at[bits] += slot.numel
                    slots.append(slot)
                    numbers.append(f"moment {slot.key}")
        for name in scalars:
            numbers += [f"value {name}", f"count {name}"]
        return Layout(slots, numbers, clients, units)

    def widths(self) -> dict[int, int]:
        """How many entries of each width there are."""
        out: dict[int, int] = {}
        for slot in self.slots:
            out[slot.bits] = out.get(slot.bits, 0) + slot.numel
        return dict(sorted(out.items(), reverse=True))

    def expects(self) -> dict[str, Tree]:
        """The one tree of a reply: a flat array a width, and the few numbers."""
        flats = {
            f"ring{bits}": torch.empty(count, dtype=TYPES[bits])
            for bits, count in self.widths().items()
        }
        return {MASKED: {"few": torch.empty(4 * len(self.names), dtype=torch.int64), **flats}}


def weight_key(tree: str, weight: str) -> str:
    return f"weight {tree}/{weight}"


def bits_of(t: Tensor, bounded: bool, ring: int) -> int:
    return ring if is_narrow(t.dtype) and bounded else 64


def is_narrow(dtype: torch.dtype) -> bool:
    return dtype == torch.complex64 or (dtype.is_floating_point and dtype.itemsize <= 4)


def parts_of(t: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, anything else as it is."""
    return torch.view_as_real(t) if t.is_complex() else t


# -- tensors ---------------------------------------------------------------------------------------


def to_whole(
    x: Tensor,
    weight: float,
    slot: Slot,
    clients: int,
    out: Tensor,
    rng: torch.Generator | None = None,
) -> tuple[float, int]:
    """weight * x as whole numbers into `out`; its largest magnitude, and how many were clipped.
    rng: round up or down by chance, so that the mean is right however few bits there are."""
    flat = parts_of(x).reshape(-1)
    if slot.bits == 64 or not flat.is_floating_point():
        flat = flat.double()
    elif flat.dtype != torch.float32:
        flat = flat.float()
    low, high = torch.aminmax(flat) if flat.numel() else (torch.zeros(1), torch.zeros(1))
    peak = abs(weight) * max(-float(low), float(high))
    scale = math.ldexp(1.0, scale_of(slot.bits, slot.bound, clients))
    limit = _limit(slot.bits, clients)
    clipped = 0
    space = torch.empty(min(_PIECE, flat.numel()), dtype=flat.dtype)
    for piece, place in zip(torch.split(flat, _PIECE), torch.split(out, _PIECE), strict=True):
        scaled = torch.mul(piece, weight * scale, out=space[: piece.numel()])
        if peak * scale > limit:
            clipped += int((scaled.abs() > limit).sum())
            scaled.clamp_(-limit, limit)
        if rng is not None:
            scaled.add_(torch.rand(scaled.shape, generator=rng, dtype=scaled.dtype)).floor_()
            scaled.clamp_(-limit, limit)
        else:
            scaled.round_()
        place.copy_(scaled)
    return peak, clipped


_PIECE = 1 << 18  # entries converted at a time, so that they stay in the cache


def _limit(bits: int, clients: int) -> float:
    """The largest whole number of one client. Of 64 bits a float64 must hold it exactly."""
    most = 1 << (bits - 1 - clients.bit_length())
    return float(most - 1 if bits <= 16 else most - (1 << max(0, most.bit_length() - 24)))


def to_mean(total: Tensor, slot: Slot, clients: int, weight: float) -> Tensor:
    """The sum of whole numbers as a mean: divided by the scale and by the sum of weights."""
    factor = math.ldexp(1.0, -scale_of(slot.bits, slot.bound, clients)) / weight if weight else 0.0
    kind = slot.dtype if slot.dtype.is_floating_point or slot.dtype.is_complex else torch.float64
    if kind.is_complex:
        pairs = (total.double() * factor).view(*slot.shape, 2).contiguous()
        return torch.view_as_complex(pairs).to(kind)
    out = torch.empty(slot.shape, dtype=kind)
    pieces = zip(torch.split(total, _PIECE), torch.split(out.view(-1), _PIECE), strict=True)
    for piece, place in pieces:
        place.copy_(piece.double() * factor)
    return out


def next_bounds(layout: Layout, totals: Mapping[str, float]) -> dict[str, int]:
    """Exponents, by tensor, from the sums of squared peaks, and units of weights from their sums.
    What was clipped has at least twice the bound the next time. What was added too coarsely stays
    of unknown size.
    """
    units = {
        key: _next_unit(unit, totals[key] / layout.clients) for key, unit in layout.units.items()
    }
    bounds: dict[str, int] = {}
    most: dict[str, int] = {}
    for slot in layout.slots:
        group = weight_key(slot.tree, slot.weight)
        moved = units[group] - layout.units[group]
        if _is_coarse(layout, slot, totals):
            continue
        bounds[slot.key] = _next_bound(slot, layout, totals) - moved
        if is_narrow(slot.dtype):
            most[group] = max(most.get(group, LEAST_BOUND), bounds[slot.key])
    for slot in layout.slots:
        if slot.key in bounds:
            least = most.get(weight_key(slot.tree, slot.weight), LEAST_BOUND) - FALL
            bounds[slot.key] = max(bounds[slot.key], least)
    return {**units, **bounds}


def too_coarse(layout: Layout, totals: Mapping[str, float]) -> bool:
    """Tensors of unknown size, added with weights so small that hardly a bit of them is left?"""
    return any(_is_coarse(layout, slot, totals) for slot in layout.slots)


def _is_coarse(layout: Layout, slot: Slot, totals: Mapping[str, float]) -> bool:
    mean = totals[weight_key(slot.tree, slot.weight)] / layout.clients
    return slot.bits == 64 and is_narrow(slot.dtype) and 0 < mean < COARSE


def _next_unit(unit: int, mean: float) -> int:
    exponent = math.frexp(mean)[1] if mean > 0 else 0
    moved = unit + exponent if abs(exponent) > DRIFT else unit
    return max(-MOST_UNIT, min(MOST_UNIT, moved))


def _next_bound(slot: Slot, layout: Layout, totals: Mapping[str, float]) -> int:
    whole = math.sqrt(max(0.0, totals[f"moment {slot.key}"]))
    peak = _SLACK * whole / math.sqrt(layout.clients)
    bound = math.frexp(peak)[1] if peak else LEAST_BOUND
    if not is_narrow(slot.dtype):
        bound = max(bound, FIRST_BOUND)
    else:
        bound = min(bound, slot.bound + RISE)
        if slot.bits < 64:
            bound = max(bound, slot.bound - (1 if totals[WRITERS] else FALL))
    if totals[SATURATED] and whole > 0.999 * math.ldexp(1.0, slot.bound):
        bound = max(bound, slot.bound + 1)
    return max(LEAST_BOUND, min(MOST_BOUND, bound))


# -- few numbers -----------------------------------------------------------------------------------

_MOST = 2.0**60  # that one client adds: 2^10 of them, and some more, do not wrap


def encode(values: Sequence[float], masks: Sequence[int] = ()) -> Tensor:
    """Numbers (and masks) modulo 2^128, in parts of 32 bits."""
    out = []
    for k, value in enumerate(values):
        value = max(-_MOST, min(_MOST, value))
        whole = round(math.ldexp(value, UNIT)) + (masks[k] if masks else 0)
        out += [whole >> shift & 0xFFFFFFFF for shift in range(0, WIDE, 32)]
    return torch.tensor(out, dtype=torch.int64)


def decode(total: Tensor, masks: Sequence[int] = ()) -> Iterator[float]:
    """The sums, from the sums of their parts."""
    parts = total.tolist()
    for k in range(len(parts) // 4):
        whole = sum(part << 32 * j for j, part in enumerate(parts[4 * k : 4 * k + 4]))
        whole = (whole - (masks[k] if masks else 0)) % (1 << WIDE)
        if whole >> (WIDE - 1):
            whole -= 1 << WIDE
        yield whole / (1 << UNIT)


def declared_sums(declared: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The scalars that can be read from sums; the others are withheld."""
    return {name: s for name, s in declared.items() if s.read in ("mean", "sum")}

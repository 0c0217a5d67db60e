"""Fixed point: whole numbers by hand, bounds, clipping, and the few numbers modulo 2^128."""

from __future__ import annotations

import math

import pytest
import torch

from fedlens.trust.fixed_point import (
    FALL,
    FIRST_BOUND,
    RISE,
    SATURATED,
    WRITERS,
    Layout,
    Slot,
    decode,
    encode,
    next_bounds,
    scale_of,
    to_mean,
    to_whole,
    too_coarse,
)


def slot(n: int, bits: int, bound: int, dtype: torch.dtype = torch.float32) -> Slot:
    return Slot("delta", "mean", "w", torch.Size([n]), dtype, bits, 0, bound)


def test_whole_numbers_by_hand() -> None:
    """Three clients need two bits, so a bound of 2 = 2^1 leaves 2^(31 - 2 - 1) = 2^28 a unit. 0.75
    with the weight 2 is 1.5: 1.5 * 2^28 = 402653184. -3.5 with it is -7, beyond the bound, and is
    clipped to -(2^29 - 2^6), the nearest number below 2^29 that a float32 holds well inside."""
    out = torch.empty(3, dtype=torch.int32)
    assert scale_of(32, 1, 3) == 28
    x = torch.tensor([0.75, -3.5, 2.0**-29])
    peak, clipped = to_whole(x, 2.0, slot(3, 32, 1), 3, out)
    assert (peak, clipped) == (7.0, 1)
    assert out.tolist() == [402653184, -(2**29 - 2**6), 1]
    mean = to_mean(out * 3, slot(3, 32, 1), 3, 6.0)
    assert mean[0] == 0.75 and mean.dtype == torch.float32


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("clients", [3, 4, 16, 20, 100])
def test_no_sum_of_clipped_numbers_wraps(bits: int, clients: int) -> None:
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    for sign in (1.0, -1.0):
        out = torch.empty(2, dtype=kind)
        to_whole(torch.tensor([sign * 1e30, 0.0]), 1.0, slot(2, bits, 3), clients, out)
        assert abs(int(out[0])) * clients < 2 ** (bits - 1)
        assert abs(int(out[0])) >= 0.99 * 2 ** (bits - 1 - clients.bit_length())


def test_precision_is_that_of_float32_or_better() -> None:
    """20 clients, 32 bits, a bound 16 times the largest entry: errors of a mean stay below 2^-24 of
    the largest entry, half of what rounding that entry to float32 costs."""
    rng = torch.Generator().manual_seed(1)
    xs = [torch.randn(1000, generator=rng) for _ in range(20)]
    most = max(float(x.abs().max()) for x in xs)
    s = slot(1000, 32, math.frexp(16 * most)[1])
    total = torch.zeros(1000, dtype=torch.int32)
    for x in xs:
        out = torch.empty(1000, dtype=torch.int32)
        assert to_whole(x, 1.0, s, 20, out)[1] == 0
        total += out
    truth = torch.stack(xs).double().mean(0)
    error = (to_mean(total, s, 20, 20.0).double() - truth).abs().max()
    assert float(error) < most * 2**-23


def test_sixteen_bits_are_right_on_average() -> None:
    """A value of 0.3 steps is rounded up in three cases of ten: 40,000 of them have a mean within
    five standard errors, 5 sqrt(0.21 / 40000) = 0.0115. Rounding to the nearest gives 0 for all."""
    s = slot(40_000, 16, 0)
    step = 2.0 ** -scale_of(16, 0, 3)
    out = torch.empty(40_000, dtype=torch.int16)
    rng = torch.Generator().manual_seed(0)
    to_whole(torch.full((40_000,), 0.3 * step), 1.0, s, 3, out, rng)
    assert set(out.tolist()) == {0, 1}
    assert abs(float(out.float().mean()) - 0.3) < 0.0115
    to_whole(torch.full((40_000,), 0.3 * step), 1.0, s, 3, out)
    assert not out.any()


def test_few_numbers_are_added_modulo_2_128() -> None:
    """Each multiple of 2^-56 comes back exactly, also where parts and masks carry and borrow."""
    values = [[-1.5, 2.0**-56, 3e9], [0.25, -(2.0**-56), -3e9], [1.0, 5.0, 0.0]]
    masks = [(1 << 128) - 1, 1 << 127, 12345 << 60]
    total = sum(encode(v, masks) for v in values)
    assert isinstance(total, torch.Tensor)
    assert list(decode(total, [3 * m for m in masks])) == [-0.25, 5.0, 0.0]
    assert list(decode(sum(encode(v) for v in values))) == [-0.25, 5.0, 0.0]  # type: ignore[arg-type]


def layout(bounds: dict[str, int]) -> Layout:
    tree = {
        "a": torch.zeros(4),
        "b": torch.zeros(4),
        "n": torch.zeros((), dtype=torch.int64),
    }
    return Layout.of({"delta": tree}, {}, ["loss"], bounds, 4, 32)


def test_bounds_follow_the_moments_and_not_the_sum() -> None:
    """Four clients with peaks 1, 1, 1, 1: 16 sqrt(4/4) = 16 = 2^4, whose next power of two is 2^5.
    What is 2^-20 as large has a bound 12 powers below the largest, not 20. Integers keep theirs."""
    first = layout({})
    assert {s.bits for s in first.slots} == {64} and first.widths() == {64: 9}
    totals = dict.fromkeys(first.names, 0.0)
    totals |= {"moment delta/mean/a": 4.0, "moment delta/mean/b": 4.0 * 2.0**-40}
    found = next_bounds(first, totals)
    assert found.pop("weight delta/mean") == 0
    assert found == {"delta/mean/a": 5, "delta/mean/b": -7, "delta/mean/n": FIRST_BOUND}
    second = layout(found)
    assert second.widths() == {64: 1, 32: 8}
    # nothing came: where clients remember, no more than half of it is taken back
    nothing = dict.fromkeys(second.names, 0.0)
    assert next_bounds(second, nothing | {WRITERS: 1.0})["delta/mean/a"] == 4
    assert next_bounds(second, nothing)["delta/mean/a"] == 5 - FALL


def test_a_lie_about_a_peak_costs_a_round() -> None:
    """One of four claims a peak of 2^34, as large as can be said: the bound rises by 2^4, after
    which the 32 bits still hold 2^-19 of an honest peak; the next round has the old one back."""
    here = layout({"delta/mean/a": 5, "delta/mean/b": 5, "delta/mean/n": FIRST_BOUND})
    honest = dict.fromkeys(here.names, 0.0) | {"moment delta/mean/a": 4.0}
    lied = next_bounds(here, honest | {"moment delta/mean/a": 2.0**69})
    assert lied["delta/mean/a"] == 5 + RISE
    after = layout(lied)
    assert next_bounds(after, honest)["delta/mean/a"] == 5
    first = next_bounds(layout({}), honest | {"moment delta/mean/a": 2.0**69})
    assert first["delta/mean/a"] == FIRST_BOUND + RISE


def test_what_was_clipped_has_twice_the_bound() -> None:
    """One of four had a peak of 40, beyond 2^5: 16 sqrt(1600/4) = 320 gives 2^9. One with just more
    than its bound of 2^9 would keep that; clipped, it has 2^10."""
    here = layout({"delta/mean/a": 5, "delta/mean/b": 9, "delta/mean/n": FIRST_BOUND})
    totals = dict.fromkeys(here.names, 0.0)
    totals |= {"moment delta/mean/a": 1600.0, "moment delta/mean/b": 513.0**2 / 1000}
    found = next_bounds(here, totals | {SATURATED: 1.0, WRITERS: 4.0})
    assert found["delta/mean/a"] == 9
    totals["moment delta/mean/b"] = 512.5**2
    assert next_bounds(here, totals | {SATURATED: 1.0})["delta/mean/b"] >= 10


def test_tiny_weights_get_a_unit_of_their_own() -> None:
    """Weights of 2^-35 (a loss of 24) on entries of 1: in the first round, 2^-35 in steps of 2^-28
    is nothing, and the sum of the weights, 4 * 2^-35, tells it. The unit becomes 2^-34 (frexp of
    2^-35 is 1/2 * 2^-34), in which a weight is 1/2 and a peak 1/2: 16 * 1/2 = 2^3, so 2^4.
    """
    first = layout({})
    totals = dict.fromkeys(first.names, 0.0) | {"weight delta/mean": 4 * 2.0**-35}
    assert too_coarse(first, totals)
    found = next_bounds(first, totals)
    assert found["weight delta/mean"] == -34 and "delta/mean/a" not in found
    second = layout(found)
    assert second.widths() == {64: 9}  # its sizes are still unknown
    totals |= {"weight delta/mean": 4 * 0.5, "moment delta/mean/a": 4 * 0.5**2}
    assert not too_coarse(second, totals)
    found = next_bounds(second, totals)
    assert found["weight delta/mean"] == -34 and found["delta/mean/a"] == 4


def test_a_unit_that_moves_takes_its_bounds_along() -> None:
    """Weights of 500 on entries of 1: a bound of 2^13 (16 * 500 = 8000) in units of 1. In units of
    2^9, the frexp of 500, it is 2^4: the whole numbers are the same."""
    first = layout({})
    totals = dict.fromkeys(first.names, 0.0)
    totals |= {"weight delta/mean": 4 * 500.0, "moment delta/mean/a": 4 * 500.0**2}
    found = next_bounds(first, totals)
    assert (found["weight delta/mean"], found["delta/mean/a"]) == (9, 4)
    slot = layout(found).slots[0]
    one, other = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    x = torch.tensor([1.0, -0.3, 0.77, 1e-3])
    to_whole(x, 500.0 / 2**9, slot, 4, one)
    to_whole(x, 500.0, slot._replace(bound=13), 4, other)
    assert torch.equal(one, other)

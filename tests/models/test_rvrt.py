from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fedlens.models.rvrt import GuidedAttention, _clip_flows, deformable_attention


def value(image: Tensor, y: float, x: float) -> Tensor:
    """Bilinear, nothing outside: image (C, h, w)."""
    h, w = image.shape[-2:]
    total = torch.zeros(len(image), dtype=image.dtype)
    for yy, xx in itertools.product(
        (math.floor(y), math.floor(y) + 1), (math.floor(x), math.floor(x) + 1)
    ):
        if 0 <= yy < h and 0 <= xx < w:
            total += (1 - abs(y - yy)) * (1 - abs(x - xx)) * image[:, yy, xx]
    return total


def slow(q: Tensor, kv: Tensor, offset: Tensor, heads: int) -> Tensor:
    """The published definition, pixel by pixel: channels of keys and values in one row, cut into
    groups, each with offsets of its own.
    """
    n, s, groups = offset.shape[:3]
    channels, h, w = q.shape[1:]
    wide, d = 2 * channels // groups, channels // heads
    out = torch.zeros_like(q)
    for b, y, x in itertools.product(range(n), range(h), range(w)):
        columns = torch.zeros(2 * channels, s * 9, dtype=q.dtype)
        for frame, g, tap in itertools.product(range(s), range(groups), range(9)):
            dy, dx = offset[b, frame, g, tap, :, y, x].tolist()
            part = slice(g * wide, (g + 1) * wide)
            columns[part, frame * 9 + tap] = value(
                kv[b, frame, part], y + tap // 3 - 1 + dy, x + tap % 3 - 1 + dx
            )
        keys, values = columns[:channels], columns[channels:]
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            weights = (q[b, part, y, x] @ keys[part] * d**-0.5).softmax(0)
            out[b, part, y, x] = values[part] @ weights
    return out


@pytest.mark.parametrize(("groups", "heads"), [(4, 4), (4, 2), (2, 4)])
def test_deformable_attention_by_definition(groups: int, heads: int) -> None:
    torch.manual_seed(0)
    q, kv = (
        torch.randn(2, 8, 4, 5, dtype=torch.float64),
        torch.randn(2, 2, 16, 4, 5, dtype=torch.float64),
    )
    offset = 3 * torch.randn(2, 2, groups, 9, 2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(
        deformable_attention(q, kv, offset, heads), slow(q, kv, offset, heads)
    )


def test_equal_keys_give_the_mean() -> None:
    """No offsets, keys all zero: an inner pixel of the answer is the mean of nine neighbours in two
    frames.
    """
    kv = torch.zeros(1, 2, 4, 5, 5)
    kv[:, :, 2:] = torch.arange(25.0).view(5, 5)
    kv[:, 1, 2:] += 10
    found = deformable_attention(torch.randn(1, 2, 5, 5), kv, torch.zeros(1, 2, 2, 9, 2, 5, 5), 1)
    assert found[0, :, 2, 2].tolist() == pytest.approx([17, 17])


def test_each_frame_looks_at_its_own_place_first() -> None:
    """Offsets are the flows alone (the learned rest starts at zero): the flows that come back are
    the flows that went in.
    """
    torch.manual_seed(0)
    align = GuidedAttention(8, 4, 4, 8, 10.0)
    flows = torch.randn(1, 2, 2, 2, 6, 6)
    x, used = align(*(torch.randn(1, 2, 8, 6, 6) for _ in range(3)), flows)
    assert x.shape == (1, 2, 8, 6, 6)
    torch.testing.assert_close(used, flows)


def test_flows_of_clips_by_hand() -> None:
    """Uniform motion of (1, 0) a frame: frame 2 to 0 is 2, 3 to 1 is 2 (same place); 2 to 1 is 1, 3
    to 0 is 3 (the other). Inside, away from the right border, where what is fetched lies outside.
    """
    flows = torch.zeros(1, 5, 2, 4, 9)
    flows[:, :, 0] = 1
    steps = _clip_flows(flows)
    assert len(steps) == 2 and steps[0].shape == (1, 2, 2, 2, 4, 9)
    assert steps[0][0, :, :, 0, 1, 2].tolist() == [[2, 1], [2, 3]]


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 offset groups do not fit"):
        GuidedAttention(8, 3, 4, 8, 10.0)

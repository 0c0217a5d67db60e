from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from torch import Tensor

from fedlens.models.swin import Mlp, SwinBlock, WindowAttention, attend, drop_rates, recomputed

SIZES = [
    ((3, 5, 6), (2, 4, 4), (1, 2, 2)),
    ((2, 4, 8), (2, 4, 4), (1, 2, 2)),
    ((4, 3, 2), (2, 4, 4), (0, 0, 0)),
    ((1, 8, 4), (2, 4, 4), (0, 0, 0)),
]


def by_definition(block: SwinBlock, x: Tensor) -> Tensor:
    """Attention token by token: q_i meets k_j where both lie in one window of the rolled clip and
    neither was carried around a border without the other. Where the clip is no larger than the
    window, the window is the clip and nothing is rolled."""
    attn = block.attn
    size = x.shape[1:4]
    window = [min(n, w) for n, w in zip(size, attn.window)]
    shift = [0 if n <= w else s for n, w, s in zip(size, attn.window, block.shift)]
    full = [-(-n // w) * w for n, w in zip(size, window)]
    padded = torch.zeros(*full, x.shape[-1])
    padded[: size[0], : size[1], : size[2]] = block.norm1(x)[0]
    places = list(itertools.product(*(range(n) for n in full)))
    rolled = [tuple((p - s) % n for p, s, n in zip(place, shift, full)) for place in places]
    home = [
        (tuple(r // w for r, w in zip(roll, window)), tuple(p < s for p, s in zip(place, shift)))
        for roll, place in zip(rolled, places)
    ]
    inside = [tuple(r % w for r, w in zip(roll, window)) for roll in rolled]
    heads, d = attn.heads, x.shape[-1] // attn.heads
    q, k, v = attn.qkv_self(padded.flatten(0, 2)).view(-1, 3, heads, d).unbind(1)
    out = torch.zeros_like(q)
    rows = [2 * w - 1 for w in attn.window]
    for i, j_all in (
        (i, [j for j in range(len(places)) if home[j] == home[i]]) for i in range(len(places))
    ):
        gaps = [
            [a - b + w - 1 for a, b, w in zip(inside[i], inside[j], attn.window)] for j in j_all
        ]
        bias = attn.relative_position_bias_table[
            [(g[0] * rows[1] + g[1]) * rows[2] + g[2] for g in gaps]
        ]
        score = (q[i] * k[j_all]).sum(-1) * d**-0.5 + bias
        out[i] = (score.softmax(0)[..., None] * v[j_all]).sum(0)
    result = attn.proj(out.flatten(1)).view(*full, -1)
    return result[None, : size[0], : size[1], : size[2]]


@pytest.mark.parametrize(("size", "window", "shift"), SIZES)
def test_windows_by_definition(
    size: tuple[int, int, int], window: tuple[int, int, int], shift: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    block = SwinBlock(WindowAttention(8, window, 2, bias_std=1.0), Mlp(8, 16), 8, shift)
    x = torch.randn(1, *size, 8)
    expected = x + by_definition(block, x)
    expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-5)


def test_a_batch_is_its_clips() -> None:
    torch.manual_seed(0)
    block = SwinBlock(WindowAttention(8, (2, 4, 4), 2, mutual=True), Mlp(8, 16), 8, (1, 2, 2))
    x = torch.randn(3, 4, 8, 12, 8)
    torch.testing.assert_close(block(x), torch.cat([block(one[None]) for one in x]))


def test_mutual_attention_by_definition() -> None:
    """One window of two frames: where frame 0 stands comes what frame 1 asked of frame 0, and the
    other way round; then the self part.
    """
    torch.manual_seed(0)
    attn = WindowAttention(8, (2, 2, 2), 2, mutual=True)
    x = torch.randn(1, 8, 8)
    q, k, v = attn.qkv_mut(x[0] + attn.position_bias[0].repeat(2, 1)).view(2, 4, 3, 2, 4).unbind(2)
    mutual = torch.empty(2, 4, 2, 4)
    for frame, head, i in itertools.product(range(2), range(2), range(4)):
        weights = (q[1 - frame, i, head] * k[frame, :, head]).sum(-1).div(2).softmax(0)
        mutual[frame, i, head] = (weights[:, None] * v[frame, :, head]).sum(0)
    q, k, v = attn.qkv_self(x[0]).view(8, 3, 2, 4).permute(1, 2, 0, 3)
    bias = attn.relative_position_bias_table[attn.relative_position_index].permute(2, 0, 1)
    own = ((q @ k.mT / 2 + bias).softmax(-1) @ v).transpose(0, 1).reshape(8, 8)
    expected = attn.proj(torch.cat([mutual.reshape(8, 8), own], 1))
    torch.testing.assert_close(attn(x, (2, 2, 2), [(0, 1, None)])[0], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_without_scores(masked: bool) -> None:
    """The chunked backward pass against autograd through the written-out formula, in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(6, 6, dtype=torch.float64)
    if masked:
        mask[0, 3:] = float("-inf")
    way = torch.randn(5, 2, 6, 3, dtype=torch.float64)
    ours = torch.autograd.grad((attend(q, k, v, bias + mask) * way).sum(), (q, k, v, bias))
    plain = ((q @ k.mT * 3**-0.5 + bias + mask).softmax(-1) @ v * way).sum()
    for a, b in zip(ours, torch.autograd.grad(plain, (q, k, v, bias))):
        torch.testing.assert_close(a, b)


def test_the_chunks_of_the_backward_pass_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 6, 3, requires_grad=True) for _ in range(3))
    whole = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    monkeypatch.setattr("fedlens.models.swin.SCORES", 2 * prod((2, 6, 6)))
    for a, b in zip(whole, torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))):
        torch.testing.assert_close(a, b)


def test_skipping_by_hand() -> None:
    """A rate of 1/2 keeps a sample's branch, doubled, or drops it: x + 2 f(x) or x. Over the two
    branches at most four values.
    """
    torch.manual_seed(0)
    block = SwinBlock(WindowAttention(4, (1, 2, 2), 1), Mlp(4, 4), 4, (0, 0, 0), drop=0.5).train()
    x = torch.randn(1, 1, 2, 2, 4).repeat(64, 1, 1, 1, 1)
    kinds = {tuple(round(v, 4) for v in one.flatten().tolist()) for one in block(x)}
    assert len(kinds) == 4
    assert tuple(round(v, 4) for v in x[0].flatten().tolist()) in kinds


def test_drop_rates_by_hand() -> None:
    assert drop_rates(0.3, (2, 2)) == [
        [0, pytest.approx(0.1)],
        [pytest.approx(0.2), pytest.approx(0.3)],
    ]


def test_recomputed_runs_twice_only_when_there_is_a_gradient() -> None:
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x.square()

    x = torch.tensor(3.0, requires_grad=True)
    recomputed(f, x, on=True).backward()
    assert x.grad == 6 and len(calls) == 2
    with torch.no_grad():
        recomputed(f, x, on=True)
    assert len(calls) == 3

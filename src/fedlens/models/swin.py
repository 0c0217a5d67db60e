"""Attention in shifted windows of a clip (Liu et al., 2021), shared by VRT, RVRT and IART.

Tokens are (B, T, H, W, C). A block cuts them into windows, shifted by half a window in every second
block, and attends inside each. Two things keep it small and quick, neither changes the result:
- Rolling, cutting and sorting the windows by the shape of their mask is one permutation of the
  tokens. A mask exists only where a shifted window wraps around a border, so there are at most
  eight different ones, and no window carries its own.
- Attention keeps q, k, v and the bias, never a score; going back, scores are computed again a few
  windows at a time.

Deviations: masked scores are -inf (the public code adds -100, which is 0 after the softmax in
float32). Where a clip is smaller than the window, positions are cropped in time, height and width;
the public code fails there or crops the flattened table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedlens.core import heap
from fedlens.models.clips import ClipSize

SCORES = 1 << 21  # scores recomputed at a time when going back: 8 MB


def recomputed(f: Callable[..., Any], *inputs: Any, on: bool) -> Any:
    """f(*inputs); if `on`, its inner results are not kept but computed again when the gradient
    is.
    """
    if not (on and torch.is_grad_enabled()):
        return f(*inputs)

    def part(*inputs: Any) -> Any:
        heap.tidy()
        return f(*inputs)

    return checkpoint(part, *inputs, use_reentrant=False)


# -- attention that keeps no scores ----------------------------------------------------------------


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        (out,) = grads
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        want = bias is not None and ctx.needs_input_grad[3]
        db = torch.zeros_like(bias) if want else None
        few = max(1, SCORES // (q.shape[1] * q.shape[2] * k.shape[2]))
        by = q.shape[-1] ** -0.5
        for low in range(0, len(q), few):
            s = slice(low, low + few)
            scores = torch.matmul(q[s] * by, k[s].mT)
            if bias is not None:
                scores += bias
            p = torch.softmax(scores, -1)
            dv[s] = torch.matmul(p.mT, out[s])
            ds = torch._softmax_backward_data(torch.matmul(out[s], v[s].mT), p, -1, p.dtype)
            if db is not None:
                db += ds.sum(0, keepdim=True)
            dq[s] = torch.matmul(ds, k[s]) * by
            dk[s] = torch.matmul(ds.mT, q[s]) * by
        return dq, dk, dv, db


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k' / sqrt(d) + bias) v for q, k, v of (windows, heads, tokens, d) and a bias that
    all windows share.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    found: Tensor = _Attend.apply(q, k, v, bias)  # type: ignore[no-untyped-call]
    return found


# -- windows ---------------------------------------------------------------------------------------


class WindowLayout(NamedTuple):
    """A permutation of tokens into windows, its inverse, and for each run of windows the scores to
    forbid (or None).
    """

    order: Tensor
    inverse: Tensor
    runs: tuple[tuple[int, int, Tensor | None], ...]


class _Reorder(torch.autograd.Function):
    """Rows of a permutation; the gradient is the inverse permutation, which is much quicker than a
    scattered sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, *ctx.saved_tensors), None, None


@lru_cache(maxsize=64)
@torch.inference_mode(False)
@torch.no_grad()
def window_layout(
    size: ClipSize, window: ClipSize, shift: ClipSize, device: torch.device
) -> WindowLayout:
    """How a clip of `size`, a multiple of `window`, falls into windows after it was rolled back by
    `shift`.
    """

    def parts(x: Tensor) -> Tensor:
        x = x.roll([-s for s in shift], (0, 1, 2))
        x = x.view(
            size[0] // window[0],
            window[0],
            size[1] // window[1],
            window[1],
            size[2] // window[2],
            window[2],
        )
        return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, prod(window))

    tokens = parts(torch.arange(prod(size)).view(size))
    # Tokens that met only because the clip was rolled lie in different halves of the last window
    # along some axis.
    region = torch.zeros(size, dtype=torch.long)
    for axis, (n, s) in enumerate(zip(size, shift)):
        wrapped = (torch.arange(n) < s).long().view([-1 if a == axis else 1 for a in range(3)])
        region = region * 2 + wrapped
    regions = parts(region)
    kinds, kind = torch.unique(regions, dim=0, return_inverse=True)
    sort = kind.argsort(stable=True)
    runs, low = [], 0
    for number, one in enumerate(kinds):
        high = low + int((kind == number).sum())
        clash = one[:, None] != one[None, :]
        forbidden = torch.zeros(clash.shape).masked_fill(clash, float("-inf")).to(device)
        runs.append((low, high, forbidden if bool(clash.any()) else None))
        low = high
    order = tokens[sort].reshape(-1)
    return WindowLayout(order.to(device), order.argsort().to(device), _joined(runs))


def _joined(
    runs: list[tuple[int, int, Tensor | None]],
) -> tuple[tuple[int, int, Tensor | None], ...]:
    """Neighbouring runs without a mask are one run."""
    out: list[tuple[int, int, Tensor | None]] = []
    for low, high, mask in runs:
        if out and mask is None and out[-1][2] is None:
            out[-1] = (out[-1][0], high, None)
        else:
            out.append((low, high, mask))
    return tuple(out)


def relative_index(window: ClipSize) -> Tensor:
    """For every pair of tokens of a window the row of the bias table that belongs to their
    distance.
    """
    place = torch.stack(torch.meshgrid(*(torch.arange(n) for n in window), indexing="ij")).flatten(
        1
    )
    gap = place[:, :, None] - place[:, None, :] + torch.tensor(window).view(3, 1, 1) - 1
    _, h, w = window
    return (gap[0] * (2 * h - 1) + gap[1]) * (2 * w - 1) + gap[2]


def sine_position(y: Tensor, x: Tensor, width: int, temperature: float) -> Tensor:
    """Sines and cosines of two angles, `width` channels: first those of y, then those of x."""
    step = temperature ** (2 * (torch.arange(width // 2, device=y.device) // 2) / (width // 2))

    def waves(angle: Tensor) -> Tensor:
        a = angle[..., None] / step
        return torch.stack((a[..., 0::2].sin(), a[..., 1::2].cos()), -1).flatten(-2)

    return torch.cat((waves(y), waves(x)), -1)


class WindowAttention(nn.Module):
    """Self-attention with a learned bias per distance; `mutual` adds attention between the two
    frames of a window, with sine positions.

    qkv: the name under which checkpoints know the projection.
    """

    relative_position_index: Tensor
    position_bias: Tensor

    def __init__(
        self,
        dim: int,
        window: ClipSize,
        heads: int,
        *,
        mutual: bool = False,
        qkv: str = "qkv_self",
        bias_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.window, self.heads, self.mutual, self._qkv = window, heads, mutual, qkv
        distances = prod(2 * n - 1 for n in window)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(distances, heads))
        if bias_std:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=bias_std)
        self.register_buffer("relative_position_index", relative_index(window))
        self.add_module(qkv, nn.Linear(dim, 3 * dim))
        if mutual:
            _, h, w = window
            y, x = torch.meshgrid(
                torch.arange(1, h + 1) / (h + 1e-6),
                torch.arange(1, w + 1) / (w + 1e-6),
                indexing="ij",
            )
            self.register_buffer(
                "position_bias",
                sine_position(y * 2 * torch.pi, x * 2 * torch.pi, dim, 10000).view(1, h * w, dim),
            )
            self.qkv_mut = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(2 * dim if mutual else dim, dim)

    def forward(
        self, x: Tensor, window: ClipSize, runs: Sequence[tuple[int, int, Tensor | None]]
    ) -> Tensor:
        """x: (B, windows * tokens, C), sorted as `window_layout` says."""
        b, _, c = x.shape
        n = prod(window)
        qkv = self.get_submodule(self._qkv)(x).view(b, -1, n, 3, self.heads, c // self.heads)
        bias = self._bias(window)
        out = [
            _self(qkv[:, low:high], bias if mask is None else bias + mask)
            for low, high, mask in runs
        ]
        if self.mutual:
            _, h, w = window
            place = self.position_bias.view(*self.window[1:], c)[:h, :w].reshape(1, 1, h * w, c)
            qkv = self.qkv_mut((x.view(b, -1, h * w, c) + place).flatten(1, 2)).view(
                b, -1, n, 3, self.heads, c // self.heads
            )
            other = [
                _mutual(qkv[:, low:high], None if mask is None else mask[: n // 2, : n // 2])
                for low, high, mask in runs
            ]
            return self.proj(torch.cat([_beside(other), _beside(out)], -1))  # type: ignore[no-any-return]
        return self.proj(_beside(out))  # type: ignore[no-any-return]

    def _bias(self, window: ClipSize) -> Tensor:
        index, n = self.relative_position_index, prod(window)
        if window != self.window:
            d, h, w = window
            index = index.view(self.window * 2)[:d, :h, :w, :d, :h, :w].reshape(n, n)
        return self.relative_position_bias_table.t()[:, index.flatten()].view(1, self.heads, n, n)


def _heads(part: Tensor) -> Tensor:
    """(B, windows, tokens, heads, d) -> (B * windows, heads, tokens, d)."""
    return part.flatten(0, 1).transpose(1, 2)


def _self(qkv: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (_heads(qkv[:, :, :, i]) for i in range(3))
    out = attend(q, k, v, bias)
    return out.transpose(1, 2).reshape(qkv.shape[0], -1, qkv.shape[-2] * qkv.shape[-1])


def _mutual(qkv: Tensor, mask: Tensor | None) -> Tensor:
    """Each frame of a pair asks the other one; its answer stands where the other frame is."""
    b, n_w, n = qkv.shape[:3]
    frames = qkv.reshape(b, n_w, 2, n // 2, *qkv.shape[3:])
    q, k, v = (
        frames[:, :, :, :, 0].flip(2).flatten(1, 2),
        frames[:, :, :, :, 1].flatten(1, 2),
        frames[:, :, :, :, 2].flatten(1, 2),
    )
    out = attend(_heads(q), _heads(k), _heads(v), None if mask is None else mask[None, None])
    return out.transpose(1, 2).reshape(b, -1, qkv.shape[-2] * qkv.shape[-1])


def _beside(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


# -- blocks ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class GatedMlp(nn.Module):
    """GEGLU (Shazeer, 2020)."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc11, self.fc12, self.fc2 = (
            nn.Linear(dim, hidden),
            nn.Linear(dim, hidden),
            nn.Linear(hidden, out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc11(x)) * self.fc12(x))  # type: ignore[no-any-return]


class SwinBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). drop: the chance that a sample skips either in
    training.
    """

    def __init__(
        self,
        attn: WindowAttention,
        mlp: nn.Module,
        dim: int,
        shift: ClipSize,
        drop: float = 0.0,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            attn,
            nn.LayerNorm(dim),
            mlp,
        )
        self.shift, self.drop, self.recompute = shift, drop, recompute

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self._both, x, on=self.recompute)  # type: ignore[no-any-return]

    def _both(self, x: Tensor) -> Tensor:
        x = x + self._skip(self._attention(self.norm1(x)))
        return x + self._skip(self.mlp(self.norm2(x)))

    def _attention(self, x: Tensor) -> Tensor:
        b, *size, c = x.shape
        window: ClipSize = tuple(min(n, w) for n, w in zip(size, self.attn.window))  # type: ignore[assignment]
        shift: ClipSize = tuple(
            0 if n <= w else s for n, w, s in zip(size, self.attn.window, self.shift)
        )  # type: ignore[assignment]
        full = tuple(-(-n // w) * w for n, w in zip(size, window))
        x = F.pad(
            x, [0, 0, *(k for n, f in zip(reversed(size), reversed(full)) for k in (0, f - n))]
        )
        windows = window_layout(full, window, shift, x.device)  # type: ignore[arg-type]
        x = _Reorder.apply(x.flatten(1, 3), windows.order, windows.inverse)  # type: ignore[no-untyped-call]
        x = self.attn(x, window, windows.runs)
        x = _Reorder.apply(x, windows.inverse, windows.order).view(b, *full, c)  # type: ignore[no-untyped-call]
        return x[:, : size[0], : size[1], : size[2]]

    def _skip(self, x: Tensor) -> Tensor:
        if not (self.training and self.drop):
            return x
        keep = (torch.rand(x.shape[0], device=x.device) >= self.drop).to(x.dtype) / (1 - self.drop)
        return x * keep.view(-1, *[1] * (x.dim() - 1))


class SwinBlocks(nn.Module):
    """Blocks in a row; every second one is shifted by half a window."""

    def __init__(self, blocks: Sequence[SwinBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def drop_rates(highest: float, depths: Sequence[int]) -> list[list[float]]:
    """The chance to be skipped rises evenly from 0 at the first block to `highest` at the last;
    here by groups of blocks.
    """
    last = max(1, sum(depths) - 1)
    starts = [sum(depths[:i]) for i in range(len(depths))]
    return [
        [highest * (start + k) / last for k in range(depth)] for start, depth in zip(starts, depths)
    ]


def half(window: ClipSize, number: int) -> ClipSize:
    """The shift of block `number`."""
    return (window[0] // 2, window[1] // 2, window[2] // 2) if number % 2 else (0, 0, 0)

"""IART (Xu et al., 2024): video super-resolution with implicit alignment, official size and a small
one.

Four passes through the video, backward and forward twice, frame by frame. A frame attends to the
features of the two frames before it on the way (shifted windows over the three, from PSRT), each
aligned to it first. The alignment (Eq. 5-9) does not interpolate: a pixel attends to the four
pixels around where SpyNet's flow points, and sine positions of the fraction and of the four corners
tell it how far they are.

Names and shapes are those of the published checkpoints, including three convolutions per pass that
are never used. Deviations from the public code: keys and values of the four corners are projected
before they are fetched, which is the same and four times cheaper; the parts of a step are
recomputed in the backward pass (`recompute`), one after the other; enlarging by 2 and 3 (there: 4
only); frames smaller than 64 pixels work; the shortcut for mirrored clips, which changes nothing,
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.models.clips import PASSES, ClipModel, ClipSize, Configuration, bilinear_base
from fedlens.models.spynet import SpyNet, both_ways, load_flow, pixel_grid, warp
from fedlens.models.swin import (
    Mlp,
    SwinBlock,
    SwinBlocks,
    WindowAttention,
    drop_rates,
    half,
    recomputed,
    sine_position,
)

CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # y before x
TEMPERATURE = 0.01


class ImplicitWarp(nn.Module):
    position_bias: Tensor
    window_idx_offset: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        corners = torch.tensor(CORNERS)
        angle = corners / (1 + 1e-6) * (2 * torch.pi)
        self.register_buffer(
            "position_bias", sine_position(angle[:, 0], angle[:, 1], dim, TEMPERATURE)[None]
        )
        self.register_buffer("window_idx_offset", corners)

    def forward(self, other: Tensor, current: Tensor, flow: Tensor) -> Tensor:
        """`other` (B, C, h, w) seen from `current`, along `flow` (B, 2, h, w)."""
        b, c, h, w = current.shape
        where = (pixel_grid(flow) + flow).flip(1)  # y before x
        whole = where.floor()
        angle = (where - whole) / (2 + 1e-6) * (2 * torch.pi)
        q = self.q(
            current.permute(0, 2, 3, 1) + sine_position(angle[:, 0], angle[:, 1], c, TEMPERATURE)
        )
        at = whole.long()[:, :, None] + self.window_idx_offset.t().view(1, 2, 4, 1, 1)
        at = at[:, 0].clamp(0, h - 1) * w + at[:, 1].clamp(0, w - 1)  # b, corners, h, w
        d = c // self.heads
        k, v = (
            self._corners(layer, other, at).view(b, 4, h * w, self.heads, d)
            for layer in (self.k, self.v)
        )
        scores = (q.reshape(b, 1, h * w, self.heads, d) * d**-0.5 * k).sum(-1, keepdim=True)
        return (scores.softmax(1) * v).sum(1).reshape(b, h, w, c).permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    def _corners(self, layer: nn.Linear, other: Tensor, at: Tensor) -> Tensor:
        """layer(pixel + position) = layer(pixel) + layer's weight on the position: project once,
        fetch four times.
        """
        b, c = other.shape[:2]
        projected = layer(other.flatten(2).transpose(1, 2))
        found = projected.gather(1, at.view(b, -1, 1).expand(-1, -1, c)).view(b, 4, -1, c)
        return found + F.linear(self.position_bias, layer.weight).view(1, 4, 1, c)  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


def _by_frame(conv: nn.Conv2d, tokens: Tensor) -> Tensor:
    return torch.unflatten(
        conv(tokens.flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1), 0, tokens.shape[:2]
    )


class IARTResidual(nn.Module):
    def __init__(self, dim: int, heads: int, window: ClipSize, drops: Sequence[float]) -> None:
        super().__init__()

        def block(i: int, drop: float) -> SwinBlock:
            attention = WindowAttention(dim, window, heads, qkv="qkv")
            return SwinBlock(
                attention, Mlp(dim, 2 * dim), dim, half(window, i), drop, recompute=False
            )

        self.residual_group = SwinBlocks([block(i, drop) for i, drop in enumerate(drops)])
        self.conv = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + _by_frame(self.conv, self.residual_group(x))


class Fuse(nn.Module):
    """Three frames in, the middle one out."""

    def __init__(
        self,
        dim: int,
        depths: Sequence[int],
        heads: int,
        window: ClipSize,
        drop_path: float,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        # Part of every checkpoint, used by none of IART's passes.
        self.conv_first, self.conv_first_feat = (
            nn.Conv2d(3, dim, 3, padding=1),
            nn.Conv2d(64, dim, 3, padding=1),
        )
        self.conv_before_upsample = nn.Conv2d(dim, 64, 3, padding=1)
        self.patch_embed = Normed(dim)
        self.layers = nn.ModuleList(
            IARTResidual(dim, heads, window, drops) for drops in drop_rates(drop_path, depths)
        )
        self.norm = nn.LayerNorm(dim)
        self.conv_after_body = nn.Conv2d(dim, dim, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.patch_embed(frames.permute(0, 1, 3, 4, 2))
        for layer in self.layers:
            x = recomputed(layer, x, on=self.recompute)
        return recomputed(self._out, x[:, 1], frames[:, 1], on=self.recompute)  # type: ignore[no-any-return]

    def _out(self, tokens: Tensor, frame: Tensor) -> Tensor:
        return self.conv_after_body(self.norm(tokens).permute(0, 3, 1, 2)) + frame  # type: ignore[no-any-return]


class IART(ClipModel):
    """
    Args:
        scale: 2, 3 or 4.
        window: of the attention, as frames, height and width.
        depths: blocks of each layer of a pass.
        dim: features of a pass.
        heads: of the attention.
        width: features of the enlarged picture.
        drop_path: the chance to skip the last block, rising from 0 at the first.
        recompute: compute parts again in the backward pass, to save memory.
        flow_weights: a SpyNet checkpoint to start from.
        tile: frames, height and width of a piece, in input pixels; None takes every clip whole.
        overlap: of two pieces, likewise.
    """

    def __init__(
        self,
        scale: int = 4,
        *,
        window: ClipSize = (3, 8, 8),
        depths: Sequence[int] = (6, 6, 6),
        dim: int = 120,
        heads: int = 6,
        width: int = 64,
        drop_path: float = 0.1,
        recompute: bool = True,
        flow_weights: str | None = None,
        tile: ClipSize | None = (100, 128, 128),
        overlap: ClipSize = (2, 20, 20),
    ) -> None:
        super().__init__(scale, (1, 1, 1), tile, overlap)
        self.recompute = recompute
        self.spynet = SpyNet()
        self.conv_first = nn.Conv2d(3, dim, 3, padding=1)
        self.swin_backbone = nn.ModuleDict(
            {p: Fuse(dim, depths, heads, window, drop_path, recompute) for p in PASSES}
        )
        self.implicit_warp = ImplicitWarp(dim, heads)
        self.conv_before_upsample = nn.Conv2d(dim, width, 3, padding=1)
        by = 3 if scale == 3 else 2
        self.upconv1 = nn.Conv2d(width, width * by * by, 3, padding=1)
        if scale == 4:
            self.upconv2 = nn.Conv2d(width, width * 4, 3, padding=1)
        self.conv_hr = nn.Conv2d(width, width, 3, padding=1)
        self.conv_last = nn.Conv2d(width, 3, 3, padding=1)
        if flow_weights:
            load_flow(self.spynet, flow_weights)

    def restore(self, clip: Tensor) -> Tensor:
        later, earlier = recomputed(both_ways, self.spynet, clip, on=self.recompute)
        x = torch.unflatten(self.conv_first(clip.flatten(0, 1)), 0, clip.shape[:2])
        for name in PASSES:
            back = name.startswith("backward")
            x = (
                self._pass(name, x.flip(1), later[0].flip(1)).flip(1)
                if back
                else self._pass(name, x, earlier[0])
            )
        parts = zip(x.unbind(1), clip.unbind(1))
        return torch.stack([recomputed(self._enlarge, *p, on=self.recompute) for p in parts], 1)

    def _pass(self, name: str, features: Tensor, flows: Tensor) -> Tensor:
        """In the order of travel; flows[:, i] leads from frame i + 1 back to frame i."""
        done: list[Tensor] = []
        for i, current in enumerate(features.unbind(1)):
            back = [(done[-1], flows[:, i - 1])] if i else []
            if i > 1:
                near = flows[:, i - 1]
                back.append((done[-2], near + warp(flows[:, i - 2], near)))
            done.append(self._step(name, current, back))
        return torch.stack(done, 1)

    def _step(self, name: str, current: Tensor, back: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """back: the last result and its flow, the one before and its flow, as far as there are
        any.
        """
        aligned = [
            recomputed(self.implicit_warp, x, current, flow, on=self.recompute) for x, flow in back
        ]
        if not aligned:
            first = last = current
        else:
            first, last = aligned[0], aligned[1] if len(aligned) > 1 else torch.zeros_like(current)
        return self.swin_backbone[name](torch.stack([first, current, last], 1))  # type: ignore[no-any-return]

    def _enlarge(self, x: Tensor, frame: Tensor) -> Tensor:
        x = self.conv_before_upsample(x)
        for conv in (self.upconv1, self.upconv2) if self.scale == 4 else (self.upconv1,):
            x = F.leaky_relu(F.pixel_shuffle(conv(x), 3 if self.scale == 3 else 2), 0.1)
        x = F.leaky_relu(self.conv_hr(x), 0.1)
        return self.conv_last(x) + bilinear_base(frame, self.scale)  # type: ignore[no-any-return]

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        if not {"implicit_warp.q.weight", "upconv1.weight"} <= weights.keys():
            return None
        dim, up = weights["implicit_warp.q.weight"].shape[0], weights["upconv1.weight"]
        scale = 4 if "upconv2.weight" in weights else 3 if up.shape[0] == 9 * up.shape[1] else 2
        layers = len(
            {n.split(".")[3] for n in weights if n.startswith("swin_backbone.forward_1.layers.")}
        )
        official = (dim, layers) == (120, 3)
        words = "official configuration, " if official else ""
        words = f"IART, {words}x{scale}, width {dim}, {layers} layers"
        return Configuration(words, scale, {} if official else None)


def iart_small(scale: int = 4, recompute: bool = True, flow_weights: str | None = None) -> IART:
    """IART in small, for tests and CPUs.

    Args:
        scale: by how much it enlarges.
        recompute: compute parts again in the backward pass, to save memory.
        flow_weights: a SpyNet checkpoint to start from.
    """
    return IART(
        scale,
        window=(3, 4, 4),
        depths=(2,),
        dim=24,
        heads=2,
        width=24,
        drop_path=0.0,
        recompute=recompute,
        flow_weights=flow_weights,
    )

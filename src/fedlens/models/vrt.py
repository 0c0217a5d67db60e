"""VRT (Liang et al., 2022): a video restoration transformer, at its official sizes and a small one.

Seven stages (three down, three up) and a last one at full size. A stage is mutual attention between
pairs of frames (Eq. 1-4), self attention in clip windows, and parallel warping (Eq. 5-7):
neighbours are brought to each frame by a deformable convolution whose offsets are SpyNet's flow
plus a learned rest, and fused with it. The output corrects the bilinearly enlarged clip.

Names and shapes are those of the published checkpoints: 6 frames (window 6x8x8, one neighbour
either side, 12 deformable groups), 7 frames (8x8x8, two, 16) and 16 frames (8x8x8, three, 24).
`frames` is what a configuration was trained for; it takes any number from `fewest` up.

Deviations from the public code, none of which changes a result where that code runs: all frames of
a stage are warped at once; blocks, warping and the last layers are recomputed in the backward pass
(`recompute`); heights and widths that are not multiples of 8 are padded; frames smaller than 64
pixels work (see swin.py and spynet.py). Enlarging by 2 and 3 exists there too, but no checkpoint
does. At scale 1 it restores: deblurring, or with `noise` denoising.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.ops import deform_conv2d

from fedlens.models.clips import (
    NOISE,
    ClipModel,
    ClipSize,
    Configuration,
    FrameConv,
    Upsample,
    bilinear_base,
    with_noise,
)
from fedlens.models.spynet import SpyNet, both_ways, load_flow, pixel_grid, sample_at, warp
from fedlens.models.swin import (
    GatedMlp,
    SwinBlock,
    SwinBlocks,
    WindowAttention,
    drop_rates,
    half,
    recomputed,
)

SCALES_OF_STAGES = (1, 2, 4, 8, 4, 2, 1)
# window, reach, groups
OFFICIAL: dict[int, tuple[ClipSize, int, int]] = {
    6: ((6, 8, 8), 1, 12),
    7: ((8, 8, 8), 2, 16),
    16: ((8, 8, 8), 3, 24),
}
RESTORING = ((6, 8, 8), 1, 16)  # at scale 1
# blocks and channels of the stages, when enlarging and when restoring
DEPTHS = {False: (8,) * 7 + (4,) * 6, True: (8,) * 7 + (4,) * 4}
DIMS = {False: (120,) * 7 + (180,) * 6, True: (96,) * 7 + (120,) * 4}
WARPED = 4  # frames warped at a time

Flows = Sequence[Tensor]  # per reach 1, 2, ...: (B, T - reach, 2, h, w)


def attention_blocks(
    dim: int, heads: int, window: ClipSize, drops: Sequence[float], mutual: bool, recompute: bool
) -> SwinBlocks:
    return SwinBlocks(
        [
            SwinBlock(
                WindowAttention(dim, window, heads, mutual=mutual),
                GatedMlp(dim, 2 * dim, dim),
                dim,
                half(window, i),
                drop,
                recompute,
            )
            for i, drop in enumerate(drops)
        ]
    )


class FoldTokens(nn.Module):
    """Four neighbouring tokens become one with four times the channels (columns before rows), or
    the other way round.
    """

    def __init__(self, up: bool) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        b, t, h, w, c = x.shape
        if self.up:
            return (
                x.view(b, t, h, w, 2, 2, c // 4)
                .permute(0, 1, 2, 5, 3, 4, 6)
                .reshape(b, t, 2 * h, 2 * w, c // 4)
            )
        return (
            x.view(b, t, h // 2, 2, w // 2, 2, c)
            .permute(0, 1, 2, 4, 5, 3, 6)
            .reshape(b, t, h // 2, w // 2, 4 * c)
        )


class GuidedDeform(nn.Module):
    """A deformable convolution around where the flow points. reach: the farthest neighbour; each
    has its share of the groups.
    """

    def __init__(self, dim: int, groups: int, reach: int, limit: float) -> None:
        super().__init__()
        self.limit, self.reach = limit, reach
        bound = (dim * 9) ** -0.5
        self.weight = nn.Parameter(torch.empty(dim, dim, 3, 3).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(dim))
        widths = ((1 + reach) * dim + 2 * reach, dim, dim, dim, 27 * groups)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.LeakyReLU(0.1)]
        self.conv_offset = nn.Sequential(*layers[:-1])
        last = self.conv_offset[-1]
        nn.init.zeros_(last.weight)  # type: ignore[arg-type]
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, current: Tensor, others: Sequence[Tensor], flows: Sequence[Tensor]) -> Tensor:
        """current (N, C, h, w); one frame and one flow per reach. Which frames stand together in N
        does not matter.
        """
        warped = [warp(x, f) for x, f in zip(others, flows)]
        out = self.conv_offset(torch.cat([*warped, current, *flows], 1))
        offset, strength = torch.split(out, [2 * out.shape[1] // 3, out.shape[1] // 3], 1)
        offset = self.limit * offset.tanh()
        share = offset.shape[1] // (2 * self.reach)
        offset = offset + torch.cat([f.flip(1).repeat(1, share, 1, 1) for f in flows], 1)
        aligned: Tensor = deform_conv2d(
            torch.cat(list(others), 1),
            offset,
            self.weight,
            self.bias,
            padding=1,
            mask=strength.sigmoid(),
        )
        return aligned


class VRTStage(nn.Module):
    def __init__(
        self,
        inputs: int,
        dim: int,
        heads: int,
        window: ClipSize,
        drops: Sequence[float],
        move: Literal["none", "down", "up"],
        reach: int,
        groups: int,
        limit: float,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        if move == "none":
            self.reshape = nn.Sequential(nn.Identity(), nn.LayerNorm(dim))
        else:
            wide = inputs // 4 if move == "up" else 4 * inputs
            self.reshape = nn.Sequential(
                FoldTokens(move == "up"), nn.LayerNorm(wide), nn.Linear(wide, dim)
            )
        pairs = int(len(drops) * 0.75)
        self.residual_group1 = attention_blocks(
            dim, heads, (2, window[1], window[2]), drops[:pairs], True, recompute
        )
        self.linear1 = nn.Linear(dim, dim)
        # The public code hands both groups the first of the stage's drop rates.
        self.residual_group2 = attention_blocks(
            dim, heads, window, drops[: len(drops) - pairs], False, recompute
        )
        self.linear2 = nn.Linear(dim, dim)
        self.pa_deform = GuidedDeform(dim, groups, reach, limit)
        self.pa_fuse = GatedMlp(3 * dim, 3 * dim, dim)

    def forward(self, x: Tensor, later: Flows, earlier: Flows) -> Tensor:
        """later: flows of a frame to the ones after it, earlier: to the ones before it."""
        x = self.reshape(x)
        x = x + self.linear1(self.residual_group1(x))
        x = x + self.linear2(self.residual_group2(x))
        planes = x.permute(0, 1, 4, 2, 3).contiguous()
        nothing = torch.zeros_like(planes[:, :1])
        after = torch.cat([self._align(planes, later, True), nothing], 1)
        before = torch.cat([nothing, self._align(planes, earlier, False)], 1)
        return recomputed(self._fuse, x, after, before, on=self.recompute)  # type: ignore[no-any-return]

    def _fuse(self, x: Tensor, after: Tensor, before: Tensor) -> Tensor:
        parts = [x, after.permute(0, 1, 3, 4, 2), before.permute(0, 1, 3, 4, 2)]
        return self.pa_fuse(torch.cat(parts, -1))  # type: ignore[no-any-return]

    def _align(self, x: Tensor, flows: Flows, after: bool) -> Tensor:
        """The neighbours of every frame that has one on that side, brought to it; beyond the clip
        there is nothing, and no motion.
        """
        t = x.shape[1]
        others, ways = [], []
        for m, flow in enumerate(flows):
            there = x[:, m + 1 :] if after else x[:, : t - 1 - m]
            others.append(_filled(there, m, after).flatten(0, 1))
            ways.append(_filled(flow, m, after).flatten(0, 1))
        current = (x[:, :-1] if after else x[:, 1:]).flatten(0, 1)
        done = []
        for low in range(0, len(current), WARPED):
            few = slice(low, low + WARPED)
            done.append(
                recomputed(
                    self.pa_deform,
                    current[few],
                    [o[few] for o in others],
                    [f[few] for f in ways],
                    on=self.recompute,
                )
            )
        return torch.unflatten(torch.cat(done), 0, (x.shape[0], t - 1))


def _filled(x: Tensor, frames: int, behind: bool) -> Tensor:
    if not frames:
        return x
    nothing = torch.zeros_like(x[:, :1]).expand(-1, frames, -1, -1, -1)
    return torch.cat([x, nothing] if behind else [nothing, x], 1)


class VRTResidual(nn.Module):
    """A part of the last stage: self-attention and a linear layer, added to what came in."""

    def __init__(
        self, dim: int, heads: int, window: ClipSize, drops: Sequence[float], recompute: bool
    ) -> None:
        super().__init__()
        self.residual_group = attention_blocks(dim, heads, window, drops, False, recompute)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.residual_group(x))  # type: ignore[no-any-return]


class VRT(ClipModel):
    """
    Args:
        scale: 2, 3 or 4; at 1 it restores, and there is one configuration, for 6 frames.
        frames: 6, 7 or 16, the clip length an official configuration was made for; it sets window,
            reach and groups unless they are given.
        window: of the attention, as frames, height and width.
        depths: blocks of the seven stages and of the parts of the last one.
        dims: features of the same.
        heads: of the attention.
        alone: how many of the last parts see single frames.
        reach: neighbours either side that are brought to a frame.
        groups: of the deformable convolutions.
        width: features of the enlarged picture.
        drop_path: the chance to skip the last block, rising from 0 at the first.
        recompute: compute parts again in the backward pass, to save memory.
        flow_weights: a SpyNet checkpoint to start from.
        noise: standard deviation in levels of 255, for weights that take it as an input.
        tile: frames, height and width of a piece, in input pixels; None takes every clip whole.
        overlap: of two pieces, likewise.
    """

    scales = (1, 2, 3, 4)

    def __init__(
        self,
        scale: int = 4,
        frames: int = 6,
        *,
        window: ClipSize | None = None,
        depths: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        heads: int = 6,
        alone: int = 2,
        reach: int | None = None,
        groups: int | None = None,
        width: int = 64,
        drop_path: float = 0.2,
        recompute: bool = True,
        flow_weights: str | None = None,
        noise: float | None = None,
        tile: ClipSize | None = (40, 128, 128),
        overlap: ClipSize = (2, 20, 20),
    ) -> None:
        super().__init__(scale, (1, 8, 8), tile, overlap)
        self.noise = noise
        depths, dims = depths or DEPTHS[scale == 1], dims or DIMS[scale == 1]
        if frames not in OFFICIAL:
            raise ValueError(
                f"VRT's official configurations are for 6, 7 and 16 frames, not {frames}"
            )
        usual = OFFICIAL[frames] if scale > 1 else RESTORING
        window, reach, groups = window or usual[0], reach or usual[1], groups or usual[2]
        self.reach, self.recompute = reach, recompute
        drops = drop_rates(drop_path, depths)
        self.conv_first = FrameConv(3 * 9 + (noise is not None), dims[0])
        self.spynet = SpyNet((1, 2, 4, 8))
        moves: Sequence[Literal["none", "down", "up"]] = (
            "none",
            "down",
            "down",
            "down",
            "up",
            "up",
            "up",
        )
        for i, (move, size) in enumerate(zip(moves, SCALES_OF_STAGES)):
            inputs = dims[max(i - 1, 0)]
            stage = VRTStage(
                inputs, dims[i], heads, window, drops[i], move, reach, groups, 10 / size, recompute
            )
            self.add_module(f"stage{i + 1}", stage)
        self.stage8 = nn.ModuleList(
            [nn.Sequential(nn.Identity(), nn.LayerNorm(dims[6]), nn.Linear(dims[6], dims[7]))]
        )
        for i in range(7, len(dims)):
            seen = (1, window[1], window[2]) if i >= len(dims) - alone else window
            self.stage8.append(VRTResidual(dims[i], heads, seen, drops[i], recompute))
        self.norm = nn.LayerNorm(dims[-1])
        self.conv_after_body = nn.Linear(dims[-1], dims[0])
        if scale > 1:
            self.conv_before_upsample = nn.Sequential(FrameConv(dims[0], width), nn.LeakyReLU(0.01))
            self.upsample = Upsample(scale, width)
        self.conv_last = FrameConv(width if scale > 1 else dims[0], 3)
        if flow_weights:
            load_flow(self.spynet, flow_weights)

    @property
    def fewest(self) -> int:
        return self.reach + 1

    def restore(self, clip: Tensor) -> Tensor:
        later, earlier = self._flows(clip)
        x = torch.cat(
            [
                clip,
                _four(clip[:, 1:], later[0][0], True),
                _four(clip[:, :-1], earlier[0][0], False),
            ],
            2,
        )
        x = with_noise(x, self.noise)
        x = torch.unflatten(self.conv_first(x.flatten(0, 1)), 0, clip.shape[:2])
        deep = self.conv_after_body(self.norm(self._body(x.permute(0, 1, 3, 4, 2), later, earlier)))
        x = (x + deep.permute(0, 1, 4, 2, 3)).flatten(0, 1)
        parts = zip(torch.split(x, 1), torch.split(clip.flatten(0, 1), 1))
        return torch.unflatten(
            torch.cat([recomputed(self._enlarge, *p, on=self.recompute) for p in parts]),
            0,
            clip.shape[:2],
        )

    def _enlarge(self, x: Tensor, frame: Tensor) -> Tensor:
        if self.scale > 1:
            x = self.upsample(self.conv_before_upsample(x))
        detail: Tensor = self.conv_last(x)
        return detail + bilinear_base(frame, self.scale)

    def _flows(self, clip: Tensor) -> tuple[list[Flows], list[Flows]]:
        """Per size of a stage, per reach. A flow to the frame after next is the flow to the next
        one and that one's own, fetched.
        """
        later, earlier = recomputed(both_ways, self.spynet, clip, on=self.recompute)
        return [_chain(f, self.reach, True) for f in later], [
            _chain(f, self.reach, False) for f in earlier
        ]

    def _body(self, x: Tensor, later: list[Flows], earlier: list[Flows]) -> Tensor:
        def stage(number: int, x: Tensor) -> Tensor:
            size = SCALES_OF_STAGES[number - 1].bit_length() - 1
            return self.get_submodule(f"stage{number}")(x, later[size], earlier[size])  # type: ignore[no-any-return]

        x1 = stage(1, x)
        x2 = stage(2, x1)
        x3 = stage(3, x2)
        x = stage(5, stage(4, x3))
        x = stage(7, stage(6, x + x3) + x2) + x1
        for layer in self.stage8:
            x = layer(x)
        return x

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        try:
            first, offset = (
                weights["conv_first.weight"],
                weights["stage1.pa_deform.conv_offset.0.weight"],
            )
            dim, groups = (
                first.shape[0],
                weights["stage1.pa_deform.conv_offset.6.weight"].shape[0] // 27,
            )
            reach = (offset.shape[1] - dim) // (dim + 2)
            tokens = weights["stage1.residual_group2.blocks.0.attn.relative_position_index"].shape[
                0
            ]
            area = prod(weights["stage1.residual_group1.blocks.0.attn.position_bias"].shape[1:2])
            shuffles = tuple(
                w.shape[0] // w.shape[1]
                for n, w in weights.items()
                if n.startswith("upsample.") and w.dim() == 5
            )
        except (KeyError, IndexError):
            return None
        scale = {(4, 1): 2, (9, 1): 3, (4, 4, 1): 4}.get(shuffles, 1)
        official_of = {
            (reach, groups, window[0]): frames
            for frames, (window, reach, groups) in OFFICIAL.items()
        }
        told = first.shape[1] == 28
        known = official_of.get((reach, groups, tokens // area)) if dim == 120 else None
        official = f"official configuration for {known} frames, " if known else ""
        arguments: dict[str, Any] | None = {"frames": known} if known else None
        if scale == 1 and (dim, reach, groups, tokens // area) == (96, 1, 16, 6):
            official = f"official configuration for {'denoising' if told else 'restoring'}, "
            arguments = {"noise": NOISE} if told else {}
        words = (
            f"VRT, {official}x{scale}, width {dim}, windows of {tokens // area} frames, reach"
            f" {reach}, {groups} deformable groups"
        )
        return Configuration(words, scale, arguments)


def _four(frames: Tensor, flow: Tensor, after: bool) -> Tensor:
    """The four pixels around where the flow points, unmixed; nothing where there is no neighbour.
    No gradient reaches the flow.
    """
    b, n = frames.shape[:2]
    where = (pixel_grid(flow) + flow).flatten(0, 1)
    x, y = torch.split(where, 1, 1)
    corners = [
        (x.floor(), y.floor()),
        (x.floor(), y.ceil()),
        (x.ceil(), y.floor()),
        (x.ceil(), y.ceil()),
    ]
    image = frames.flatten(0, 1)
    found = torch.unflatten(
        torch.cat([sample_at(image, torch.cat(c, 1), "nearest") for c in corners], 1), 0, (b, n)
    )
    return _filled(found, 1, after)


def _chain(flow: Tensor, reach: int, after: bool) -> Flows:
    flows = [flow]
    for m in range(1, reach):
        near, rest = (flows[-1][:, :-1], flow[:, m:]) if after else (flows[-1][:, 1:], flow[:, :-m])
        flows.append(near + warp(rest.flatten(0, 1), near.flatten(0, 1)).view_as(near))
    return flows


def vrt_small(scale: int = 4, recompute: bool = True, flow_weights: str | None = None) -> VRT:
    """VRT in small, for tests and CPUs.

    Args:
        scale: by how much it enlarges.
        recompute: compute parts again in the backward pass, to save memory.
        flow_weights: a SpyNet checkpoint to start from.
    """
    return VRT(
        scale,
        window=(2, 4, 4),
        depths=(2,) * 7 + (1,) * 2,
        dims=(24,) * 9,
        heads=2,
        alone=1,
        reach=1,
        groups=4,
        width=24,
        drop_path=0.0,
        recompute=recompute,
        flow_weights=flow_weights,
    )

"""RVRT (Liang et al., 2022): a recurrent video restoration transformer that moves in clips of two
frames, official size and a small one.

Four passes through the video, backward and forward twice. A pass carries the features of a clip to
the next one by guided deformable attention (Eq. 4-8): a frame looks at 3x3 places around where
SpyNet's flow and a learned rest point, in each frame of the clip before, and attends to what it
finds there. The second pair of passes starts from the places the first pair ended at.

The attention is written with `grid_sample` and runs on every device; the public code needs a CUDA
kernel. As there, the offset groups are spread over the concatenated keys and values: the first half
moves the keys, the second half the values.

Names and shapes are those of the published checkpoint. Deviations from the public code: a step of a
pass is recomputed in the backward pass (`recompute`); an odd number of frames is padded by
repeating the last one; enlarging by 2 and 3 (there: 4 only); the shortcut for mirrored clips, which
changes nothing, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.models.clips import (
    NOISE,
    PASSES,
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
    Mlp,
    SwinBlock,
    SwinBlocks,
    WindowAttention,
    half,
    recomputed,
)

CLIP = 2  # frames that move together
TAPS = 9
SHRUNK = 4  # at scale 1 features are this much smaller than frames
WIDTH, RESTORING_WIDTH = 144, 192
# of the first convolution of the first layers, of the four passes, of the last layers
INPUT_GROUPS = {
    "enlarge": (1, 1, 1, 1, 1, 1),
    "deblur": (1, 3, 3, 3, 3, 3),
    "denoise": (1, 3, 4, 6, 8, 4),
}


def deformable_attention(q: Tensor, kv: Tensor, offset: Tensor, heads: int) -> Tensor:
    """Attention of every pixel of q (N, C, h, w) to 3x3 moved places in each of S frames, kv (N, S,
    2C, h, w).

    offset (N, S, groups, 9, 2, h, w): y before x, added to the 3x3 neighbours. A group moves 2C /
    groups neighbouring channels of kv.
    """
    n, s, groups = offset.shape[:3]
    h, w = q.shape[-2:]
    channels, pairs = q.shape[1], groups // 2
    # the channels of a group of keys, and of the group of values that belongs to it
    wide = channels // pairs
    d = channels // heads
    out = []
    for g in range(pairs):
        k = _fetch(kv[:, :, g * wide : (g + 1) * wide], offset[:, :, g]).view(
            n, s, wide // d, d, TAPS, h * w
        )
        ask = q[:, g * wide : (g + 1) * wide].reshape(n, 1, wide // d, d, 1, h * w) * d**-0.5
        scores = (ask * k).sum(3)  # n, s, heads, taps, pixels
        weights = torch.unflatten(
            scores.transpose(1, 2).flatten(2, 3).softmax(2), 2, (s, TAPS)
        ).transpose(1, 2)
        at = channels + g * wide
        v = _fetch(kv[:, :, at : at + wide], offset[:, :, pairs + g]).view(
            n, s, wide // d, d, TAPS, h * w
        )
        out.append((weights[:, :, :, None] * v).sum((1, 4)).reshape(n, wide, h, w))
    return torch.cat(out, 1)


def _fetch(images: Tensor, offset: Tensor) -> Tensor:
    """(N, S, C, h, w) at the nine moved places of every pixel: (N * S, C, 9 h, w)."""
    tap = torch.arange(TAPS, device=offset.device)
    around = torch.stack((tap % 3 - 1, tap // 3 - 1), 1).view(TAPS, 2, 1, 1)
    where = offset.flatten(0, 1).flip(2) + around + pixel_grid(offset)
    return sample_at(images.flatten(0, 1), where.transpose(1, 2).flatten(2, 3))


class GuidedAttention(nn.Module):
    """limit: how far, in pixels, the learned rest may lead away from the flow."""

    def __init__(self, dim: int, groups: int, heads: int, hidden: int, limit: float) -> None:
        super().__init__()
        if groups % 2 or (2 * dim) % (groups // 2) or heads % (groups // 2):
            raise ValueError(
                f"{groups} offset groups do not fit {heads} heads: half of the groups must divide"
                " the heads"
            )
        self.groups, self.heads, self.limit = groups, heads, limit
        layers: list[nn.Module] = [
            FrameConv(dim * (1 + CLIP) + 2 * CLIP, hidden, 1),
            nn.LeakyReLU(0.1),
        ]
        for _ in range(4):
            layers += [FrameConv(hidden, hidden), nn.LeakyReLU(0.1)]
        last = FrameConv(hidden, CLIP * groups * TAPS * 2, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        self.conv_offset = nn.Sequential(*layers, last)
        self.proj_q = nn.Sequential(nn.Identity(), nn.Linear(dim, 2 * dim))
        self.proj_k = nn.Sequential(nn.Identity(), nn.Linear(dim, 2 * dim))
        self.proj_v = nn.Sequential(nn.Identity(), nn.Linear(dim, 2 * dim))
        self.proj = nn.Sequential(nn.Identity(), nn.Linear(2 * dim, dim))
        self.mlp = nn.Sequential(nn.Identity(), Mlp(dim, 2 * dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, flows: Tensor) -> tuple[Tensor, Tensor]:
        """q, k, v: (B, 2, C, h, w); flows (B, 2, 2, 2, h, w): of each frame to the frame in its own
        place, then to the other one. Returns the aligned features and the flows that were used in
        the end: the mean over groups and places."""
        b, t, _, h, w = q.shape
        warped = [
            warp(_turned(v, i).flatten(0, 1), flows[:, :, i].flatten(0, 1)).view_as(v)
            for i in range(CLIP)
        ]
        rest = self.conv_offset(torch.cat([q, *warped, *flows.unbind(2)], 2).flatten(0, 1))
        offset = (
            self.limit * rest.tanh().view(b, t, CLIP, self.groups * TAPS, 2, h, w)
            + flows.flip(3)[:, :, :, None]
        )
        kv = torch.cat([_linear(self.proj_k, k), _linear(self.proj_v, v)], 2)
        kv = torch.stack([_turned(kv, i) for i in range(CLIP)], 2).flatten(0, 1)
        places = offset.view(b * t, CLIP, self.groups, TAPS, 2, h, w)
        found = deformable_attention(_linear(self.proj_q, q).flatten(0, 1), kv, places, self.heads)
        x = self.proj(found.permute(0, 2, 3, 1))
        x = torch.unflatten((x + self.mlp(x)).permute(0, 3, 1, 2), 0, (b, t))
        return x, offset.mean(3).flip(3)


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(2, 4)).transpose(2, 4)  # type: ignore[no-any-return]


def _turned(x: Tensor, by: int) -> Tensor:
    """For every frame of a clip the frame `by` places on, around the corner."""
    return x.roll(-by, 1) if by else x


class RVRTResidual(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, window: ClipSize) -> None:
        super().__init__()

        def block(i: int) -> SwinBlock:
            return SwinBlock(
                WindowAttention(dim, window, heads, bias_std=0),
                Mlp(dim, 2 * dim),
                dim,
                half(window, i),
                recompute=False,
            )

        self.residual_group = SwinBlocks([block(i) for i in range(depth)])
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.residual_group(x))  # type: ignore[no-any-return]


class Refine(nn.Module):
    """A convolution, then shifted-window attention; the places in between are empty so that the
    names fit the checkpoint.
    """

    def __init__(
        self,
        inputs: int,
        dim: int,
        count: int,
        depth: int,
        heads: int,
        window: ClipSize,
        groups: int = 1,
    ) -> None:
        super().__init__()
        body = nn.Sequential(*(RVRTResidual(dim, depth, heads, window) for _ in range(count)))
        gap = nn.Identity
        self.main = nn.Sequential(
            gap(),
            FrameConv(inputs, dim, groups=groups),
            gap(),
            nn.LayerNorm(dim),
            gap(),
            body,
            gap(),
            nn.LayerNorm(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs, h, w) -> (B, T, dim, h, w)."""
        tokens = torch.unflatten(self.main[1](x.flatten(0, 1)), 0, x.shape[:2]).permute(
            0, 1, 3, 4, 2
        )
        return self.main[2:](tokens).permute(0, 1, 4, 2, 3)  # type: ignore[no-any-return]


class QuarterFeatures(nn.Sequential):
    """The first layers at scale 1: a quarter of the size, then as when enlarging. Places are empty
    so that the names fit the checkpoint."""

    def __init__(self, inputs: int, dim: int, refine: Refine) -> None:
        super().__init__(
            nn.Identity(),
            FrameConv(inputs, dim, stride=2),
            nn.LeakyReLU(0.1),
            FrameConv(dim, dim, stride=2),
            nn.LeakyReLU(0.1),
            nn.Identity(),
            refine,
        )

    def forward(self, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1)
        for layer in list(self)[:-1]:
            frames = layer(frames)
        return self[-1](torch.unflatten(frames, 0, x.shape[:2]))  # type: ignore[no-any-return]


class RVRT(ClipModel):
    """
    Args:
        scale: 2, 3 or 4; at 1 it restores, with another width and grouped convolutions.
        window: of the attention, as frames, height and width.
        counts: residual parts of the first layers, of a pass and of the last layers.
        depth: blocks in each of these parts.
        dim: features; the official number by default.
        heads: of the attention.
        groups: of offsets.
        align_heads: of the guided attention.
        hidden: features that its offsets are computed from.
        width: features of the enlarged picture.
        limit: how far, in pixels, a learned offset may lead away from the flow.
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
        *,
        window: ClipSize = (2, 8, 8),
        counts: Sequence[int] = (1, 2, 1),
        depth: int = 2,
        dim: int | None = None,
        heads: int = 6,
        groups: int = 12,
        align_heads: int = 12,
        hidden: int = 64,
        width: int = 64,
        limit: float = 10.0,
        recompute: bool = True,
        flow_weights: str | None = None,
        noise: float | None = None,
        tile: ClipSize | None = (100, 128, 128),
        overlap: ClipSize = (2, 20, 20),
    ) -> None:
        step = 1 if scale > 1 else SHRUNK
        super().__init__(scale, (CLIP, step, step), tile, overlap)
        self.recompute, self.noise = recompute, noise
        dim = dim or (WIDTH if scale > 1 else RESTORING_WIDTH)
        mixed = INPUT_GROUPS["enlarge" if scale > 1 else "deblur" if noise is None else "denoise"]
        single = (1, window[1], window[2])
        self.spynet = SpyNet()
        first = Refine(3 if scale > 1 else dim, dim, counts[0], depth, heads, single, mixed[0])
        self.feat_extract = (
            first if scale > 1 else QuarterFeatures(3 + (noise is not None), dim, first)
        )
        self.backbone = nn.ModuleDict(
            {
                p: Refine((2 + i) * dim, dim, counts[1], depth, heads, window, mixed[i + 1])
                for i, p in enumerate(PASSES)
            }
        )
        self.deform_align = nn.ModuleDict(
            {p: GuidedAttention(dim, groups, align_heads, hidden, limit) for p in PASSES}
        )
        self.reconstruction = Refine(5 * dim, dim, counts[2], depth, heads, single, mixed[5])
        self.conv_before_upsampler = nn.Sequential(FrameConv(dim, width, 1), nn.LeakyReLU(0.1))
        self.upsampler = Upsample(scale if scale > 1 else SHRUNK, width)
        self.conv_last = FrameConv(width, 3)
        if flow_weights:
            load_flow(self.spynet, flow_weights)

    def restore(self, clip: Tensor) -> Tensor:
        shallow = torch.cat(
            [
                recomputed(self.feat_extract, part, on=self.recompute)
                for part in torch.split(with_noise(clip, self.noise), CLIP, 1)
            ],
            1,
        )
        later, earlier = recomputed(both_ways, self.spynet, self._small(clip), on=self.recompute)
        seen, moved = [shallow], dict[str, list[Tensor]]()
        for name in PASSES:
            back = name.startswith("backward")
            flows = later[0].flip(1) if back else earlier[0]
            features = [x.flip(1) for x in seen] if back else seen
            ways = moved.get(name[:-1]) or _clip_flows(flows)
            x, moved[name[:-1]] = self._pass(name, features, ways)
            seen.append(x.flip(1) if back else x)
        parts = zip(torch.split(torch.cat(seen, 2), 1, 1), torch.split(clip, 1, 1))
        return torch.cat([recomputed(self._enlarge, *p, on=self.recompute) for p in parts], 1)

    def _small(self, clip: Tensor) -> Tensor:
        """As large as the features are."""
        if self.scale > 1:
            return clip
        small = F.interpolate(clip.flatten(0, 1), scale_factor=1 / SHRUNK, mode="bicubic")
        return torch.unflatten(small, 0, clip.shape[:2])

    def _pass(
        self, name: str, features: list[Tensor], flows: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Through the clips in the order of travel; `features` of the passes before this one, the
        latest last.
        """
        here = torch.split(torch.cat(features, 2), CLIP, 1)
        latest = torch.split(features[-1], CLIP, 1)
        x = torch.zeros_like(latest[0])
        done, used = [], []
        for i, now in enumerate(here):
            if i:
                x, way = recomputed(
                    self._step,
                    name,
                    latest[i],
                    latest[i - 1],
                    x,
                    flows[i - 1],
                    now,
                    on=self.recompute,
                )
                used.append(way)
            else:
                x = recomputed(self._refine, name, now, x, on=self.recompute)
            done.append(x)
        return torch.cat(done, 1), used

    def _step(
        self, name: str, q: Tensor, k: Tensor, x: Tensor, flows: Tensor, now: Tensor
    ) -> tuple[Tensor, Tensor]:
        aligned, used = self.deform_align[name](q, k, x, flows)
        return self._refine(name, now, aligned), used

    def _refine(self, name: str, now: Tensor, x: Tensor) -> Tensor:
        return x + self.backbone[name](torch.cat([now, x], 2))  # type: ignore[no-any-return]

    def _enlarge(self, x: Tensor, frame: Tensor) -> Tensor:
        x = self.reconstruction(x)[:, 0]
        detail: Tensor = self.conv_last(self.upsampler(self.conv_before_upsampler(x)))
        return (detail + bilinear_base(frame[:, 0], self.scale))[:, None]

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        try:
            dim = weights["deform_align.backward_1.proj_q.1.weight"].shape[1]
            groups = weights["deform_align.backward_1.conv_offset.10.weight"].shape[0] // (
                CLIP * TAPS * 2
            )
            shuffles = tuple(
                w.shape[0] // w.shape[1]
                for n, w in weights.items()
                if n.startswith("upsampler.") and w.dim() == 5
            )
        except (KeyError, IndexError):
            return None
        scale = {(4, 1): 2, (9, 1): 3, (4, 4, 1): 4}.get(shuffles, 1)
        restoring = weights.get("feat_extract.1.weight")
        if restoring is not None:
            scale = 1
        told = restoring is not None and restoring.shape[1] == 4
        official = (dim, groups) == (WIDTH if scale > 1 else RESTORING_WIDTH, 12)
        purpose = " for denoising" if told else " for restoring" if scale == 1 else ""
        words = (
            f"RVRT, {f'official configuration{purpose}, ' if official else ''}x{scale},"
            f" width {dim}, {groups} offset groups"
        )
        arguments = {"noise": NOISE} if told else {}
        return Configuration(words, scale, arguments if official else None)


def _clip_flows(flows: Tensor) -> list[Tensor]:
    """From flows between neighbours in the order of travel, those of frames 2 and 3 of two clips to
    frames 0 and 1: per step (B, 2, 2, 2, h, w), first to the frame in the same place of its clip,
    then to the other one."""
    out = []
    for i in range(CLIP - 1, flows.shape[1] - 1, CLIP):
        f01, f12, f23 = flows[:, i - 1], flows[:, i], flows[:, i + 1]
        f02 = f12 + warp(f01, f12)
        f13 = f23 + warp(f12, f23)
        f03 = f23 + warp(f02, f23)
        out.append(torch.stack([torch.stack([f02, f13], 1), torch.stack([f12, f03], 1)], 2))
    return out


def rvrt_small(scale: int = 4, recompute: bool = True, flow_weights: str | None = None) -> RVRT:
    """RVRT in small, for tests and CPUs.

    Args:
        scale: by how much it enlarges.
        recompute: compute parts again in the backward pass, to save memory.
        flow_weights: a SpyNet checkpoint to start from.
    """
    return RVRT(
        scale,
        window=(2, 4, 4),
        counts=(1, 1, 1),
        dim=24,
        heads=2,
        groups=4,
        align_heads=4,
        hidden=16,
        width=24,
        recompute=recompute,
        flow_weights=flow_weights,
    )

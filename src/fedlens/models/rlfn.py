"""RLFN (Kong et al., 2022): a small network that enlarges pictures one by one, so a clip frame by
frame.

Blocks of three convolutions with a detour, each followed by spatial attention (ESA) that looks at
the frame through a coarse grid; a last convolution and a pixel shuffle. No bicubic base: a fresh
network has all to learn, which is why one starts from published weights.

Names and shapes are those of the published checkpoints: `RLFN` (6 blocks, width 52), `rlfn_s` (6,
48) and `rlfn_ntire` (4, 46 with 48 in the middle: the winner of NTIRE 2022). Frames smaller than 15
pixels, which the public code refuses, are padded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.models.clips import Configuration

_LEVELS = 255  # the published weights were trained on these, not on [0, 1]
SMALLEST = 15  # what ESA's stride and pool need


class SpatialAttention(nn.Module):
    """ESA: how much each place counts, decided on a grid six times as coarse."""

    def __init__(self, width: int, inner: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 1)
        self.conv_f = nn.Conv2d(inner, inner, 1)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=2)
        self.conv3 = nn.Conv2d(inner, inner, 3, padding=1)
        self.conv4 = nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        few = self.conv1(x)
        coarse = self.conv3(F.max_pool2d(self.conv2(few), 7, stride=3))
        coarse = F.interpolate(coarse, x.shape[-2:], mode="bilinear", align_corners=False)
        strength: Tensor = self.conv4(coarse + self.conv_f(few))
        return x * strength.sigmoid()


class FeatureBlock(nn.Module):
    """RLFB: three convolutions and a detour, a mix of channels, attention."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.c1_r = nn.Conv2d(width, middle, 3, padding=1)
        self.c2_r = nn.Conv2d(middle, middle, 3, padding=1)
        self.c3_r = nn.Conv2d(middle, width, 3, padding=1)
        self.c5 = nn.Conv2d(width, width, 1)
        self.esa = SpatialAttention(width)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in (self.c1_r, self.c2_r, self.c3_r):
            out = F.leaky_relu(layer(out), 0.05, inplace=True)
        return self.esa(self.c5(out + x))  # type: ignore[no-any-return]


class RLFN(nn.Module):
    """
    Args:
        scale: 2, 3 or 4.
        width: features of the trunk.
        blocks: of the trunk.
        middle: channels inside a block, where they are others.
    """

    frame_wise = frame_by_frame = True
    channels_last = True
    bytes_per_pixel = 4000  # of a frame, while it is worked on

    def __init__(
        self, scale: int = 4, width: int = 52, blocks: int = 6, middle: int | None = None
    ) -> None:
        super().__init__()
        self.scale, self.blocks = scale, blocks
        self.conv_1 = nn.Conv2d(3, width, 3, padding=1)
        for k in range(blocks):
            self.add_module(f"block_{k + 1}", FeatureBlock(width, middle or width))
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1)
        last = nn.Conv2d(width, 3 * scale * scale, 3, padding=1)
        self.upsampler = nn.Sequential(last, nn.PixelShuffle(scale))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 3, h, w). Where nothing is learned, a frame at a time, which takes less memory."""
        frames = x.flatten(0, 1)
        parts = frames.split(1) if not torch.is_grad_enabled() else [frames]
        out: Tensor = torch.cat([self.enlarge(part) for part in parts]).unflatten(0, x.shape[:2])
        return out

    def enlarge(self, frames: Tensor) -> Tensor:
        h, w = frames.shape[-2:]
        return self.picture(self.features(frames))[..., : h * self.scale, : w * self.scale]

    def features(self, frames: Tensor) -> Tensor:
        """(N, width, h, w) of frames (N, 3, h, w); of tiny ones as large as they are padded to."""
        h, w = frames.shape[-2:]
        if min(h, w) < SMALLEST:
            more = (0, max(0, SMALLEST - w), 0, max(0, SMALLEST - h))
            frames = F.pad(frames, more, mode="replicate")
        shallow = self.conv_1(frames * _LEVELS)
        deep = shallow
        for k in range(self.blocks):
            deep = self.get_submodule(f"block_{k + 1}")(deep)
        found: Tensor = self.conv_2(deep) + shallow
        return found

    def picture(self, features: Tensor) -> Tensor:
        large: Tensor = self.upsampler(features) / _LEVELS
        return large

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        if not {"conv_1.weight", "block_1.c1_r.weight", "upsampler.0.weight"} <= weights.keys():
            return None
        if "join.weight" in weights:  # RecurrentRLFN: more than this
            return None
        middle, width = weights["block_1.c1_r.weight"].shape[:2]
        blocks = len({n.split(".")[0] for n in weights if n.startswith("block_")})
        scale = int((weights["upsampler.0.weight"].shape[0] // 3) ** 0.5)
        size = {"width": width, "blocks": blocks}
        words = f"RLFN, x{scale}, {blocks} blocks, width {width}"
        if middle != width:
            size["middle"] = middle
            words += f" with {middle} in the middle"
        return Configuration(words, scale, size)

    @staticmethod
    def recognise(weights: Mapping[str, Tensor]) -> str | None:
        found = RLFN.configuration(weights)
        return found.words if found else None


def rlfn_s(scale: int = 4) -> RLFN:
    """Its authors' smaller one, 0.47 M parameters at x4.

    Args:
        scale: 2, 3 or 4.
    """
    return RLFN(scale, 48, 6)


def rlfn_ntire(scale: int = 4) -> RLFN:
    """The pruned one of the NTIRE 2022 challenge, 0.32 M parameters at x4.

    Args:
        scale: 2, 3 or 4.
    """
    return RLFN(scale, 46, 4, 48)

"""Networks that turn a clip (B, T, 3, h, w) into one that is `scale` times as large: what VRT, RVRT
and IART have in common.

`ClipModel` refuses what the network cannot take, pads what it can only nearly take and crops the
result, and, outside training, works in tiles when a clip is larger than `tile`. Tiles overlap; each
pixel comes from the tile in which it lies farther from the edge.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NOISE = 20.0  # what a denoiser is told until somebody says otherwise
ClipSize = tuple[int, int, int]  # frames, height, width
# how RVRT and IART go through a clip, by the names of their checkpoints
PASSES = ("backward_1", "forward_1", "backward_2", "forward_2")


class Configuration(NamedTuple):
    """What weights show of the network they belong to. official: the arguments besides the scale
    that make an official configuration; None where it is none."""

    words: str
    scale: int
    official: dict[str, Any] | None


class ClipModel(nn.Module):
    """Abstract: `restore` does the work. tile, overlap: frames, height and width in input pixels;
    tile None takes every clip whole. noise: where a network is told how strong it is, the standard
    deviation in levels of 255.
    """

    least_frames: ClassVar[int] = 2
    scales: ClassVar[tuple[int, ...]] = (2, 3, 4)
    noise: float | None = None

    def __init__(
        self,
        scale: int,
        multiple: ClipSize,
        tile: ClipSize | None = (40, 128, 128),
        overlap: ClipSize = (2, 20, 20),
    ) -> None:
        super().__init__()
        if scale not in self.scales:
            known = f"{', '.join(map(str, self.scales[:-1]))} or {self.scales[-1]}"
            raise ValueError(f"{type(self).__name__} enlarges by {known}, not by {scale}")
        if tile and any(o >= t for o, t in zip(overlap, tile)):
            raise ValueError(f"tiles of {tile} cannot overlap by {overlap}")
        self.scale, self.multiple, self.tile, self.overlap = scale, multiple, tile, overlap

    @abstractmethod
    def restore(self, clip: Tensor) -> Tensor:
        """The work, for a clip whose frames, height and width are multiples of `multiple`."""

    @staticmethod
    @abstractmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        """Which configuration of this network the weights belong to; None if to none."""

    @staticmethod
    def recognise(weights: Mapping[str, Tensor]) -> str | None:
        """Which of the clip networks, in which configuration, these weights belong to."""
        return next((found.words for _, found in configurations(weights)), None)

    @property
    def fewest(self) -> int:
        return self.least_frames

    def forward(self, clip: Tensor) -> Tensor:
        name = type(self).__name__
        if clip.dim() != 5 or clip.shape[2] != 3:
            raise ValueError(
                f"{name} takes clips of shape (batch, frames, 3, height, width), not"
                f" {tuple(clip.shape)}"
            )
        if clip.shape[1] < self.fewest:
            raise ValueError(
                f"{name} needs clips of at least {self.fewest} frames, this one has {clip.shape[1]}"
            )
        if (
            self.tile is None
            or self.training
            or torch.is_grad_enabled()
            or all(n <= t for n, t in zip(_size(clip), self.tile))
        ):
            return self._whole(clip)
        return self._tiled(clip, self.tile)

    def _whole(self, clip: Tensor) -> Tensor:
        t, h, w = _size(clip)
        out = self.restore(pad_to_multiple(clip, self.multiple))
        return out[:, :t, :, : h * self.scale, : w * self.scale]

    def _tiled(self, clip: Tensor, tile: ClipSize) -> Tensor:
        s = self.scale
        b, (t, h, w) = clip.shape[0], _size(clip)
        out = clip.new_empty(b, t, 3, h * s, w * s)
        for t0, t1, a0, a1 in spans(t, tile[0], self.overlap[0]):
            for y0, y1, b0, b1 in spans(h, tile[1], self.overlap[1]):
                for x0, x1, c0, c1 in spans(w, tile[2], self.overlap[2]):
                    part = self._whole(clip[:, t0:t1, :, y0:y1, x0:x1])
                    inner = part[
                        :,
                        a0 - t0 : a1 - t0,
                        :,
                        (b0 - y0) * s : (b1 - y0) * s,
                        (c0 - x0) * s : (c1 - x0) * s,
                    ]
                    out[:, a0:a1, :, b0 * s : b1 * s, c0 * s : c1 * s] = inner
        return out


def _size(clip: Tensor) -> ClipSize:
    return clip.shape[1], clip.shape[3], clip.shape[4]


def spans(n: int, tile: int, overlap: int) -> Iterator[tuple[int, int, int, int]]:
    """Tiles along one axis: what each sees (from, to) and what of its result is used (from, to).
    All see `tile`, or all there is.
    """
    if n <= tile:
        yield 0, n, 0, n
        return
    step = tile - overlap
    starts = [*range(0, n - tile, step), n - tile]
    used = 0
    for start, after in zip(starts, [*starts[1:], None]):
        end = n if after is None else (start + tile + after + 1) // 2
        yield start, start + tile, used, end
        used = end


def configurations(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Configuration]]:
    """The networks that these weights can belong to, by name."""
    from fedlens.models.iart import IART
    from fedlens.models.recurrent_rlfn import RecurrentRLFN
    from fedlens.models.rlfn import RLFN
    from fedlens.models.rvrt import RVRT
    from fedlens.models.vrt import VRT
    from fedlens.models.vsr import BidirectionalVSR, LightVSR

    readers: dict[str, Callable[[Mapping[str, Tensor]], Configuration | None]] = {
        "vrt": VRT.configuration,
        "rvrt": RVRT.configuration,
        "iart": IART.configuration,
        "rlfn": RLFN.configuration,
        "recurrent": RecurrentRLFN.configuration,
        "light": LightVSR.configuration,
        "bidirectional": BidirectionalVSR.configuration,
    }
    for name, reader in readers.items():
        if found := reader(weights):
            yield name, found


def pad_to_multiple(clip: Tensor, multiple: ClipSize) -> Tensor:
    """The last frame, row and column repeated, up to a multiple."""
    t, h, w = (-n % m for n, m in zip(_size(clip), multiple))
    if t:
        clip = torch.cat([clip, clip[:, -1:].expand(-1, t, -1, -1, -1)], 1)
    if h or w:
        clip = torch.unflatten(
            F.pad(clip.flatten(0, 1), (0, w, 0, h), mode="replicate"), 0, clip.shape[:2]
        )
    return clip


def bilinear_base(frames: Tensor, scale: int) -> Tensor:
    """The picture that the network only has to correct."""
    if scale == 1:
        return frames
    return F.interpolate(frames, scale_factor=scale, mode="bilinear", align_corners=False)


def with_noise(clip: Tensor, noise: float | None) -> Tensor:
    """A fourth channel that says how strong the noise is, where a network wants one."""
    if noise is None:
        return clip
    return torch.cat([clip, torch.full_like(clip[:, :, :1], noise / 255)], 2)


class FrameConv(nn.Conv3d):
    """A convolution inside each frame, on frames (N, C, H, W); checkpoints hold it as one over a
    clip with a kernel of one frame.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, groups: int = 1, stride: int = 1
    ) -> None:
        super().__init__(
            inputs,
            outputs,
            (1, kernel, kernel),
            stride=(1, stride, stride),
            padding=(0, kernel // 2, kernel // 2),
            groups=groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x,
            self.weight[:, :, 0],
            self.bias,
            stride=self.stride[-1],
            padding=self.kernel_size[-1] // 2,
            groups=self.groups,
        )


class Upsample(nn.Sequential):
    """Pixel shuffles up to the scale and a last convolution. Two places per shuffle are empty so
    that the names fit the checkpoints.
    """

    def __init__(self, scale: int, width: int) -> None:
        layers: list[nn.Module] = []
        for by in {2: (2,), 3: (3,), 4: (2, 2)}[scale]:
            layers += [
                FrameConv(width, by * by * width),
                nn.Identity(),
                nn.PixelShuffle(by),
                nn.Identity(),
                nn.LeakyReLU(0.1),
            ]
        super().__init__(*layers, FrameConv(width, width))

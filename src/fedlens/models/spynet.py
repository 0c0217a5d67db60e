"""SpyNet (Ranjan and Black, 2017): optical flow coarse to fine, shared by VRT, RVRT and IART; and
warping along a flow.

Six levels; each refines twice the enlarged flow of the level below from (reference, warped other
frame, flow), Eq. 1-4. The frames are brought to a multiple of 32 first, the flow is brought back
and rescaled. A flow is (N, 2, H, W) in pixels, x before y.

Names and shapes are those of the published checkpoints. Deviation: at 32 pixels the coarsest level
has one pixel and starts from a zero flow; the public implementations start from an empty one there,
which PyTorch refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.data.images.reading import IMAGENET_MEAN, IMAGENET_STD

_LEVELS = 6


def pixel_grid(like: Tensor) -> Tensor:
    """(2, h, w): the x and the y of every pixel of something (..., h, w)."""
    h, w = like.shape[-2:]
    y, x = torch.meshgrid(
        torch.arange(h, device=like.device), torch.arange(w, device=like.device), indexing="ij"
    )
    return torch.stack((x, y)).to(like.dtype)


def sample_at(
    image: Tensor, where: Tensor, mode: str = "bilinear", padding: str = "zeros"
) -> Tensor:
    """Values of `image` (N, C, H, W) at the pixel positions `where` (N, 2, h, w)."""
    h, w = image.shape[-2:]
    size = torch.tensor([max(w - 1, 1), max(h - 1, 1)], dtype=where.dtype, device=where.device)
    return F.grid_sample(
        image,
        where.permute(0, 2, 3, 1) * (2 / size) - 1,
        mode=mode,
        padding_mode=padding,
        align_corners=True,
    )


def warp(image: Tensor, flow: Tensor, padding: str = "zeros") -> Tensor:
    """`image` fetched from where the flow points."""
    return sample_at(image, pixel_grid(flow) + flow, padding=padding)


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (8, 32, 64, 32, 16, 2)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 7, padding=3), nn.ReLU()]
        self.basic_module = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.basic_module(x)  # type: ignore[no-any-return]


class SpyNet(nn.Module):
    """
    Args:
        scales: 1 gives the flow at full size, 2 at half size and so on; one tensor per scale comes
            out.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, scales: Sequence[int] = (1,)) -> None:
        super().__init__()
        self.scales = tuple(scales)
        self.basic_module = nn.ModuleList(Level() for _ in range(_LEVELS))
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))

    def forward(self, reference: Tensor, other: Tensor) -> list[Tensor]:
        h, w = reference.shape[-2:]
        full = (math.ceil(h / 32) * 32, math.ceil(w / 32) * 32)
        pyramid = [self._normal(reference, full)], [self._normal(other, full)]
        for levels in pyramid:
            for _ in range(_LEVELS - 1):
                levels.insert(0, F.avg_pool2d(levels[0], 2))
        flow = torch.zeros_like(pyramid[0][0][:, :2])
        found = {}
        for i, (a, b, level) in enumerate(zip(*pyramid, self.basic_module)):
            if i:
                flow = F.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=True) * 2
            flow = flow + level(torch.cat([a, warp(b, flow, padding="border"), flow], 1))
            if (scale := 2 ** (_LEVELS - 1 - i)) in self.scales:
                found[scale] = _resize(flow, (h // scale, w // scale))
        return [found[s] for s in self.scales]

    def _normal(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return (
            F.interpolate(x, size=size, mode="bilinear", align_corners=False) - self.mean
        ) / self.std


def _resize(flow: Tensor, size: tuple[int, int]) -> Tensor:
    """A flow is a length: it shrinks with the picture."""
    h, w = flow.shape[-2:]
    by = torch.tensor([size[1] / w, size[0] / h], dtype=flow.dtype, device=flow.device).view(
        1, 2, 1, 1
    )
    return F.interpolate(flow, size=size, mode="bilinear", align_corners=False) * by


def both_ways(spynet: SpyNet, clip: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Flows between neighbours of a clip (B, T, 3, H, W), per scale (B, T-1, 2, h, w): frame t to
    t+1, and t+1 to t.
    """
    b, t = clip.shape[:2]
    first, second = clip[:, :-1].flatten(0, 1), clip[:, 1:].flatten(0, 1)
    flows = spynet(torch.cat([first, second]), torch.cat([second, first]))
    halves = [f.view(2, b, t - 1, *f.shape[1:]) for f in flows]
    return [f[0] for f in halves], [f[1] for f in halves]


def load_flow(spynet: SpyNet, path: str | Path) -> None:
    """A SpyNet checkpoint; the published ones lack the two constants."""
    from fedlens.core.weights import check_fit, read_weights

    own = spynet.state_dict()
    spynet.load_state_dict(
        check_fit({**{n: own[n] for n in ("mean", "std")}, **read_weights(path)}, spynet, path)
    )

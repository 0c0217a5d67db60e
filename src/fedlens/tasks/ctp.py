"""CtP: catch the patch (Wang et al., CVPR 2021). Patches cut from the clip itself are pasted along
random paths; where are they, how large?

A path is straight between key frames: the first, the last, and none, one or two in between
(probabilities .5, .3, .2). From key to key the centre moves by up to 3 pixels a frame in each
direction and the logarithm of each side by up to .025 (at a size of 112; in proportion to the size
elsewhere), and the patch stays inside. A patch is cut from a random frame at a random place, and
laid over with an opacity of .8 to 1, as a rectangle, ellipse or rhombus (.5, .35, .15), with a soft
edge in half of the cases. A frame shows it with probability .8, the first and its own always; the
targets cover all frames.

The network is told the box of the first frame: RoIAlign 5x5 (sampling 2, aligned) on the map, whose
time is folded by a convolution. It answers for every frame with the shift of the centre, in sides
of the first box, over .8, and the logarithm of the sides' growth over .04. Loss: smooth L1, summed
over the two coordinates, mean over patches and frames; centre + size. The backbone's last stage
keeps its height and width (stride 8 in all). Head on R3D-18 with 16 frames: 7,111,744 parameters.

Frames: a random stride up to `stride`, as far as the video is long enough (capped), each frame
moved by a random part of the stride. Where the public code is not described in our notes (what
exactly the jitter of .18 moves, from where in its frame a patch is cut) this is our reading: the
jitter is of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.limits import Count, NotNegative
from fedlens.core.picture import Picture
from fedlens.core.task import Adapt
from fedlens.data.video.frames import Frames
from fedlens.models.video import SplitNet
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_ssl import VideoSSL

FULL = 112  # the size all lengths below are meant for
PATCH_SCALES = (16.0, 24.0, 28.0, 32.0, 48.0, 64.0)
SPEED, GROWTH = 3.0, 0.025
SHIFT_UNIT, GROWTH_UNIT = 0.8, 0.04
KEY_SHARES, SHAPE_SHARES = (0.5, 0.3, 0.2), (0.5, 0.35, 0.15)
SEEN, ROI_CELLS = 0.8, 5


class TrackHead(nn.Module):
    def __init__(self, shape: tuple[int, int, int, int], frames: int, size: int) -> None:
        super().__init__()
        width, t, h, _ = shape
        self.frames, self.scale = frames, h / size
        self.fold = nn.Conv3d(width, width, (t, 1, 1))
        self.hidden = nn.Linear(width * ROI_CELLS * ROI_CELLS, width)
        self.answer = nn.Linear(width, frames * 4)

    def forward(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """(B, width, t, h, w) and (B, patches, 4) in pixels, left top right bottom -> (B, patches,
        frames, 4).
        """
        from torchvision.ops import roi_align

        flat = F.relu(self.fold(maps))[:, :, 0]
        regions = roi_align(
            flat,
            list(boxes.to(flat.dtype)),
            ROI_CELLS,
            spatial_scale=self.scale,
            sampling_ratio=2,
            aligned=True,
        )
        out: Tensor = self.answer(F.relu(self.hidden(regions.flatten(1))))
        return out.view(*boxes.shape[:2], self.frames, 4)


@dataclass
class CtP(VideoSSL):
    """patches: how many. stride: the largest between frames. jitter: of a patch's scale. speed,
    growth: see above. The rest as in every video pretext task: backbone (r3d18, r2plus1d18, r3d10,
    r3d10s, module:Class), frames and size of a clip, clips per video in retrieval, majority, init.
    """

    patches: Count = 3
    stride: Count = 5
    jitter: NotNegative = 0.18
    speed: NotNegative = SPEED
    growth: NotNegative = GROWTH

    last_stride = 1

    @property
    def least(self) -> int:
        return self.frames

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        clip = cut_clip(frames, self.numbers(len(frames), rng), self.size, rng if augment else None)
        paths = torch.stack(
            [
                draw_path(self.frames, self.size, self.jitter, rng, self.speed, self.growth)
                for _ in range(self.patches)
            ]
        )
        return {"x": paste(clip, paths, rng), "boxes": corners(paths[:, 0]), "y": targets(paths)}

    def numbers(self, length: int, rng: Generator) -> Sequence[int]:
        """Which frames: a stride that fits, a start, and each frame somewhere within its stride."""
        stride = 1 + int(
            torch.randint(max(1, min(self.stride, length // self.frames)), (), generator=rng)
        )
        start = int(torch.randint(length - stride * self.frames + 1, (), generator=rng))
        late = torch.randint(stride, (self.frames,), generator=rng).tolist()
        return [start + k * stride + late[k] for k in range(self.frames)]

    def head(self, shape: tuple[int, int, int, int]) -> nn.Module:
        return TrackHead(shape, self.frames, self.size)

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        assert isinstance(model, SplitNet)
        maps = model.maps(batch["x"])
        maps = adapt(maps, batch) if adapt else maps
        head: Any = model.head
        return Output(head(maps, batch["boxes"]), maps)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        each = F.smooth_l1_loss(output.prediction, batch["y"], reduction="none")
        # over two coordinates of the centre and two of the size: the sum of both losses
        return each.sum(-1).mean()

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        clip = made["x"]
        return Picture(
            "A training example: patches that move",
            [larger(clip[:, t]) for t in range(clip.shape[1])],
            kind="strip",
        )


# -- patches ---------------------------------------------------------------------------------------


def draw_path(
    frames: int,
    size: int,
    jitter: float,
    rng: Generator,
    speed: float = SPEED,
    growth: float = GROWTH,
) -> Tensor:
    """(frames, 4): centre x, centre y, width, height in every frame."""
    # Plain numbers: a tensor operation takes longer than all of this arithmetic.
    draw = iter(torch.rand(24, generator=rng).tolist())
    unit = size / FULL
    scale = (
        PATCH_SCALES[int(next(draw) * len(PATCH_SCALES))]
        * unit
        * (1 + jitter * (2 * next(draw) - 1))
    )
    ratio = 2 ** (2 * next(draw) - 1)
    sides = [min(max(v, 2.0), 0.9 * size) for v in (scale * ratio**0.5, scale / ratio**0.5)]
    centre = [v / 2 + next(draw) * (size - v) for v in sides]
    keys = key_frames(frames, draw)
    points = [[*centre, *sides]]
    for gap in [b - a for a, b in pairwise(keys)]:
        sides = [
            min(max(v * math.exp((2 * next(draw) - 1) * growth * gap), 2.0), 0.9 * size)
            for v in sides
        ]
        moved = [c + (2 * next(draw) - 1) * speed * unit * gap for c in centre]
        centre = [min(max(c, v / 2), size - v / 2) for c, v in zip(moved, sides, strict=True)]
        points.append([*centre, *sides])
    return between(keys, points)


def key_frames(frames: int, draw: Iterator[float]) -> list[int]:
    """The ends and, by chance, one or two in between; three numbers of `draw` are used."""
    share, *places = (next(draw) for _ in range(3))
    inner = sum(share >= bound for bound in (KEY_SHARES[0], KEY_SHARES[0] + KEY_SHARES[1]))
    free = list(range(1, frames - 1))
    chosen = [free.pop(int(place * len(free))) for place in places[:inner] if free]
    return sorted({0, *chosen, frames - 1})


def between(keys: Sequence[int], points: Sequence[Sequence[float]]) -> Tensor:
    """Straight lines from key frame to key frame."""
    at = np.arange(keys[-1] + 1)
    return torch.from_numpy(
        np.stack([np.interp(at, keys, [p[k] for p in points]) for k in range(4)], 1)
    ).float()


def corners(boxes: Tensor) -> Tensor:
    """Centre and sides -> left, top, right, bottom."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def targets(path: Tensor) -> Tensor:
    """(..., frames, 4): shift of the centre in sides of the first box, over .8; logarithm of the
    sides' growth, over .04.
    """
    first = path[..., :1, :]
    shift = (path[..., :2] - first[..., :2]) / first[..., 2:] / SHIFT_UNIT
    return torch.cat([shift, (path[..., 2:] / first[..., 2:]).log() / GROWTH_UNIT], -1)


def paste(clip: Tensor, paths: Tensor, rng: Generator) -> Tensor:
    """A new (3, T, S, S) with a patch for each of the paths (P, T, 4), cut from the clip as it
    was.
    """
    t, size = clip.shape[1:3]
    draws = torch.rand(len(paths), 6 + t, generator=rng)
    out = clip.clone()
    for path, draw in zip(paths, draws, strict=True):
        frame, left, top, shape, soft, strength = draw[:6].tolist()
        own = int(frame * t)
        w, h = path[own, 2:].tolist()
        shown = draw[6:] < SEEN
        shown[0] = shown[own] = True
        # Only where the patch ever is: most of the picture is none of its business.
        reach = corners(path)
        (x0, y0), (x1, y1) = (
            reach[:, :2].amin(0).floor().int().tolist(),
            reach[:, 2:].amax(0).ceil().int().tolist(),
        )
        u, v = (
            (
                2
                * (torch.arange(max(0, a), min(size, b)) + 0.5 - path[:, k, None])
                / path[:, 2 + k, None]
            )  # -1 ... 1 in the box: (T, side)
            for k, (a, b) in enumerate(((x0, x1), (y0, y1)))
        )
        form = sum(shape >= bound for bound in (SHAPE_SHARES[0], SHAPE_SHARES[0] + SHAPE_SHARES[1]))
        opacity = (
            cover(u[:, None, :], v[:, :, None], form, soft < 0.5)
            * ((0.8 + 0.2 * strength) * shown)[:, None, None]
        )
        # Where in its frame, again as -1 ... 1, a place in the patch comes from.
        from_x = ((left * (size - w) + (u.clamp(-1, 1) + 1) / 2 * w) * (2 / size) - 1)[
            :, None, :
        ].expand(opacity.shape)
        from_y = ((top * (size - h) + (v.clamp(-1, 1) + 1) / 2 * h) * (2 / size) - 1)[
            :, :, None
        ].expand(opacity.shape)
        source = torch.stack([from_x, from_y], -1).flatten(0, 1)[None]
        texture = F.grid_sample(
            clip[None, :, own], source, padding_mode="border", align_corners=False
        )[0].view(3, *opacity.shape)
        window = out[:, :, max(0, y0) : y1, max(0, x0) : x1]
        window.lerp_(texture, opacity.expand_as(texture))
    return out


def cover(u: Tensor, v: Tensor, shape: int, soft: bool) -> Tensor:
    """1 inside, 0 outside: rectangle, ellipse, rhombus; a soft edge falls off over the outer
    fifth.
    """
    u, v = u.abs(), v.abs()
    r = (
        torch.maximum(u, v)
        if shape == 0
        else (u.square() + v.square()).sqrt()
        if shape == 1
        else u + v
    )
    inside: Tensor = ((1 - r) / 0.2).clamp(0, 1) if soft else (r < 1).to(r.dtype)
    return inside

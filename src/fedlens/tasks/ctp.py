"""CtP: catch the patch (Wang et al., CVPR 2021). Patches cut from the clip itself are pasted along random paths; where are they, how
large?

A path is straight between key frames: the first, the last, and none, one or two in between (probabilities .5, .3, .2). From key to key
the centre moves by up to 3 pixels a frame in each direction and the logarithm of each side by up to .025 (at a size of 112; in proportion
to the size elsewhere), and the patch stays inside. A patch is cut from a random frame at a random place, and laid over with an opacity of
.8 to 1, as a rectangle, ellipse or rhombus (.5, .35, .15), with a soft edge in half of the cases. A frame shows it with probability .8,
the first and its own always; the targets cover all frames.

The network is told the box of the first frame: RoIAlign 5x5 (sampling 2, aligned) on the map, whose time is folded by a convolution. It
answers for every frame with the shift of the centre, in sides of the first box, over .8, and the logarithm of the sides' growth over .04.
Loss: smooth L1, summed over the two coordinates, mean over patches and frames; centre + size. The backbone's last stage keeps its height
and width (stride 8 in all). Head on R3D-18 with 16 frames: 7,111,744 parameters.

Frames: a random stride up to `stride`, as far as the video is long enough (capped), each frame moved by a random part of the stride.
Where the public code is not described in our notes (what exactly the jitter of .18 moves, from where in its frame a patch is cut) this is
our reading: the jitter is of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.client import Batch, Output
from fedlens.data.video import Frames
from fedlens.models.video import SplitNet
from fedlens.pictures import Picture
from fedlens.tasks.task import Adapt
from fedlens.tasks.video_ssl import VideoSSL, cut, larger

FULL = 112  # the size all lengths below are meant for
SCALES = (16.0, 24.0, 28.0, 32.0, 48.0, 64.0)
SPEED, GROWTH = 3.0, 0.025
SHIFT_UNIT, GROWTH_UNIT = 0.8, 0.04
KEYS, SHAPES = (0.5, 0.3, 0.2), (0.5, 0.35, 0.15)
SEEN, CELLS = 0.8, 5


class TrackHead(nn.Module):
    def __init__(self, shape: tuple[int, int, int, int], frames: int, size: int) -> None:
        super().__init__()
        width, t, h, _ = shape
        self.frames, self.scale = frames, h / size
        self.fold = nn.Conv3d(width, width, (t, 1, 1))
        self.hidden = nn.Linear(width * CELLS * CELLS, width)
        self.answer = nn.Linear(width, frames * 4)

    def forward(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """(B, width, t, h, w) and (B, patches, 4) in pixels, left top right bottom -> (B, patches, frames, 4)."""
        from torchvision.ops import roi_align

        flat = F.relu(self.fold(maps))[:, :, 0]
        regions = roi_align(flat, list(boxes.to(flat.dtype)), CELLS, spatial_scale=self.scale, sampling_ratio=2, aligned=True)
        out: Tensor = self.answer(F.relu(self.hidden(regions.flatten(1))))
        return out.view(*boxes.shape[:2], self.frames, 4)


@dataclass
class CtP(VideoSSL):
    """patches: how many. stride: the largest between frames. jitter: of a patch's scale. The rest as in every video pretext task:
    backbone (r3d18, r2plus1d18, r3d10, r3d10s, module:Class), frames and size of a clip, clips per video in retrieval, majority, init."""

    patches: int = 3
    stride: int = 5
    jitter: float = 0.18

    last_stride = 1

    @property
    def least(self) -> int:
        return self.frames

    def sample(self, frames: Frames, label: int, rng: Generator, augment: bool) -> dict[str, Tensor]:
        clip = cut(frames, self.numbers(len(frames), rng), self.size, rng if augment else None)
        paths = []
        original = clip
        for _ in range(self.patches):
            path = draw_path(self.frames, self.size, self.jitter, rng)
            clip = paste(clip, original, path, rng)
            paths.append(path)
        return {
            "x": clip,
            "boxes": torch.stack([corners(p[0]) for p in paths]),
            "y": torch.stack([targets(p) for p in paths]),
        }

    def numbers(self, length: int, rng: Generator) -> Sequence[int]:
        """Which frames: a stride that fits, a start, and each frame somewhere within its stride."""
        stride = 1 + int(torch.randint(max(1, min(self.stride, length // self.frames)), (), generator=rng))
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
        return each.sum(-1).mean()  # over two coordinates of the centre and two of the size: the sum of both losses

    def shown(self, made: Mapping[str, Tensor]) -> Picture:
        clip = made["x"]
        return Picture("A training example: patches that move", [larger(clip[:, t]) for t in range(clip.shape[1])], kind="strip")


# -- patches ------------------------------------------------------------------------------------------------------------------------------


def draw_path(frames: int, size: int, jitter: float, rng: Generator) -> Tensor:
    """(frames, 4): centre x, centre y, width, height in every frame."""
    unit = size / FULL
    scale = SCALES[int(torch.randint(len(SCALES), (), generator=rng))] * unit
    ratio = float(2 ** (2 * torch.rand((), generator=rng) - 1))
    scale *= 1 + jitter * float(2 * torch.rand((), generator=rng) - 1)
    side = torch.tensor([scale * ratio**0.5, scale / ratio**0.5]).clamp(2.0, 0.9 * size)
    keys = key_frames(frames, rng)
    centre = side / 2 + torch.rand(2, generator=rng) * (size - side)
    points = [torch.cat([centre, side])]
    for gap in [b - a for a, b in pairwise(keys)]:
        move, grow = 2 * torch.rand(2, 2, generator=rng) - 1
        side = (side * (grow * GROWTH * gap).exp()).clamp(2.0, 0.9 * size)
        centre = (centre + move * SPEED * unit * gap).clamp(side / 2, size - side / 2)
        points.append(torch.cat([centre, side]))
    return between(keys, torch.stack(points))


def key_frames(frames: int, rng: Generator) -> list[int]:
    inner = int(torch.multinomial(torch.tensor(KEYS), 1, generator=rng))
    inner = min(inner, max(0, frames - 2))
    chosen = (1 + torch.randperm(max(0, frames - 2), generator=rng)[:inner]).tolist() if inner else []
    return sorted({0, *chosen, frames - 1})


def between(keys: Sequence[int], points: Tensor) -> Tensor:
    """Straight lines from key frame to key frame."""
    out = torch.empty(keys[-1] + 1, points.shape[1])
    for a, b, p, q in zip(keys, keys[1:], points, points[1:]):
        share = torch.arange(b - a + 1)[:, None] / (b - a)
        out[a : b + 1] = p + share * (q - p)
    return out if len(keys) > 1 else points


def corners(box: Tensor) -> Tensor:
    """Centre and sides -> left, top, right, bottom."""
    return torch.cat([box[:2] - box[2:] / 2, box[:2] + box[2:] / 2])


def targets(path: Tensor) -> Tensor:
    """(frames, 4): shift of the centre in sides of the first box, over .8; logarithm of the sides' growth, over .04."""
    first = path[0]
    return torch.cat([(path[:, :2] - first[:2]) / first[2:] / SHIFT_UNIT, (path[:, 2:] / first[2:]).log() / GROWTH_UNIT], 1)


def paste(clip: Tensor, original: Tensor, path: Tensor, rng: Generator) -> Tensor:
    """A new (3, T, S, S) with one patch in it, cut from the original."""
    t, size = clip.shape[1], clip.shape[2]
    own = int(torch.randint(t, (), generator=rng))
    w, h = (max(2, min(size, round(v))) for v in path[own, 2:].tolist())
    left, top = (int(torch.randint(size - v + 1, (), generator=rng)) for v in (w, h))
    patch = original[:, own, top : top + h, left : left + w]
    draw = torch.rand(2, generator=rng).tolist()
    shape = int(torch.multinomial(torch.tensor(SHAPES), 1, generator=rng))
    shown = torch.rand(t, generator=rng) < SEEN
    shown[0] = shown[own] = True
    grid = torch.arange(size) + 0.5
    u, v = (2 * (grid - path[:, k, None]) / path[:, 2 + k, None] for k in (0, 1))  # -1 ... 1 inside the box, (T, S)
    place = torch.stack([u[:, None, :].expand(t, size, size), v[:, :, None].expand(t, size, size)], -1)
    texture = F.grid_sample(patch[None].expand(t, -1, -1, -1), place, padding_mode="border", align_corners=False).transpose(0, 1)
    opacity = (0.8 + 0.2 * draw[0]) * cover(place, shape, soft=draw[1] < 0.5) * shown[:, None, None]
    pasted: Tensor = clip * (1 - opacity) + texture * opacity
    return pasted


def cover(place: Tensor, shape: int, soft: bool) -> Tensor:
    """1 inside, 0 outside: rectangle, ellipse, rhombus; a soft edge falls off over the outer fifth."""
    u, v = place.abs().unbind(-1)
    r = torch.maximum(u, v) if shape == 0 else (u.square() + v.square()).sqrt() if shape == 1 else u + v
    inside: Tensor = ((1 - r) / 0.2).clamp(0, 1) if soft else (r < 1).to(r.dtype)
    return inside

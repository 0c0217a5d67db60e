"""CtP: catch the patch (Wang et al., CVPR 2021). Patches cut from the clip itself are pasted along
random paths (`patches.py`); where are they, how large?

The network is told the box of the first frame: RoIAlign 5x5 (sampling 2, aligned) on the map, whose
time is folded by a convolution. It answers for every frame with the shift of the centre in pixels
(of 112; in proportion elsewhere) over .8, and the logarithm of the sides' growth over .04. Loss:
smooth L1, summed over the two coordinates, mean over patches and frames; centre + size. The
backbone's last stage keeps its height and width (stride 8 in all). Head on R3D-18 with 16 frames:
7,111,744 parameters; its linear layers begin with deviations of .001, so that it first answers
"nothing moves".

Frames: a random stride up to `stride`, each frame moved by a random part of the stride. Afterwards
colours change over time (`video_colour.py`).

As the public code, except: a stride that does not fit into the video is not drawn (there the last
frame is repeated); a square is cut and then resized, smoothed where it shrinks (there the whole
frame is resized first, without smoothing); pixels are not rounded to 256 steps after pasting and
after colours; hues go round. `shift="sides"` is another target, of this project alone and its
default until 0.1: the shift in sides of the first box over .8. It counts the centre's part of the
loss far less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.limits import Count, NotNegative
from fedlens.core.picture import Picture
from fedlens.core.task import Adapt
from fedlens.data.video.frames import Frames
from fedlens.models.video import SplitNet
from fedlens.tasks.patches import FULL, draw_boxes, paste, uniforms
from fedlens.tasks.video_clips import cut_clip, larger
from fedlens.tasks.video_colour import jitter_colours
from fedlens.tasks.video_ssl import VideoSSL, small_normal

SHIFT_UNIT, GROWTH_UNIT = 0.8, 0.04
ROI_CELLS = 5


class TrackHead(nn.Module):
    def __init__(self, shape: tuple[int, int, int, int], frames: int, size: int) -> None:
        super().__init__()
        width, t, h, _ = shape
        self.frames, self.scale = frames, h / size
        self.fold = nn.Conv3d(width, width, (t, 1, 1))
        self.hidden = nn.Linear(width * ROI_CELLS * ROI_CELLS, width)
        self.answer = nn.Linear(width, frames * 4)
        nn.init.kaiming_normal_(self.fold.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fold.bias)  # type: ignore[arg-type]
        small_normal(self.hidden, self.answer)

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
    """
    Args:
        patches: how many.
        stride: the largest between frames.
        jitter: of a patch's sides, as a logarithm.
        speed: the most that a patch's centre moves, in pixels of 112 a frame (`tasks/patches.py`).
        growth: the most that the logarithm of its sides changes, a frame.
        shift: the centre's target in "pixels" (published) or in "sides" of the first box.
        colour: change colours over time.
    """

    patches: Count = 3
    stride: Count = 5
    jitter: NotNegative = 0.18
    speed: NotNegative = 3.0
    growth: NotNegative = 0.025
    shift: Literal["pixels", "sides"] = "pixels"
    colour: bool = True

    last_stride = 1

    @property
    def least(self) -> int:
        return self.frames

    def sample(
        self, frames: Frames, label: int, rng: Generator, augment: bool
    ) -> dict[str, Tensor]:
        clip = cut_clip(frames, self.numbers(len(frames), rng), self.size, rng if augment else None)
        draw = uniforms(rng)
        boxes = draw_boxes(
            self.patches, self.frames, self.size, self.jitter, self.speed, self.growth, draw
        )
        x = paste(clip, boxes, draw)
        if augment and self.colour:
            x = jitter_colours(x, draw, 0.25, 0.5, 30 / 255, 0.12, moving=True)
        unit = SHIFT_UNIT * self.size / FULL if self.shift == "pixels" else None
        return {"x": x, "boxes": boxes[:, 0], "y": targets(boxes, unit)}

    def numbers(self, length: int, rng: Generator) -> Sequence[int]:
        """Which frames: a stride that fits, a start, and each frame somewhere within its stride."""
        fits = (length - 1) // max(1, self.frames - 1)
        stride = 1 + int(torch.randint(max(1, min(self.stride, fits)), (), generator=rng))
        start = int(torch.randint(length - stride * (self.frames - 1), (), generator=rng))
        late = torch.randint(stride, (self.frames,), generator=rng).tolist()
        return [min(start + k * stride + late[k], length - 1) for k in range(self.frames)]

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


def targets(boxes: Tensor, unit: float | None = SHIFT_UNIT) -> Tensor:
    """(..., frames, 4) left, top, right, bottom -> shift of the centre over `unit` pixels (None: in
    sides of the first box, over .8); logarithm of the sides' growth over .04.
    """
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp_min(1)
    by = SHIFT_UNIT * sides[..., :1, :] if unit is None else unit
    shift = (centre - centre[..., :1, :]) / by
    return torch.cat([shift, (sides / sides[..., :1, :]).log() / GROWTH_UNIT], -1)

"""Enlarging a clip piece by piece, in space and in time, with a margin of context around each piece
that is thrown away; so memory depends on the tile, not on the film.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedlens.core.limits import Count, Natural

TileSide = Annotated[int, Ge(8)]


class Tiles:
    """How a long or large clip is worked through: `tile` low-resolution pixels and `window` frames
    at a time, each with context.
    """

    def __init__(
        self,
        scale: int,
        tile: TileSide = 256,
        margin: Natural = 16,
        window: Count = 16,
        overlap: Natural = 4,
    ) -> None:
        self.scale, self.tile, self.margin, self.window, self.overlap = (
            scale,
            tile,
            margin,
            window,
            overlap,
        )

    def run(
        self,
        model: nn.Module,
        read: Callable[[int, int], Tensor],
        length: int,
        *,
        rounded: bool = True,
        done: Callable[[int], None] | None = None,
    ) -> Iterator[Tensor]:
        """Enlarged frames, `window` at a time, as levels 0...255 (uint8 if rounded). `read(low,
        high)` gives frames in [0, 1].
        """
        place = next((p.device for p in model.parameters()), torch.device("cpu"))
        grad = nullcontext() if not torch.is_grad_enabled() else torch.no_grad()
        for low in range(0, length, self.window):
            high = min(low + self.window, length)
            first, last = max(0, low - self.overlap), min(length, high + self.overlap)
            with grad:
                out = self._window(
                    model, read(first, last).to(place), low - first, high - low, rounded
                )
            yield out
            if done:
                done(high - low)

    def _window(
        self, model: nn.Module, clip: Tensor, skip: int, count: int, rounded: bool
    ) -> Tensor:
        """Frames skip ... skip + count - 1 of the enlarged clip; each tile is rounded at once, so
        that only bytes are kept.
        """
        h, w = clip.shape[-2:]
        s = self.scale
        out = torch.empty(count, 3, h * s, w * s, dtype=torch.uint8 if rounded else torch.float32)
        for top in range(0, h, self.tile):
            for left in range(0, w, self.tile):
                bottom, right = min(top + self.tile, h), min(left + self.tile, w)
                up, before = max(0, top - self.margin), max(0, left - self.margin)
                piece = clip[
                    ..., up : min(h, bottom + self.margin), before : min(w, right + self.margin)
                ]
                y0, x0 = (top - up) * s, (left - before) * s
                big = run_network(model, piece[None], s)[0, skip : skip + count]
                big = (
                    big[..., y0 : y0 + (bottom - top) * s, x0 : x0 + (right - left) * s]
                    .float()
                    .clamp(0, 1)
                    * 255
                )
                out[..., top * s : bottom * s, left * s : right * s] = (
                    big.round_() if rounded else big
                )
        return out


def run_network(model: nn.Module, x: Tensor, scale: int) -> Tensor:
    """model(x), with a clear sentence if it is not a super-resolution network."""
    y = model(x)
    want = (*x.shape[:3], x.shape[3] * scale, x.shape[4] * scale)
    if not isinstance(y, Tensor) or tuple(y.shape) != want:
        what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"{type(model).__name__} made {what} of a clip {tuple(x.shape)}; at scale {scale} it"
            f" must be {want}"
        )
    return y

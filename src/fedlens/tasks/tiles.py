"""Enlarging a clip piece by piece, in space and in time, with a margin of context around each piece
that is thrown away; so memory depends on the tile, not on the film.

A network says by attributes what it needs, if it needs less than others: `frame_wise` (no other
frames), `looks_ahead` (frames after the one it makes), `fewest` (frames it takes at least),
`frame_by_frame` (works on one at a time), `bytes_per_pixel` (memory for a pixel of a frame that is
worked on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedlens.core.limits import Count, Natural

TileSide = Annotated[int, Ge(8)]
TILE, WINDOW = 256, 16  # unless somebody says otherwise
_SIDES = (512, 384, 256, 192, 128, 96, 64)  # what is tried where memory decides
WINDOWS = (32, 16, 8, 4)
BYTES_PER_PIXEL = 14_000  # VRT's, the hungriest that is known


@dataclass(frozen=True)
class Tiles:
    """How a long or large clip is worked through: `tile` low-resolution pixels and `window` frames
    at a time, each with context.
    """

    scale: int
    tile: TileSide = TILE
    margin: Natural = 16
    window: Count = WINDOW
    overlap: Natural = 4

    def run(
        self,
        model: nn.Module,
        read: Callable[[int, int], Tensor],
        length: int,
        *,
        levels: int | None = 255,
        start: int = 0,
        done: Callable[[int], None] | None = None,
    ) -> Iterator[Tensor]:
        """Enlarged frames from `start` on, `window` at a time, as whole levels up to 255 (uint8) or
        more (int32); without levels as they are, in [0, 1]. `read(low, high)` gives frames in [0,
        1].
        """
        place = next((p.device for p in model.parameters()), torch.device("cpu"))
        grad = nullcontext() if not torch.is_grad_enabled() else torch.no_grad()
        before, after = self.context(model)
        for low in range(start, length, self.window):
            high = min(low + self.window, length)
            first, last = max(0, low - before), min(length, high + after)
            with grad:
                clip = at_least(read(first, last).to(place), getattr(model, "fewest", 1))
                out = self._window(model, clip, low - first, high - low, levels)
            yield out
            if done:
                done(high - low)

    def context(self, model: nn.Module) -> tuple[int, int]:
        """Frames before and after a window that are looked at too."""
        if getattr(model, "frame_wise", False):
            return 0, 0
        return self.overlap, min(self.overlap, getattr(model, "looks_ahead", self.overlap))

    def _window(
        self, model: nn.Module, clip: Tensor, skip: int, count: int, levels: int | None
    ) -> Tensor:
        """Frames skip ... skip + count - 1 of the enlarged clip; each tile is rounded at once, so
        that only whole levels are kept.
        """
        h, w = clip.shape[-2:]
        s = self.scale
        kind = {None: torch.float32, 255: torch.uint8}.get(levels, torch.int32)
        out = torch.empty(count, 3, h * s, w * s, dtype=kind)
        for (top, bottom), (left, right) in product(self._spans(h), self._spans(w)):
            up, before = max(0, top - self.margin), max(0, left - self.margin)
            down, after = min(h, bottom + self.margin), min(w, right + self.margin)
            piece = clip[..., up:down, before:after]
            y0, x0 = (top - up) * s, (left - before) * s
            big = run_network(model, piece[None], s)[0, skip : skip + count]
            big = big[..., y0 : y0 + (bottom - top) * s, x0 : x0 + (right - left) * s]
            big = big.float().clamp(0, 1)
            if levels:
                big = big.mul_(levels).round_()
            out[..., top * s : bottom * s, left * s : right * s] = big
        return out

    def _spans(self, n: int) -> list[tuple[int, int]]:
        return [(low, min(low + self.tile, n)) for low in range(0, n, self.tile)]

    def fitted(
        self,
        model: nn.Module,
        size: tuple[int, int],
        room: int,
        tile: int | None = None,
        window: int | None = None,
    ) -> Tiles:
        """Those that do least work twice and need at most `room` bytes, for frames of this (height,
        width). tile, window: what is given is kept.
        """
        choices = [
            replace(self, tile=side, window=frames)
            for side in ([tile] if tile else _SIDES)
            for frames in ([window] if window else WINDOWS)
        ]
        possible = [t for t in choices if t.memory(model, size) <= room]
        if not possible:
            return min(choices, key=lambda t: t.memory(model, size))
        return min(possible, key=lambda t: (t.work(model, size), t.memory(model, size)))

    def work(self, model: nn.Module, size: tuple[int, int]) -> float:
        """Pixels that the network sees for a frame."""
        sides = [
            sum(min(n, high + self.margin) - max(0, low - self.margin) for low, high in spans)
            for n, spans in ((n, self._spans(n)) for n in size)
        ]
        return sides[0] * sides[1] * (1 + sum(self.context(model)) / self.window)

    def memory(self, model: nn.Module, size: tuple[int, int]) -> int:
        """Bytes, roughly: the network's own, its result, and the window as it was and will be."""
        pixels = 1
        for n in size:
            pixels *= min(n, self.tile + 2 * self.margin)
        frames = self.window + sum(self.context(model))
        each: Any = getattr(model, "bytes_per_pixel", BYTES_PER_PIXEL)
        once = 1 if getattr(model, "frame_by_frame", False) else frames
        network = pixels * (each * once + 2 * 12 * self.scale**2 * frames)
        whole = size[0] * size[1] * frames * (15 + 2 * 3 * self.scale**2)
        return int(network + whole)


def at_least(clip: Tensor, fewest: int) -> Tensor:
    """The last frame repeated, where a network takes no clip as short as this."""
    if len(clip) >= fewest:
        return clip
    return torch.cat([clip, clip[-1:].expand(fewest - len(clip), -1, -1, -1)])


def run_network(model: nn.Module, x: Tensor, scale: int) -> Tensor:
    """model(x), with a clear error message if it is not a super-resolution network."""
    y = model(x)
    want = (*x.shape[:3], x.shape[3] * scale, x.shape[4] * scale)
    if not isinstance(y, Tensor) or tuple(y.shape) != want:
        what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"{type(model).__name__} made {what} of a clip {tuple(x.shape)}; at scale {scale} it"
            f" must be {want}"
        )
    return y

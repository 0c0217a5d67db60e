"""Patches that travel through a clip: CtP's transform, as its public code does it.

A first box has one of six scales and seven ratios, each side stretched by up to e^jitter. All
patches of a clip share the key frames at which their centres turn, and other ones at which their
sides do: the ends and none, one or two in between (.5, .3, .2). From key to key the centre moves
by up to `speed` pixels a frame along each axis, as far as the first box would stay inside, and the
logarithm of each side by up to `growth`; the way there is even, or speeds up from rest, or slows
down to rest (.7, .15, .15). Boxes are cut off at the edge and rounded to whole pixels (of 112, as
all lengths: in a small clip they lie between its pixels, or rounding would be most of the motion).

A patch is what its own box shows in a random frame, resized for the others, as a rectangle, ellipse
or rhombus (.5, .35, .15), with a soft edge in half of the cases and an opacity between .8 and 1
that changes over the frames. Large ones are pasted first. A frame shows a patch with probability
.8, the first and its own always.

Lengths are meant for clips of 112 and in proportion elsewhere. Random numbers come first, as
arrays; what is made of them is arithmetic that the tests hold against the public code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional as F

Floats = NDArray[np.float64]

FULL = 112  # the size all lengths are meant for
SCALES = (16.0, 24.0, 28.0, 32.0, 48.0, 64.0)
RATIOS = (0.5, 0.67, 0.75, 1.0, 1.33, 1.5, 2.0)
KEY_SHARES, SHAPE_SHARES, PACE_SHARES = (0.5, 0.3, 0.2), (0.5, 0.35, 0.15), (0.7, 0.15, 0.15)
EVEN, FASTER, SLOWER = range(3)
SEEN = 0.8


def uniforms(rng: Generator) -> Iterator[float]:
    """As many as are asked for; one tensor operation for many of them."""
    while True:
        yield from torch.rand(64, dtype=torch.float64, generator=rng).tolist()


def pick(draw: Iterator[float], shares: Sequence[float]) -> int:
    place = next(draw)
    return sum(place >= bound for bound in accumulate(shares[:-1]))


def spread(draw: Iterator[float], shape: tuple[int, ...], reach: float) -> Floats:
    """Numbers between -reach and reach."""
    count = int(np.prod(shape))
    return np.array([(2 * next(draw) - 1) * reach for _ in range(count)]).reshape(shape)


# -- where a patch is ------------------------------------------------------------------------------


def draw_boxes(
    patches: int,
    frames: int,
    size: int,
    jitter: float,
    speed: float,
    growth: float,
    draw: Iterator[float],
) -> Tensor:
    """(patches, frames, 4): left, top, right, bottom in pixels."""
    unit = size / FULL
    ratios = np.sqrt([RATIOS[int(next(draw) * len(RATIOS))] for _ in range(patches)])
    scales = np.array([SCALES[int(next(draw) * len(SCALES))] for _ in range(patches)]) * unit
    sides = np.stack([scales * ratios, scales / ratios], 1)
    stretch = np.exp(spread(draw, (patches, 2), jitter))
    first = first_boxes(sides * stretch, spread(draw, (patches, 2), 0.5) + 0.5, size)
    tracks = []
    for reach in (speed * unit, growth):  # of the centres, then of the sides
        keys = key_frames(frames, draw)
        paces = [pick(draw, PACE_SHARES) for _ in keys[1:]]
        steps = [spread(draw, (patches, 2), reach * (b - a)) for a, b in pairwise(keys)]
        tracks.append((keys, paces, steps))
    return torch.from_numpy(moving_boxes(first, size, *tracks)).float()


def first_boxes(sides: Floats, places: Floats, size: int) -> Floats:
    """Boxes with these sides; places from 0 (left, top) to 1 (right, bottom)."""
    sides = np.clip(sides, 1, size - 1)
    corner = places * (size - sides)
    return np.concatenate([corner, corner + sides], 1)


def key_frames(
    frames: int, draw: Iterator[float], shares: Sequence[float] = KEY_SHARES
) -> list[int]:
    """The ends and, by chance, some in between: at even distances, moved by up to a third of
    one.
    """
    inner = pick(draw, shares)
    apart = frames / (inner + 1)
    reach = int(apart / 3)
    ticks = [int(apart * k) + int(2 * reach * next(draw)) - reach for k in range(1, inner + 1)]
    return sorted({0, *ticks, frames - 1})


Track = tuple[Sequence[int], Sequence[int], Sequence[Floats]]  # key frames, paces, steps (P, 2)


def moving_boxes(first: Floats, size: int, moves: Track, grows: Track) -> Floats:
    """(P, 4) and its ways -> (P, frames, 4). Steps of the centre are pixels, steps of the sides
    logarithms.
    """
    sides = first[:, 2:] - first[:, :2]
    centres = [(first[:, :2] + first[:, 2:]) / 2]
    for step in moves[2]:
        centres.append(np.clip(centres[-1] + step, sides / 2, size - sides / 2))
    sizes = [sides]
    for step in grows[2]:
        sizes.append(sizes[-1] * np.exp(step))
    centre = between(moves[0], np.stack(centres), moves[1])
    half = between(grows[0], np.stack(sizes), grows[1]) / 2
    unit = size / FULL
    low = np.clip(np.round((centre - half) / unit) * unit, 0, size - 1)
    high = np.clip(np.round((centre + half) / unit) * unit, low + 1, size)  # a pixel is left of it
    return np.concatenate([low, high], 2).transpose(1, 0, 2)


def between(keys: Sequence[int], values: Floats, paces: Sequence[int]) -> Floats:
    """(frames, ...) from the values (keys, ...) at the key frames, a pace for every stretch."""
    out = np.repeat(values[:1], keys[-1] + 1, 0)  # a single frame stays at its first value
    for k, (a, b) in enumerate(pairwise(keys)):
        at = np.linspace(0, 1, b - a + 1)
        part = {EVEN: at, FASTER: at**2, SLOWER: 1 - (1 - at) ** 2}[paces[k]]
        part = part.reshape(-1, *(1 for _ in values.shape[1:]))
        out[a : b + 1] = values[k] + part * (values[k + 1] - values[k])
    return out


# -- what it looks like ----------------------------------------------------------------------------


def paste(clip: Tensor, boxes: Tensor, draw: Iterator[float]) -> Tensor:
    """A new (3, T, S, S) with a patch for each of the boxes (P, T, 4), cut from the clip as it
    was.
    """
    frames = clip.shape[1]
    layers = []
    for path in boxes:
        own = int(next(draw) * frames)
        left, top = path[own, :2].floor().int().tolist()
        right, bottom = path[own, 2:].ceil().int().tolist()
        shape = pick(draw, SHAPE_SHARES)
        edge = 0.3 + 0.15 * next(draw) if next(draw) < 0.5 else None
        mask = cover(right - left, bottom - top, shape, edge)
        keys = key_frames(frames, draw)
        strengths = 0.9 + spread(draw, (len(keys),), 0.1)
        strength = torch.from_numpy(between(keys, strengths, [EVEN] * len(keys))).float()
        shown = torch.tensor([next(draw) <= SEEN for _ in range(frames)])
        shown[0] = shown[own] = True
        layers.append((clip[:, own, top:bottom, left:right], mask, strength * shown))
    out = clip.clone()
    mean_sides = (boxes[..., 2:] - boxes[..., :2]).mean(1)
    # the largest first: a small one would vanish below it
    for k in mean_sides.prod(1).argsort(descending=True, stable=True).tolist():
        overlay(out, boxes[k], *layers[k])
    return out


def overlay(out: Tensor, path: Tensor, patch: Tensor, mask: Tensor, opacity: Tensor) -> None:
    """Into `out` (3, T, S, S): the patch (3, h, w) with its mask (h, w), resized into the box of
    every frame (T, 4).
    """
    x0, y0 = path[:, :2].amin(0).floor().int().tolist()
    x1, y1 = path[:, 2:].amax(0).ceil().int().tolist()
    # -1 ... 1 inside the box of a frame: (T, side of the window in which the patch ever is)
    u, v = (
        2 * (torch.arange(a, b) + 0.5 - path[:, k, None]) / (path[:, k + 2] - path[:, k])[:, None]
        - 1
        for k, (a, b) in enumerate(((x0, x1), (y0, y1)))
    )
    inside = (v.abs() < 1)[:, :, None] & (u.abs() < 1)[:, None, :]
    grid = torch.stack(
        [u[:, None, :].expand(inside.shape), v[:, :, None].expand(inside.shape)], -1
    ).flatten(0, 1)[None]
    both = torch.cat([patch, mask[None]])[None]
    made = F.grid_sample(both, grid, padding_mode="border", align_corners=False)[0]
    made = made.view(4, *inside.shape)
    weight = made[3] * inside * opacity[:, None, None]
    window = out[:, :, y0:y1, x0:x1]
    window.lerp_(made[:3], weight.expand_as(window))


def cover(width: int, height: int, shape: int, edge: float | None) -> Tensor:
    """(height, width), 1 inside and 0 outside: rectangle, ellipse, rhombus. Distances from the
    middle are in sides; a soft edge falls from 1 at `edge` to 0 at .5.
    """
    u = (torch.arange(width) - (width - 1) // 2).abs()[None] / width
    v = (torch.arange(height) - (height - 1) // 2).abs()[:, None] / height
    if shape == 0:
        distance = torch.maximum(u, v)
        inside = torch.ones(height, width)
    else:
        distance = (u.square() + v.square()).sqrt() if shape == 1 else u + v
        inside = (distance < 0.5).float()
    return inside if edge is None else inside * ((0.5 - distance) / (0.5 - edge)).clamp(0, 1)

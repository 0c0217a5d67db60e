"""Colours of a clip (3, T, H, W) in [0, 1], changed by chance: what CtP's public code does to its
clips.

Strengths are its own: hue by up to 12 of 180, saturation by a factor e^-.1 to e^.1, brightness by
up to `bright` of 1, contrast by a factor of up to e^`contrast`. Where they are `moving`, brightness
and contrast change over the frames, from key frame to key frame (`patches.py`). Hues go round;
there they are cut off at the ends of the scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedlens.tasks.patches import PACE_SHARES, between, key_frames, pick, spread

HUE, SATURATION = 12 / 180, 0.1
MOVING_KEYS = (0.7, 0.3)


def jitter_colours(
    clip: Tensor,
    draw: Iterator[float],
    tint: float,
    light: float,
    bright: float,
    contrast: float,
    moving: bool,
) -> Tensor:
    """tint: probability of another hue and saturation. light: of another brightness, and of
    another contrast.
    """
    frames = clip.shape[1]
    if next(draw) < tint:
        hue, factor = next(draw), next(draw)
        clip = tinted(clip, (2 * hue - 1) * HUE, float(np.exp((2 * factor - 1) * SATURATION)))
    if next(draw) < light:
        clip = (clip + over_time(frames, draw, bright, moving)).clamp(0, 1)
    if next(draw) < light:
        clip = (clip * over_time(frames, draw, contrast, moving, log=True)).clamp(0, 1)
    return clip


def over_time(
    frames: int, draw: Iterator[float], reach: float, moving: bool, log: bool = False
) -> Tensor:
    """(frames, 1, 1)"""
    keys = key_frames(frames, draw, MOVING_KEYS) if moving else [0, frames - 1]
    values = spread(draw, (len(keys),) if moving else (1,), reach).repeat(1 if moving else 2)
    paces = [pick(draw, PACE_SHARES) if moving else 0 for _ in keys[1:]]
    # what goes from key to key is the factor, not its logarithm
    path = between(keys, np.exp(values) if log else values, paces)
    return torch.from_numpy(path).float()[:, None, None]


def tinted(clip: Tensor, hue: float, saturation: float) -> Tensor:
    """Hue turned by a part of the circle; saturation multiplied, brightness (the largest of red,
    green and blue) kept.
    """
    from torchvision.transforms.v2.functional import adjust_hue

    turned: Tensor = adjust_hue(clip.transpose(0, 1), hue).transpose(0, 1)
    top = turned.amax(0)
    # a saturation above 1 would make the smallest colour negative
    return (top - (top - turned) * saturation).clamp(0, 1)

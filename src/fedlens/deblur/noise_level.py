"""How noisy a photo is, from the photo alone.

The diagonal difference of four neighbours, (a - b - c + d) / 2, has the deviation of the noise and
next to nothing of a blurred scene; a mean of what is not far out ignores the edges that are left.
Near either end of the range noise is cut off, so nothing is measured there.
"""

from __future__ import annotations

import math

from torch import Tensor

# of rounding to whole grey levels: no photo of 8 bits is better than this
ROUNDING = 12**-0.5
BLACK, WHITE = 0.5, 254.5  # in grey levels: at or beyond them a pixel was cut off
NEAR = 8.0  # so far from the ends, noise of a few grey levels is whole


def is_clipped(pixels: Tensor, margin: float = 0.0) -> Tensor:
    """(H, W): whether any channel lies within `margin` of an end of the range."""
    return ((pixels <= BLACK + margin) | (pixels >= WHITE - margin)).any(0)


def noise_level(pixels: Tensor) -> float:
    """Standard deviation in grey levels, at least that of rounding; of (C, H, W) in [0, 255]."""
    if min(pixels.shape[-2:]) < 2:
        return ROUNDING
    x = pixels.double()
    diagonal = (x[:, :-1, :-1] - x[:, 1:, :-1] - x[:, :-1, 1:] + x[:, 1:, 1:]) / 2
    cut = is_clipped(pixels, NEAR)
    whole = ~(cut[:-1, :-1] | cut[1:, :-1] | cut[:-1, 1:] | cut[1:, 1:])
    usable = diagonal[:, whole] if int(whole.sum()) >= 64 else diagonal.flatten(1)
    square = usable.square().flatten()
    level = max(ROUNDING, math.sqrt(float(square.median())) / 0.6745)
    # A median of whole grey levels is one of few numbers: a mean of what lies within 2.5 deviations
    # is not. A Gaussian that is cut there has 0.9113 of its variance.
    for _ in range(8):
        near = square[square <= (2.5 * level) ** 2]
        level = max(ROUNDING, math.sqrt(float(near.mean()) / 0.9113))
    return level

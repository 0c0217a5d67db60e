"""Random numbers that protect somebody: seeded in a simulation, so that it can be repeated, and of
the operating system where a run is real.

A generator of torch has a state that follows from a seed, on a CPU from 32 bits of it; noise of it
can be found out and subtracted. What the operating system gives cannot. Neither hides the last bits
of a floating-point number (Mironov, 2012): see docs/differential_privacy.md.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Generator, Tensor

_UNIT = 2.0**-53


def draw_normal(count: int, deviation: float, rng: Generator | None = None) -> Tensor:
    """`count` numbers from N(0, deviation^2), float32. rng: None for the operating system's."""
    if rng is not None:
        return torch.randn(count, generator=rng).mul_(deviation)
    half = (count + 1) // 2
    radius = torch.from_numpy(_system(half, open_end=1)).log_().mul_(-2).sqrt_().mul_(deviation)
    angle = torch.from_numpy(_system(half)).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float()


def draw_chosen(count: int, rate: float, rng: Generator | None = None) -> Tensor:
    """Which of `count` are chosen, each by itself with the probability `rate`."""
    if rng is not None:
        chances = torch.rand(count, generator=rng, dtype=torch.float64)
    else:
        chances = torch.from_numpy(_system(count))
    return (chances < rate).nonzero().flatten()


def secret_generator() -> Generator:
    """Of what is random but adds no noise, such as augmentation: nobody else has its seed."""
    return Generator().manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)


def _system(count: int, open_end: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Uniform in [0, 1), or in (0, 1] with open_end=1; 53 bits each."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return (words + np.uint64(open_end)).astype(np.float64) * _UNIT

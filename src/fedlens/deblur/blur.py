"""Blur kernels, in two families: MATLAB's fspecial definitions, and those of the FedDeblur authors'
public code.

The two differ where fspecial is involved. The authors' motion kernel keeps only the half of the
line that leaves the centre (whole only at 90 degrees), so that it blurs about half as much and is
off-centre; their disk is a hard mask instead of an area-weighted one. Camera shake is a random walk
of the camera in three dimensions with a drifting orientation, seen as a histogram of where a point
went. The authors draw the size of that histogram at random (odd, at most 27) and then pad or crop
it to the size asked for. A crop loses light, and their code leaves it lost: sums of 0.35 to 0.83,
so that some clients are dark ("authors-dark"). No camera does that to its own kernel and no figure
of the paper mentions it, so here a cropped kernel is scaled to sum 1 again ("authors").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError

Family = Literal["fspecial", "authors", "authors-dark"]
Blur = Literal["mixed", "motion", "synthesis"]

# Table 3 of the paper: the complete setting, clients 1 to 10.
MIXED = (
    ("motion", 15, 45),
    ("gaussian", 9, 2),
    ("shake", 15, 0),
    ("motion", 20, 0),
    ("disk", 5, 0),
    ("motion", 15, 135),
    ("gaussian", 10, 3),
    ("disk", 10, 0),
    ("shake", 12, 0),
    ("motion", 20, 90),
)
# Table 4: the partial setting, clients 1 to 9; length and angle.
MOTION = (
    (10, 0),
    (11, 22),
    (13, 45),
    (15, 67),
    (17, 90),
    (19, 112),
    (21, 135),
    (23, 157),
    (25, 180),
)


def client_kernel(blur: Blur, k: int, family: Family, seed: int, size: int = 15) -> Tensor:
    """The kernel of client k. Past the end of a table it is gone through again, motion turned by 17
    degrees each time.
    """
    rng = np.random.default_rng([seed, 0x5A4E, k])
    if blur == "synthesis":
        return shake(size, rng, family)
    if blur == "motion":
        length, angle = MOTION[k % len(MOTION)]
        return motion(length, angle + 17 * (k // len(MOTION)), family)
    kind, a, b = MIXED[k % len(MIXED)]
    if kind == "motion":
        return motion(a, b + 17 * (k // len(MIXED)), family)
    if kind == "gaussian":
        return gaussian(a, b)
    return disk(a, family) if kind == "disk" else shake(a, rng, family)


def motion(length: float, angle: float, family: Family = "fspecial") -> Tensor:
    """A line of `length` pixels at `angle` degrees, anti-clockwise. A pixel weighs 1 minus its
    distance to the line, or to the line's end for pixels farther from the centre than that."""
    half, phi = (max(1.0, length) - 1) / 2, math.radians(angle % 180)
    cos, sin = math.cos(phi), math.sin(phi)
    columns = int(half * abs(cos) + 1 - length * 2**-52)
    rows = int(half * sin + 1 - length * 2**-52)
    y, x = np.mgrid[rows : -rows - 1 : -1, -columns : columns + 1].astype(float)  # y points up
    along, across = x * cos + y * sin, y * cos - x * sin
    beyond = np.hypot(x, y) >= half
    distance = np.where(beyond, np.hypot(across, half - np.abs(along)), np.abs(across))
    weight = np.maximum(0.0, 1 - distance)
    if family != "fspecial" and angle % 180 != 90:
        weight = np.where(along >= 0, weight, 0.0)
    return normalised(weight)


def gaussian(size: int, sigma: float) -> Tensor:
    axis = np.arange(size) - (size - 1) / 2
    profile = np.exp(-(axis**2) / (2 * sigma**2))
    return normalised(np.outer(profile, profile))


def disk(radius: float, family: Family = "fspecial") -> Tensor:
    """How much of each pixel the disk covers; in the authors' families, whether the pixel's centre
    is covered.
    """
    reach = math.ceil(radius - 0.5) if family == "fspecial" else int(radius)
    axis = np.arange(-reach, reach + 1)
    if family != "fspecial":
        return normalised((np.hypot(*np.meshgrid(axis, axis)) <= radius).astype(float))
    # sample columns inside each pixel, area in closed form along rows
    fine = np.abs(axis[:, None] + (np.arange(256) + 0.5) / 256 - 0.5)
    edge = np.sqrt(np.maximum(0.0, radius**2 - fine**2))
    covered = np.clip(edge[None] - (np.abs(axis)[:, None, None] - 0.5), 0, 1)
    covered[reach] = np.minimum(1, 2 * edge)  # the middle row is cut from above and below
    return normalised(covered.mean(-1))


def shake(size: int, rng: np.random.Generator, family: Family = "fspecial") -> Tensor:
    """Camera shake on a `size` x `size` grid. A crop that leaves less than a fifth of the light is
    drawn again.
    """
    while True:
        path = _walk(200, rng)
        cells = size
        if family != "fspecial":
            cells = round(min(5 - math.log(rng.uniform(1e-12, 1)) / 0.15, 27))
            cells += 1 - cells % 2
        kernel = _trace(path, cells, family)
        pad = (size - cells) // 2
        kernel = np.pad(kernel, pad) if pad >= 0 else kernel[-pad:pad, -pad:pad]
        if kernel.sum() > 0.2:
            dark = family == "authors-dark"
            return torch.from_numpy(np.ascontiguousarray(kernel)) if dark else normalised(kernel)


def _walk(steps: int, rng: np.random.Generator) -> np.ndarray:
    """A point's path: a velocity that drifts less and less, turned by an orientation that drifts
    too. (2, steps)
    """
    velocity, turn, place = rng.standard_normal(3), np.zeros(3), np.zeros(3)
    path = np.zeros((3, steps))
    for t in range(1, steps):
        turn = turn + 2 * math.pi / steps * (rng.standard_normal(3) / (t + 1) + turn)
        velocity = velocity + rng.standard_normal(3) / (t + 1)
        place = place + _rotation(turn) @ velocity
        path[:, t] = place
    return path[:2]


def _rotation(angles: np.ndarray) -> np.ndarray:
    (a, b, c), (p, q, r) = np.cos(angles), np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, a, -p], [0, p, a]])
    about_y = np.array([[b, 0, q], [0, 1, 0], [-q, 0, b]])
    about_z = np.array([[c, -r, 0], [r, c, 0], [0, 0, 1]])
    return np.asarray(about_z @ about_y @ about_x)


def _trace(path: np.ndarray, cells: int, family: Family) -> np.ndarray:
    """How long the point stayed in each cell, smoothed a little. Like the authors' one, their last
    row and column stay empty.
    """
    low, high = path.min(1, keepdims=True), path.max(1, keepdims=True)
    spot = (path - low) / (high - low)
    kernel = np.zeros((cells, cells))
    if family != "fspecial":
        place = np.floor(spot * cells).astype(int)
        inside = (place < cells - 1).all(0)
        np.add.at(kernel, tuple(place[:, inside]), 1.0)
    # the longer side of the path spans the grid, its shape is kept, and the smoothing still fits
    else:
        span = (path - (low + high) / 2) / (high - low).max()
        place = np.round(span * (cells - 3) + (cells - 1) / 2).astype(int)
        np.add.at(kernel, tuple(place), 1.0)
    soft = gaussian(3, 1).numpy()
    padded = np.pad(kernel, 1)
    smooth = sum(
        soft[i, j] * padded[i : i + cells, j : j + cells] for i in range(3) for j in range(3)
    )
    return np.asarray(smooth / smooth.sum())


def normalised(kernel: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(kernel / kernel.sum()))


# what a person can say about a blur, by kind: the names of its numbers and the largest of each
SAID: dict[str, dict[str, float]] = {
    "motion": {"length": 200, "angle": 360},
    "defocus": {"radius": 100},
    "gaussian": {"sigma": 50},
}


def said_kernel(kind: str, **numbers: float) -> Tensor:
    """A kernel from a few numbers, in pixels and degrees: motion (length, angle anti-clockwise),
    defocus (radius) or gaussian (sigma).
    """
    if kind == "motion":
        return motion(numbers["length"], numbers["angle"])
    if kind == "defocus":
        return disk(max(numbers["radius"], 0.5))
    sigma = max(numbers["sigma"], 0.1)
    return gaussian(2 * math.ceil(3 * sigma) + 1, sigma)


def check_kernel(kernel: Tensor, whose: str, size: Sequence[int] | None = None) -> None:
    """Refuses what blurs nothing or cannot; `size`: of the image that it is to fit into."""
    if kernel.dim() != 2:
        raise DataError(
            f"the kernel of {whose} is not a matrix: its shape is {tuple(kernel.shape)}"
        )
    if not bool(torch.isfinite(kernel).all()):
        raise DataError(f"the kernel of {whose} holds NaN or infinite values")
    if float(kernel.min()) < 0:
        raise DataError(f"the kernel of {whose} has negative values: light does not subtract")
    if float(kernel.sum()) <= 0:
        raise DataError(f"the kernel of {whose} sums to zero")
    if size is not None and (kernel.shape[0] > size[0] or kernel.shape[1] > size[1]):
        raise DataError(
            f"the kernel of {whose} ({kernel.shape[0]} x {kernel.shape[1]}) is larger than the"
            f" image ({size[0]} x {size[1]})"
        )

"""t-SNE (van der Maaten & Hinton, 2008), exact: points of many dimensions laid out in the plane so
that neighbours stay neighbours. For pictures.

Eq. 1: p(j|i) is a Gaussian around i whose width gives every point the same perplexity. Eq. 4: q is
Student's t in the plane. Gradient descent on KL(P || Q), Eq. 5, with momentum, gains and early
exaggeration. Starts from the first two principal components, so that the same features give the
same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def tsne(x: Tensor, perplexity: float = 30.0, steps: int = 500) -> Tensor:
    """(N, D) -> (N, 2)."""
    x = x.double()
    n = len(x)
    if n < 4:
        raise ValueError(f"t-SNE needs a few points, not {n}")
    p = affinities(x, min(perplexity, (n - 1) / 3))
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    y = u[:, :2] * s[:2]
    y = y / y[:, 0].std().clamp_min(1e-12) * 1e-4
    speed, gain, rate = torch.zeros_like(y), torch.ones_like(y), max(50.0, n / 48)
    for k in range(steps):
        near = 1 / (1 + torch.cdist(y, y).square())
        near.fill_diagonal_(0)
        pull = (p * (12 if k < 250 else 1) - near / near.sum()) * near
        gradient = 4 * (pull.sum(1, keepdim=True) * y - pull @ y)
        gain = torch.where(gradient.sign() != speed.sign(), gain + 0.2, gain * 0.8).clamp_min(0.01)
        speed = (0.5 if k < 250 else 0.8) * speed - rate * gain * gradient
        y = y + speed
    centred: Tensor = (y - y.mean(0)).float()
    return centred


def affinities(x: Tensor, perplexity: float) -> Tensor:
    """Symmetric P; every row's width is found by bisection, all rows at once."""
    n = len(x)
    d = torch.cdist(x, x).square()
    d = d / d.mean().clamp_min(1e-12)
    low, high = torch.full((n, 1), 1e-6, dtype=x.dtype), torch.full((n, 1), 1e6, dtype=x.dtype)
    for _ in range(60):
        beta = (low * high).sqrt()
        rows, entropy = _rows(d, beta)
        wide = entropy[:, None] > math.log(perplexity)
        low, high = torch.where(wide, beta, low), torch.where(wide, high, beta)
    return (rows + rows.T) / (2 * n)


def _rows(d: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    away = torch.eye(len(d), dtype=torch.bool)
    rows = torch.softmax((-beta * d).masked_fill(away, -torch.inf), 1)
    return rows, -(rows * rows.clamp_min(1e-300).log()).sum(1)


GROUP_COLOURS = (
    (214, 69, 65),
    (46, 134, 193),
    (39, 174, 96),
    (243, 156, 18),
    (142, 68, 173),
    (44, 62, 80),
)


def scatter(points: Tensor, groups: Tensor, labels: Sequence[str], side: int = 480) -> Tensor:
    """A picture (3, side, side): one colour per group, the labels above."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    fine, top = 2 * side, 72  # drawn twice as large, so that dots come out round
    canvas = Image.new("RGB", (fine, fine), "white")
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(26)

    def dot(x: float, y: float, group: int) -> None:
        pen.ellipse([x - 7, y - 7, x + 7, y + 7], fill=GROUP_COLOURS[group % len(GROUP_COLOURS)])

    low, high = points.amin(0), points.amax(0)
    scale = (torch.tensor([fine - 48, fine - top - 48]) / (high - low).clamp_min(1e-9)).min()
    spots = (
        (points - (low + high) / 2) * scale + torch.tensor([fine / 2, (fine + top) / 2])
    ).tolist()
    for (x, y), group in zip(spots, groups.tolist(), strict=True):
        dot(x, y, group)
    at = 24.0
    for k, label in enumerate(labels):
        dot(at, 36, k)
        pen.text((at + 16, 36), label, fill="#333333", font=font, anchor="lm")
        at += 56 + pen.textlength(label, font=font)
    small = canvas.resize((side, side), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 255

from __future__ import annotations

import itertools
import math

import torch

from fedlens.models.iart import ImplicitWarp


def test_implicit_warp_by_definition() -> None:
    """Pixel by pixel: four corners around where the flow points, clamped to the picture; each is
    projected with its own position.
    """
    torch.manual_seed(0)
    warp = ImplicitWarp(8, 2)
    other, current, flow = (
        torch.randn(1, 8, 4, 5),
        torch.randn(1, 8, 4, 5),
        2 * torch.randn(1, 2, 4, 5),
    )
    found = warp(other, current, flow)

    def position(y: float, x: float) -> torch.Tensor:
        parts = []
        for angle in (y, x):
            for i in range(4):
                a = angle / 0.01 ** (2 * (i // 2) / 4)
                parts.append(math.cos(a) if i % 2 else math.sin(a))
        return torch.tensor(parts)

    full = 2 * math.pi
    for y, x in itertools.product(range(4), range(5)):
        py, px = y + float(flow[0, 1, y, x]), x + float(flow[0, 0, y, x])
        fy, fx = py - math.floor(py), px - math.floor(px)
        q = warp.q(
            current[0, :, y, x] + position(fy / (2 + 1e-6) * full, fx / (2 + 1e-6) * full)
        ).view(2, 4)
        tokens = []
        for dy, dx in itertools.product((0, 1), (0, 1)):
            cy, cx = min(max(math.floor(py) + dy, 0), 3), min(max(math.floor(px) + dx, 0), 4)
            tokens.append(
                other[0, :, cy, cx] + position(dy / (1 + 1e-6) * full, dx / (1 + 1e-6) * full)
            )
        corners = torch.stack(tokens)
        k, v = warp.k(corners).view(4, 2, 4), warp.v(corners).view(4, 2, 4)
        weights = (q * k).sum(-1).div(2).softmax(0)
        torch.testing.assert_close(
            found[0, :, y, x], (weights[..., None] * v).sum(0).flatten(), atol=1e-4, rtol=1e-4
        )

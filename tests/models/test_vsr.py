from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlens.data.video.degrade import enlarge
from fedlens.models.vsr import BidirectionalVSR, LightVSR, warp_inside


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("make", [LightVSR, BidirectionalVSR])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_shapes_size_and_start(make: type[nn.Module], scale: int) -> None:
    """Untrained, both are exactly bicubic enlargement; also for odd sizes and a single frame."""
    torch.manual_seed(0)
    model = make(scale=scale)
    assert 100_000 <= count(model) <= 300_000
    for shape in [(2, 3, 3, 9, 12), (1, 1, 3, 8, 8)]:
        x = torch.rand(shape)
        torch.testing.assert_close(model(x), enlarge(x, scale))


def test_every_parameter_learns() -> None:
    for make in (LightVSR, BidirectionalVSR):
        torch.manual_seed(0)
        model = make(scale=2, width=8, blocks=1)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        model(torch.rand(1, 3, 3, 16, 16)).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def reaches(model: nn.Module, frames: int = 5) -> torch.Tensor:
    """reaches[i, j]: does output frame i depend on input frame j?"""
    x = torch.rand(1, frames, 3, 8, 8)
    before = model(x)
    rows = []
    for j in range(frames):
        y = x.clone()
        y[:, j] += 0.3
        rows.append((model(y) - before).abs().amax((0, 2, 3, 4)) > 1e-6)
    return torch.stack(rows, 1)


def test_where_information_flows() -> None:
    """The light network looks one frame ahead and any number back; the bidirectional one sees the
    whole clip from every frame.
    """
    torch.manual_seed(0)
    light, both = LightVSR(2, 8, 1), BidirectionalVSR(2, 8, 1)
    for model in (light, both):
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
    seen = reaches(light)
    assert all(bool(seen[i, j]) == (j <= i + 1) for i in range(5) for j in range(5))
    assert bool(reaches(both).all())


def test_warp_by_whole_pixels() -> None:
    """A flow of (1, 2) fetches the pixel one column right and two rows down."""
    x = torch.rand(1, 1, 6, 7)
    flow = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 6, 7)
    torch.testing.assert_close(warp_inside(x, flow)[..., :4, :6], x[..., 2:, 1:], atol=1e-5, rtol=0)

"""VRT and RVRT at scale 1: deblurring, and denoising with a told strength."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlens.models import IART, RVRT, VRT
from fedlens.tasks.super_resolution import SuperResolution

# millions of parameters, as their papers report them
OFFICIAL: list[tuple[Any, dict[str, Any], float, str]] = [
    (VRT, {}, 18.3, "VRT, official configuration for restoring, x1"),
    (VRT, {"noise": 20.0}, 18.3, "VRT, official configuration for denoising, x1"),
    (RVRT, {}, 13.6, "RVRT, official configuration for restoring, x1"),
    (RVRT, {"noise": 20.0}, 12.8, "RVRT, official configuration for denoising, x1"),
]


@pytest.mark.parametrize(("make", "options", "millions", "words"), OFFICIAL)
def test_official_sizes_are_told_by_their_weights(
    make: Any, options: dict[str, Any], millions: float, words: str
) -> None:
    with torch.device("meta"):
        model = make(1, **options)
    state = model.state_dict()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    told = SuperResolution.arguments_from_weights(state, {})
    assert told == {"model": make.__name__.lower(), "scale": 1, "options": options}
    assert str(model.recognise(state)).startswith(words)


def small(make: Any, noise: float | None) -> nn.Module:
    torch.manual_seed(0)
    if make is VRT:
        sizes = {"depths": (1,) * 9, "dims": (24,) * 9, "heads": 2, "groups": 4, "alone": 1}
    else:
        sizes = {"counts": (1, 1, 1), "depth": 1, "dim": 24, "heads": 2, "groups": 4}
        sizes |= {"align_heads": 4, "hidden": 8}
    model: nn.Module = make(1, noise=noise, **sizes)
    return model.eval()


@pytest.mark.parametrize("make", [VRT, RVRT])
def test_the_size_stays_and_the_noise_is_heard(make: Any) -> None:
    """Also for sides that need padding."""
    x = torch.rand(1, 4, 3, 21, 30, generator=torch.Generator().manual_seed(0))
    blind, told = small(make, None), small(make, 20.0)
    with torch.no_grad():
        assert blind(x).shape == told(x).shape == x.shape
        quiet = told(x)
        told.noise = 50.0
        assert not torch.equal(told(x), quiet)


def test_others_do_not_restore() -> None:
    with pytest.raises(ValueError, match="IART enlarges by 2, 3 or 4, not by 1"):
        IART(1)

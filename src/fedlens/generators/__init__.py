"""Generators: what makes images of a class, behind one interface. Loaded on first use."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Gaussians": "gaussians",
    "ImageGenerator": "generator",
    "ReadyImages": "ready_images",
    "SmallDiffusion": "small_diffusion",
    "StableDiffusion": "stable_diffusion",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

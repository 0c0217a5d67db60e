"""Generators: what makes images of a class, behind one interface. Loaded on first use."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "Gaussians": "gaussians",
    "ImageGenerator": "generator",
    "ReadyImages": "ready_images",
    "SmallDiffusion": "small_diffusion",
    "StableDiffusion": "stable_diffusion",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)

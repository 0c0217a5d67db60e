"""Loaded on first use, so that `import fedlens` stays quick."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Cifar10": "cifar",
    "Cifar100": "cifar",
    "Clips": "clips",
    "CocoPose": "pose",
    "Csv": "folders",
    "HuggingFace": "folders",
    "ImageFolder": "folders",
    "Listed": "tensors",
    "Lspet": "pose",
    "MovingShapes": "videos",
    "MovingTextures": "clips",
    "Mpii": "pose",
    "Npz": "folders",
    "People": "pose",
    "Scene": "scene",
    "StickFigures": "pose",
    "Synthetic": "synthetic",
    "Tensors": "tensors",
    "TinyImageNet": "folders",
    "Videos": "videos",
}  # fmt: skip
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

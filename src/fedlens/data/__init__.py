"""Loaded on first use, so that `import fedlens` stays quick."""

from __future__ import annotations

from fedlens.lazy import lazily

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
    "MovingShapes": "moving_shapes",
    "MovingTextures": "moving_textures",
    "Mpii": "pose",
    "Npz": "folders",
    "People": "people",
    "Scene": "scene",
    "StickFigures": "stick_figures",
    "Synthetic": "synthetic",
    "Tensors": "tensors",
    "TinyImageNet": "folders",
    "Videos": "videos",
}  # fmt: skip
__all__ = list(_WHERE)
__getattr__ = lazily(__name__, _WHERE)

"""Where data comes from, by the name a recipe gives it; loaded on first use."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "Cifar10": "images.cifar",
    "Cifar100": "images.cifar",
    "Clips": "video.clips",
    "CocoPose": "pose.coco",
    "Csv": "images.folders",
    "FigureMasks": "images.masks",
    "HuggingFace": "images.folders",
    "ImageFolder": "images.folders",
    "Listed": "images.tensors",
    "Lspet": "pose.datasets",
    "MaskFolder": "images.masks",
    "Masked": "images.masks",
    "MovingShapes": "video.moving_shapes",
    "MovingTextures": "video.moving_textures",
    "Mpii": "pose.datasets",
    "Npz": "images.folders",
    "People": "pose.people",
    "StickFigures": "pose.stick_figures",
    "Synthetic": "images.synthetic",
    "Tensors": "images.tensors",
    "TinyImageNet": "images.folders",
    "TorchDatasets": "torch_datasets",
    "Videos": "video.videos",
    "WebDataset": "images.shards",
}  # fmt: skip
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)

"""Still images as tensors: (C, H, W) in [0, 255], from a file, from an array or from scikit-image. A 16-bit file is scaled to that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".npy")
SHIPPED = (
    "astronaut", "brick", "camera", "cat", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "moon", "page", "rocket", "text",
)  # fmt: skip


def read_image(path: Path, colour: str = "auto") -> Tensor:
    """colour: "grey" and "rgb" convert, "auto" leaves it as it is."""
    from PIL import Image, UnidentifiedImageError

    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as opened:
                keep = opened.mode in ("L", "RGB") or opened.mode.startswith("I")
                array = np.asarray(opened if keep else opened.convert("L" if opened.mode in ("1", "LA") else "RGB"))
    except FileNotFoundError as e:
        raise DataError(f"there is no image at {path}") from e
    except (OSError, ValueError, UnidentifiedImageError) as e:
        raise DataError(f"{path} is not an image that can be read: {e}") from e
    return _to_tensor(array, colour, str(path))


def shipped(name: str, colour: str) -> Tensor:
    """An image inside scikit-image; those that it would have to download are refused."""
    try:
        from skimage import data
    except ImportError as e:
        raise DataError("the shipped images come with scikit-image: pip install scikit-image, or give image=PATH") from e
    if name not in SHIPPED:
        raise DataError(f"there is no image {name!r}: give a path, or one of {', '.join(SHIPPED)}")
    try:
        return _to_tensor(getattr(data, name)(), colour, name)
    except DataError:
        raise
    except Exception as e:  # scikit-image tries to download what its wheel does not hold
        raise DataError(f"the image {name!r} is not in this installation of scikit-image: try camera or astronaut") from e


def _to_tensor(array: np.ndarray, colour: str, name: str) -> Tensor:
    scale = 255 / 65535 if array.dtype in (np.uint16, np.int32) else 1.0
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)) * scale
    if x.dim() == 3 and x.shape[-1] in (1, 3, 4):
        x = x[..., :3].movedim(-1, 0)
    elif x.dim() == 2:
        x = x[None]
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        raise DataError(f"{name} has the shape {tuple(array.shape)}, which is neither a grey nor an RGB image")
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{name} holds NaN or infinite pixels")
    if colour == "grey" and x.shape[0] == 3:
        x = (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    if colour == "rgb" and x.shape[0] == 1:
        x = x.expand(3, -1, -1)
    return x.contiguous()


def resize(x: Tensor, size: int) -> Tensor:
    """Bicubic with antialiasing, a channel at a time and without rounding, kept inside [0, 255]."""
    from PIL import Image

    planes = [np.asarray(Image.fromarray(p.numpy()).resize((size, size), Image.Resampling.BICUBIC)) for p in x]
    return torch.from_numpy(np.stack(planes)).clamp(0, 255)

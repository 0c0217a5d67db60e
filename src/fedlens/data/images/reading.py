"""Still images as tensors: (C, H, W) in [0, 255], from a file, from an array or from scikit-image.
A 16-bit file is scaled to that.

`opened` and `converted` are how every image file is read, whatever it is for. A telephone stores
pixels as its sensor lay and says in EXIF how to hold them; `converted` turns them as a viewer
would, unless somebody's annotations count the stored pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError
from fedlens.data.suffixes import HEIC_SUFFIXES, IMAGE_SUFFIXES

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# what `read_image` reads: images, and arrays, which hold pixels that were not rounded
READABLE = (*IMAGE_SUFFIXES, ".npy")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of pixels in [0, 1]
SHIPPED_IMAGES = (
    "astronaut",
    "brick",
    "camera",
    "cat",
    "chelsea",
    "clock",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "moon",
    "page",
    "rocket",
    "text",
)


@contextmanager
def opened(path: Path | IO[bytes]) -> Iterator[Picture]:
    """PIL's image. A file that claims to be larger than any picture is a broken one, so it raises
    what those raise.
    """
    from PIL import Image

    if isinstance(path, Path) and path.suffix.lower() in HEIC_SUFFIXES:
        _learn_heic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large, but not too large
        warnings.filterwarnings("ignore", ".*orrupt EXIF")  # the pixels are good all the same
        try:
            image = Image.open(path)
        except Image.DecompressionBombError as e:
            raise OSError(str(e).split(",")[0]) from e
    try:
        with image:
            yield image
    except SyntaxError as e:  # PIL's, of a PNG with a broken piece in its middle
        raise OSError(str(e)) from e


def _learn_heic() -> None:
    """What telephones save today; PIL needs a plug-in for it, which turns the pixels by itself."""
    try:
        import pillow_heif
    except ImportError as e:
        raise OSError("HEIC needs a package of its own: pip install pillow-heif") from e
    pillow_heif.register_heif_opener()


def orientation(picture: Picture) -> int:
    """EXIF's number, 1 (as stored) to 8. EXIF is often broken, and PIL then warns or stumbles; the
    pixels are good all the same.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = picture.getexif().get(0x0112, 1)
        except Exception:
            return 1
    return found if found in range(1, 9) else 1


def upright(picture: Picture) -> Picture:
    from PIL import Image

    picture.load()  # PIL turns a TIFF by itself when it is loaded, and forgets the tag
    ways = Image.Transpose
    how = (
        None,
        ways.FLIP_LEFT_RIGHT,
        ways.ROTATE_180,
        ways.FLIP_TOP_BOTTOM,
        ways.TRANSPOSE,
        ways.ROTATE_270,
        ways.TRANSVERSE,
        ways.ROTATE_90,
    )
    turn = how[orientation(picture) - 1]
    return picture if turn is None else picture.transpose(turn)


def upright_size(picture: Picture) -> tuple[int, int]:
    """(width, height) after `upright`, from the header alone wherever that can be."""
    if picture.format == "TIFF":  # versions of PIL differ in when they turn it
        picture.load()
    return picture.size[::-1] if orientation(picture) >= 5 else picture.size


def converted(picture: Picture, mode: str, turn: bool = True) -> Picture:
    """In another mode, and upright. PIL cuts levels off at 255, so 16 bits would be white; of
    floats nobody knows what is white.
    """
    from PIL import Image

    picture = upright(picture) if turn else picture
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers: save it with 8 or 16 bits")
    if picture.mode.startswith("I"):
        levels = np.asarray(picture).astype(np.float64) / 257
        picture = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return picture.convert(mode)


def read_image(path: Path, colour: str = "auto", said: list[str] | None = None) -> Tensor:
    """colour: "grey" and "rgb" convert, "auto" leaves it as it is. `said`: where to put what a user
    should know about how the file was read.
    """
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with opened(path) as image:
                keep = image.mode in ("L", "RGB", "F") or image.mode.startswith("I")
                array = np.asarray(
                    upright(image)
                    if keep
                    else converted(image, "L" if image.mode in ("1", "LA") else "RGB")
                )
    except FileNotFoundError as e:
        raise DataError(f"there is no image at {path}") from e
    except (OSError, ValueError) as e:
        raise DataError(f"{path} is not an image that can be read: {e}") from e
    if in_unit_range(array):
        array = array * 255.0
        if said is not None:
            said.append(f"{path.name} holds numbers from 0 to 1: they were multiplied by 255")
    return _to_tensor(array, colour, str(path))


def in_unit_range(array: np.ndarray) -> bool:
    """Whether these are floating-point pixels in [0, 1], noise beyond its ends allowed for. A
    picture in [0, 255] that is nowhere brighter than 2 shows nothing."""
    return array.dtype.kind == "f" and array.size > 0 and 0 < float(array.max()) <= 2


def shipped(name: str, colour: str) -> Tensor:
    """An image inside scikit-image; those that it would have to download are refused."""
    try:
        from skimage import data
    except ImportError as e:
        raise DataError(
            "the shipped images come with scikit-image: pip install scikit-image, or give"
            " image=PATH"
        ) from e
    if name not in SHIPPED_IMAGES:
        raise DataError(
            f"there is no image {name!r}: give a path, or one of {', '.join(SHIPPED_IMAGES)}"
        )
    try:
        return _to_tensor(getattr(data, name)(), colour, name)
    except DataError:
        raise
    except Exception as e:  # scikit-image tries to download what its wheel does not hold
        raise DataError(
            f"the image {name!r} is not in this installation of scikit-image: try camera or"
            " astronaut"
        ) from e


def _to_tensor(array: np.ndarray, colour: str, name: str) -> Tensor:
    scale = 255 / 65535 if array.dtype in (np.uint16, np.int32) else 1.0
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)) * scale
    if x.dim() == 3 and x.shape[-1] in (1, 3, 4):
        x = x[..., :3].movedim(-1, 0)
    elif x.dim() == 2:
        x = x[None]
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        raise DataError(
            f"{name} has the shape {tuple(array.shape)}, which is neither a grey nor an RGB image"
        )
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

    planes = [
        np.asarray(Image.fromarray(p.numpy()).resize((size, size), Image.Resampling.BICUBIC))
        for p in x
    ]
    return torch.from_numpy(np.stack(planes)).clamp(0, 255)

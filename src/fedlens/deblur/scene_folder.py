"""A folder of the user's own observations of one scene: what is read, and what is refused.

One sub-folder per client with observation.png|npy, kernel.npy|png|mat and, for a partial view,
position.json ({"top": .., "left": ..}, in pixels of the scene); at the top scene.json ({"height":
.., "width": ..}; without it every view is complete) and, where it is known, truth.png. Where there
is a sharp picture of the scene that every client may see, reference.png at the top, a client
without a kernel estimates it from that picture and its own photo.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlens.data.images.reading import read_image
from fedlens.data.source import DataError
from fedlens.deblur.blur import check_kernel
from fedlens.deblur.views import align_views, estimate_kernel

KERNELS = (".npy", ".png", ".mat")


@dataclass(frozen=True)
class OwnView:
    """One client's folder, as read. An empty kernel is yet to be estimated."""

    name: str
    pixels: Tensor
    kernel: Tensor
    place: tuple[int, int] | None


@dataclass(frozen=True)
class OwnScene:
    """Views that fit together, each with its kernel; the scene's height and width; and the truth,
    where it is known.
    """

    views: Sequence[OwnView]
    size: tuple[int, int]
    truth: Tensor | None


def read_scene(folder: Path, colour: str, align: bool, kernel_size: int) -> OwnScene:
    """`align`: bring the views into register first. `kernel_size`: of kernels that are
    estimated.
    """
    sharp = _read_if_there(folder / "reference.png", colour)
    views = [read_view(f, colour, sharp is not None) for f in client_folders(folder)]
    size = read_size(folder, views)
    _check_size(sharp, size, "reference.png")
    if align:
        first = [] if sharp is None else [sharp]
        registered = align_views([*first, *(v.pixels for v in views)])[len(first) :]
        views = [replace(v, pixels=x) for v, x in zip(views, registered, strict=True)]
    if sharp is not None:
        views = [_with_kernel(v, sharp, kernel_size) for v in views]
    if len({v.pixels.shape[0] for v in views}) > 1:
        raise DataError(
            f"{folder} mixes grey and colour observations: set colour=grey or colour=rgb"
        )
    for v in views:
        check_kernel(v.kernel, v.name, v.pixels.shape[-2:])
        check_place(v, size)
    check_overlap(views)
    truth = _read_if_there(folder / "truth.png", colour)
    _check_size(truth, size, "truth.png")
    return OwnScene(views, size, truth)


def client_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    found = sorted(
        p
        for p in folder.iterdir()
        if p.is_dir() and any((p / f"observation{s}").is_file() for s in (".png", ".npy"))
    )
    if not found:
        raise DataError(f"{folder} has no sub-folder with an observation.png or observation.npy")
    return found


def read_view(folder: Path, colour: str, estimated: bool = False) -> OwnView:
    """`estimated`: a missing kernel is no error."""
    png = folder / "observation.png"
    pixels = read_image(png if png.is_file() else folder / "observation.npy", colour)
    place = None
    if (spot := folder / "position.json").is_file():
        try:
            position = json.loads(spot.read_text())
            place = int(position["top"]), int(position["left"])
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f'{spot} should read {{"top": .., "left": ..}}') from e
    missing = estimated and not any((folder / f"kernel{s}").is_file() for s in KERNELS)
    return OwnView(
        folder.name, pixels, torch.empty(0, 0) if missing else read_kernel(folder), place
    )


def read_kernel(folder: Path) -> Tensor:
    """kernel.npy, kernel.png or kernel.mat, scaled to sum 1."""
    found = [folder / f"kernel{s}" for s in KERNELS if (folder / f"kernel{s}").is_file()]
    if not found:
        raise DataError(
            f"{folder} has no kernel.npy, kernel.png or kernel.mat, and there is no sharp"
            " reference.png to estimate it from"
        )
    path = found[0]
    if path.suffix == ".mat":
        kernel = _read_mat(path)
    elif path.suffix == ".png":
        kernel = read_image(path, "grey")[0].double()
    else:
        try:
            kernel = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float64))
        except (OSError, ValueError, TypeError, EOFError) as e:
            raise DataError(f"{path} is not an array of numbers that numpy can read") from e
    check_kernel(kernel, folder.name)
    return kernel / kernel.sum()


def _read_mat(path: Path) -> Tensor:
    """The first matrix of a MATLAB file, old format or HDF5 (which is stored transposed)."""
    try:
        from scipy.io import loadmat

        arrays = [v for k, v in loadmat(path).items() if not k.startswith("__")]
    except NotImplementedError:
        try:
            import h5py
        except ImportError as e:
            raise DataError(
                f'{path} is a MATLAB 7.3 file: pip install "fedlens[deblur]" reads it'
            ) from e
        with h5py.File(path) as f:
            arrays = [np.asarray(v).T for v in f.values() if getattr(v, "ndim", 0) == 2]
    matrices = [
        a for a in arrays if getattr(a, "ndim", 0) == 2 and np.issubdtype(a.dtype, np.number)
    ]
    if not matrices:
        raise DataError(f"{path} holds no matrix")
    return torch.from_numpy(np.ascontiguousarray(matrices[0], dtype=np.float64))


def read_size(folder: Path, views: Sequence[OwnView]) -> tuple[int, int]:
    if (file := folder / "scene.json").is_file():
        try:
            size = json.loads(file.read_text())
            height, width = int(size["height"]), int(size["width"])
            if min(height, width) < 1:
                raise ValueError
            return height, width
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f'{file} should read {{"height": .., "width": ..}}') from e
    if any(v.place for v in views):
        raise DataError(
            f"{folder} has views with a position but no scene.json with the scene's height and"
            " width"
        )
    first = views[0]
    for v in views[1:]:
        if v.pixels.shape[-2:] != first.pixels.shape[-2:]:
            raise DataError(
                f"the observations differ in size: {first.name} is {_size_text(first.pixels)},"
                f" {v.name} is {_size_text(v.pixels)}"
            )
    return int(first.pixels.shape[-2]), int(first.pixels.shape[-1])


def _read_if_there(path: Path, colour: str) -> Tensor | None:
    return read_image(path, colour) if path.is_file() else None


def _with_kernel(v: OwnView, sharp: Tensor, size: int) -> OwnView:
    if v.kernel.numel():
        return v
    check_place(v, (int(sharp.shape[-2]), int(sharp.shape[-1])))
    top, left = v.place or (0, 0)
    same = sharp[..., top : top + v.pixels.shape[-2], left : left + v.pixels.shape[-1]]
    return replace(v, kernel=estimate_kernel(v.pixels, same, size, v.name))


def _check_size(image: Tensor | None, size: tuple[int, int], name: str) -> None:
    if image is not None and tuple(image.shape[-2:]) != size:
        raise DataError(f"{name} is {_size_text(image)}, the scene is {size[0]} x {size[1]}")


def check_place(v: OwnView, size: tuple[int, int]) -> None:
    if v.place is None:
        if tuple(v.pixels.shape[-2:]) != size:
            raise DataError(
                f"{v.name} has no position.json, so it should be {size[0]} x {size[1]} like the"
                f" scene, not {_size_text(v.pixels)}"
            )
        return
    top, left = v.place
    if (
        top < 0
        or left < 0
        or top + v.pixels.shape[-2] > size[0]
        or left + v.pixels.shape[-1] > size[1]
    ):
        raise DataError(
            f"the view of {v.name} ({_size_text(v.pixels)} at {top}, {left}) reaches outside the"
            f" scene of {size[0]} x {size[1]}"
        )


def check_overlap(views: Sequence[OwnView]) -> None:
    """A view that meets no other one has nothing to agree on."""
    boxes = [
        (*v.place, v.place[0] + v.pixels.shape[-2], v.place[1] + v.pixels.shape[-1])
        for v in views
        if v.place
    ]
    if len(boxes) < len(views) or len(views) < 2:
        return  # a complete view meets them all
    for v, a in zip(views, boxes, strict=True):
        if not any(
            b is not a and a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
            for b in boxes
        ):
            raise DataError(
                f"the view of {v.name} overlaps no other view, so there is nothing to agree on"
            )


def _size_text(x: Tensor) -> str:
    return f"{x.shape[-2]} x {x.shape[-1]}"

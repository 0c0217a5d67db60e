"""A folder of the user's own observations of one scene: what is read, and what is refused.

One sub-folder per client with observation.* (any image that can be read: a telephone's JPEG, TIFF,
HEIC with pillow-heif, or .npy), the kernel and, for a partial view, position.json ({"top": ..,
"left": ..}, in pixels of the scene); at the top scene.json ({"height": .., "width": ..}; without it
every view is complete) and, where it is known, truth.png.

A kernel, or a grid of them, is a file (`kernel_files.py`). A client without one estimates it: from
reference.png at the top, a sharp picture of the scene that every client may see, where there is
one, else from its own photo alone (`blind.py`).

`align`: the views are brought into register with reference.png, else with the anchor (`views.py`).
What does not fit is left out: it stays in the federation with a confidence of 0 everywhere, so that
nobody but its owner learns of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedlens.data.images.reading import READABLE, read_image
from fedlens.data.source import DataError
from fedlens.data.suffixes import HEIC_SUFFIXES
from fedlens.deblur.blind import blind_kernel
from fedlens.deblur.blind_check import doubt
from fedlens.deblur.blur import check_kernel
from fedlens.deblur.kernel_files import read_kernel
from fedlens.deblur.kernel_fit import estimate_kernel
from fedlens.deblur.noise_level import noise_level
from fedlens.deblur.views import LEAST_LIKENESS, as_anchor, expected_error, register

PHOTO_SUFFIXES = (*READABLE, *HEIC_SUFFIXES)


@dataclass(frozen=True)
class OwnView:
    """One client's folder, as read.

    Args:
        kernel: an empty one is yet to be estimated; of a grid, the mean.
        place: top and left of a partial view.
        noise: of the photo as it was taken, in grey levels.
        confidence: (h, w) in [0, 1]: how much each pixel counts; None: 1.
        grid: (rows, columns, k, k): the kernels of a blur that differs across the photo.
    """

    name: str
    pixels: Tensor
    kernel: Tensor
    place: tuple[int, int] | None
    noise: float
    confidence: Tensor | None = None
    grid: Tensor | None = None


@dataclass(frozen=True)
class OwnScene:
    """Views that fit together, each with its kernel; the scene's height and width; the truth, where
    it is known; and what its owner should know about how all this was read.
    """

    views: Sequence[OwnView]
    size: tuple[int, int]
    truth: Tensor | None
    notes: Sequence[str] = ()


def read_scene(
    folder: Path, colour: str, align: bool, kernel_size: int, anchor: str | None = None
) -> OwnScene:
    """`align`: bring the views into register first, with the one that is called `anchor`.
    `kernel_size`: of kernels that are estimated.
    """
    notes: list[str] = []
    sharp = _read_if_there(folder, "reference", colour, notes)
    truth = _read_if_there(folder, "truth", colour, notes)
    views = [read_view(f, colour, notes) for f in client_folders(folder)]
    if len({v.pixels.shape[0] for v in views}) > 1:
        raise DataError(
            f"{folder} mixes grey and colour observations: set colour=grey or colour=rgb"
        )
    if sharp is None:
        views = [_found_alone(v, kernel_size, notes) for v in views]
    if align:
        views = align_views(views, sharp, anchor, truth is not None, kernel_size, notes)
        size = int(views[0].pixels.shape[-2]), int(views[0].pixels.shape[-1])
    else:
        size = read_size(folder, views)
        _check_size(sharp, size, "reference.png")
        if sharp is not None:
            views = [_with_kernel(v, sharp, kernel_size) for v in views]
    for v in views:
        check_kernel(v.kernel, v.name, v.pixels.shape[-2:])
        check_place(v, size)
    check_overlap(views)
    _check_size(truth, size, "truth.png")
    return OwnScene(weighted_by_noise(views), size, truth, notes)


def align_views(
    views: Sequence[OwnView],
    sharp: Tensor | None,
    anchor: str | None,
    has_truth: bool,
    kernel_size: int,
    notes: list[str],
) -> list[OwnView]:
    """The views on the grid of the reference, else of the anchor: the one that was named, the first
    one where there is a truth (which shows what that one shows), else the one that its blur and
    noise hurt least."""
    if any(v.place for v in views):
        raise DataError("align=true finds out where views lie: leave position.json out, or align")
    for v in views:
        if v.grid is not None:
            raise DataError(
                f"{v.name} has a grid of kernels: align=true turns a view's kernel with it, and can"
                " turn only one"
            )
    if sharp is not None:
        like, still, kernel = "reference.png", sharp, torch.ones(1, 1, dtype=torch.float64)
    else:
        chosen = _find_anchor(views, anchor, has_truth)
        like, still, kernel = chosen.name, chosen.pixels, chosen.kernel
        notes.append(f"the views were aligned with {like}")
    out, dropped = [], []
    for v in views:
        if sharp is None and v.name == like:
            found = as_anchor(v.pixels, v.kernel)
        else:
            estimate = partial(estimate_kernel, sharp=still, size=kernel_size, whose=v.name)
            found = register(v.pixels, v.kernel, still, kernel, estimate)
        if not found.fits:
            dropped.append(v.name)
            notes.append(
                f"view {v.name} does not fit and was left out: its details have a correlation of"
                f" {found.likeness:.2f} with those of {like}, below {LEAST_LIKENESS}"
            )
        elif float(found.confidence.mean()) < 0.1:
            notes.append(
                f"view {v.name} hardly counts: it shows what {like} shows in"
                f" {100 * float(found.confidence.mean()):.0f} % of the picture"
            )
        out.append(
            replace(v, pixels=found.pixels, kernel=found.kernel, confidence=found.confidence)
        )
    if len(dropped) == len(views) - (sharp is None) and len(views) > 1:
        raise DataError(f"no view fits {like}: there is nothing to restore together")
    return out


def _find_anchor(views: Sequence[OwnView], name: str | None, has_truth: bool) -> OwnView:
    if name is not None:
        named = [v for v in views if v.name == name]
        if not named:
            there = ", ".join(v.name for v in views)
            raise DataError(f"anchor={name} is none of the views: {there}")
        return named[0]
    if has_truth:
        return views[0]
    return min(views, key=lambda v: expected_error(v.kernel, v.noise))


def weighted_by_noise(views: Sequence[OwnView]) -> list[OwnView]:
    """A photo with twice the noise of the best one counts a quarter. Levels that are about the same
    stay the same: an estimate is not that exact."""
    best = min(v.noise for v in views)
    out = []
    for v in views:
        share = (best / v.noise) ** 2
        if share < 0.5:
            whole = torch.ones(v.pixels.shape[-2:]) if v.confidence is None else v.confidence
            v = replace(v, confidence=whole * share)
        out.append(v)
    return out


def client_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    found = sorted(
        p for p in folder.iterdir() if p.is_dir() and photo_of(p, "observation") is not None
    )
    if not found:
        raise DataError(
            f"{folder} has no sub-folder with an observation (observation.jpg, .png, .tif, .npy)"
        )
    return found


def photo_of(folder: Path, stem: str) -> Path | None:
    """The one image of this name, whatever its kind; capitals in the suffix do not matter."""
    found = sorted(
        p
        for p in folder.iterdir()
        if p.stem == stem and p.suffix.lower() in PHOTO_SUFFIXES and p.is_file()
    )
    if len(found) > 1:
        raise DataError(f"{folder} has both {found[0].name} and {found[1].name}: leave one")
    return found[0] if found else None


def read_view(folder: Path, colour: str, notes: list[str]) -> OwnView:
    photo = photo_of(folder, "observation")
    assert photo is not None  # or it would be no client's folder
    said: list[str] = []
    pixels = read_image(photo, colour, said)
    notes += [f"{folder.name}/{line}" for line in said]
    place = None
    if (spot := folder / "position.json").is_file():
        try:
            position = json.loads(spot.read_text())
            place = int(position["top"]), int(position["left"])
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f'{spot} should read {{"top": .., "left": ..}}') from e
    kernel = read_kernel(folder)
    view = OwnView(folder.name, pixels, kernel, place, noise_level(pixels))
    return _with_grid(view, kernel) if kernel.dim() == 4 else view


def _with_grid(v: OwnView, grid: Tensor) -> OwnView:
    rows, columns = grid.shape[:2]
    if rows > v.pixels.shape[-2] or columns > v.pixels.shape[-1]:
        raise DataError(
            f"the grid of {v.name} has {rows} x {columns} kernels, but its photo only"
            f" {_size_text(v.pixels)} pixels"
        )
    return replace(v, kernel=grid.mean((0, 1)), grid=grid)


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


def _read_if_there(folder: Path, stem: str, colour: str, notes: list[str]) -> Tensor | None:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    path = photo_of(folder, stem)
    return None if path is None else read_image(path, colour, notes)


def _with_kernel(v: OwnView, sharp: Tensor, size: int) -> OwnView:
    if v.kernel.numel():
        return v
    check_place(v, (int(sharp.shape[-2]), int(sharp.shape[-1])))
    top, left = v.place or (0, 0)
    same = sharp[..., top : top + v.pixels.shape[-2], left : left + v.pixels.shape[-1]]
    return replace(v, kernel=estimate_kernel(v.pixels, same, size, v.name))


def _found_alone(v: OwnView, size: int, notes: list[str]) -> OwnView:
    if v.kernel.numel():
        return v
    notes.append(f"the kernel of {v.name} was estimated from its own photo alone")
    kernel = blind_kernel(v.pixels, size, v.name)
    if why := doubt(v.pixels, kernel):
        notes.append(
            f"WARNING: the kernel found in the photo of {v.name} is probably wrong: {why}. Give"
            f" {v.name}/kernel.json, a sharp reference.png or another kernel_size, or leave"
            f" {v.name} out"
        )
    return replace(v, kernel=kernel)


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

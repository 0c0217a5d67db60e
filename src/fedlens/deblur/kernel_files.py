"""The kernel in a client's folder, as it was written down: one for the photo, or a grid of them for
a blur that differs across it.

kernel.npy|png|mat, or kernel.json with a few numbers: {"motion": {"length": 15, "angle": 30}},
{"defocus": {"radius": 4}} or {"gaussian": {"sigma": 2}}.

A grid lies over the photo, its rows from top to bottom, and each kernel is that of the middle of
its cell (`varying.py`). It is kernel.npy with four axes (rows, columns, height and width of a
kernel); kernel.json with a list of rows of such numbers; or a file a place, kernel_0_0.png,
kernel_0_1.json, ..., of any kind each: row and column, counted from 0.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.data.images.reading import read_image
from fedlens.data.source import DataError
from fedlens.deblur.blur import SAID, check_kernel, said_kernel
from fedlens.deblur.varying import one_size

KERNELS = (".npy", ".png", ".mat", ".json")
NO_KERNEL = torch.empty(0, 0, dtype=torch.float64)
_PLACE = re.compile(r"kernel_(\d{1,3})_(\d{1,3})")


def read_kernel(folder: Path) -> Tensor:
    """The kernel, (k, k), or the grid, (rows, columns, k, k), each scaled to sum 1; empty where
    there is none."""
    whole = [folder / f"kernel{s}" for s in KERNELS if (folder / f"kernel{s}").is_file()]
    placed = sorted(p for p in folder.iterdir() if p.suffix in KERNELS and _PLACE.fullmatch(p.stem))
    if len(whole) > 1:
        raise DataError(f"{folder} has both {whole[0].name} and {whole[1].name}: leave one")
    if whole and placed:
        raise DataError(
            f"{folder} has both {whole[0].name} and {placed[0].name}: leave the one kernel or the"
            " grid"
        )
    if placed:
        return _read_placed(folder, placed)
    if not whole:
        return NO_KERNEL
    kernel = _read_file(whole[0])
    if kernel.dim() != 4:
        return _checked(kernel, folder.name)
    if 0 in kernel.shape:
        raise DataError(f"{whole[0]} is a grid without kernels: its shape is {tuple(kernel.shape)}")
    return _grid(folder, [list(row) for row in kernel])


def _read_placed(folder: Path, files: list[Path]) -> Tensor:
    """kernel_0_0.png and its neighbours, none missing."""
    found: dict[tuple[int, int], Path] = {}
    for path in files:
        match = _PLACE.fullmatch(path.stem)
        assert match is not None
        place = int(match[1]), int(match[2])
        if place in found:
            raise DataError(f"{folder} has both {found[place].name} and {path.name}: leave one")
        found[place] = path
    rows, columns = (1 + max(place[axis] for place in found) for axis in (0, 1))
    for r in range(rows):
        for c in range(columns):
            if (r, c) not in found:
                raise DataError(
                    f"{folder} has a grid of {rows} x {columns} kernels without kernel_{r}_{c}"
                )
    return _grid(folder, [[_read_file(found[r, c]) for c in range(columns)] for r in range(rows)])


def _grid(folder: Path, kernels: list[list[Tensor]]) -> Tensor:
    return one_size(
        [
            [_checked(k, f"{folder.name} at row {r}, column {c}") for c, k in enumerate(row)]
            for r, row in enumerate(kernels)
        ]
    )


def _checked(kernel: Tensor, whose: str) -> Tensor:
    check_kernel(kernel, whose)
    return kernel / kernel.sum()


def _read_file(path: Path) -> Tensor:
    if path.suffix == ".json":
        return _read_said(path)
    if path.suffix == ".mat":
        return _read_mat(path)
    if path.suffix == ".png":
        return read_image(path, "grey")[0].double()
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float64))
    except (OSError, ValueError, TypeError, EOFError) as e:
        raise DataError(f"{path} is not an array of numbers that numpy can read") from e


def _read_said(path: Path) -> Tensor:
    """{"motion": {"length": 15, "angle": 30}} and the like, or a list of rows of them."""
    try:
        said = json.loads(path.read_text())
    except ValueError as e:
        raise DataError(f"{path} should read {_ways()}") from e
    if not isinstance(said, list):
        return _from_numbers(said, str(path))
    if not said or not all(isinstance(row, list) and row for row in said):
        raise DataError(f"{path} should read {_ways()}, or be a list of rows of these")
    if len({len(row) for row in said}) > 1:
        counts = ", ".join(str(len(row)) for row in said)
        raise DataError(f"the rows of {path} differ in length: {counts}")
    return one_size(
        [
            [_from_numbers(one, f"row {r}, column {c} of {path}") for c, one in enumerate(row)]
            for r, row in enumerate(said)
        ]
    )


def _ways() -> str:
    return " or ".join(f'{{"{kind}": {{{", ".join(SAID[kind])}}}}}' for kind in SAID)


def _from_numbers(entry: Any, where: str) -> Tensor:
    try:
        ((kind, said),) = entry.items()
        numbers = {name: float(said[name]) for name in SAID[kind]}
        known = set(said) == set(SAID[kind])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{where} should read {_ways()}") from e
    for name, most in SAID[kind].items():
        if not known or not 0 <= numbers[name] <= most:
            raise DataError(f"{where} should read {_ways()}, {name} from 0 to {most:g}")
    return said_kernel(kind, **numbers)


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

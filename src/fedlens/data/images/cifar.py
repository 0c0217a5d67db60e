"""CIFAR-10 and CIFAR-100 in the layouts people have: the official binary and python archives, and
folders of images.

The python layout is a pickle; it is read with an unpickler that knows numpy arrays and nothing
else.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedlens.data.images.labelled import (
    Collection,
    Labelled,
    LabelledSource,
    Reader,
    listing,
)
from fedlens.data.paths import class_folders, locate
from fedlens.data.source import DataError

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


ADVICE = "; download=true fetches it"


@dataclass
class _Cifar(LabelledSource):
    """
    Args:
        root: the folder that holds the archive's folder, or that folder itself, or one with train/
            and test/ class folders.
        download: let torchvision fetch it into root where it is missing.
    """

    root: str = ""
    download: bool = False

    names: ClassVar[tuple[str, ...]]
    # folder, train files, test file, label bytes (the last one counts)
    binary: ClassVar[tuple[str, tuple[str, ...], str, int]]
    # folder, train files, test file, key of the labels
    python: ClassVar[tuple[str, tuple[str, ...], str, bytes]]
    torchvision: ClassVar[str]

    def read(self, seed: int) -> Collection:
        root = self._place()
        for place in (root, root / "jpg", root / self.binary[0], root / self.python[0]):
            if (place / self.binary[1][0]).is_file():
                return self._binary(place)
            if (place / self.python[1][0]).is_file():
                return self._python(place)
            if (place / "train").is_dir() and (place / "test").is_dir():
                return self._folders(place)
        if self.download:
            return self._fetched(root)
        raise DataError(
            f"{root} holds no {type(self).__name__}: neither {self.binary[0]}, {self.python[0]} nor"
            f" train/ and test/ folders{ADVICE}"
        )

    def _place(self) -> Path:
        if self.download:
            return Path(self.root).expanduser()
        try:
            return locate(self.root, f"{type(self).__name__} folder", "data.root")
        except DataError as e:
            raise DataError(f"{e}{ADVICE}") from None

    def _binary(self, place: Path) -> Collection:
        _, train, test, wide = self.binary

        def one(names: tuple[str, ...]) -> Labelled:
            rows = []
            for name in names:
                raw = np.fromfile(_there(place / name), dtype=np.uint8)
                if not len(raw) or len(raw) % (wide + 3072):
                    raise DataError(
                        f"{place / name} is damaged: {len(raw)} bytes are not a whole number of"
                        " images"
                    )
                rows.append(raw.reshape(-1, wide + 3072))
            table = np.concatenate(rows)
            return self._labelled(table[:, wide:], table[:, wide - 1])

        names = [
            place / n for n in ("batches.meta.txt", "fine_label_names.txt") if (place / n).is_file()
        ]
        classes = tuple(names[0].read_text().split()) if names else self.names
        return Collection(one(train), one((test,)), classes)

    def _python(self, place: Path) -> Collection:
        _, train, test, key = self.python

        def one(names: tuple[str, ...]) -> Labelled:
            found = [_unpickle(_there(place / n)) for n in names]
            return self._labelled(
                np.concatenate([f[b"data"] for f in found]),
                np.concatenate([np.asarray(f[key]) for f in found]),
            )

        return Collection(one(train), one((test,)), self.names)

    def _labelled(self, pixels: Any, labels: Any) -> Labelled:
        y = torch.from_numpy(np.asarray(labels).astype(np.int64))
        if int(y.max()) >= len(self.names):
            raise DataError(
                f"label {int(y.max())} is out of range for {len(self.names)} classes: is this"
                f" really {type(self).__name__}?"
            )
        return Labelled(torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32)), y)

    def _folders(self, place: Path) -> Collection:
        names = [p.name for p in class_folders(place / "train")]
        reader = Reader(32)
        return Collection(
            reader.read(listing(place / "train", names)),
            reader.read(listing(place / "test", names)),
            names,
            reader.skipped,
        )

    def _fetched(self, root: Path) -> Collection:
        from torchvision import datasets

        try:
            getattr(datasets, self.torchvision)(root, download=True)
        except (OSError, RuntimeError) as e:
            raise DataError(f"{type(self).__name__} could not be downloaded: {e}") from None
        return self._python(root / self.python[0])


def _there(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path} is missing")
    return path


class _Arrays(pickle.Unpickler):
    """Plain containers and numpy arrays only: a pickle could otherwise run anything."""

    allowed: ClassVar[set[tuple[str, str]]] = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        ("numpy.core.numeric", "_frombuffer"),
        ("numpy._core.numeric", "_frombuffer"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise DataError(
                f"a CIFAR file asks for {module}.{name}: it is not what it claims to be"
            )
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickle(path: Path) -> dict[bytes, Any]:
    with path.open("rb") as file:
        try:
            found: dict[bytes, Any] = _Arrays(file, encoding="bytes").load()
        except (
            pickle.UnpicklingError,
            EOFError,
            IndexError,
            KeyError,
            AttributeError,
            TypeError,
        ) as e:
            raise DataError(f"{path} is damaged: {e}") from None
    if not isinstance(found, dict) or b"data" not in found:
        raise DataError(f"{path} is not a CIFAR batch")
    return found


@dataclass
class Cifar10(_Cifar):
    """CIFAR-10.

    Args:
        root: the archive's folder, its parent, or train/ and test/ class folders.
        download: fetch it into root.
    """

    root: str = "cifar10"
    names: ClassVar[tuple[str, ...]] = CIFAR10_CLASSES
    binary: ClassVar[Any] = (
        "cifar-10-batches-bin",
        tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
        "test_batch.bin",
        1,
    )
    python: ClassVar[Any] = (
        "cifar-10-batches-py",
        tuple(f"data_batch_{k}" for k in range(1, 6)),
        "test_batch",
        b"labels",
    )
    torchvision: ClassVar[str] = "CIFAR10"


@dataclass
class Cifar100(_Cifar):
    """CIFAR-100 with its 100 fine labels.

    Args:
        root: the archive's folder, its parent, or train/ and test/ class folders.
        download: fetch it into root.
    """

    root: str = "cifar100"
    names: ClassVar[tuple[str, ...]] = tuple(f"class {k}" for k in range(100))
    binary: ClassVar[Any] = ("cifar-100-binary", ("train.bin",), "test.bin", 2)
    python: ClassVar[Any] = ("cifar-100-python", ("train",), "test", b"fine_labels")
    torchvision: ClassVar[str] = "CIFAR100"

"""The interface of all generators, and the disk that remembers what they made.

`generate(label, n, rng)` gives n images of a class. `bind` binds a generator to the names of the
classes and the shape of the images it has to make, and refuses what cannot work before any client
starts. `ImageStore` keeps what a client made: the images depend on the generator, the seed, the
client and how many are wanted of each class, so the same run a second time reads them and makes
none.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from fedlens.core.client import generator as stream
from fedlens.core.client import seeded
from fedlens.core.files import home_folder, write_atomically
from fedlens.core.limits import Limited
from fedlens.core.message import BadMessage, Message
from fedlens.data.source import DataError


class ImageGenerator(metaclass=Limited):
    """Makes images of a class. Subclasses are dataclasses: their arguments are the recipe's table
    and part of their identity.
    """

    @abstractmethod
    def generate(self, label: int, n: int, rng: Generator) -> Tensor:
        """n images of the class, (n, C, H, W): uint8, or floats in [0, 1]. The same rng gives the
        same images.
        """

    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        """This generator for these classes, in this order, and images of this shape. Raises a
        DataError where it cannot do it.
        """
        return self

    def identity(self) -> str:
        """What its images depend on: its class and arguments, and the files behind them
        (`sources`), looked at once.
        """
        if "_identity" not in self.__dict__:
            self.__dict__["_identity"] = self._identify()
        found: str = self.__dict__["_identity"]
        return found

    def _identify(self) -> str:
        assert is_dataclass(self)
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        words = [
            f"{k}={v.identity() if isinstance(v, ImageGenerator) else v!r}"
            for k, v in given.items()
        ]
        return hashlib.sha256(
            "\n".join([type(self).__name__, *words, *self.sources()]).encode()
        ).hexdigest()[:16]

    def sources(self) -> Iterable[str]:
        """Lines that change when the files behind this generator do."""
        return ()


def file_stamps(files: Iterable[Path]) -> list[str]:
    """Names, sizes and times of change: quick, and any change of a file shows."""
    return [f"{p.name} {(s := p.stat()).st_size} {s.st_mtime_ns}" for p in files]


def match_classes(classes: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    """For every class the place of its name among `known`. Names of another kind altogether (wnids
    beside words) go by their order.
    """
    if not set(classes) & set(known):
        if len(classes) > len(known):
            raise DataError(f"{what} knows {len(known)} classes, but {len(classes)} are asked for")
        return list(range(len(classes)))
    if missing := [c for c in classes if c not in known]:
        raise DataError(
            f"{what} has nothing for class {missing[0]!r} ({len(known)} of {len(classes)} classes"
            " are there)"
        )
    return [list(known).index(c) for c in classes]


def check_label(label: int, classes: int, what: str) -> None:
    if not 0 <= label < classes:
        raise DataError(f"{what} knows {classes} classes, so it cannot make class {label}")


def check_images(
    made: Tensor, n: int, shape: Sequence[int], generator: ImageGenerator, label: int
) -> Tensor:
    """What a generator gave, or an error message about what is wrong with it."""
    name = type(generator).__name__
    if len(made) != n:
        raise DataError(f"{name} made {len(made)} images of class {label} where {n} were asked for")
    if tuple(made.shape[1:]) != tuple(shape):
        raise DataError(
            f"{name} makes images of {describe_shape(made.shape[1:])}, but the clients' are"
            f" {describe_shape(shape)}"
        )
    return made


def describe_shape(shape: Sequence[int]) -> str:
    return (
        f"{shape[2]}x{shape[1]} with {shape[0]} channels"
        if len(shape) == 3
        else f"shape {tuple(shape)}"
    )


@dataclass(frozen=True)
class ImageStore:
    """Images that clients made, a file for each client. folder: where; None makes them anew every
    time.
    """

    folder: Path | None

    def images(
        self,
        generator: ImageGenerator,
        wanted: Mapping[int, int],
        shape: Sequence[int],
        seed: int,
        client: int,
    ) -> tuple[dict[int, Tensor], int]:
        """`wanted[label]` images of every class, and how many had to be made just now."""
        wanted = {label: n for label, n in sorted(wanted.items()) if n > 0}
        if not wanted:
            return {}, 0
        path = self._path(generator, wanted, seed, client)
        if path is not None and (found := _read(path, wanted, shape)) is not None:
            return found, 0
        made = {}
        # Hidden random state is put back, so that a run that makes its images and one that finds
        # them go on alike.
        with seeded(stream(seed, client, 0xF11)), torch.no_grad():
            for label, n in wanted.items():
                some = generator.generate(label, n, stream(seed, client, label, 0xF1))
                made[label] = _as_bytes(check_images(some, n, shape, generator, label))
        if path is not None:
            _write(path, made)
        return made, sum(wanted.values())

    def _path(
        self, generator: ImageGenerator, wanted: Mapping[int, int], seed: int, client: int
    ) -> Path | None:
        if self.folder is None:
            return None
        plan = hashlib.sha256(repr(sorted(wanted.items())).encode()).hexdigest()[:12]
        return (
            self.folder
            / generator.identity()
            / f"seed-{seed}"
            / f"client-{client}-{plan}.safetensors"
        )


def open_store(cache: str) -> ImageStore:
    """Where made images are kept: nowhere (""), in FEDLENS_HOME or ~/.fedlens ("auto"), or in the
    folder that is named."""
    if not cache:
        return ImageStore(None)
    home = home_folder()
    return ImageStore(home / "generated" if cache == "auto" else Path(cache).expanduser())


def _as_bytes(images: Tensor) -> Tensor:
    """Images become uint8, as the datasets' own; what is not an image (a vector) stays as it is."""
    if images.dim() == 4 and images.is_floating_point():
        return (images.clamp(0, 1) * 255).round().byte()
    return images


def _read(path: Path, wanted: Mapping[int, int], shape: Sequence[int]) -> dict[int, Tensor] | None:
    """None where there is no such file, or where it is not what it should be: then the images are
    made again.
    """
    try:
        found = Message.from_bytes(bytearray(path.read_bytes())).trees["made"]
        images = {label: found[str(label)] for label in wanted}
    except (OSError, BadMessage, KeyError):
        return None
    fits = all(tuple(images[label].shape) == (n, *shape) for label, n in wanted.items())
    return images if fits else None


def _write(path: Path, made: Mapping[int, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    trees = {"made": {str(label): t.contiguous() for label, t in made.items()}}
    write_atomically(path, Message(trees).to_bytes(), sync=False)

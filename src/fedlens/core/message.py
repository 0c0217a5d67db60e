"""Messages: all that moves between server and clients, and all that persists.

The byte form is the safetensors format (8 bytes of header length, a JSON header, raw arrays),
written here in a few lines so that arrays can be read from shared memory without a copy;
`safetensors` itself reads and writes the same files. No pickle anywhere.

The header begins with a digest: the sha256 of all bytes but its own. What was damaged or altered on
its way is refused before anything of it is read. It keeps nobody from sending what they like under
a digest of their own; what a reply must look like is the business of `replies.refuse`. Between
processes of one machine, through shared memory, messages go without (0.15 s for 142 MB).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlens.core.limits import MOST_WEIGHT
from fedlens.core.tree import Tree, count_bytes

T = TypeVar("T")
SERVER = -1  # the sender of what comes down
MOST_CLIENTS = 1 << 40  # numbers of clients beyond it are nobody's
MEAN = "mean"  # the name of a tree's only weight, where it has just one
# the name of a weight under which whole numbers are added, modulo 2^bits, and not averaged
RING = "ring"

_LARGEST = 1 << 62  # whole numbers beyond it fit no 64 bits elsewhere
_DIMENSIONS = 64  # torch has no arrays with more
_DIGEST = b'{"__metadata__":{"digest":"'  # how every header begins; 64 hexadecimal digits follow
_DIGITS = slice(8 + len(_DIGEST), 8 + len(_DIGEST) + 64)  # their place in a message

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class BadMessage(ValueError):
    """Bytes that are not a message: truncated, tampered with, or made by something else."""


@dataclass(frozen=True)
class Header:
    """What the core itself says in a message; scalars are the layers' own.

    Args:
        round: counted from 0; in a reply the round it answers.
        rounds: how many are planned.
        seed: of everything.
        population: clients that can be asked.
        cohort: clients asked in this round, 0 where nobody was asked.
        trip: 0 for the message that clients work on; others (keys, what follows) are a wire layer's
            own and leave client memory as it is.
        evaluate: score what is sent, do not learn from it.
        rehearsal: a dry run that leaves no trace.
        stop: in a state, the algorithm has ended the run.
        max_weight: the largest weight that a reply may claim.
    """

    round: int = 0
    rounds: int = 1
    seed: int = 0
    population: int = 1
    cohort: int = 0
    trip: int = 0
    evaluate: bool = False
    rehearsal: bool = False
    stop: bool = False
    max_weight: float = MOST_WEIGHT

    @staticmethod
    def read(table: Mapping[str, Any]) -> Header:
        """From JSON: every field known, and of its own type."""
        for name, value in table.items():
            kind = _HEADER.get(name)
            if kind is None or type(value) is not kind or not abs(value) <= _LARGEST:
                raise BadMessage("its header has an unknown field, or one of a wrong type or size")
        return Header(**table)


_HEADER: Mapping[str, Any] = {f.name: type(f.default) for f in fields(Header)}


@dataclass(frozen=True)
class Message:
    """Named trees and scalars; never changes.

    Args:
        trees: named arrays, by name.
        scalars: numbers, by name.
        weights: of a reply's trees, by tree and name: how much the tree counts in each sum (default
            1).
        sender: the client's number, or the server.
        header: what the core itself says.
        texts: a little of what is neither, such as public keys; like scalars, they arrive singly.
    """

    trees: Mapping[str, Tree] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sender: int = SERVER
    header: Header = Header()
    texts: Mapping[str, str] = field(default_factory=dict)
    _derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def put(self, **trees: Tree) -> Message:
        return replace(self, trees={**self.trees, **trees}, _derived={})

    def drop(self, *names: str) -> Message:
        return replace(
            self,
            trees={n: t for n, t in self.trees.items() if n not in names},
            weights={n: w for n, w in self.weights.items() if n not in names},
            _derived={},
        )

    def note(self, **scalars: float) -> Message:
        return replace(self, scalars={**self.scalars, **scalars}, _derived={})

    def weigh(self, tree: str, weight: float | None = None, /, **named: float) -> Message:
        """Replace the weights of one tree: `weigh("delta", 50)` or `weigh("delta", uniform=1,
        loss=0.3)`.
        """
        new = named if weight is None else {MEAN: weight, **named}
        return replace(self, weights={**self.weights, tree: new}, _derived={})

    def with_header(self, header: Header | None = None, /, **changes: float) -> Message:
        """The same under another header, or with some of its fields changed."""
        changed: Header = replace(header or self.header, **changes)  # type: ignore[arg-type]
        return replace(self, header=changed, _derived={})

    def derived(self, key: str, compute: Callable[[], T]) -> T:
        """A message never changes, so what follows from it can be computed once per process and
        kept with it.
        """
        if key not in self._derived:
            self._derived[key] = compute()
        found: T = self._derived[key]
        return found

    @property
    def round(self) -> int:
        return self.header.round

    def count_bytes(self) -> int:
        """Bytes of arrays and texts; the header is not counted, so that engines agree."""
        arrays = sum(count_bytes(t) for t in self.trees.values())
        return arrays + sum(len(text) for text in self.texts.values())

    def to_bytes(self, sealed: bool = True) -> bytearray:
        """sealed: with a digest, for whatever leaves this machine or this hour."""
        header, arrays, size = self._layout()
        out = bytearray(8 + len(header) + size)
        self._fill(memoryview(out), header, arrays)
        if sealed:
            out[_DIGITS] = _digest([memoryview(out)])
        return out

    def write_into(self, buffer: memoryview) -> int:
        """Write into a shared buffer, without a digest; returns the number of bytes, nothing is
        written when the buffer is too small.
        """
        header, arrays, size = self._layout()
        total = 8 + len(header) + size
        if total <= len(buffer):
            self._fill(buffer[:total], header, arrays)
        return total

    def digest(self) -> str:
        """sha256 of all its bytes but those in which it stands itself."""
        header, arrays, _ = self._layout()
        start = len(header).to_bytes(8, "little") + header
        return _digest(chain([memoryview(start)], map(_bytes_of, arrays))).decode()

    def pieces(self, size: int) -> Iterator[bytes]:
        """The bytes of `to_bytes`, `size` at a time: the whole never lies in memory a second
        time.
        """
        header, arrays, _ = self._layout()
        start = bytearray(len(header).to_bytes(8, "little") + header)
        start[_DIGITS] = self.digest().encode()
        piece = bytearray()
        for part in chain([memoryview(start)], map(_bytes_of, arrays)):
            for low in range(0, len(part), size):
                piece += part[low : low + size]
                if len(piece) >= size:
                    yield bytes(memoryview(piece)[:size])
                    piece = piece[size:]
        if piece:
            yield bytes(piece)

    def _layout(self) -> tuple[bytes, list[Tensor], int]:
        named = [
            (f"{tree}/{name}", t)
            for tree, arrays in self.trees.items()
            for name, t in arrays.items()
        ]
        # Widest types first, as safetensors does: every array then starts on a multiple of its own
        # item size.
        named.sort(key=lambda item: (-item[1].element_size(), item[0]))
        meta = {
            "scalars": dict(self.scalars),
            "weights": {t: dict(w) for t, w in self.weights.items()},
            "sender": self.sender,
            "header": asdict(self.header),
            "trees": {tree: list(arrays) for tree, arrays in self.trees.items()},
        }
        if self.texts:
            meta["texts"] = dict(self.texts)
        blank = "0" * 64
        header: dict[str, Any] = {"__metadata__": {"digest": blank, "message": json.dumps(meta)}}
        offset = 0
        for key, t in named:
            size = t.numel() * t.element_size()
            header[key] = {
                "dtype": _NAMES[t.dtype],
                "shape": list(t.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return text, [t for _, t in named], offset

    @staticmethod
    def _fill(out: memoryview, header: bytes, arrays: list[Tensor]) -> None:
        out[:8] = len(header).to_bytes(8, "little")
        offset = 8 + len(header)
        out[8:offset] = header
        for t in arrays:
            size = t.numel() * t.element_size()
            if size:
                flat = torch.frombuffer(out[offset : offset + size], dtype=t.dtype)
                flat.copy_(t.detach().reshape(-1))
            offset += size

    @staticmethod
    def from_bytes(
        data: bytes | bytearray | memoryview, copy: bool = False, sealed: bool = True
    ) -> Message:
        """Read a message. Arrays are views of `data` unless `copy`: the caller keeps `data`
        unchanged as long as they live. sealed: refuse what does not have the digest it names.
        """
        view = memoryview(bytearray(data) if isinstance(data, bytes) and not copy else data)
        try:
            if sealed and bytes(view[_DIGITS]) != _digest([view]):
                raise BadMessage("its digest is not that of its bytes: damaged or altered")
            return _parse(view, copy)
        except BadMessage:
            raise
        except Exception as e:
            # Of bytes that somebody else made, anything may come.
            raise BadMessage(f"not a message: {type(e).__name__}") from e


def _digest(parts: Iterable[memoryview]) -> bytes:
    """Of all bytes but those where the digest itself stands, which the first part holds."""
    digest = hashlib.sha256()
    for k, part in enumerate(parts):
        for stretch in [part] if k else [part[: _DIGITS.start], part[_DIGITS.stop :]]:
            digest.update(stretch)
    return digest.hexdigest().encode()


def _parse(view: memoryview, copy: bool) -> Message:
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > len(view) - 8:
        raise BadMessage("truncated")
    index = json.loads(bytes(view[8 : 8 + length]))
    meta = json.loads(index.pop("__metadata__")["message"])
    if meta.keys() - {"texts"} != {"scalars", "weights", "sender", "trees", "header"}:
        raise BadMessage("its parts are not those of a message")
    _check_places(index, len(view) - 8 - length)
    found = {key: _read(view, 8 + length, entry, copy) for key, entry in index.items()}
    trees = {tree: {n: found.pop(f"{tree}/{n}") for n in ns} for tree, ns in meta["trees"].items()}
    if found:
        raise BadMessage("it holds arrays of no tree")
    weights = {tree: _numbers(named) for tree, named in meta["weights"].items()}
    sender = _whole(meta["sender"], SERVER, MOST_CLIENTS)
    header, texts = Header.read(meta["header"]), _strings(meta.get("texts", {}))
    return Message(trees, _numbers(meta["scalars"]), weights, sender, header, texts)


def _check_places(index: Mapping[str, Any], size: int) -> None:
    """Arrays follow each other and fill the rest, as safetensors has it: no byte counts twice."""
    at = 0
    for low, high in sorted(entry["data_offsets"] for entry in index.values()):
        if low != at:
            raise BadMessage("its arrays overlap or leave gaps")
        at = high
    if at != size:
        raise BadMessage("its arrays are not what follows its header")


def _numbers(table: Mapping[str, Any]) -> dict[str, float]:
    """Named numbers. Whether they are finite is asked where they are used: a state may hold NaN."""
    for value in table.values():
        if type(value) is int:
            _whole(value, -_LARGEST, _LARGEST)
        elif type(value) is not float:
            raise BadMessage("something in it is not a number")
    return dict(table)


def _strings(table: Mapping[str, Any]) -> dict[str, str]:
    for name, value in table.items():
        if not isinstance(value, str):
            raise BadMessage(f"{name!r} is not a text")
    return dict(table)


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise BadMessage("a whole number is out of range")
    return value


def _bytes_of(t: Tensor) -> memoryview:
    raw: Any = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _read(view: memoryview, start: int, entry: Mapping[str, Any], copy: bool) -> Tensor:
    dtype = _TYPES[entry["dtype"]]
    if len(entry["shape"]) > _DIMENSIONS:
        raise BadMessage("an array has too many dimensions")
    shape = [_whole(n, 0, len(view)) for n in entry["shape"]]
    low, high = (_whole(n, 0, len(view)) for n in entry["data_offsets"])
    count = math.prod(shape)
    size = count * dtype.itemsize
    if high - low != size or start + high > len(view):
        raise BadMessage("array out of bounds")
    if not size:
        return torch.empty(shape, dtype=dtype)
    if copy:
        own = bytearray(view[start + low : start + high])
        return torch.frombuffer(own, dtype=dtype).reshape(shape)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start + low).reshape(shape)

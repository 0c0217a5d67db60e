"""The ledger: one signed line for everything that leaves a client, each holding the hash of the
line before.

A line is written, and on disk, before the bytes it speaks of leave; so everything that left is in
the ledger, and a line may be about bytes that a crash kept from leaving. A line is JSON:

    line       its number, from 1
    time       UTC
    kind       "key": from here on lines are signed with this key (line 1, and after a rotation,
               there still signed with the old one); "reply", "evaluation", "protocol" (a wire
               layer's own trips), "greeting", "failure"
    client, job, recipe (its hash), round
    trees      of each tree its bytes, and of each array in it type and shape
    scalars, weights, said    in full; said: what goes beside a message, such as a reason
    texts      in full, long ones as their hash
    protection layers under which no single reply can be read
    bytes, sha256             of the payload, as it leaves
    privacy    what this reply costs in differential privacy, where a layer accounts for it
    overhead   requests that were sent since the line before (heartbeats, questions for work, the
               fields around a payload), and the bytes of their headers and bodies
    receipt    the server's signature of an earlier head, if one has arrived
    torn       bytes of an unfinished line that a crash left here and that were removed
    previous   SHA-256 of the line before
    signature  ECDSA P-384 with SHA-384 of all this, with the client's own key

A chain shows that nothing inside it changed. That nothing is missing at its end is shown by the
heads that the server has countersigned.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.files import name_in_errors
from fedlens.core.message import Header, Message
from fedlens.core.tree import count_bytes
from fedlens.trust.signing import (
    SigningKey,
    canonical,
    make_signing_key,
    public_text,
    read_signing_key,
    sign,
)

LEDGER_FILE = "ledger.jsonl"  # in a site's folder
NOTHING = "0" * 64  # what the first line follows
_TAIL = 1 << 16  # bytes read at a time to find the last line
_LONG = 200  # characters of a text that a line holds in full
_PIECE = 4 << 20  # bytes of a simulated reply, hashed at a time


class LedgerError(ValueError):
    """A ledger that cannot be continued or read; the message names file and line."""


class Head(NamedTuple):
    """The last line of a ledger: its number and its hash."""

    line: int
    hash: str


@dataclass(frozen=True)
class Leaving:
    """What is about to leave a client. payload: its bytes, in pieces. message: what they are, if
    they are a message. said: what goes beside it.
    """

    kind: str
    client: int
    payload: Iterable[bytes | bytearray | memoryview] = ()
    job: str = ""
    recipe: str = ""
    round: int | None = None
    message: Message | None = None
    said: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    protection: Sequence[str] = ()
    receipt: Mapping[str, Any] | None = None
    overhead: Mapping[str, int] | None = None
    privacy: Mapping[str, Any] | None = None

    def table(self) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        for piece in self.payload:
            digest.update(piece)
            size += len(piece)
        message = self.message or Message()
        table: dict[str, Any] = {
            "kind": self.kind,
            "client": self.client,
            "job": self.job,
            "recipe": self.recipe,
            "round": self.round,
            "trees": {name: _describe_tree(tree) for name, tree in message.trees.items()},
            "scalars": {name: _number(v) for name, v in message.scalars.items()},
            "weights": {
                tree: {name: _number(v) for name, v in named.items()}
                for tree, named in message.weights.items()
            },
            "texts": {name: _text(v) for name, v in message.texts.items()},
            "said": dict(self.said),
            "protection": list(self.protection),
            "bytes": size,
            "sha256": digest.hexdigest(),
        }
        beside = {"receipt": self.receipt, "overhead": self.overhead, "privacy": self.privacy}
        return table | {name: dict(value) for name, value in beside.items() if value}


def protection(algorithm: Algorithm) -> tuple[str, ...]:
    """The layers of a stack that hide what a single client sent."""
    layers = [part for part in algorithm.parts() if isinstance(part, Layer)]
    return tuple(type(layer).__name__ for layer in layers if layer.hides_replies)


def _describe_tree(tree: Mapping[str, Tensor]) -> dict[str, Any]:
    arrays = {}
    for name, t in tree.items():
        shape = "x".join(map(str, t.shape))
        arrays[name] = f"{str(t.dtype).removeprefix('torch.')} {shape}".rstrip()
    return {"bytes": count_bytes(dict(tree)), "arrays": arrays}


def _text(value: str) -> str:
    """A long one is a boxed secret or a list of keys: named by its hash."""
    if len(value) <= _LONG:
        return value
    return f"{len(value)} characters, sha256 {hashlib.sha256(value.encode()).hexdigest()}"


def kind_of(asked: Header) -> str:
    """What a reply to a message with this header is."""
    if asked.trip:
        return "protocol"
    return "evaluation" if asked.evaluate else "reply"


def _number(value: float) -> float | str:
    """JSON has no word for NaN and infinity, and a ledger leaves nothing out."""
    return value if value - value == 0 else str(value)


class Ledger:
    """Appends to one file. Several processes may: each line is written under a lock, after the one
    that is last then.

    Args:
        path: the file.
        key: the site's signing key, or its file.
        sync: whether a line must survive a power cut.
    """

    def __init__(self, path: Path, key: SigningKey | Path, sync: bool = True) -> None:
        self.path, self.sync = path, sync
        self.key = read_signing_key(key) if isinstance(key, Path) else key

    def append(self, leaving: Leaving) -> Head:
        table = leaving.table()
        with self._open() as file:
            last, torn = _last_line(file, self.path)
            if last is None:
                last = self._write(file, self._key_line(self.key), None, 0, self.key)
            return _head(self._write(file, table, last, torn, self.key))

    def rotate(self, new: SigningKey) -> Head:
        """From the next line on, the ledger is signed with `new`; the old key says so."""
        with self._open() as file:
            last, torn = _last_line(file, self.path)
            head = _head(self._write(file, self._key_line(new), last, torn, self.key))
        self.key = new
        return head

    @contextmanager
    def _open(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _key_line(self, key: SigningKey) -> dict[str, Any]:
        return {"kind": "key", "key": public_text(key.public_key())}

    def _write(
        self, file: int, table: dict[str, Any], last: bytes | None, torn: int, key: SigningKey
    ) -> bytes:
        before = _head(last) if last else Head(0, NOTHING)
        table = {
            "line": before.line + 1,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **table,
            **({"torn": torn} if torn else {}),
            "previous": before.hash,
        }
        line = canonical({**table, "signature": sign(key, canonical(table))})
        with name_in_errors(self.path):
            data = memoryview(line + b"\n")
            while data:
                data = data[os.write(file, data) :]
            if self.sync:
                os.fsync(file)
        return line


@dataclass(frozen=True)
class Ledgers:
    """The ledgers of a simulation's clients: in `folder` one file each, and beside it a key of its
    own, made when it is first needed.
    """

    folder: Path
    job: str
    recipe: str
    protection: Sequence[str] = ()

    def record_reply(self, reply: Message, asked: Header) -> None:
        self._record(kind_of(asked), reply.sender, reply.round, reply.pieces(_PIECE), reply, {})

    def record_failure(self, client: int, round: int, reason: str) -> None:
        self._record("failure", client, round, (reason.encode(),), None, {"reason": reason})

    def _record(
        self,
        kind: str,
        client: int,
        round: int,
        payload: Iterable[bytes],
        message: Message | None,
        said: Mapping[str, str],
    ) -> None:
        key = self.folder / "keys" / f"{client}"
        if not key.exists():
            make_signing_key(key)
        ledger = Ledger(self.folder / f"{client}.jsonl", key, sync=False)
        about = self.job, self.recipe, round
        ledger.append(Leaving(kind, client, payload, *about, message, said, self.protection))


def _head(line: bytes) -> Head:
    return Head(int(json.loads(line)["line"]), hashlib.sha256(line).hexdigest())


def _last_line(file: int, path: Path) -> tuple[bytes | None, int]:
    """The last whole line, and how many bytes of an unfinished one were removed behind it."""
    size = at = os.fstat(file).st_size
    tail = b""
    while at and tail.count(b"\n") < 2:
        at = max(0, at - _TAIL)
        tail = os.pread(file, size - at, at)
    *lines, torn = tail.split(b"\n")
    if torn:
        os.ftruncate(file, size - len(torn))
    if not lines:
        return None, len(torn)
    try:
        _head(lines[-1])
    except (ValueError, TypeError, KeyError) as e:
        raise LedgerError(
            f"the last line of {path} is not a ledger's: nothing leaves before its operator has"
            " looked at it (`fedlens ledger FOLDER --verify`)"
        ) from e
    return lines[-1], len(torn)

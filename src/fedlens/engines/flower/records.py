"""Flower's records and what FedLens puts into them: a few fields and the pieces of a message.

A RecordDict holds a ConfigRecord "fedlens" with the fields. A small message rides among them as
"message", a larger one has an ArrayRecord "message" of its own: Flower makes an object of every
record, array and chunk, and each costs four requests on its way, about 20 ms of the SuperLink's
time apiece. Imports no torch, because a site's network process uses it.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

FIELDS, PIECES = "fedlens", "message"
SMALL = 1 << 20  # bytes of a message that ride among the fields


def to_records(fields: Mapping[str, Any], pieces: list[bytes]) -> RecordDict:
    if sum(len(piece) for piece in pieces) <= SMALL:
        riding = {PIECES: list(pieces)} if pieces else {}
        return RecordDict({FIELDS: ConfigRecord({**fields, **riding})})
    arrays = {
        f"{k:04d}": Array("uint8", (len(piece),), "fedlens.core.message", piece)
        for k, piece in enumerate(pieces)
    }
    return RecordDict({FIELDS: ConfigRecord(dict(fields)), PIECES: ArrayRecord(arrays)})


def with_fields(content: RecordDict, fields: Mapping[str, Any]) -> RecordDict:
    """The same message with fields of its own; its arrays are shared, for Flower stores equal
    content once.
    """
    own = ConfigRecord({**content[FIELDS], **fields})
    return RecordDict({**content, FIELDS: own})


def take_fields(content: Any) -> dict[str, Any] | None:
    """The fields, or None where this is no content of ours. It need not even be a RecordDict:
    Flower builds whatever object a sender names."""
    record = content.get(FIELDS) if isinstance(content, RecordDict) else None
    if not isinstance(record, ConfigRecord):
        return None
    return {name: value for name, value in record.items() if name != PIECES}


def take_pieces(content: Any) -> list[bytes]:
    """The pieces of a message, out of their record: nobody else keeps them alive from here on."""
    if not isinstance(content, RecordDict):
        return []
    fields, record = content.get(FIELDS), content.get(PIECES)
    if isinstance(fields, ConfigRecord) and PIECES in fields:
        riding = fields.pop(PIECES)
        whole = isinstance(riding, list) and all(isinstance(piece, bytes) for piece in riding)
        return riding if whole else []
    if not isinstance(record, ArrayRecord):  # none, or something that is no message
        return []
    names = sorted(record)
    pieces = [record[n].data for n in names]
    for n in names:
        del record[n]
    return pieces


class Unpacked:
    """Adds up what Flower would make of the objects that a sender stored: it repeats a chunk as
    often as arrays name it, so that a few bytes can ask for any number of them. Objects may come in
    any order, and several at once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._chunks: dict[str, int] = {}  # id -> bytes
        self._named: Counter[str] = Counter()  # id of a chunk -> how often
        self._arrays: set[str] = set()
        self._lock = threading.Lock()

    def add(self, object_id: str, content: bytes) -> None:
        """An exception of any kind means that Flower could not read it either."""
        kind, children, _ = get_object_head_values_from_object_content(content)
        with self._lock:
            if kind == ArrayChunk.__qualname__ and object_id not in self._chunks:
                self._chunks[object_id] = len(content)
                self.bytes += self._named[object_id] * len(content)
            elif kind == Array.__qualname__ and object_id not in self._arrays:
                self._arrays.add(object_id)
                for index in json.loads(get_object_body(content, Array))["arraychunk_ids"]:
                    self._named[children[index]] += 1
                    self.bytes += self._chunks.get(children[index], 0)

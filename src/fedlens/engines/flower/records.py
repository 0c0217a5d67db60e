"""Flower's records and what FedLens puts into them: a few fields and the pieces of a message.

A RecordDict holds a ConfigRecord "fedlens" with the fields. A small message rides among them as
"message", a larger one has an ArrayRecord "message" of its own: Flower makes an object of every
record, array and chunk, and each costs four requests on its way, about 20 ms of the SuperLink's
time apiece. Imports no torch, because a site's network process uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

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

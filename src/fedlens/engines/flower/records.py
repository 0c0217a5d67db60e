"""Flower's records and what FedLens puts into them: a few fields and the pieces of a message.

A RecordDict holds a ConfigRecord "fedlens" with the fields and, where there is a message, an
ArrayRecord "message" with its pieces. Imports no torch, because a site's network process uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FIELDS, PIECES = "fedlens", "message"


def to_records(fields: Mapping[str, Any], pieces: list[bytes]) -> RecordDict:
    content = RecordDict({FIELDS: ConfigRecord(dict(fields))})
    if pieces:
        arrays = {
            f"{k:04d}": Array("uint8", (len(piece),), "fedlens.core.message", piece)
            for k, piece in enumerate(pieces)
        }
        content[PIECES] = ArrayRecord(arrays)
    return content


def take_fields(content: Any) -> dict[str, Any] | None:
    """The fields, or None where this is no content of ours. It need not even be a RecordDict:
    Flower builds whatever object a sender names."""
    record = content.get(FIELDS) if isinstance(content, RecordDict) else None
    return dict(record) if isinstance(record, ConfigRecord) else None


def take_pieces(content: Any) -> list[bytes]:
    """The pieces of a message, out of their record: nobody else keeps them alive from here on."""
    record = content.get(PIECES) if isinstance(content, RecordDict) else None
    if not isinstance(record, ArrayRecord):  # none, or something that is no message
        return []
    names = sorted(record)
    pieces = [record[n].data for n in names]
    for n in names:
        del record[n]
    return pieces

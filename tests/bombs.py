"""Objects of Flower's that are small on their way and large when they are put together."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body, get_object_id


def named_often(data: bytes, times: Sequence[int]) -> list[tuple[str, bytes]]:
    """A chunk, and an array for each of `times` that names it as often: ids and contents, the chunk
    first."""
    whole = Array("uint8", (len(data),), "x", data)
    ((chunk_id, chunk),) = whole.slice_array()
    found = [(chunk_id, chunk.deflate())]
    for k, often in enumerate(times):
        # the shape tells arrays apart that hold the same
        about = {"dtype": "uint8", "shape": [k], "stype": "x", "arraychunk_ids": [0] * often}
        content = add_header_to_object_body(json.dumps(about).encode(), whole)
        found.append((get_object_id(content), content))
    return found

"""The ClientApp: carries a message from Flower to the site's worker and the reply back. `write_app`
ships this file to the sites as it is.

Flower starts a new process for every message. Importing torch and reading the site's data each time
would cost more than most rounds do, so this file imports neither torch nor FedLens: it hands the
message to the site's resident worker (`fedlens join` keeps one, reachable through the Unix socket
`worker` of the node config). Where there is none, as in anybody's plain SuperNode, it does the work
itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

Handle = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]


def carry(envelope: Message, context: Context, handle: Handle | None = None) -> Message:
    header = {
        "kind": envelope.metadata.message_type,
        "facts": dict(envelope.content["fedlens"]),
        "node": dict(context.node_config),
        "run": dict(context.run_config),
    }
    pieces = take(envelope.content)
    facts, pieces = (handle or resident(str(context.node_config.get("worker", ""))))(header, pieces)
    return Message(records(facts, pieces), reply_to=envelope)


def take(content: RecordDict) -> list[bytes]:
    """The pieces of a message, out of their record: nobody else keeps them alive from here on."""
    record = content.get("message")
    if not isinstance(record, ArrayRecord):  # none, or something that is no message
        return []
    names = sorted(record)
    pieces = [record[n].data for n in names]
    for n in names:
        del record[n]
    return pieces


def records(facts: dict[str, Any], pieces: list[bytes]) -> RecordDict:
    content = RecordDict({"fedlens": ConfigRecord(facts)})
    if pieces:
        arrays = {
            f"{k:04d}": Array("uint8", (len(p),), "fedlens.core.message", p)
            for k, p in enumerate(pieces)
        }
        content["message"] = ArrayRecord(arrays)
    return content


def resident(path: str) -> Handle:
    """The worker behind a socket, or this process where nobody listens."""
    if path:
        with contextlib.suppress(OSError):
            line = socket.socket(socket.AF_UNIX)
            line.connect(path)
            return lambda header, pieces: over(line, header, pieces)
    from fedlens.engines.flower.site import handle

    return handle


def over(
    line: socket.socket, header: dict[str, Any], pieces: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    with line:
        send(line, header, pieces)
        answer = receive(line)
    return answer if answer else ({"lost": "its worker died while it worked"}, [])


def send(line: socket.socket, header: dict[str, Any], pieces: list[bytes]) -> None:
    """A frame: the header's length, the header with the sizes of the pieces, the pieces. Empties
    `pieces`.
    """
    text = json.dumps({**header, "sizes": [len(p) for p in pieces]}).encode()
    line.sendall(len(text).to_bytes(8, "little") + text)
    while pieces:
        line.sendall(pieces.pop(0))


def receive(line: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next frame, or None if the other end is gone."""
    try:
        header = json.loads(_exactly(line, int.from_bytes(_exactly(line, 8), "little")))
        return header, [_exactly(line, size) for size in header.pop("sizes")]
    except EOFError:
        return None


def _exactly(line: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        got = line.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return bytes(out)


app = ClientApp()
app.query()(carry)
app.train()(carry)

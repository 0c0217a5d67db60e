"""The ClientApp: carries a message from Flower to the site's worker and the reply back. `write_app`
ships this file to the sites as it is; Flower calls `app`.

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

# A header and the pieces of a message in, the fields and the pieces of the reply out; see `site`.
AnswerRequest = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]


def relay(
    envelope: Message, context: Context, answer_request: AnswerRequest | None = None
) -> Message:
    """One message from Flower, answered by the site's worker unless told otherwise."""
    header = {
        "kind": envelope.metadata.message_type,
        "request": dict(envelope.content["fedlens"]),
        "node": dict(context.node_config),
        "run": dict(context.run_config),
    }
    if answer_request is None:
        answer_request = connect_worker(str(context.node_config.get("worker", "")))
    fields, pieces = answer_request(header, take_pieces(envelope.content))
    return Message(to_records(fields, pieces), reply_to=envelope)


def take_pieces(content: RecordDict) -> list[bytes]:
    """The pieces of a message, out of their record: nobody else keeps them alive from here on."""
    record = content.get("message")
    if not isinstance(record, ArrayRecord):  # none, or something that is no message
        return []
    names = sorted(record)
    pieces = [record[n].data for n in names]
    for n in names:
        del record[n]
    return pieces


def to_records(fields: dict[str, Any], pieces: list[bytes]) -> RecordDict:
    content = RecordDict({"fedlens": ConfigRecord(fields)})
    if pieces:
        arrays = {
            f"{k:04d}": Array("uint8", (len(piece),), "fedlens.core.message", piece)
            for k, piece in enumerate(pieces)
        }
        content["message"] = ArrayRecord(arrays)
    return content


def connect_worker(path: str) -> AnswerRequest:
    """The worker behind a socket, or this process where nobody listens."""
    if path:
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            return lambda header, pieces: ask_worker(connection, header, pieces)
    from fedlens.engines.flower.site import answer_request

    return answer_request


def ask_worker(
    connection: socket.socket, header: dict[str, Any], pieces: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    with connection:
        send_frame(connection, header, pieces)
        frame = receive_frame(connection)
    return frame if frame else ({"lost": "its worker died while it worked"}, [])


def send_frame(connection: socket.socket, header: dict[str, Any], pieces: list[bytes]) -> None:
    """A frame: the header's length, the header with the sizes of the pieces, the pieces. Empties
    `pieces`.
    """
    text = json.dumps({**header, "sizes": [len(piece) for piece in pieces]}).encode()
    connection.sendall(len(text).to_bytes(8, "little") + text)
    while pieces:
        connection.sendall(pieces.pop(0))


def receive_frame(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next frame, or None if the other end is gone."""
    try:
        length = int.from_bytes(_receive_exactly(connection, 8), "little")
        header = json.loads(_receive_exactly(connection, length))
        return header, [_receive_exactly(connection, size) for size in header.pop("sizes")]
    except EOFError:
        return None


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return bytes(out)


app = ClientApp()
app.query()(relay)
app.train()(relay)

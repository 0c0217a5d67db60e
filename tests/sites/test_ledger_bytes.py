"""What a site's ledger says, held against the bytes that arrive behind the server's front, captured
at a socket: four real sites under masks, one of which withholds its evaluation; the other three are
enough for a sum of metrics.
"""

from __future__ import annotations

import base64
import hashlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deployment import TESTS
from hospitals import STUDY, Federation

pytest.importorskip("flwr")
from flwr.app import ConfigRecord
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedlens.engines.flower.records import PIECES, take_fields, take_pieces
from fedlens.trust.departures import read_departures
from fedlens.trust.ledger import LEDGER_FILE
from fedlens.trust.signing import canonical, parse_public_key
from fedlens.trust.verify import verify

pytestmark = [pytest.mark.trust, pytest.mark.timeout(600)]
SITES = 4
STUDY_OF_FOUR = STUDY.replace("clients = 2", f"clients = {SITES}\npersonal = true").replace(
    '"malignant"]', '"malignant"]\nholdout = 0.4'
)
PUSH, CONFIRM = "/push-messages", "/confirm-message-received"


@dataclass
class Captured:
    """What came from one site. requests: path, body, and how much of it is payload, in the order of
    arrival. beats: bodies of heartbeats, which have a connection of their own."""

    requests: list[tuple[str, bytes, int]] = field(default_factory=list)
    beats: list[bytes] = field(default_factory=list)

    def add(self, path: str, body: bytes, payload: int) -> None:
        if path.endswith("/send-node-heartbeat"):
            self.beats.append(body)
        else:
            self.requests.append((path, body, payload))


def read_tap(path: Path) -> Iterator[tuple[bytes, str, bytes]]:
    """Key, path and body of every request, in the order in which they were complete."""
    begun: dict[bytes, bytes] = {}  # of each connection
    with path.open("rb") as file:
        while line := file.readline():
            connection, size = line.split()
            data = begun.get(connection, b"") + file.read(int(size))
            while found := first_request(data):
                *request, data = found
                yield tuple(request)
            begun[connection] = data
    assert not any(begun.values())


def first_request(data: bytes) -> tuple[bytes, str, bytes, bytes] | None:
    """Key, path, body, and what follows."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    length = int(headers["content-length"])
    if len(rest) < length:
        return None
    key = base64.b64decode(headers["flwr-public-key"])
    return key, first.split()[1], rest[:length], rest[length:]


def test_the_ledger_is_what_arrives_behind_the_front(tmp_path: Path) -> None:
    tap = tmp_path / "tap"
    here = Federation(tmp_path, SITES, STUDY_OF_FOUR)
    try:
        here.serve("--json-log", program=(str(TESTS / "tapped_serve.py"), str(tap)))
        for site in range(SITES):
            here.join(site)
        for site in range(SITES):
            here.wait_until_joined(site)
        code, output = here.run("run")
        assert code == 0, output
        for site in range(SITES):
            here.stop(f"site-{site}", signal.SIGTERM)
    finally:
        here.close()
    objects: dict[str, bytes] = {}
    sites = {key: Captured() for key in here.bindings().values()}
    for key, path, body in read_tap(tap):
        size = 0
        if path.endswith("/push-object"):
            pushed = PushObjectRequest.FromString(body)
            objects[pushed.object_id] = pushed.object_content
            size = payload_in(pushed.object_content)
        sites[key].add(path, body, size)
    kinds = []
    for number, captured in enumerate(sites.values()):
        ledger = tmp_path / f"hospital-{number}" / "memory" / LEDGER_FILE
        lines = ledger.read_bytes().splitlines()
        assert verify(ledger, parse_public_key(here.known[number].read_text())).intact
        tables = {k: json.loads(line) for k, line in enumerate(lines, 1)}
        assert tables.pop(1)["kind"] == "key"
        kinds.append({table["kind"] for table in tables.values()})
        arrived = dict(messages(captured, objects))
        assert arrived.keys() == tables.keys()  # nothing else came, nothing else is claimed
        for k, (fields, payload) in arrived.items():
            assert fields.pop("head") == hashlib.sha256(lines[k - 1]).hexdigest()
            assert fields == tables[k]["said"]
            sent = payload or canonical(fields)
            assert len(sent) == tables[k]["bytes"]
            assert hashlib.sha256(sent).hexdigest() == tables[k]["sha256"]
        payload = sum(len(sent) for _, sent in arrived.values())
        check_overhead(captured, list(tables.values()), payload)
        left = read_departures(ledger)
        assert left.overhead.times == sum(t["overhead"]["requests"] for t in tables.values())
    assert all({"greeting", "reply", "evaluation", "protocol"} <= found for found in kinds)
    said = here.log("server")
    ours = " ".join(our_words(said))
    assert "sites can join" in ours and "site-2.pub may join as client 2" in ours
    assert said.count("may join as client") == ours.count("may join as client") == SITES


def payload_in(content: bytes) -> int:
    """Bytes of a message in one of Flower's objects: a large one comes in chunks, a small one rides
    among the fields."""
    if content.startswith(b"ArrayChunk"):
        return len(ArrayChunk.inflate(content).data)
    if content.startswith(b"ConfigRecord"):
        riding: Any = ConfigRecord.inflate(content).get(PIECES, [])
        return sum(map(len, riding))
    return 0


def messages(
    captured: Captured, objects: dict[str, bytes]
) -> Iterator[tuple[int, tuple[dict[str, Any], bytes]]]:
    """By the line of the ledger that it names: fields and payload of every reply."""
    for path, body, _ in captured.requests:
        if not path.endswith(PUSH):
            continue
        pushed = PushMessagesRequest.FromString(body)
        for message, tree in zip(pushed.messages_list, pushed.message_object_trees, strict=True):
            found = {t.object_id: objects[t.object_id] for t in iterate_object_tree(tree)}
            content = inflate_object_from_contents(message.metadata.message_id, found).content
            fields = take_fields(content)
            assert fields is not None
            yield fields.pop("line"), (fields, b"".join(take_pieces(content)))


def check_overhead(captured: Captured, tables: list[dict[str, Any]], payload: int) -> None:
    """Up to the last message that this site has received, every byte of every body is payload or
    overhead. How many heartbeats had been sent by then follows from the number of requests."""
    received = [k for k, (path, *_) in enumerate(captured.requests) if path.endswith(CONFIRM)]
    assert len(received) == len(tables)
    requests = captured.requests[: received[-1] + 1]
    beats = sum(t["overhead"]["requests"] for t in tables) - len(requests)
    assert 0 <= beats <= len(captured.beats)
    bodies = sum(len(body) for _, body, _ in requests) + sum(map(len, captured.beats[:beats]))
    overhead = sum(t["overhead"]["bodies"] for t in tables)
    assert bodies == overhead + sum(size for *_, size in requests)
    assert sum(size for *_, size in captured.requests) == payload
    assert all(t["overhead"]["headers"] > 0 for t in tables)


def our_words(log: str) -> list[str]:
    """What `fedlens serve --json-log` said; Flower's own programs write as they like."""
    return [json.loads(line)["message"] for line in log.splitlines() if line.startswith('{"time"')]

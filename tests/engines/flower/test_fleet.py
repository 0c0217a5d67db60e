"""A site's connection without a network: what it does with a message, with nonsense, and with what
it was working on when it was killed. With a network: test_sites.py.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import ssl
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr")
from bombs import named_often
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedlens.engines.flower.fleet import Away, Fleet, Refused, _call
from fedlens.engines.flower.records import take_fields, take_pieces, to_records
from fedlens.sites.worker import SiteWorker


class SuperLink:
    """Its Fleet API as far as a message needs it, with one message to fetch."""

    def __init__(self, content: RecordDict) -> None:
        metadata = Metadata(
            run_id=7, message_id="", src_node_id=1, dst_node_id=2, reply_to_message_id="",
            group_id="", created_at=now().timestamp(), ttl=600.0, message_type="train",
        )  # fmt: skip
        message = make_message(metadata=metadata, content=content)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
        self.tree, self.proto = get_object_tree(message), message_to_proto(message)
        self.waiting, self.pushed = [self.proto], dict[str, bytes]()
        self.reply: Any = None

    def PullMessages(self, request: Any) -> Any:
        found, self.waiting = self.waiting, []
        return PullMessagesResponse(
            messages_list=found, message_object_trees=[self.tree] * len(found)
        )

    def PullObject(self, request: Any) -> Any:
        return PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=self.objects[request.object_id],
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass

    def GetRun(self, request: Any) -> Any:
        about = {"fab_id": "mallory/\x1b[2Jthief", "fab_version": "1", "fab_hash": "ab" * 32}
        return SimpleNamespace(run=SimpleNamespace(**about, account_name=""))

    def PushMessages(self, request: Any) -> Any:
        self.reply = request.messages_list[0]
        wanted = _ids(request.message_object_trees[0])
        return PushMessagesResponse(objects_to_push=wanted, session_id="s")

    def PushObject(self, request: Any) -> Any:
        assert get_object_id(request.object_content) == request.object_id
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def swap(self, record: str, ids: dict[str, str], others: list[tuple[str, bytes]]) -> None:
        """A record's children are others from now on; nobody compares a content with its id."""
        content = self.objects[record]
        for old, new in ids.items():
            content = content.replace(old.encode(), new.encode())
            del self.objects[old]
        self.objects |= {record: content, **dict(others)}
        self.tree = ObjectTree(
            object_id=self.tree.object_id, children=[ObjectTree(object_id=k) for k in self.objects]
        )

    def answer(self) -> Message:
        """The reply as the server would read it."""
        found = inflate_object_from_contents(self.reply.metadata.message_id, dict(self.pushed))
        assert isinstance(found, Message)
        return found


def _ids(tree: Any) -> list[str]:
    return [*(i for child in tree.children for i in _ids(child)), tree.object_id]


def fleet(folder: Path, said: list[str] | None = None, **options: Any) -> Fleet:
    log = (said if said is not None else []).append
    return Fleet("x:1", None, None, folder, log, _node=Node(node_id=2), **options)  # type: ignore[arg-type]


def test_a_message_comes_in_and_its_reply_goes_out(tmp_path: Path) -> None:
    link = SuperLink(to_records({"job": "j"}, [b"a" * 10, b"b"]))
    seen: list[Any] = []

    def handle(header: dict[str, Any], pieces: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        seen.append((header["kind"], header["request"], list(pieces)))
        assert (tmp_path / "at-work").exists()  # should it be killed now, it will know
        return {"client": 2}, [b"c" * 5]

    here = fleet(tmp_path)
    assert here._answer_next(link, handle) and not here._answer_next(link, handle)
    assert seen == [("train", {"job": "j"}, [b"a" * 10, b"b"])]
    reply = link.answer()
    assert link.reply.metadata.reply_to_message_id == link.proto.metadata.message_id
    assert take_fields(reply.content) == {"client": 2}
    assert take_pieces(reply.content) == [b"c" * 5]
    assert not (tmp_path / "at-work").exists()


def test_what_was_at_work_is_answered_after_a_restart(tmp_path: Path) -> None:
    """Only what names the message is kept; its content is not, and is not needed."""
    link = SuperLink(to_records({"job": "j"}, [b"x" * 1000]))

    def die(header: Any, pieces: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet(tmp_path)._answer_next(link, die)
    assert len((tmp_path / "at-work").read_bytes()) < 1000
    asked: list[Any] = []

    def refuse(header: Any, pieces: Any) -> Any:
        asked.append(header)
        return {"lost": header["reason"], "detail": ""}, []

    fleet(tmp_path)._finish_interrupted(link, refuse)
    assert asked == [{"kind": "refuse", "reason": "restarted"}]
    assert take_fields(link.answer().content) == {"lost": "restarted", "detail": ""}
    assert link.reply.metadata.reply_to_message_id == link.proto.metadata.message_id
    assert message_from_proto(link.reply).metadata.dst_node_id == 1
    assert not (tmp_path / "at-work").exists()


def test_junk_of_an_earlier_life_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "at-work").write_bytes(b"\xff" * 40)
    fleet(tmp_path)._finish_interrupted(SuperLink(RecordDict()), lambda h, p: ({}, []))
    assert not (tmp_path / "at-work").exists()


def test_a_message_that_is_not_ours_is_handed_on_as_that(tmp_path: Path) -> None:
    """Another app's content; the log names the app, without its control characters."""
    seen: list[Any] = []
    said: list[str] = []

    def handle(header: Any, pieces: Any) -> Any:
        seen.append((header, pieces))
        return {"lost": "stranger", "detail": ""}, []

    link = SuperLink(RecordDict({"loot": ConfigRecord({"path": "/data"})}))
    assert fleet(tmp_path, said)._answer_next(link, handle)
    (header, pieces), *_ = seen
    assert header["request"] is None and pieces == []
    assert "mallory/" in said[0] and "thief 1, bundle abab" in said[0] and said[0].isprintable()


def test_a_message_beyond_all_measure_is_not_taken_in(tmp_path: Path) -> None:
    said: list[str] = []
    link = SuperLink(to_records({"job": "j"}, [b"x" * 100_000]))

    def handle(header: Any, pieces: Any) -> Any:
        raise AssertionError("nothing to handle")

    assert fleet(tmp_path, said, max_bytes=50_000)._answer_next(link, handle)
    assert "more than 50000 bytes" in said[-1]


@pytest.mark.parametrize("how", ["one array", "many arrays", "many names"])
def test_a_message_that_would_grow_is_not_put_together(tmp_path: Path, how: str) -> None:
    """A chunk of 100 kB that is named 300 times: by one array, by as many, or an array by as many
    names. Its server hears that the message cannot be read."""
    record = ArrayRecord({f"{k:04d}": Array("uint8", (1,), "x", b"%d" % k) for k in range(300)})
    link = SuperLink(RecordDict({"fedlens": ConfigRecord({"job": "j"}), "message": record}))
    times = {"one array": [300], "many arrays": [1] * 300, "many names": [1]}[how]
    bomb = named_often(bytes(100_000), times)
    arrays = [a.object_id for a in record.values()]
    told = [bomb[1 + k % len(times)][0] for k in range(300)]
    seen: list[Any] = []

    def handle(header: Any, pieces: list[bytes]) -> Any:
        seen.append((header["kind"], header.get("reason"), sum(map(len, pieces))))
        return {"lost": "message", "detail": ""}, []

    link.swap(record.object_id, dict(zip(arrays, told)), bomb)
    assert fleet(tmp_path, max_bytes=1_000_000)._answer_next(link, handle)
    assert seen == [("refuse", "message", 0)]


@pytest.mark.parametrize("what", ["no tree", "no content", "no tree and no content", "bad ttl"])
def test_a_message_that_is_none_costs_that_message(tmp_path: Path, what: str) -> None:
    """A server that announces a message without its objects, or nothing but an empty one."""
    link, said = SuperLink(to_records({"job": "j"}, [b"x"])), list[str]()
    whole = PullMessagesResponse(messages_list=[link.proto], message_object_trees=[link.tree])
    if "no tree" in what:
        del whole.message_object_trees[:]
    if "no content" in what:
        whole.messages_list[0].Clear()
    if what == "bad ttl":
        whole.messages_list[0].metadata.ttl = float("nan")
        whole.messages_list[0].metadata.created_at = float("inf")
    odd = [whole, PullMessagesResponse()]
    link.PullMessages = lambda request: odd.pop(0)  # type: ignore[method-assign]
    here = fleet(tmp_path, said)
    assert here._answer_next(link, lambda h, p: ({"lost": "message", "detail": ""}, []))
    assert not here._answer_next(link, lambda h, p: ({}, []))
    assert not (tmp_path / "at-work").exists()
    if "no tree" in what:
        assert "the server announced what is no message" in said[-1]


class Flood(http.server.BaseHTTPRequestHandler):
    """Whatever it is asked for, it answers as `how` says."""

    how = "long"
    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.asked.append(self.path)
        block = bytes(1 << 20)
        self.send_response(307 if self.how == "elsewhere" else 200)
        if self.how == "elsewhere":
            self.send_header("location", "/internal")
        if self.how == "packed":
            self.send_header("content-encoding", "gzip")
            block = gzip.compress(bytes(1 << 24))
        if self.how == "no protobuf":
            block = b"\xff" * 10
        often = 64 if self.how == "long" else 1
        self.send_header("content-length", str(often * len(block)))
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(often):
                self.wfile.write(block)
                type(self).sent += len(block)

    sent = 0

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("how", ["long", "packed", "no protobuf", "elsewhere"])
def test_an_answer_that_cannot_be_one_is_not_taken_in(tmp_path: Path, how: str) -> None:
    """Longer than any answer, packed (a megabyte may become a gigabyte), no answer at all, or a
    way to another address: a site says so and goes on."""
    Flood.how, Flood.sent = how, 0
    Flood.asked.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flood)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said: list[str] = []
    key = ec.generate_private_key(ec.SECP384R1())
    context = ssl.create_default_context()
    here = Fleet("x:1", context, key, tmp_path, said.append, _node=Node(node_id=2))
    with here._client() as client:
        client._base_url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(Away):
            here._answer_next(client, lambda h, p: ({}, []))
    server.shutdown()
    server.server_close()
    assert Flood.asked == ["/v1/fleet/pull-messages"]
    assert how != "long" or Flood.sent < 48 << 20


@pytest.mark.parametrize("value", [b"x", [b"x"]])
def test_fields_of_bytes_are_no_request(tmp_path: Path, value: Any) -> None:
    """They have no place on the line to the worker, which is JSON. A small message rides among the
    fields and is taken out before."""
    link = SuperLink(to_records({"job": "j", "odd": value}, [b"a message"]))
    with SiteWorker({"client": 0}, print, [sys.executable, "-c", ECHO]) as worker:
        worker.start()
        assert fleet(tmp_path)._answer_next(link, worker.handle)
    assert take_fields(link.answer().content) == {"lost": "message", "detail": ""}


ECHO = """
import socket, sys
from fedlens.sites.worker import receive_frame, send_frame
line = socket.socket(fileno=int(sys.argv[-1]))
while frame := receive_frame(line):
    send_frame(line, {"lost": frame[0].get("reason", "none"), "detail": ""}, [])
"""


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (httpx.ConnectError("no"), Away),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] x"), Refused),
        (httpx.HTTPStatusError("x", request=None, response=httpx.Response(503)), Away),  # type: ignore[arg-type]
        (
            httpx.HTTPStatusError("x", request=None, response=httpx.Response(403)),
            httpx.HTTPStatusError,
        ),  # type: ignore[arg-type]
    ],
)
def test_what_is_worth_waiting_for(trouble: Exception, kind: type[Exception]) -> None:
    def method(request: Any) -> None:
        raise trouble

    with pytest.raises(kind):
        _call(method, None)

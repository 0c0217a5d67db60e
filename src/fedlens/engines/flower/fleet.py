"""A site's connection to a SuperLink: activate the node, say that it is alive, fetch messages, push
replies. In place of Flower's SuperNode, which executes whatever app a run brings along: this client
never asks for the app, so nothing of it can run here. The only module that uses Flower's internals
of the Fleet API (flwr 1.41 and 1.42).

Imports no torch, and whoever works does so in another process (`sites.worker`): a training step
must not keep a heartbeat waiting.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.app.message.message import Message, make_message
from flwr.common.serde import message_from_proto, message_to_proto, metadata_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlens.core.log import Log
from fedlens.engines.flower.records import Unpacked, take_fields, take_pieces, to_records

# header and pieces of a message in, fields and pieces of the reply out: see `site.answer_request`
Handle = Callable[[dict[str, Any], list[bytes]], tuple[Mapping[str, Any], list[bytes]]]
Result = TypeVar("Result")

HEARTBEAT = 20.0  # seconds; the SuperLink gives a node up after two of them
QUICK, QUIET = 0.1, 1.0  # seconds between two looks for work, while there is some and later
AWAY = (502, 503, 504)  # what an HTTP server says in place of a SuperLink that is away
MAX_BYTES = 4 << 30  # of a message
ANSWER_BYTES = 16 << 20  # of the answer to one request; a message comes in pieces of 4 MB


class Refused(Exception):
    """The server does not let this site in; one message for its operator."""


class Away(Exception):
    """The server cannot be reached just now."""


class Odd(Away):
    """The server answers, but nothing that can be an answer."""


class Overhead:
    """Counts what this process sends: one of Flower's interceptors, the last before the network.
    What is not payload goes into the site's ledger with its next line.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # heartbeats come from a thread of their own
        self._requests = self._headers = self._bodies = 0

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        request: httpx.Request = context.request
        first = len(f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n")
        headers = sum(len(name) + len(value) + 4 for name, value in request.headers.raw)
        with self._lock:
            self._requests += 1
            self._headers += first + headers + 2
            self._bodies += len(request.content)
        return call_next(context)

    def leave_out(self, payload: int) -> None:
        with self._lock:
            self._bodies -= payload

    def take(self) -> dict[str, int]:
        """Requests, bytes of their headers and of their bodies since this was last asked for."""
        with self._lock:
            names = ("requests", "headers", "bodies")
            found = dict(zip(names, (self._requests, self._headers, self._bodies)))
            self._requests = self._headers = self._bodies = 0
        return found


@dataclass
class Fleet:
    """One site's connection.

    Args:
        address: host:port of the server.
        tls: trusts the federation's CA alone, and holds this site's certificate.
        key: the site's private key, an elliptic curve key of `cryptography`.
        folder: where the node's id and the message at work are kept, for a restart.
        log: for the site's operator.
        max_bytes: of a message from the server.
    """

    address: str
    tls: ssl.SSLContext
    key: Any
    folder: Path
    log: Log
    max_bytes: int = MAX_BYTES
    _node: Node | None = None
    _lost: threading.Event = field(default_factory=threading.Event)
    _known: dict[int, str] = field(default_factory=dict)  # run -> its app, in words
    _overhead: Overhead = field(default_factory=Overhead)

    def serve(self, handle: Handle, patience: float) -> None:
        """Answer messages until an exception ends it; the node then goes offline at once.

        Args:
            handle: makes a reply of a message.
            patience: seconds to keep trying at the beginning, before the server lets us in.

        Raises:
            Refused: if it never does.
            Away: if it cannot even be reached.
        """
        with self._client() as client, self._client() as beats:
            self._activate(client, patience)
            self.log(f"joined {self.address}")
            ended = threading.Event()
            thread = threading.Thread(target=self._beat, args=(beats, ended), daemon=True)
            thread.start()
            try:
                self._finish_interrupted(client, handle)
                self._work(client, handle)
            finally:
                ended.set()
                thread.join(HEARTBEAT)
                with contextlib.suppress(httpx.HTTPError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=self._node_id))
                (self.folder / "node").unlink(missing_ok=True)

    def _work(self, client: FleetHttpClient, handle: Handle) -> None:
        pause, reachable = QUICK, True
        while True:
            began = time.monotonic()
            try:
                if self._lost.is_set():
                    self._activate(client, 0.0)
                busy = self._answer_next(client, handle)
                took = time.monotonic() - began
                # where a look takes long, somebody is busy: looking more often would not help
                pause = QUICK if busy else min(QUIET, max(pause * 1.1, 2 * took))
                if not reachable:
                    self.log("the server is back")
                reachable = True
            except Away as e:
                if reachable:
                    self.log(f"the server cannot be reached ({e}); trying again")
                reachable, pause = False, QUIET
            time.sleep(pause)

    # -- one message -------------------------------------------------------------------------------

    def _answer_next(self, client: FleetHttpClient, handle: Handle) -> bool:
        """Fetch a message, if there is one, and answer it."""
        pulled = _call(client.PullMessages, PullMessagesRequest(node=self._node))
        if not pulled.messages_list:
            return False
        proto = pulled.messages_list[0]
        self._mark_at_work(proto)
        try:
            asked, tree = message_from_proto(proto), pulled.message_object_trees[0]
        except Exception:  # whatever a server sends
            self.log("the server announced what is no message")
            self._mark_at_work(None)
            return True
        try:
            header, pieces = self._receive(client, asked, tree)
            fields, pieces = handle(header, pieces)
            self._send(client, asked, fields, pieces)
        except (ObjectPullError, ObjectPushError, Odd) as e:
            self.log(f"a message of run {asked.metadata.run_id} got lost: {e}")
        except httpx.HTTPStatusError as e:
            # most often a run that ended meanwhile: nobody waits for this reply
            self.log(f"run {asked.metadata.run_id} takes no reply: {e.response.status_code}")
        self._mark_at_work(None)
        return True

    def _receive(
        self, client: FleetHttpClient, asked: Message, tree: ObjectTree
    ) -> tuple[dict[str, Any], list[bytes]]:
        run, name = asked.metadata.run_id, asked.metadata.message_id
        pull = make_pull_object_fn_protobuf(_patiently(client.PullObject), self._node, run)
        room = self.max_bytes

        def pull_within(object_id: str) -> bytes:
            nonlocal room
            content: bytes = pull(object_id)
            room -= len(content)
            if room < 0:
                raise ObjectPullError(name, f"it has more than {self.max_bytes} bytes")
            return content

        contents = pull_objects(
            [t.object_id for t in iterate_object_tree(tree)],
            pull_object_fn=pull_within,
            initial_backoff=0.05,
            backoff_cap=1.0,
        )
        confirm = make_confirm_message_received_fn_protobuf(
            _patiently(client.ConfirmMessageReceived), self._node, run
        )
        confirm(name)
        header = {
            "kind": asked.metadata.message_type,
            "overhead": self._overhead.take(),
            "asker": self._name_asker(client, run),
        }
        try:
            fields, pieces = self._put_together(name, contents)
            return {**header, "request": fields}, pieces
        except Exception:  # whatever a server sends: it is not for us
            return {**header, "kind": "refuse", "reason": "message"}, []

    def _put_together(
        self, name: str, contents: dict[str, bytes]
    ) -> tuple[dict[str, Any] | None, list[bytes]]:
        """Fields and pieces of a message, of which no part may be there more often than it fits."""
        unpacked = Unpacked()
        for id, object_content in contents.items():
            unpacked.add(id, object_content)
        if unpacked.bytes > self.max_bytes:
            raise ValueError("its arrays are too large")
        content = inflate_object_from_contents(name, contents).content
        fields, pieces = take_fields(content), take_pieces(content)
        if sum(len(piece) for piece in pieces) > self.max_bytes:  # one array under many names
            raise ValueError("its pieces are too large")
        if not all(_is_plain(value) for value in (fields or {}).values()):
            raise ValueError("a field is neither text nor number")
        return fields, pieces

    def _send(
        self,
        client: FleetHttpClient,
        asked: Message,
        fields: Mapping[str, Any],
        pieces: list[bytes],
    ) -> None:
        run = asked.metadata.run_id
        payload = sum(len(piece) for piece in pieces)
        reply = Message(to_records(fields, pieces), reply_to=asked)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.0],
            )
            taken = _patiently(client.PushMessages)(request)
            push = make_push_object_fn_protobuf(
                _patiently(client.PushObject), self._node, run, taken.session_id
            )
            wanted = set(taken.objects_to_push)
            stored = [o for id, o in objects.items() if id not in wanted]
            payload -= sum(len(o.data) for o in stored if isinstance(o, ArrayChunk))
            del stored  # pushing empties `objects`, so that each can go when it is sent
            push_objects(objects, push, object_ids_to_push=wanted)
        self._overhead.leave_out(payload)

    def _name_asker(self, client: FleetHttpClient, run: int) -> str:
        """Who asks, for the site's log: the run and its app, of which nothing but its name is
        fetched.
        """
        if run not in self._known:
            about = _patiently(client.GetRun)(GetRunRequest(node=self._node, run_id=run)).run
            app = f"{about.fab_id} {about.fab_version}, bundle {about.fab_hash[:16]}"
            account = f" of {about.account_name}" if about.account_name else ""
            self._known[run] = repr(f"run {run}{account} ({app})")[1:-1]
            self.log(f"{self._known[run]} asks")
        return self._known[run]

    # -- a restart ---------------------------------------------------------------------------------

    def _mark_at_work(self, proto: MessageProto | None) -> None:
        """Keep what names the message at work, until it is answered."""
        place = self.folder / "at-work"
        if proto is None:
            place.unlink(missing_ok=True)
        else:
            place.write_bytes(MessageProto(metadata=proto.metadata).SerializeToString())

    def _finish_interrupted(self, client: FleetHttpClient, handle: Handle) -> None:
        """The message that this site was working on when it was killed: nobody else will answer it,
        and the server would wait as long as a round may take.
        """
        place = self.folder / "at-work"
        if not place.exists():
            return
        with contextlib.suppress(Exception):  # it may have expired, or be a file of junk
            proto = MessageProto()
            proto.ParseFromString(place.read_bytes())
            metadata = metadata_from_proto(proto.metadata)
            asked = make_message(metadata=metadata, content=RecordDict())
            self._send(client, asked, *handle({"kind": "refuse", "reason": "restarted"}, []))
        self._mark_at_work(None)

    # -- being a node ------------------------------------------------------------------------------

    def _client(self) -> FleetHttpClient:
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(self.key, self.key.public_key()),
            self._overhead,
        ]
        url = f"https://{self.address}"
        client = FleetHttpClient(url, interceptors=interceptors, verify=self.tls)
        # Flower's own would go wherever a server sends it, with a signature of this site's
        client._client.follow_redirects = False
        client._client.event_hooks = {"response": [_take_no_more]}
        return client

    @property
    def _node_id(self) -> int:
        return int(self._node.node_id) if self._node else 0

    def _activate(self, client: FleetHttpClient, patience: float) -> None:
        """A node that still counts as online cannot be activated, and one of ours does for a while
        after it was killed: it is deactivated first.
        """
        until = time.monotonic() + patience
        place = self.folder / "node"
        while True:
            try:
                with contextlib.suppress(OSError, ValueError, httpx.HTTPStatusError):
                    old = int(place.read_text())
                    _call(client.DeactivateNode, DeactivateNodeRequest(node_id=old))
                request = ActivateNodeRequest(
                    public_key=public_key_to_bytes(self.key.public_key()),
                    heartbeat_interval=HEARTBEAT,
                )
                id = _call(client.ActivateNode, request).node_id
                self._node = Node(node_id=id)
                place.write_text(str(id))
                self._lost.clear()
                return
            except (Away, httpx.HTTPStatusError) as e:
                if time.monotonic() > until:
                    if isinstance(e, Away):
                        raise
                    raise Refused(f"the server refused this site's key ({_status(e)})") from e
            time.sleep(QUIET)

    def _beat(self, client: FleetHttpClient, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT / 3):
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
            with contextlib.suppress(Away, httpx.HTTPStatusError):
                if not _call(client.SendNodeHeartbeat, request).success:
                    self._lost.set()


class _Bounded(httpx.SyncByteStream):
    """The body of an answer, as long as it is no longer than one can be."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, ANSWER_BYTES

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.stream:
            self.left -= len(chunk)
            if self.left < 0:
                raise httpx.DecodingError(f"an answer of more than {ANSWER_BYTES} bytes")
            yield chunk

    def close(self) -> None:
        self.stream.close()


def _take_no_more(response: httpx.Response) -> None:
    """Before a byte of its body is read. Packed, a few bytes could become any number."""
    if "content-encoding" in response.headers:
        raise httpx.DecodingError("an answer that is packed")
    response.stream = _Bounded(response.stream)


def _is_plain(value: Any) -> bool:
    """Text, a number, or a list of them: what can go on in JSON."""
    inside = value if isinstance(value, list) else [value]
    return all(isinstance(v, str | int | float) for v in inside)


def _call(method: Callable[[Any], Result], request: Any) -> Result:
    try:
        return method(request)
    except httpx.TransportError as e:
        if "CERTIFICATE_VERIFY_FAILED" in str(e):  # waiting makes no other certificate of it
            raise Refused("the server cannot prove that it is the one of this CA file") from e
        raise Away(str(e) or type(e).__name__) from e
    except (httpx.DecodingError, ValueError) as e:  # Flower's own, of what is no protobuf
        raise Odd(f"odd answer: {e}") from e
    except httpx.HTTPStatusError as e:
        if e.response.is_redirect:
            raise Odd("odd answer: ask elsewhere") from e
        if e.response.status_code in AWAY:
            raise Away(_status(e)) from e
        raise


def _status(e: httpx.HTTPStatusError) -> str:
    return f"HTTP status {e.response.status_code}"


def _patiently(method: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """While the server is away, wait: work that is done is not thrown away."""

    def call(request: Any) -> Result:
        for pause in _pauses():
            try:
                return _call(method, request)
            except Odd:
                raise
            except Away:
                time.sleep(pause)
        raise AssertionError("unreachable")

    return call


def _pauses() -> Iterator[float]:
    pause = QUICK
    while True:
        yield pause
        pause = min(5.0, pause * 2)

"""The server's door, tried as an attacker would: real TLS on 127.0.0.1, and behind it something
that writes down every byte that gets through.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
import h11
import httpx
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlens.engines.flower.pushed import objection
from fedlens.sites import keys, network
from fedlens.sites.front import PATHS, PUSH, Front
from fedlens.trust.signing import read_signing_key

PULL = "/v1/fleet/pull-messages"


class Behind:
    """Stands where the SuperLink would. Keeps what it gets; answers everything with 200 and the
    size of the body it got.
    """

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bytes = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                parsed = h11.Connection(h11.SERVER)
                parsed.receive_data(head)
                length = int(dict(parsed.next_event().headers)[b"content-length"])
                left = length
                while left:
                    chunk = await reader.read(left)
                    if not chunk:
                        return
                    self.bytes += len(chunk)
                    left -= len(chunk)
                body = str(length).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


class Door:
    """A front with short deadlines in a thread, sites 0 and 1 on its list."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.said, self.behind = folder, list[str](), Behind()
        keys.make_authority(folder)
        keys.make_server_certificate(folder, [])
        for name in ("site-0", "site-1", "revoked"):
            keys.make_site_certificate(folder, keys.make_site_key(folder / name)[1])
        self.port, self.inner = network.free_port(), network.free_port()
        listed = {self.public(f"site-{k}"): k for k in (0, 1)}
        self.front = Front(
            listed,
            self.inner,
            network.tls_context(folder / "ca.crt"),
            self.said.append,
            max_body=100_000,
            idle=2.0,
            seconds=0.5,
            pace=100_000,
            connections=3,
            objection=objection,
            max_push=99_500,
        )
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.run(),))
        self.ended = asyncio.Event()
        self.up = True

    async def run(self) -> None:
        inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inside.load_cert_chain(self.keys / "server.pem", self.keys / "server.key")
        link = await asyncio.start_server(
            self.behind.answer, "127.0.0.1", self.inner, ssl=inside, limit=1 << 18
        )
        outside = await self.front.listen("127.0.0.1", self.port, network.front_tls(self.keys))
        self.ready.set()
        while not self.ended.is_set():
            if not self.up:
                link.close()
            await asyncio.sleep(0.02)
        outside.close()
        link.close()
        # a task that outlives its loop is complained about in whatever test runs next
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def __enter__(self) -> Door:
        self.thread.start()
        assert self.ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.loop.close()

    def public(self, name: str) -> bytes:
        return keys.public_pem(keys.site_public_key(self.keys / f"{name}.pub"))

    def tls(self, name: str) -> ssl.SSLContext:
        return network.site_tls(self.keys / "ca.crt", self.keys / f"{name}.crt", self.keys / name)

    def signed(self, name: str) -> dict[str, str]:
        """The headers by which a node proves itself, as Flower makes them."""
        secret = read_signing_key(self.keys / name)
        seen: dict[str, str] = {}

        class Keep(httpx.BaseTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                seen.update({k: v for k, v in request.headers.items() if k.startswith("flwr-")})
                return httpx.Response(200)

        sign = NodeAuthHttpInterceptor(secret, secret.public_key())
        client = FleetHttpClient("https://127.0.0.1", interceptors=[sign])
        client._client = httpx.Client(transport=Keep())
        client.PullMessages(PullMessagesRequest())
        return seen

    def post(
        self,
        path: str = PULL,
        connection: str = "site-0",
        headers: dict[str, str] | None = None,
        body: bytes = b"x",
        method: str = "POST",
    ) -> httpx.Response:
        headers = self.signed(connection) if headers is None else headers
        with httpx.Client(verify=self.tls(connection)) as client:
            return client.request(
                method, f"https://127.0.0.1:{self.port}{path}", headers=headers, content=body
            )

    def raw(self, connection: str = "site-0") -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        return self.tls(connection).wrap_socket(plain, server_hostname="127.0.0.1")

    def head(self, first: str, *lines: str, key: str = "site-0") -> bytes:
        signed = [f"{k}: {v}" for k, v in self.signed(key).items()]
        return "\r\n".join([first, "host: x", *signed, *lines, "", ""]).encode("latin-1")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with Door(tmp_path_factory.mktemp("front")) as here:
        yield here


@pytest.fixture(autouse=True)
def fresh(door: Door) -> None:
    door.behind.heads.clear()
    door.behind.bytes = 0
    door.said.clear()


def status(line: ssl.SSLSocket) -> int:
    """The status of the next response; 0 if the connection was closed instead."""
    line.settimeout(20)
    with contextlib.suppress(OSError):
        first = line.recv(4096)
        return int(first.split()[1]) if first else 0
    return 0


ME, OTHER, SERVER = 7, 8, 1  # nodes


def pushed(size: int = 0, node: int = ME, trees: int = 1, **said: Any) -> bytes:
    """The body of a push-messages request. said: what the message says of itself. size: brought to
    so many bytes by a long group id."""
    facts = {"src_node_id": ME, "dst_node_id": SERVER, "reply_to_message_id": "a", **said}

    def written(filler: int) -> bytes:
        message = Message(metadata=Metadata(run_id=3, group_id="g" * filler, **facts))
        request = PushMessagesRequest(node=Node(node_id=node), messages_list=[message])
        request.message_object_trees.extend([ObjectTree(object_id="o")] * trees)
        return request.SerializeToString()

    body = written(0)
    return written(size - len(body) - 8) if size else body


def test_what_a_site_needs_goes_through_whole(door: Door) -> None:
    """Every path, and a body in many chunks; other headers stay outside."""
    for path in sorted(PATHS):
        body = pushed(99_000) if path == PUSH else bytes(99_000)
        headers = {**door.signed("site-0"), "x-mine": "1", "cookie": "a=b"}
        answer = door.post(path.decode(), headers=headers, body=body)
        assert (answer.status_code, answer.content) == (200, b"99000")
    assert len(door.behind.heads) == len(PATHS) == 9
    assert door.behind.bytes == 9 * 99_000
    assert not any(b"x-mine" in h or b"cookie" in h for h in door.behind.heads)
    assert not door.said


def outsiders(door: Door) -> dict[str, ssl.SSLContext]:
    """TLS of people who are no sites."""
    ca = door.keys / "ca.crt"
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    only_ca = network.tls_context(ca)
    elsewhere = door.keys / "elsewhere"
    if not elsewhere.exists():
        keys.make_authority(elsewhere)
        public = keys.make_site_key(elsewhere / "site-0")[1]
        keys.make_site_certificate(elsewhere, public)
    forged = network.site_tls(ca, elsewhere / "site-0.crt", elsewhere / "site-0")
    as_server = network.tls_context(ca)
    as_server.load_cert_chain(door.keys / "server.pem", door.keys / "server.key")
    return {"nothing": blind, "the CA file": only_ca, "own CA": forged, "server's": as_server}


@pytest.mark.parametrize("who", ["nothing", "the CA file", "own CA", "server's"])
@pytest.mark.parametrize("path", [PULL, "/v1/control/list-nodes", "/v1/runtime/acquire-task"])
def test_an_outsider_gets_no_answer_at_all(door: Door, who: str, path: str) -> None:
    """With and without the CA file, with a certificate of another authority, with one that is for a
    server: not even a status, whatever is asked. The node signature of a site does not help."""
    headers = door.signed("site-0")
    with httpx.Client(verify=outsiders(door)[who]) as client, pytest.raises(httpx.TransportError):
        client.post(f"https://127.0.0.1:{door.port}{path}", headers=headers, content=b"x")
    assert not door.behind.heads


def test_a_certificate_that_is_no_longer_on_the_list(door: Door) -> None:
    assert door.post(connection="revoked").status_code == 403
    assert door.said == ["refused a stranger: a certificate whose key is not on the list of sites"]
    assert not door.behind.heads


OTHER_PATHS = [
    "/v1/control/list-nodes",
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/v1/runtime/pull-task-input",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/get-fab",
    "/",
    "/docs",
    "/v1/fleet",
    "/v1/fleet/",
]
TRICKS = [
    PULL + "/",
    PULL + "?x=1",
    PULL + "#x",
    PULL + "%00",
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/pull-messages/../../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet//pull-messages",
    "//v1/fleet/pull-messages",
    "/V1/FLEET/PULL-MESSAGES",
    "/v1/fleet/pull-message\u017f",
    "/v1/fleet/pull%2Dmessages",
    "/v1/fleet\\pull-messages",
    "https://127.0.0.1/v1/control/list-nodes",
    "http://127.0.0.1/v1/fleet/pull-messages",
    "*",
]


@pytest.mark.parametrize("path", [*OTHER_PATHS, *TRICKS])
def test_a_site_with_its_key_reaches_nothing_else(door: Door, path: str) -> None:
    """Sent as it stands, without a client that would tidy it up."""
    target = path.encode("utf-8").decode("latin-1")
    with door.raw() as line:
        line.sendall(door.head(f"POST {target} HTTP/1.1", "content-length: 1") + b"x")
        assert status(line) in (400, 404)
    assert not door.behind.heads
    assert all(text.isprintable() for text in door.said)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "TRACE"])
def test_only_posts(door: Door, method: str) -> None:
    with door.raw() as line:
        line.sendall(door.head(f"{method} {PULL} HTTP/1.1", "content-length: 0"))
        assert status(line) == 405
    assert not door.behind.heads


def test_a_recorded_signature_is_worth_nothing_to_another_site(door: Door) -> None:
    """Site 1 has got hold of a header that site 0 sent a moment ago. On its own connection it may
    not use it; nor may it leave the key out, or send two."""
    recorded = door.signed("site-0")
    assert door.post(connection="site-1", headers=recorded).status_code == 403
    assert door.said[-1].startswith("refused the site of client 1: a node key that is not")
    for headers in ({}, {**recorded, "flwr-public-key": "!"}, {"flwr-public-key": ""}):
        assert door.post(connection="site-1", headers=headers).status_code == 403
    both = base64.b64encode(door.public("site-1")).decode()
    with door.raw("site-1") as line:
        twice = door.head(
            f"POST {PULL} HTTP/1.1", f"flwr-public-key: {both}", "content-length: 1", key="site-0"
        )
        line.sendall(twice + b"x")
        assert status(line) == 400  # the front would look at one, the SuperLink at the other
    assert not door.behind.heads


FORGED = {
    "another node's reply": pushed(src_node_id=OTHER),
    "the server's message to another site": pushed(
        src_node_id=SERVER, dst_node_id=OTHER, reply_to_message_id=""
    ),
    "a message to another site": pushed(dst_node_id=OTHER),
    "no reply": pushed(reply_to_message_id=""),
    "no message": PushMessagesRequest(node=Node(node_id=ME)).SerializeToString(),
    "a second message": pushed()
    + PushMessagesRequest(
        messages_list=[Message(metadata=Metadata(src_node_id=OTHER))]
    ).SerializeToString(),
    "another node in front": pushed(node=OTHER),
    "no tree": pushed(trees=0),
    "junk": bytes(100),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_site_pushes_replies_of_its_own_and_nothing_else(door: Door, forged: str) -> None:
    """The SuperLink would take a message's own word for who sent it."""
    answer = door.post(PUSH.decode(), body=FORGED[forged])
    assert answer.status_code == 403 and not door.behind.heads
    assert door.said[-1].startswith("refused the site of client 0: ")


def test_what_passes_is_a_reply_of_the_requests_own_node_whatever_the_bytes() -> None:
    """Bodies with changed, lost and doubled bytes, and two joined into one: an objection in words,
    or what the SuperLink will read is as it should be."""
    rng = random.Random(0)
    passed = 0
    bodies = [pushed(), pushed(300), *FORGED.values()]
    for _ in range(5000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            at = rng.randrange(len(body) or 1)
            piece = rng.choice((b"", rng.randbytes(1), bytes(body[at : at + 9]) * 2))
            body[at : at + rng.choice((0, 1, 1, 4))] = piece
        body += rng.choice((b"", b"", rng.choice(bodies)))
        why = objection(bytes(body))
        if why is None:
            passed += 1
            request = PushMessagesRequest.FromString(bytes(body))
            (message,) = request.messages_list
            assert message.metadata.src_node_id == request.node.node_id
            assert message.metadata.dst_node_id == SERVER and message.metadata.reply_to_message_id
        else:
            assert why.isprintable()
    assert 100 < passed < 4000


def test_an_announcement_is_held_in_memory_and_so_it_is_small(door: Door) -> None:
    with door.raw() as line:
        line.sendall(door.head(f"POST {PUSH.decode()} HTTP/1.1", "content-length: 99501"))
        assert status(line) == 413
    with door.raw() as line:
        line.sendall(door.head(f"POST {PUSH.decode()} HTTP/1.1", "content-length: 1000") + b"x")
        assert status(line) == 408
    assert not door.behind.heads


def test_a_body_too_large_and_one_without_an_end(door: Door) -> None:
    with door.raw() as line:
        line.sendall(door.head(f"POST {PULL} HTTP/1.1", "content-length: 100001"))
        assert status(line) == 413
    for endless in ("transfer-encoding: chunked", "connection: close"):
        with door.raw() as line:
            line.sendall(door.head(f"POST {PULL} HTTP/1.1", endless))
            assert status(line) == 411
    for nonsense in ("content-length: -1", "content-length: 1, 2", "content-length: 1e9"):
        with door.raw() as line:
            line.sendall(door.head(f"POST {PULL} HTTP/1.1", nonsense))
            assert status(line) == 400
    assert not door.behind.heads


def test_a_request_hidden_in_a_body_is_not_one(door: Door) -> None:
    """Two ways to say how long a body is, a classic: never passed on."""
    hidden = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\n\r\n"
    with door.raw() as line:
        head = door.head(
            f"POST {PULL} HTTP/1.1", f"content-length: {len(hidden)}", "transfer-encoding: chunked"
        )
        line.sendall(head + hidden)
        assert status(line) in (400, 411)
    with door.raw() as line:
        line.sendall(door.head(f"POST {PULL} HTTP/1.1", "content-length: 1") + b"x" + hidden)
        answered = b""
        with contextlib.suppress(OSError):
            while part := line.recv(4096):
                answered += part
        assert answered.count(b"HTTP/1.1 200") == 1 and b"HTTP/1.1 404" in answered
    assert len(door.behind.heads) == 1 and b"control" not in door.behind.heads[0]


def test_a_slow_body_a_slow_head_and_silence_are_cut(door: Door) -> None:
    """1000 bytes may take 0.5 s and a hundredth here. Each gets an answer or an end by the front's
    own clock, while an honest site is served as always."""
    with door.raw() as body, door.raw() as head, door.raw("site-1") as silent:
        body.sendall(door.head(f"POST {PULL} HTTP/1.1", "content-length: 1000") + b"x" * 10)
        head.sendall(f"POST {PULL} HTTP/1.1\r\nhost: x\r\n".encode())
        assert door.post().status_code == 200
        assert status(body) == 408 and status(head) == 408 and status(silent) == 408
    assert "refused the site of client 0: a body that came too slowly" in door.said


def test_one_site_cannot_take_all_connections(door: Door) -> None:
    """Three are its share; the fourth is sent away, and another site is served."""
    with door.raw() as a, door.raw() as b, door.raw() as c, door.raw() as d:
        assert status(d) == 429
        assert door.post(connection="site-1").status_code == 200
        for line in (a, b, c):
            line.close()


def test_strangers_that_say_nothing_do_not_fill_the_door(tmp_path: Path) -> None:
    """Sixty connections from one address that never begin with TLS, and before them a site that is
    slow to begin: of those that have shown no certificate eight are kept. The oldest of whoever
    holds most of them go first, so the site is served, and so is one that comes later."""
    door = Door(tmp_path / "keys")
    door.front.seconds, door.front.strangers = 20.0, 8
    with door:
        with contextlib.ExitStack() as held:
            slow = held.enter_context(socket.create_connection(("127.0.0.1", door.port), 10))
            strangers = []
            for _ in range(60):
                line = socket.create_connection(("127.0.0.1", door.port), 10, ("127.0.0.2", 0))
                strangers.append(held.enter_context(line))
            for gone in strangers[:50]:
                gone.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert gone.recv(1) == b""
            with door.tls("site-0").wrap_socket(slow, server_hostname="127.0.0.1") as line:
                line.sendall(door.head(f"POST {PULL} HTTP/1.1", "content-length: 1") + b"x")
                assert status(line) == 200
            assert door.post(connection="site-1").status_code == 200
            assert 0 < len(door.front._unproven) <= 8
        words = "8 connections have shown no certificate, most of them from 127.0.0.2"
        assert door.said == [f"{words}: the oldest are closed"]
        deadline = time.monotonic() + 10
        while door.front._unproven or any(door.front._open.values()):
            assert time.monotonic() < deadline, "what is closed is forgotten"
            time.sleep(0.02)


def test_while_the_superlink_is_down_sites_are_told_so(tmp_path: Path) -> None:
    with Door(tmp_path / "keys") as door:
        assert door.post().status_code == 200
        door.front.port = network.free_port()  # where nobody listens
        assert door.post().status_code == 503
        door.front.port = door.inner
        assert door.post().status_code == 200


def test_keys_of_flower_and_ours_are_written_alike(door: Door) -> None:
    public = keys.site_public_key(door.keys / "site-0.pub")
    assert keys.public_pem(public) == public_key_to_bytes(public)


def test_a_site_needs_a_certificate_of_its_own_key(door: Door, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no certificate .*keys --certify site-0.pub"):
        network.site_tls(door.keys / "ca.crt", tmp_path / "site-0.crt", door.keys / "site-0")
    shutil.copy(door.keys / "site-1.crt", tmp_path / "site-0.crt")
    with pytest.raises(ValueError, match="is not the certificate of the key"):
        network.site_tls(door.keys / "ca.crt", tmp_path / "site-0.crt", door.keys / "site-0")

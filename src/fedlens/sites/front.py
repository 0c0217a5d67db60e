"""The server's only door: what a site may say to the SuperLink, and nothing else.

Flower's SuperLink answers the sites (`/v1/fleet`), its operators (`/v1/control`) and its own
programs (`/v1/runtime`) at one port, and asks the latter two for no key. So it listens on the
server's own machine only, and this front stands where others can reach it. It lets a request
through if

- the connection was opened with a certificate of the federation's authority, for a key that is on
  the server's list of sites;
- it is a POST to one of PATHS, letter by letter;
- it carries Flower's node signature, made with that same key. The signature covers a time and no
  more, so a recorded one could be used again for minutes; without the site's key for the connection
  it is worth nothing;
- its body says how long it is, is no longer than `max_body`, and comes at a reasonable pace;
- where it announces a message (PUSH), that is a reply of the site's own node to the server.

What is let through is written anew: a head with the headers that the SuperLink reads, then as many
bytes as were announced. Nothing is kept in memory but a chunk, or an announcement.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import h11

from fedlens.core.log import Log
from fedlens.sites.keys import certified_key

# of the Fleet API; not in it: register-node and unregister-node (the server's list decides),
# get-fab (no site of ours wants code)
PATHS = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
        "pull-object", "push-object", "confirm-message-received", "get-run",
    )
)  # fmt: skip
PUSH = b"/v1/fleet/push-messages"
KEY_HEADER = b"flwr-public-key"
SIGNED = (KEY_HEADER, b"flwr-signature", b"flwr-timestamp")
VERSION = (b"flwr-package-name", b"flwr-package-version", b"flwr-component-name")
PASSED = frozenset((*SIGNED, *VERSION, b"content-type", b"accept"))
BACK = frozenset((b"content-type", b"flwr-version-incompatibility-message"))
_CHUNK = 1 << 18
_SAY_AGAIN = 60.0  # seconds
_SLOW = "a body that came too slowly"
_WORDS = {
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 411: "Length Required", 413: "Content Too Large",
    429: "Too Many Requests", 502: "Bad Gateway", 503: "Service Unavailable",
}  # fmt: skip

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Refusal(Exception):
    """A status to answer with, after which the connection is closed; why: for the server's log."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass
class Front:
    """A door in front of one SuperLink.

    Args:
        sites: public key as PEM -> number of the client it belongs to.
        port: of the SuperLink, on this machine.
        inner: TLS by which the SuperLink is known.
        log: the server's.
        max_body: bytes of one request. A message travels in pieces of 4 MB.
        idle: seconds that a connection may be silent between two requests.
        seconds: that a head, or a body beyond `pace`, may take.
        pace: bytes a second that a body must at least come with.
        connections: that a site may hold at a time.
        strangers: connections that have not shown a certificate yet. Of more, the oldest of
            whichever address holds most of them are closed.
        objection: why the body of a PUSH may not pass; such a body is at most `max_push` long.
    """

    sites: Mapping[bytes, int]
    port: int
    inner: ssl.SSLContext
    log: Log
    max_body: int = 16 << 20
    idle: float = 90.0
    seconds: float = 30.0
    pace: int = 16 << 10
    connections: int = 16
    strangers: int = 128
    objection: Callable[[bytes], str | None] = lambda body: None
    max_push: int = 4 << 20
    _open: Counter[int] = field(default_factory=Counter)
    # handshakes under way, the oldest first
    _unproven: dict[asyncio.Task[None], asyncio.Transport] = field(default_factory=dict)
    _crowded: float = -math.inf  # when that was last said

    async def listen(self, host: str, port: int, tls: ssl.SSLContext) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Doorstep(self, tls), host, port)

    def begin(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Somebody has connected, and has still to show a certificate."""
        if len(self._unproven) >= self.strangers:
            self._close_one()
        task = asyncio.get_running_loop().create_task(self._handshake(transport, tls))
        self._unproven[task] = transport
        task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _close_one(self) -> None:
        waiting = {task: _address(transport) for task, transport in self._unproven.items()}
        ((most, _),) = Counter(waiting.values()).most_common(1)
        oldest = next(task for task, address in waiting.items() if address == most)
        oldest.cancel()
        self._unproven.pop(oldest).abort()
        if time.monotonic() - self._crowded > _SAY_AGAIN:
            self.log(
                f"{self.strangers} connections have shown no certificate, most of them from"
                f" {most}: the oldest are closed"
            )
            self._crowded = time.monotonic()

    async def _handshake(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(_CHUNK), self.converse)
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, protocol, tls, server_side=True, ssl_handshake_timeout=self.seconds
            )
        except OSError:  # no TLS, no certificate, or gone
            return
        if secure is not None and not secure.is_closing():
            protocol.connection_made(secure)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first request to its last."""
        client, link = None, _Link(self.port, self.inner)
        try:
            client = self._who(writer)
            self._open[client] += 1
            if self._open[client] > self.connections:
                raise _Refusal(429, "too many connections")
            while await self._exchange(client, (reader, writer), link):
                pass
        except _Refusal as e:
            if e.why:
                name = "a stranger" if client is None else f"the site of client {client}"
                self.log(f"refused {name}: {e.why}")
            with contextlib.suppress(OSError, TimeoutError):
                await self._answer(writer, e.status)
        except (OSError, EOFError, TimeoutError, ssl.SSLError):
            pass  # gone, or as good as gone
        finally:
            if client is not None:
                self._open[client] -= 1
            link.close()
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    def _who(self, writer: asyncio.StreamWriter) -> int:
        """The client whose certificate opened this connection."""
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        key = certified_key(shown) if shown else b""
        if key not in self.sites:
            raise _Refusal(403, "a certificate whose key is not on the list of sites")
        return self.sites[key]

    async def _exchange(self, client: int, site: _Streams, link: _Link) -> bool:
        """One request and its response; whether there may be another."""
        reader, writer = site
        head = await self._read_head(reader)
        if head is None:
            return False
        request = _parse(h11.SERVER, head)
        if not isinstance(request, h11.Request):
            raise _Refusal(400, "what is no HTTP request")
        length = self._check(client, request)
        announced = await self._read_push(reader, length) if request.target == PUSH else b""
        try:
            inner_reader, inner_writer = await link.open()
            passed = [(k, v) for k, v in request.headers if k in PASSED]
            inner_writer.write(_head(b"POST %s HTTP/1.1" % request.target, passed, length))
            inner_writer.write(announced)
            await self._relay(reader, inner_writer, length - len(announced))
        except (ConnectionError, ssl.SSLError) as e:
            raise _Refusal(503) from e
        try:
            async with asyncio.timeout(2 * self.seconds):
                response = _parse(h11.CLIENT, await inner_reader.readuntil(b"\r\n\r\n"))
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as e:
            raise _Refusal(503) from e
        if not isinstance(response, h11.Response):
            raise _Refusal(502, "the SuperLink did not answer in HTTP")
        size = _length(response.headers)
        if size is None:
            raise _Refusal(502, "the SuperLink did not say how long its answer is")
        back = [(k, v) for k, v in response.headers if k in BACK]
        writer.write(_head(b"HTTP/1.1 %d %s" % (response.status_code, b"-"), back, size))
        await self._relay(inner_reader, writer, size)
        link.used = time.monotonic()
        return True

    async def _read_push(self, reader: asyncio.StreamReader, length: int) -> bytes:
        """The whole body of a request that announces a message, if nothing is wrong with it."""
        if length > self.max_push:
            raise _Refusal(413, f"a message announced in {length} bytes")
        try:
            async with asyncio.timeout(self.seconds + length / self.pace):
                body = await reader.readexactly(length)
        except TimeoutError as e:
            raise _Refusal(408, _SLOW) from e
        if why := self.objection(body):
            raise _Refusal(403, why)
        return body

    async def _read_head(self, reader: asyncio.StreamReader) -> bytes | None:
        """None if the site has nothing more to ask."""
        try:
            async with asyncio.timeout(self.idle):
                first = await reader.read(1)
            if not first:
                return None
            async with asyncio.timeout(self.seconds):
                return first + await reader.readuntil(b"\r\n\r\n")
        except TimeoutError as e:
            raise _Refusal(408) from e
        except asyncio.LimitOverrunError as e:
            raise _Refusal(400, "a head without an end") from e

    def _check(self, client: int, request: h11.Request) -> int:
        """The length of the body of a request that may pass."""
        if request.method != b"POST":
            raise _Refusal(405, f"asked with {_shown(request.method)}")
        if request.target not in PATHS:
            raise _Refusal(404, f"asked for {_shown(request.target)}")
        headers = dict(request.headers)
        read = [name for name, _ in request.headers if name in PASSED]
        if len(read) > len(set(read)):  # we would look at one of them, the SuperLink at the other
            raise _Refusal(400, "a header that came twice")
        if any(name not in headers for name in SIGNED):
            raise _Refusal(403, "no node signature")
        try:
            key = base64.b64decode(headers[KEY_HEADER], validate=True)
        except binascii.Error as e:
            raise _Refusal(403, "a node key that is none") from e
        if self.sites.get(key) != client:
            raise _Refusal(403, "a node key that is not the certificate's")
        length = _length(request.headers)
        if length is None:
            raise _Refusal(411, "a body that does not say how long it is")
        if length > self.max_body:
            raise _Refusal(413, f"a body of {length} bytes")
        return length

    async def _relay(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, length: int
    ) -> None:
        try:
            async with asyncio.timeout(self.seconds + length / self.pace):
                while length:
                    chunk = await source.read(min(length, _CHUNK))
                    if not chunk:
                        raise EOFError
                    target.write(chunk)
                    await target.drain()
                    length -= len(chunk)
                await target.drain()
        except TimeoutError as e:
            raise _Refusal(408, _SLOW) from e

    async def _answer(self, writer: asyncio.StreamWriter, status: int) -> None:
        line = b"HTTP/1.1 %d %s" % (status, _WORDS[status].encode())
        writer.write(_head(line, [(b"connection", b"close")], 0))
        async with asyncio.timeout(self.seconds):
            await writer.drain()


class _Doorstep(asyncio.Protocol):
    """A connection as it comes, of which nothing is read but by TLS."""

    def __init__(self, front: Front, tls: ssl.SSLContext) -> None:
        self.front, self.tls = front, tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self.front.begin(transport, self.tls)


def _address(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ["an unknown address"])[0])


class _Link:
    """A connection to the SuperLink, kept for the next request of the same site for a while: the
    SuperLink closes those that are idle."""

    KEPT = 2.0

    def __init__(self, port: int, tls: ssl.SSLContext) -> None:
        self.port, self.tls, self.used = port, tls, 0.0
        self.streams: _Streams | None = None

    async def open(self) -> _Streams:
        if self.streams is None or time.monotonic() - self.used > self.KEPT:
            self.close()
            self.streams = await asyncio.open_connection(
                "127.0.0.1", self.port, ssl=self.tls, limit=_CHUNK
            )
        return self.streams

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


def _parse(role: type[h11.CLIENT] | type[h11.SERVER], head: bytes) -> h11.Event | None:
    """The head of a message, by the strict rules of h11; None where it breaks them."""
    connection = h11.Connection(role, max_incomplete_event_size=_CHUNK)
    if role is h11.CLIENT:  # an answer is only read after a question
        connection.send(h11.Request(method="POST", target="/", headers=[("host", "-")]))
        connection.send(h11.EndOfMessage())
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request | h11.Response) else None


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    found = dict(headers)
    if b"transfer-encoding" in found or b"content-length" not in found:
        return None
    return int(found[b"content-length"])  # digits: h11 has looked


def _head(line: bytes, headers: list[tuple[bytes, bytes]], length: int) -> bytes:
    own = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % length)]
    lines = [line, *(b"%s: %s" % pair for pair in [*headers, *own])]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _shown(text: bytes) -> str:
    """What somebody sent, fit for a log."""
    return repr(text[:80].decode("latin-1"))


async def run_front(
    front: Front, host: str, port: int, tls: ssl.SSLContext, alive: Callable[[], bool]
) -> None:
    """Until the SuperLink behind it has ended."""
    async with await front.listen(host, port, tls):
        while alive():
            await asyncio.sleep(0.5)

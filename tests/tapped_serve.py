"""`fedlens serve` with a tap between its front and the SuperLink: everything that arrives behind
the front passes a socket of ours and is kept in a file, in the order of arrival: a line with the
number of the connection and the number of bytes, then the bytes. Run as a program with the name of
that file, then what `fedlens` takes.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployment import free_port

from fedlens.cli.main import main
from fedlens.sites import serve
from fedlens.sites.front import Front
from fedlens.sites.network import tls_context


class Tap:
    """Listens in a thread of its own, as the SuperLink would: with its certificate."""

    def __init__(self, path: Path, keys: Path, target: int) -> None:
        self.keys, self.target, self.port = keys, target, free_port()
        self.kept, self.numbers = path.open("wb", buffering=0), itertools.count()
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.listen(ready)), daemon=True).start()
        ready.wait()

    async def listen(self, ready: threading.Event) -> None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.keys / "server.pem", self.keys / "server.key")
        async with await asyncio.start_server(self.relay, "127.0.0.1", self.port, ssl=tls):
            ready.set()
            await asyncio.Event().wait()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(
            "127.0.0.1", self.target, ssl=tls_context(self.keys / "ca.crt")
        )
        number = next(self.numbers)

        def keep(data: bytes) -> None:
            self.kept.write(b"%d %d\n" % (number, len(data)) + data)

        ways = [pour(reader, inner_writer, keep), pour(inner_reader, writer, len)]
        await asyncio.gather(*ways, return_exceptions=True)


async def pour(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, see: Callable[[bytes], object]
) -> None:
    try:
        while data := await source.read(1 << 18):
            see(data)
            target.write(data)
            await target.drain()
    finally:
        target.close()


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    keys = Path(arguments[arguments.index("--keys") + 1])

    def tapped(sites: Any, port: int, *rest: Any) -> Front:
        return Front(sites, Tap(Path(file), keys, port).port, *rest)

    serve.Front = tapped  # type: ignore[misc,assignment]
    main(arguments)

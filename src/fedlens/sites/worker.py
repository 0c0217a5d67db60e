"""The process in which a site works, and the other end of the line to it.

`fedlens join` itself only talks to the server. What it fetches goes through a socket to this
process, in which torch is imported and the site's data is read once; what comes back goes to the
server as it is. If the process dies, of a lack of memory or a broken driver, it is started again
and one reply is lost.

A frame on the line: the header's length, the header as JSON with the sizes of the pieces, the
pieces.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedlens.config.convert import ConfigError
from fedlens.core.log import Log
from fedlens.sites.logs import log_line
from fedlens.trust.guard import Guard

if TYPE_CHECKING:
    from fedlens.engines.flower.site import MakeSite, Site

Frame = tuple[dict[str, Any], list[bytes]]
COMMAND = (sys.executable, "-m", "fedlens.sites.worker")


class SiteWorker:
    """The network's end.

    Args:
        node: the settings of this site, as `sites.site.make_site` takes them.
        log: for the site's operator.
        command: starts the process; the number of its socket is added.
    """

    def __init__(self, node: Mapping[str, Any], log: Log, command: Sequence[str] = COMMAND) -> None:
        self.node, self.log, self.command = node, log, command
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None

    def __enter__(self) -> SiteWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> dict[str, Any]:
        """What the site has to say about itself, or a ConfigError with its words."""
        self.stop()
        self.line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        told = self._exchange(dict(self.node), [])
        if told is None:
            raise ConfigError("this site's worker ended at once: its own words are above")
        if "error" in told[0]:
            raise ConfigError(told[0]["error"])
        return told[0]

    def handle(self, header: dict[str, Any], pieces: list[bytes]) -> Frame:
        """One message to the site; its reply. See `engines.flower.site.answer_request`."""
        answered = self._exchange(header, pieces)
        if answered is None:
            self.log("this site's worker died while it worked; it is started again")
            self.start()
            # without the request, of which it may have died
            known = {k: v for k, v in header.items() if k in ("asker", "overhead")}
            answered = self._exchange({**known, "kind": "refuse", "reason": "died"}, [])
        if answered is None:
            raise ConfigError("this site's worker died twice in a row")
        return answered

    def stop(self) -> None:
        if self.line is not None:
            self.line.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.line = self.process = None

    def _exchange(self, header: dict[str, Any], pieces: list[bytes]) -> Frame | None:
        assert self.line is not None
        try:
            send_frame(self.line, header, pieces)
            return receive_frame(self.line)
        except OSError:
            return None


def send_frame(line: socket.socket, header: Mapping[str, Any], pieces: list[bytes]) -> None:
    """Empties `pieces`."""
    text = json.dumps({**header, "sizes": [len(piece) for piece in pieces]}).encode()
    line.sendall(len(text).to_bytes(8, "little") + text)
    while pieces:
        line.sendall(pieces.pop(0))


def receive_frame(line: socket.socket) -> Frame | None:
    """The next frame, or None if the other end is gone."""
    try:
        length = int.from_bytes(_receive_exactly(line, 8), "little")
        header = json.loads(_receive_exactly(line, length))
        return header, [_receive_exactly(line, size) for size in header.pop("sizes")]
    except EOFError:
        return None


def _receive_exactly(line: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        got = line.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return bytes(out)


# -- in the process --------------------------------------------------------------------------------


def serve_requests(line: socket.socket, make_site: MakeSite) -> None:
    """Read this site's settings, say what it has, then answer until the other end is gone."""
    from fedlens.engines.flower.site import answer_request

    first = receive_frame(line)
    if first is None:
        return
    node = first[0]
    keep = _LastSite(make_site)
    try:
        send_frame(line, introduce(keep, node), [])
    except (ValueError, OSError) as e:  # what an operator can put right
        send_frame(line, {"error": str(e)}, [])
        return
    while frame := receive_frame(line):
        fields, pieces = answer_request(*frame, node, keep, _log_line)
        send_frame(line, fields, pieces)


def introduce(make_site: MakeSite, node: Mapping[str, Any]) -> dict[str, Any]:
    """What a site with a recipe of its own has, before any server asked; its data is read."""
    Guard.of(node)  # a policy or a ledger that cannot be read is found out now
    if not node.get("recipe"):
        return {"examples": None, "remarks": []}
    site = make_site(node, {})
    terms = asdict(site.terms) if site.terms else None
    return {"examples": site.examples, "remarks": list(site.remarks), "terms": terms}


class _LastSite:
    """Makes sites, and keeps the last one: its data and its network stay loaded."""

    def __init__(self, make_site: MakeSite) -> None:
        self.make_site = make_site
        self.key = ""
        self.site: Site | None = None

    def __call__(self, node: Mapping[str, Any], request: Mapping[str, Any]) -> Site:
        key = "" if node.get("recipe") else f"{request['recipe']} {request['job']}"
        if self.site is None or key != self.key:
            self.site, self.key = self.make_site(node, request), key
            if key:  # else `join` says them
                for remark in self.site.remarks:
                    _log_line(remark)
        return self.site


def _log_line(text: str) -> None:
    log_line(text, "fedlens: ")


def run_worker(make_site: MakeSite) -> None:
    """The whole life of the process; its last argument is the number of its socket."""
    from fedlens.engines.simulator import exit_with_parent

    exit_with_parent(os.getppid(), lasting=True)
    line = socket.socket(fileno=int(sys.argv[-1]))
    with line, contextlib.suppress(OSError):  # the other end went away
        serve_requests(line, make_site)


if __name__ == "__main__":
    from fedlens.sites.site import make_site

    run_worker(make_site)

"""A client at its own place: answers messages from memory on disk. Knows nothing of Flower, only of
headers and bytes.

Memory: a site's processes come and go, so client memory lives in files, one folder per job. Beside
it lies a stamp: the round the site last answered (last), and the round the server had heard before
that (basis). The site can go on if the server now says it heard `last` (the reply arrived) or
`basis` (it got lost). Anything else means that one of the two has forgotten something: an emptied
folder, an old backup, a server that went back further than one round. An algorithm that keeps
nothing at its clients does not mind; for any other the site declines with one sentence, unless the
server runs with `forgive`.

`python -m fedlens.engines.flower.site SOCKET` is the resident worker of a site: torch is imported
and data is read once, not once a message.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fedlens
from fedlens.core.algorithm import Algorithm
from fedlens.core.answer import answer
from fedlens.core.federation import Federation
from fedlens.core.files import write_atomically
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.engines.worker import threads

PIECE = 4 << 20  # bytes of a message handed over at a time: what is in transit exists twice

Facts = Mapping[str, Any]


class SiteError(ValueError):
    """Why a site cannot take part: one sentence for both operators."""


@dataclass(frozen=True)
class Site:
    """One client at its own place. `federation` need hold nothing but this client's part (see
    `alone`). recipe: the hash of what the site agreed to do. folder: where its memory lives.
    classes: what its labels mean, which must be the same everywhere. remarks: what of its data
    could not be used, for its own operator."""

    id: int
    algorithm: Algorithm
    federation: Federation
    folder: Path
    recipe: str = ""
    threads: int = 1
    classes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def examples(self) -> int:
        data = self.federation.holdings[self.id]
        return len(data) if hasattr(data, "__len__") else 1


MakeSite = Callable[[Facts, Facts], Site]  # (node config, run config)


def alone(id: int, data: Any, held_out: Any = None) -> Federation:
    """A federation as one site sees it: its own data under its own id."""
    return Federation(cast("Sequence[Any]", {id: data}), cast("Sequence[Any]", {id: held_out}))


def pack(message: Message) -> list[bytes]:
    return list(message.pieces(PIECE))


def unpack(pieces: list[bytes]) -> Message:
    """Empties `pieces` on the way, so that two whole copies do not live longer than they must."""
    out = bytearray(sum(len(p) for p in pieces))
    at = 0
    while pieces:
        part = pieces.pop(0)
        out[at : at + len(part)] = part
        at += len(part)
    return Message.from_bytes(out)


def handle(
    header: Facts, pieces: list[bytes], make_site: MakeSite | None = None
) -> tuple[dict[str, Any], list[bytes]]:
    """One message in, one reply out. Whatever goes wrong at a site becomes one sentence in its
    reply; the round goes on with the others.
    """
    try:
        told = header["facts"]
        if told["version"] != fedlens.__version__:
            raise SiteError(
                f"the server runs FedLens {told['version']}, this site {fedlens.__version__}:"
                " install the same version at both"
            )
        site = (make_site or _named(str(header["run"]["site"])))(header["node"], header["run"])
        if told["recipe"] != site.recipe:
            raise SiteError(
                f"the server's recipe ({told['recipe'][:12] or 'none'}) is not the one this site"
                f" agreed to ({site.recipe[:12] or 'none'}): all of it but [data] must be equal"
            )
        if header["kind"] == "query":
            return {
                "client": site.id,
                "examples": site.examples,
                "classes": ", ".join(site.classes),
            }, []
        reply = respond(
            site,
            unpack(pieces),
            str(told["job"]),
            int(told["heard"]),
            forgive=bool(told["forgive"]),
        )
        return {"client": site.id}, pack(reply)
    except Exception as e:  # a client is somebody else's code and data: anything may come out of it
        text = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        return {"lost": (text.strip().splitlines() or [type(e).__name__])[0][:400]}, []


def respond(
    site: Site, message: Message, job: str, heard: int, *, forgive: bool = False
) -> Message:
    """`answer`, from memory on disk. Leaves a stamp by which the next call knows whether it
    remembers what the server thinks it does.
    """
    folder = site.folder / job
    stamp = folder / f"{site.id}.json"
    evaluating = message.header.evaluate
    try:
        folder.mkdir(parents=True, exist_ok=True)
        last, basis = json.loads(stamp.read_text()) if stamp.exists() else (NEVER, NEVER)
        forgotten = heard not in (last, basis)
        if forgotten and evaluating:
            raise SiteError(_amnesia(heard, last, folder))
        memory = Memory(None) if forgotten else Memory(folder, durable=True)
        with threads(site.threads):
            reply = answer(site.algorithm, message, site.id, site.federation, memory, heard)
        if forgotten and memory.resident:  # it would have needed what is lost
            if not forgive:
                raise SiteError(_amnesia(heard, last, folder))
            Memory(folder, durable=True).save(site.id, memory.load(site.id))
        if not evaluating:
            write_atomically(stamp, json.dumps([message.round, heard]), sync=False)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise SiteError(
                f"this site cannot write its memory to {site.folder}: {os.strerror(e.errno)}"
            ) from e
        raise
    return reply


def _amnesia(heard: int, last: int, folder: Path) -> str:
    knows = "nothing of this job" if last == NEVER else f"round {last} as its last"
    return (
        f"the server heard this site in round {heard}, but the site remembers {knows}: bring its"
        f" folder {folder} back, or run with --forgive to let it begin anew"
    )


def _named(reference: str) -> MakeSite:
    module, _, name = reference.partition(":")
    found: MakeSite = getattr(importlib.import_module(module), name)
    return found


# -- the resident worker ---------------------------------------------------------------------------


def serve(path: Path) -> None:
    """Answer one frame per connection, for ever. The site that was built last is kept: its data and
    its network stay loaded.
    """
    from fedlens.engines.flower.client_app import receive, send

    path.unlink(missing_ok=True)
    kept: dict[str, Site] = {}

    def make_site(node: Facts, run: Facts) -> Site:
        key = json.dumps([node, run], sort_keys=True)
        if key not in kept:
            site = _named(str(run["site"]))(node, run)
            kept.clear()
            kept[key] = site
            for remark in (
                () if node.get("recipe") else site.remarks
            ):  # with a recipe, `join` read the data before and said it
                print(f"fedlens: {remark}", file=sys.stderr, flush=True)
        return kept[key]

    with socket.socket(socket.AF_UNIX) as door:
        before = os.umask(0o177)  # the socket belongs to this user alone
        door.bind(str(path))
        os.umask(before)
        door.listen()
        while True:
            line, _ = door.accept()
            with (
                line,
                contextlib.suppress(OSError),
            ):  # a caller that went away has lost its reply, nothing else
                frame = receive(line)
                if frame:
                    facts, pieces = handle(*frame, make_site)
                    if "lost" in facts:  # the server hears it too, but here is who can put it right
                        print(
                            f"fedlens: this site could not answer: {facts['lost']}",
                            file=sys.stderr,
                            flush=True,
                        )
                    send(line, facts, pieces)


if __name__ == "__main__":
    from fedlens.engines.simulator import die_with

    die_with(os.getppid(), lasting=True)
    serve(Path(sys.argv[1]))

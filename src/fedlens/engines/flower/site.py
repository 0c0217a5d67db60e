"""What a site does with a message, whoever carries it: `sites.worker` does, or the ClientApp of a
stock SuperNode. Knows nothing of Flower, only of fields and bytes.

Two doors. `accept_request` is the only way in: it decides whether this site works on a request at
all. `release` is the only way out: greetings, replies, metrics and refusals all pass it.

What leaves about an error is a reason from REASONS and, for some of them, a detail that this module
makes of numbers and of the recipe's keys. Texts of exceptions may hold paths and names of files,
and those may hold names of patients: they go to the site's own log.

Memory: a site's processes come and go, so client memory lives in files, one folder per job. Beside
it lies a stamp: the round the site last answered (last), and the round the server had heard before
that (basis). The site can go on if the server now says it heard `last` (the reply arrived) or
`basis` (it got lost). Anything else means that one of the two has forgotten something: an emptied
folder, an old backup, a server that went back further than one round. An algorithm that keeps
nothing at its clients does not mind; for any other the site refuses, unless the server runs with
`forgive`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fedlens
from fedlens.config.recipe import differing_keys
from fedlens.core.algorithm import Algorithm
from fedlens.core.answer import answer
from fedlens.core.federation import Federation
from fedlens.core.files import write_atomically
from fedlens.core.log import Log
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import BadMessage, Message
from fedlens.core.privacy import Mechanism
from fedlens.data.source import DataError
from fedlens.engines.worker import threads
from fedlens.trust.accounting import as_charge, reply_cost, tells_size
from fedlens.trust.guard import Guard
from fedlens.trust.ledger import Leaving, kind_of, protection
from fedlens.trust.policy import PolicyError, Terms
from fedlens.trust.retention import VAULT
from fedlens.trust.signing import canonical
from fedlens.trust.vault import Declined, RanBefore

PIECE_BYTES = 4 << 20  # of a message, sent at a time: what is in transit exists twice
TAKEN = (VAULT, "node", "at-work")  # in a site's folder, where a job has a folder of its name
OPEN = ("data", "about")  # tables of a recipe in which a server and its sites may differ

Fields = Mapping[str, Any]  # named values: of a request, of a reply, of a node's settings

# Why a site does not answer: what the server says about it, and all it says. {detail} is checked by
# `readable` before it is shown.
REASONS = {
    "stranger": "was asked by something that is no FedLens server",
    "version": "runs FedLens {detail}: install the same version everywhere",
    "recipe": "agreed to another recipe; these keys differ: {detail}",
    "memory": "remembers {detail}, the server something else: bring the site's folder back, or run"
    " with --forgive to let it begin anew",
    "disk": "cannot write its memory: {detail}",
    "data": "cannot use its data; the site's own log says why",
    "policy": "does not allow this: {detail} of its policy",
    "message": "could not read the message it was sent",
    "no-memory-left": "ran out of memory",
    "died": "its process died while it worked",
    "restarted": "was restarted while it worked",
    "declined": "declined what would show what the sum hides; the site's own log says why",
    "again": "has added to this round of the recipe before, to another sum or too often: to run it"
    " once more, give everybody's copy another federation.seed",
    "error": "had an error; the site's own log says which",
}


class SiteError(ValueError):
    """Why a site does not answer. reason: of REASONS. detail: leaves the site, so no path, no name
    of a file, no text of an exception. private: for the site's own log."""

    def __init__(self, reason: str, detail: str = "", private: str = "") -> None:
        super().__init__(f"{sentence(reason, detail)}{f' ({private})' if private else ''}")
        self.reason, self.detail = reason, detail


def sentence(reason: Any, detail: Any = "") -> str:
    """A reason in words of our own. Whatever a site sends, nothing else of it is ever shown."""
    known = REASONS.get(reason) if isinstance(reason, str) else None
    if known is None:
        return "did not answer, and gave no reason that is known here"
    return known.format(detail=detail if readable(detail) else "?")


def readable(text: Any, most: int = 300) -> bool:
    """One line without control characters of any kind: safe for a terminal and a log."""
    return isinstance(text, str) and len(text) <= most and text.isprintable()


@dataclass(frozen=True)
class Site:
    """One client at its own place.

    Args:
        id: its number.
        federation: need hold nothing but this client's part (see `federation_of_one`).
        folder: where its memory lives.
        recipe: the hash of what the site agreed to do.
        tables: the same in full, to name what differs.
        classes: what its labels mean, which must be the same everywhere.
        remarks: for its own operator: who sees what, and what of its data could not be used.
        terms: what the recipe asks of it, held against its policy.
    """

    id: int
    algorithm: Algorithm
    federation: Federation
    folder: Path
    recipe: str = ""
    threads: int = 1
    classes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    terms: Terms | None = None

    @property
    def examples(self) -> int:
        data = self.federation.holdings[self.id]
        return len(data) if hasattr(data, "__len__") else 1


MakeSite = Callable[[Fields, Fields], Site]  # (settings of the node, fields of the request)


def federation_of_one(id: int, data: Any, held_out: Any = None) -> Federation:
    """A federation as one site sees it: its own data under its own id."""
    return Federation(cast("Sequence[Any]", {id: data}), cast("Sequence[Any]", {id: held_out}))


def to_pieces(message: Message) -> list[bytes]:
    return list(message.pieces(PIECE_BYTES))


def from_pieces(pieces: list[bytes]) -> Message:
    """Empties `pieces` on the way, so that two whole copies do not live longer than they must."""
    out = bytearray(sum(len(piece) for piece in pieces))
    at = 0
    while pieces:
        piece = pieces.pop(0)
        out[at : at + len(piece)] = piece
        at += len(piece)
    return Message.from_bytes(out)


# -- one message -----------------------------------------------------------------------------------


def answer_request(
    header: Fields, pieces: list[bytes], node: Fields, make_site: MakeSite, log: Log
) -> tuple[Fields, list[bytes]]:
    """One message in, one reply out. Whatever goes wrong at a site becomes one reason in its reply;
    the round goes on with the others.

    Args:
        header: kind ("query", "train" or "refuse"), request (the fields that came), asker (who),
            overhead (what the network process has sent beside payloads, for the ledger).
        pieces: of the message; emptied.
        node: the settings of this site.
        log: the site's own.
    """
    guard = _guard_of(node)
    way_out = WayOut(guard, header, int(node.get("client", -1)), log)
    try:
        site = way_out.site = accept_request(header, node, make_site, guard)
        if header["kind"] == "query":
            size = {"examples": site.examples} if tells_size(site.algorithm) else {}
            fields = {"client": site.id, **size, "classes": ", ".join(site.classes)}
            return release(way_out, fields)
        request, message = header["request"], from_pieces(pieces)
        if message.header.trip and not site.algorithm.hides_singles:
            raise SiteError("message", private="a wire layer's trip, and there is no such layer")
        if message.header.evaluate and site.terms and not site.terms.evaluates:
            raise SiteError(
                "recipe", "federation.personal", "an evaluation, which it does not have"
            )
        guard.check_request(message.header)
        cost = reply_cost(site.algorithm, site.examples, message.header)
        if kind_of(message.header) == "reply":
            guard.check_cost(cost)
        with guard.time_limit():
            reply = answer_from_disk(
                site,
                message,
                str(request["job"]),
                int(request["heard"]),
                forgive=bool(request["forgive"]),
            )
        if kind_of(message.header) == "reply":
            guard.check_cost(cost)
        return release(way_out, {"client": site.id}, reply, kind_of(message.header), cost)
    except Exception as e:  # a client is somebody else's code and data: anything may come out of it
        error = e if isinstance(e, SiteError) else _reason(e)
        log(f"this site could not answer {header.get('asker', 'a request')}: {_own_words(e)}")
        return release(way_out, {"lost": error.reason, "detail": error.detail})


_guards: dict[tuple[str, ...], Guard] = {}


def _guard_of(node: Fields) -> Guard:
    """Kept while the process lives: it knows what has left."""
    key = tuple(str(node.get(k) or "") for k in ("folder", "key", "policy", "ca"))
    if key not in _guards:
        _guards[key] = Guard.of(node)
    return _guards[key]


def accept_request(header: Fields, node: Fields, make_site: MakeSite, guard: Guard) -> Site:
    """The one way in: the site that works on this request, or a SiteError that says why none does.
    Nothing has been computed before, and nothing of the message was looked at but its fields.
    """
    if header["kind"] == "refuse":  # the network process has something to say, and has no way out
        raise SiteError(str(header["reason"]))
    request = header.get("request")
    if not isinstance(request, Mapping) or not {"version", "recipe", "job"} <= request.keys():
        raise SiteError("stranger")
    if request["version"] != fedlens.__version__:
        raise SiteError("version", fedlens.__version__, f"the server runs {request['version']!r}")
    job = str(request["job"])
    if not re.fullmatch(r"[\w-]{1,64}", job, re.ASCII) or job.lower() in TAKEN:
        raise SiteError("stranger", private=f"a job cannot be called {request['job']!r}")
    site = make_site(node, request)
    if request["recipe"] != site.recipe:
        keys = _differing(site, request)
        raise SiteError("recipe", ", ".join(keys)[:300] or "unknown")
    if site.terms is not None:
        guard.check_terms(site.terms)
    return site


@dataclass
class WayOut:
    """What is known at the way out. header: of the request that is answered. client: this site's
    number. site: None where there was none to answer."""

    guard: Guard
    header: Fields
    client: int
    log: Log
    site: Site | None = None


def release(
    way: WayOut,
    fields: Fields,
    reply: Message | None = None,
    kind: str = "",
    cost: Mechanism | None = None,
) -> tuple[Fields, list[bytes]]:
    """The one way out: every byte of a site's that the server gets, as it leaves. What does not get
    into the site's ledger does not leave.

    Args:
        fields: of a greeting, of a reply, or a reason for not answering.
        reply: what the algorithm or an evaluation made.
        kind: of the reply, see `trust.ledger.kind_of`.
        cost: of the reply, in differential privacy: in the ledger before a byte leaves.
    """
    asked = way.header.get("request")
    request: Fields = asked if isinstance(asked, Mapping) else {}
    job = str(request.get("job", ""))
    pieces = to_pieces(reply) if reply is not None else []
    leaving = Leaving(
        kind or ("failure" if "lost" in fields else "greeting"),
        way.client if way.site is None else way.site.id,
        pieces if reply is not None else [canonical(fields)],
        job if readable(job, 64) else "?",
        way.site.recipe if way.site else "",
        reply.round if reply is not None else None,
        reply,
        fields,
        protection(way.site.algorithm) if way.site else (),
        way.guard.take_receipt(request, way.log),
        way.header.get("overhead"),
        as_charge(cost) if cost else None,
    )
    if reply is None:
        head = way.guard.pass_words(leaving)
    else:
        head = way.guard.pass_reply(reply, pieces, leaving)
    seen = {"line": head.line, "head": head.hash} if head else {}
    return {**fields, **seen}, pieces


def _differing(site: Site, request: Fields) -> list[str]:
    """Keys of the recipe in which the server's is another; keys only, no values."""
    try:
        theirs = tomllib.loads(str(request.get("text", "")))
    except tomllib.TOMLDecodeError:
        return []
    found = [k for k in differing_keys(site.tables, theirs) if k.split(".")[0] not in OPEN]
    return [k for k in found if readable(k)]


def _reason(e: Exception) -> SiteError:
    if isinstance(e, PolicyError):
        return SiteError("policy", e.entry)
    if isinstance(e, BadMessage):
        return SiteError("message")
    if isinstance(e, DataError):
        return SiteError("data")
    if isinstance(e, Declined):
        return SiteError("again" if isinstance(e, RanBefore) else "declined")
    return SiteError("no-memory-left" if isinstance(e, MemoryError) else "error")


def _own_words(e: Exception) -> str:
    """For the site's operator, who may see everything."""
    if os.environ.get("FEDLENS_DEBUG"):
        return "".join(traceback.format_exception(e))
    text = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
    return (text.strip().splitlines() or [type(e).__name__])[0]


# -- memory ----------------------------------------------------------------------------------------


def answer_from_disk(
    site: Site, message: Message, job: str, heard: int, *, forgive: bool = False
) -> Message:
    """`answer`, with the client's memory in files. Leaves a stamp by which the next call knows
    whether it remembers what the server thinks it does. Under masks, an answer is stored before it
    leaves: the same request has the same bytes, whoever was killed in between.
    """
    folder = site.folder / job
    if not site.algorithm.hides_singles:
        return _answer_once(site, message, folder, heard, forgive)
    if not site.algorithm.keeps_secrets:
        why = f"{site.algorithm.hiding_layer} has no vault: its masks would be no secret"
        raise SiteError("error", private=why)
    stored = folder / "answers" / f"{message.round:06d}-{message.digest()}"
    if stored.exists():
        return Message.from_bytes(bytearray(stored.read_bytes()))
    reply = _answer_once(site, message, folder, heard, forgive)
    stored.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stored, reply.to_bytes())
    if message.header.trip:  # may be of any round that a server likes
        return reply
    for old in stored.parent.iterdir():
        answered = re.match(r"(-?\d+)-", old.name)  # not what a kill left of a write
        if answered and int(answered[1]) < message.round - 1:
            old.unlink()
    return reply


def _answer_once(site: Site, message: Message, folder: Path, heard: int, forgive: bool) -> Message:
    if message.header.trip:  # memory has no part in it
        with threads(site.threads):
            return answer(site.algorithm, message, site.id, site.federation, Memory(None), heard)
    stamp = folder / f"{site.id}.json"
    evaluating = message.header.evaluate
    try:
        folder.mkdir(parents=True, exist_ok=True)
        last, basis = json.loads(stamp.read_text()) if stamp.exists() else (NEVER, NEVER)
        forgotten = heard not in (last, basis)
        if forgotten and evaluating:
            raise _forgot(heard, last, folder)
        memory = Memory(None) if forgotten else Memory(folder, durable=True)
        with threads(site.threads):
            reply = answer(site.algorithm, message, site.id, site.federation, memory, heard)
        if forgotten and memory.resident:  # it would have needed what is lost
            if not forgive:
                raise _forgot(heard, last, folder)
            Memory(folder, durable=True).save(site.id, memory.load(site.id))
        if not evaluating:
            write_atomically(stamp, json.dumps([message.round, heard]), sync=False)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise SiteError("disk", os.strerror(e.errno), str(site.folder)) from e
        raise
    return reply


def _forgot(heard: int, last: int, folder: Path) -> SiteError:
    knows = "nothing of this job" if last == NEVER else f"round {last} as its last"
    private = f"the server heard this site in round {heard}; its folder is {folder}"
    return SiteError("memory", knows, private)

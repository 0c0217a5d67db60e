"""Flower: real clients on real machines. The only file that imports flwr.

The same `run` works inside a ServerApp (through `Flower`, an engine around Flower's Grid) and the same `answer` inside a ClientApp
(`client_app`). Nothing else is new; what this file is about is that real sites come late, vanish, restart and disagree.

On the wire: a message travels in its own byte form, cut into pieces that are the arrays of one ArrayRecord ("message"); a ConfigRecord
("fedlens") beside it carries what the transport needs: versions, the hash of the recipe, the job, the round last heard. One
Message is one RecordDict and back. Pieces keep Flower from joining the whole payload twice while it receives.

Who is who: Flower's node ids are random; a site says which client it is (`client=3` in its node config) when it is greeted with a
"query" message, and is asked with "train" messages from then on.

Memory: each ClientApp call is a fresh process, so client memory lives in files at the site, one folder per job. Beside it lies
a stamp of the round the site last answered (last) and of the round the server had heard before that (basis). The site can go on if the server now
says it heard `last` (the reply arrived) or `basis` (it got lost); anything else means that one of the two has
forgotten something: an emptied folder, an old backup, a server that went back further than one round. An algorithm that keeps
nothing at its clients does not mind; for any other the site declines with one sentence, unless the server runs with `forgive`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fedlens
from fedlens.algorithm import Algorithm
from fedlens.engines.worker import Log, Worker, threads
from fedlens.federation import Federation
from fedlens.memory import NEVER, Memory
from fedlens.message import BadMessage, Message
from fedlens.replies import Lost, Nodes
from fedlens.run import answer

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
    from flwr.app import Message as Envelope
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
except ImportError as e:
    raise ImportError('this needs Flower: pip install "fedlens[flower]"') from e

PIECE = 20 << 20  # bytes; four of Flower's chunks
GREETED = "query"
ASKED = "train"

_FAILURES = {
    1: "could not load the app: is the same version of FedLens installed at the site?",
    3: "its message expired before it was fetched",
    4: "no answer before its message expired",
    5: "has vanished: the site no longer reports to the SuperLink",
    7: "does not trust the app that was sent",
    8: "its process died while it worked",
}


class SiteError(RuntimeError):
    """Why a site cannot take part: one sentence for both operators."""


# -- Message <-> RecordDict --------------------------------------------------------------------------------------------------------


def pack(message: Message) -> ArrayRecord:
    data = memoryview(message.to_bytes())
    pieces = {}
    for k, low in enumerate(range(0, len(data), PIECE)):
        part = bytes(data[low : low + PIECE])
        pieces[f"{k:04d}"] = Array("uint8", (len(part),), "fedlens.message", part)
    return ArrayRecord(pieces)


def unpack(pieces: ArrayRecord) -> Message:
    """Empties `pieces` on the way, so that no two whole copies live longer than needed."""
    names = sorted(pieces)
    out = bytearray(sum(len(pieces[n].data) for n in names))
    at = 0
    for name in names:
        part = pieces[name].data
        del pieces[name]
        out[at : at + len(part)] = part
        at += len(part)
    return Message.from_bytes(out)


# -- at a site ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """One client at its own place. `federation` need hold nothing but this client's part (see `alone`). `recipe`: the hash of what the site
    agreed to do. folder: where its memory lives."""

    id: int
    algorithm: Algorithm
    federation: Federation
    folder: Path
    recipe: str = ""
    threads: int = 1


def alone(id: int, data: Any, held_out: Any = None) -> Federation:
    """A federation as one site sees it: its own data under its own id."""
    return Federation(cast("Sequence[Any]", {id: data}), cast("Sequence[Any]", {id: held_out}))


def client_app(make_site: Callable[[Context], Site]) -> ClientApp:
    """The ClientApp of a site. `make_site` is called for every message, because every message is a new process."""
    app = ClientApp()

    @app.query()  # type: ignore[misc]
    def greet(envelope: Envelope, context: Context) -> Envelope:
        def facts() -> dict[str, Any]:
            told = dict(envelope.content["fedlens"])
            site = make_site(context)
            agree(told, site)
            data = site.federation.holdings[site.id]
            return {"client": site.id, "examples": len(data) if hasattr(data, "__len__") else 1}

        return _reply(envelope, lambda: RecordDict({"fedlens": ConfigRecord(facts())}))

    @app.train()  # type: ignore[misc]
    def ask(envelope: Envelope, context: Context) -> Envelope:
        def work() -> RecordDict:
            told = dict(envelope.content["fedlens"])
            site = make_site(context)
            agree(told, site)
            message = unpack(envelope.content["message"])
            reply = respond(site, message, str(told["job"]), int(told["heard"]), forgive=bool(told["forgive"]))
            return RecordDict({"fedlens": ConfigRecord({"client": site.id}), "message": pack(reply)})

        return _reply(envelope, work)

    return app


def agree(told: Mapping[str, Any], site: Site) -> None:
    """Server and site must run the same FedLens on the same recipe: anything else would quietly compute something nobody asked for."""
    if told["version"] != fedlens.__version__:
        raise SiteError(f"the server runs FedLens {told['version']}, this site {fedlens.__version__}: install the same version at both")
    if told["recipe"] != site.recipe:
        raise SiteError(
            f"the server's recipe ({told['recipe'][:12] or 'none'}) is not the one this site agreed to ({site.recipe[:12] or 'none'}); "
            "everything but [data] must be equal"
        )


def respond(site: Site, message: Message, job: str, heard: int, *, forgive: bool = False) -> Message:
    """`answer`, from memory on disk. Leaves a stamp by which the next call knows whether it remembers what the server thinks it does."""
    folder = site.folder / job
    stamp = folder / f"{site.id}.json"
    evaluating = bool(message.scalars.get("evaluate"))
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
            record = memory.load(site.id)
            memory = Memory(folder, durable=True)
            memory.save(site.id, record)
        if not evaluating:
            part = stamp.with_suffix(".part")
            part.write_text(json.dumps([message.round, heard]))
            os.replace(part, stamp)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise SiteError(f"this site cannot write its memory to {site.folder}: {os.strerror(e.errno)}") from e
        raise
    return reply


def _amnesia(heard: int, last: int, folder: Path) -> str:
    knows = "nothing of this job" if last == NEVER else f"round {last} as its last"
    return (
        f"the server heard this site in round {heard}, but the site remembers {knows}: bring its folder {folder} back, "
        "or start the run with forgive=true to let it begin anew"
    )


def _reply(envelope: Envelope, work: Callable[[], RecordDict]) -> Envelope:
    """Whatever goes wrong at a site becomes one sentence in its reply; the round goes on with the others."""
    try:
        content = work()
    except Exception as e:  # a client is somebody else's code and data: anything may come out of it
        text = str(e) if isinstance(e, (SiteError, ValueError)) else f"{type(e).__name__}: {e}"
        content = RecordDict({"fedlens": ConfigRecord({"lost": text.strip().splitlines()[0][:300] if text.strip() else type(e).__name__})})
    return Envelope(content, reply_to=envelope)


# -- at the server -----------------------------------------------------------------------------------------------------------------


@dataclass
class Flower:
    """An engine around a Flower Grid.

    clients: how many sites the recipe speaks of; their ids are 0 ... clients - 1, here or not. recipe: its hash. job: a name that stays the
    same when the run is resumed. timeout: seconds a round may take. patience: seconds to wait for sites, at the beginning until all are
    there and later until at least `least` are. late: replies up to so many rounds behind are still waited for. forgive: let a site that
    lost its memory begin anew. poll: seconds between two looks.
    """

    grid: Grid
    algorithm: Algorithm
    clients: int
    recipe: str = ""
    job: str = "job"
    timeout: float | None = None
    patience: float = 600.0
    least: int = 1
    late: int = 0
    forgive: bool = False
    poll: float = 0.1
    log: Log = print
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it was not let in
    _greetings: dict[str, int] = field(default_factory=dict)  # message id -> node
    _open: dict[str, tuple[int, int]] = field(default_factory=dict)  # message id -> (client, round), of this round and earlier ones
    _online: set[int] = field(default_factory=set)
    _looked: float = 0.0
    _begun: bool = False

    def ids(self) -> Sequence[int]:
        return range(self.clients)

    def exchange(self, message: Message, ids: Sequence[int], heard: Mapping[int, int]) -> Iterator[Message | Lost | Nodes]:
        began = time.monotonic()
        self._assemble()
        door = Worker(self.algorithm, Federation([]), Memory())  # checks and folds what comes in, as every engine does
        door.begin(message, self.algorithm.needs == "sums" and not self.late)
        place = {id: p for p, id in enumerate(sorted(ids))}
        yield from self._send(message, sorted(ids), heard)
        mine = {m for m, (_, number) in self._open.items() if number == message.round}
        while mine & self._open.keys():
            for outcome in self._arrivals():
                if isinstance(outcome, Message) and outcome.round == message.round:
                    yield door.admit(place[outcome.sender], outcome)
                else:
                    yield outcome
            self._look()
            if self.timeout and time.monotonic() - began > self.timeout:
                break
            time.sleep(self.poll)
        for m in mine & self._open.keys():
            yield Lost(self._open[m][0], f"no answer within {self.timeout:g} s")
        yield door.finish()

    def _send(self, message: Message, ids: Sequence[int], heard: Mapping[int, int]) -> Iterator[Lost]:
        busy = {client: number for client, number in self._open.values()}
        payload = pack(message)
        ttl = self.timeout * (1 + self.late) if self.timeout else None
        for id in ids:
            if id in busy:
                yield Lost(id, f"still busy with round {busy[id]}")
            elif id not in self.nodes:
                yield Lost(id, "has not joined")
            elif self.nodes[id] not in self._online:
                yield Lost(id, "is offline")
            else:
                facts = ConfigRecord({**self._facts(), "heard": heard.get(id, NEVER), "forgive": self.forgive})
                content = RecordDict({"fedlens": facts, "message": payload})
                for m in self.grid.push_messages([Envelope(content, self.nodes[id], ASKED, ttl=ttl, group_id=str(message.round))]):
                    self._open[m] = (id, message.round)

    def _facts(self) -> dict[str, Any]:
        return {"version": fedlens.__version__, "recipe": self.recipe, "job": self.job}

    def _arrivals(self) -> Iterator[Message | Lost]:
        """One reply at a time: pulled, turned into a message, handed on and forgotten before the next."""
        for m in list(self._open):
            for envelope in self.grid.pull_messages([m]):
                client, _ = self._open.pop(m)
                try:
                    yield self._read(client, envelope)
                except BadMessage as e:
                    yield Lost(client, str(e), refused=True)

    def _read(self, client: int, envelope: Envelope) -> Message | Lost:
        if why := _failure(envelope):
            self.log(f"client {client}: {why}")
            return Lost(client, why)
        reply = unpack(envelope.content["message"])
        if reply.sender != client:
            return Lost(client, f"answered as client {reply.sender}", refused=True)
        return reply

    # -- who is there ----------------------------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Before the first round wait for everybody, later for at least a few: a round without anyone is no round."""
        self._look(now=True)
        wanted = self.least if self._begun else self.clients
        until = time.monotonic() + self.patience
        while (here := self._present()) < wanted and time.monotonic() < until:
            time.sleep(self.poll)
            self._look()
        self._begun = True
        if here < self.least:
            reasons = "; ".join(dict.fromkeys(self.refused.values()))
            raise SiteError(f"{here} of {self.clients} sites joined within {self.patience:g} s" + (f" ({reasons})" if reasons else ""))

    def _present(self) -> int:
        return sum(node in self._online for node in self.nodes.values())

    def _look(self, now: bool = False) -> None:
        """Greet nodes that are new, and hear who they are."""
        if now or time.monotonic() - self._looked > 1.0:
            self._looked = time.monotonic()
            before, self._online = self._online, set(self.grid.get_node_ids())
            for node in sorted(self._online - before):
                if node not in self.nodes.values() and node not in self._greetings.values():
                    hello = RecordDict({"fedlens": ConfigRecord(self._facts())})
                    for m in self.grid.push_messages([Envelope(hello, node, GREETED, ttl=max(self.patience, 60.0))]):
                        self._greetings[m] = node
        for m in list(self._greetings):
            for envelope in self.grid.pull_messages([m]):
                self._admit(self._greetings.pop(m), envelope)

    def _admit(self, node: int, envelope: Envelope) -> None:
        why = _failure(envelope)
        client = int(envelope.content["fedlens"]["client"]) if not why else -1
        if not why and not 0 <= client < self.clients:
            why = f"calls itself client {client}, but there are {self.clients} (0 to {self.clients - 1})"
        if not why and self.nodes.get(client, node) != node and self.nodes[client] in self._online:
            why = f"calls itself client {client}, which is somebody else already"
        if why:
            self.refused[node] = why
            self.log(f"a site was not let in: {why}")
        else:
            self.refused.pop(node, None)
            self.nodes[client] = node
            self.log(f"client {client} has joined with {envelope.content['fedlens']['examples']} examples")

    def snapshot(self) -> Mapping[int, Path]:
        return {}  # sites keep their own memory

    def restore(self, records: Mapping[int, Path]) -> None:
        pass

    def close(self) -> None:
        pass


def _failure(envelope: Envelope) -> str | None:
    """Why an envelope carries no reply, in one sentence, or None if it carries one."""
    if envelope.has_error():
        code, reason = envelope.error.code, envelope.error.reason or ""
        return _FAILURES.get(code) or (reason.strip().splitlines() or [f"Flower error {code}"])[0][:300]
    lost = envelope.content["fedlens"].get("lost")
    return str(lost) if lost is not None else None


# -- an app -------------------------------------------------------------------------------------------------------------------------


def write_app(folder: Path, module: str, config: Mapping[str, bool | int | float | str]) -> None:
    """A Flower app as `flwr run` wants it. It carries no code: `module` (with a `server` and a `client`) must be installed at every site, because
    weights and packages do not fit into what Flower ships."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in config.items()]
    (folder / "app.py").write_text(f"from {module} import client, server\n\n__all__ = ['client', 'server']\n")
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "fedlens-job"
version = "{fedlens.__version__}"
description = "A FedLens run"
dependencies = []

[tool.flwr.app]
publisher = "fedlens"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
"""
        + "\n".join(lines)
        + "\n"
    )

"""Flower: real clients on real machines. This file and `flower_client` are the only ones that
import flwr.

The same `run` works inside a ServerApp, through `Flower`, an engine around Flower's Grid; the same
`answer` works inside a ClientApp (`client_app`, see `site`). Nothing else is new; what this file is
about is that real sites come late, vanish, restart and disagree.

On the wire: a message travels in its own byte form, cut into pieces that are the arrays of one
ArrayRecord ("message"); a ConfigRecord ("fedlens") beside it carries what the transport needs:
versions, the hash of the recipe, the job, the round last heard. One Message is one RecordDict and
back. Pieces, because Flower joins the chunks of an array twice while it receives it.

Who is who: Flower's node ids are random. A site says which client it is (`client=3` in its node
config) when it is greeted with a "query" message, and is asked with "train" messages from then on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedlens
from fedlens.core import heap
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import BadMessage, Message
from fedlens.core.replies import Arrival, Lost, refuse
from fedlens.engines.flower.site import MakeSite, SiteError, handle, pack, unpack
from fedlens.engines.worker import Log, Worker

try:
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.app import Message as Envelope
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as e:
    raise ImportError('this needs Flower: pip install "fedlens[flower]"') from e

from fedlens.engines.flower import client_app as flower_client

_FAILURES = {
    1: "could not load the app: is the same version of FedLens installed at the site?",
    3: "no answer within the time: the site did not even fetch its message",
    4: "no answer within the time",
    5: "has vanished: the site no longer reports to the SuperLink",
    7: "does not trust the app that was sent",
    8: "its process died while it worked",
}


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """The ServerApp around a function of a grid and the run's config."""
    app = ServerApp()

    def begin(grid: Grid, context: Context) -> None:
        heap.return_at_once()
        main(grid, dict(context.run_config))

    app.main()(begin)
    return app


def client_app(make_site: MakeSite) -> ClientApp:
    """The ClientApp of a site for an app with code of its own. `make_site` is called for every
    message: each one is a new process.
    """
    app = ClientApp()

    def ask(envelope: Envelope, context: Context) -> Envelope:
        return flower_client.carry(
            envelope, context, lambda header, pieces: handle(header, pieces, make_site)
        )

    app.query()(ask)
    app.train()(ask)
    return app


# -- at the server ---------------------------------------------------------------------------------

AGAIN = 30.0  # seconds after which a site that was refused may have been put right


@dataclass(frozen=True)
class _Asked:
    client: int
    round: int
    evaluating: bool


@dataclass
class Flower:
    """An engine around a Flower Grid.

    clients: how many sites the recipe speaks of; their ids are 0 ... clients - 1, here or not.
    recipe: its hash. job: a name that stays the same when the run is resumed. timeout: seconds a
    round may take. patience: seconds to wait for sites, at the beginning until all are there and
    later until at least `least` are. late: replies up to so many rounds behind are still waited
    for. forgive: let a site that lost its memory begin anew. poll: seconds between two looks, at
    least: a look costs the SuperLink a request per open message, so they become fewer the longer a
    round takes and the more sites there are. classes: what labels mean (default: what they mean to
    the first site).
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
    classes: str = ""
    log: Log = print
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    # node -> why it was not let in, and when
    refused: dict[int, tuple[str, float]] = field(default_factory=dict)
    _greetings: dict[str, int] = field(default_factory=dict)  # message id -> node
    # by message id, of this exchange and earlier ones
    _open: dict[str, _Asked] = field(default_factory=dict)
    _online: set[int] = field(default_factory=set)
    _looked: float = 0.0
    _begun: bool = False

    def ids(self) -> Sequence[int]:
        return range(self.clients)

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        self._assemble()
        began = time.monotonic()
        # checks and folds what comes in, as every engine does
        door = Worker(self.algorithm, Federation([]), Memory())
        door.begin(message, self.algorithm.needs != "replies" and not self.late)
        place = {id: p for p, id in enumerate(sorted(ids))}
        earlier = set(self._open)
        yield from self._send(message, sorted(ids), heard)
        mine = self._open.keys() - earlier
        awaited = mine or earlier  # with everybody busy, a round is there to let them finish
        while awaited & self._open.keys():
            for m, arrived in self._arrivals(mine if message.header.evaluate else self._open):
                outcome: Arrival = arrived
                if isinstance(outcome, Message) and m in mine:
                    outcome = door.admit(place[outcome.sender], outcome, own=True)
                elif isinstance(outcome, Message) and (
                    why := refuse(outcome, self.algorithm.expects(message))
                ):
                    outcome = Lost(outcome.sender, why, refused=True)
                yield outcome
            self._look()
            if self.timeout and time.monotonic() - began > self.timeout:
                break
            time.sleep(
                min(3.0, max(self.poll, (time.monotonic() - began) / 20, len(self._open) / 50))
            )
        for m in mine & self._open.keys():
            yield Lost(self._open[m].client, f"no answer within {self.timeout:g} s")
        yield door.finish()

    def _send(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Lost]:
        busy = {asked.client: asked.round for asked in self._open.values()}
        # one record for all: Flower stores equal content once
        payload = flower_client.records({}, pack(message))["message"]
        ttl = self.timeout * (1 + self.late) if self.timeout else None
        for id in ids:
            if id in busy:
                yield Lost(id, f"still busy with round {busy[id]}")
            elif id not in self.nodes:
                yield Lost(id, "has not joined")
            elif self.nodes[id] not in self._online:
                yield Lost(id, "is offline")
            else:
                facts = ConfigRecord(
                    {**self._facts(), "heard": heard.get(id, NEVER), "forgive": self.forgive}
                )
                content = RecordDict({"fedlens": facts, "message": payload})
                envelope = Envelope(
                    content, self.nodes[id], "train", ttl=ttl, group_id=str(message.round)
                )
                (m,) = self.grid.push_messages([envelope]) or [None]
                if m:
                    self._open[m] = _Asked(id, message.round, message.header.evaluate)
                else:
                    yield Lost(id, "the SuperLink did not take its message")

    def _facts(self) -> dict[str, Any]:
        return {"version": fedlens.__version__, "recipe": self.recipe, "job": self.job}

    def _arrivals(self, wanted: Collection[str]) -> Iterator[tuple[str, Message | Lost]]:
        """One reply at a time: pulled, turned into a message, handed on and forgotten before the
        next.
        """
        for m in [m for m in self._open if m in wanted]:
            for envelope in self.grid.pull_messages([m]):
                asked = self._open.pop(m)
                try:
                    outcome = self._read(asked.client, envelope)
                except BadMessage as e:
                    outcome = Lost(asked.client, str(e), refused=True)
                if m in wanted or not asked.evaluating:
                    yield m, outcome

    def _read(self, client: int, envelope: Envelope) -> Message | Lost:
        if why := _failure(envelope):
            return Lost(client, why)
        reply = unpack(flower_client.take(envelope.content))
        if reply.sender != client:
            return Lost(client, f"answered as client {reply.sender}", refused=True)
        return reply

    # -- who is there ------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Before the first round wait for everybody, later for at least a few: a round without
        anyone is no round.
        """
        self._look(now=True)
        wanted = self.least if self._begun else self.clients
        until = time.monotonic() + self.patience
        while (here := self._present()) < wanted and time.monotonic() < until:
            time.sleep(self.poll)
            self._look()
        self._begun = True
        if here < self.least:
            reasons = "; ".join(dict.fromkeys(why for why, _ in self.refused.values()))
            raise SiteError(
                f"{here} of {self.clients} sites joined within {self.patience:g} s"
                + (f" ({reasons})" if reasons else "")
            )

    def _present(self) -> int:
        return sum(node in self._online for node in self.nodes.values())

    def _look(self, now: bool = False) -> None:
        """Greet nodes that are new, or that were refused a while ago, and hear who they are."""
        if now or time.monotonic() - self._looked > 1.0:
            self._looked = time.monotonic()
            self._online = set(self.grid.get_node_ids())
            settled = {*self.nodes.values(), *self._greetings.values()}
            settled |= {
                node for node, (_, when) in self.refused.items() if self._looked - when < AGAIN
            }
            for node in sorted(self._online - settled):
                hello = RecordDict({"fedlens": ConfigRecord(self._facts())})
                for m in self.grid.push_messages(
                    [Envelope(hello, node, "query", ttl=max(self.patience, 60.0))]
                ):
                    self._greetings[m] = node
        for m in list(self._greetings):
            for envelope in self.grid.pull_messages([m]):
                self._admit(self._greetings.pop(m), envelope)

    def _admit(self, node: int, envelope: Envelope) -> None:
        why = _failure(envelope) or self._objection(node, envelope.content["fedlens"])
        if why:
            if self.refused.get(node, ("", 0.0))[0] != why:
                self.log(f"a site was not let in: {why}")
            self.refused[node] = (why, time.monotonic())
        else:
            told = envelope.content["fedlens"]
            self.refused.pop(node, None)
            self.nodes[told["client"]] = node
            self.classes = self.classes or str(told.get("classes", ""))
            self.log(f"client {told['client']} has joined with {told['examples']} examples")

    def _objection(self, node: int, told: Mapping[str, Any]) -> str | None:
        client, classes = told.get("client"), str(told.get("classes", ""))
        if (
            type(client) is not int or type(told.get("examples")) is not int
        ):  # somebody else's program: any type may come
            return (
                "does not say in numbers which client it is and how many examples it has: is it a"
                " FedLens site of the same version?"
            )
        if not 0 <= client < self.clients:
            return (
                f"calls itself client {client}, but there are {self.clients} (0 to"
                f" {self.clients - 1})"
            )
        if self.nodes.get(client, node) != node and self.nodes[client] in self._online:
            return f"calls itself client {client}, which is somebody else already"
        if classes != (self.classes or classes):
            return (
                f"client {client} has the classes {classes}, not {self.classes}: let everybody's"
                " [data] list all of them as names"
            )
        return None

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
        return (
            _FAILURES.get(code)
            or (reason.strip().splitlines() or [f"Flower error {code}"])[0][:300]
        )
    told = envelope.content.get("fedlens")
    if not isinstance(told, ConfigRecord):
        return "answered without the record by which FedLens sites are known"
    lost = told.get("lost")
    return str(lost) if lost is not None else None


# -- an app ----------------------------------------------------------------------------------------


def write_app(
    folder: Path, server: str, site: str, config: Mapping[str, bool | int | float | str]
) -> None:
    """A Flower app as `flwr run` wants it. server: "module:main" (see `server_app`); site:
    "module:make_site". Both must be installed where they run: weights and packages do not fit into
    what Flower ships."""
    folder.mkdir(parents=True, exist_ok=True)
    module, _, name = server.partition(":")
    (folder / "server.py").write_text(
        f"from {module} import {name}\n\nfrom fedlens.engines.flower.engine import"
        f" server_app\n\napp = server_app({name})\n"
    )
    (folder / "client.py").write_text(Path(flower_client.__file__).read_text())
    lines = [
        f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in {"site": site, **config}.items()
    ]
    (folder / "pyproject.toml").write_text(
        _PYPROJECT.format(version=fedlens.__version__) + "".join(lines)
    )


_PYPROJECT = """[project]
name = "fedlens-job"
version = "{version}"
description = "A FedLens run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedlens"

[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"

[tool.flwr.app.config]
"""

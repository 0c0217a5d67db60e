"""The Flower engine: real clients on real machines, through Flower's Grid. Only the modules of this
folder import flwr.

The same `run` works inside a ServerApp, with `Flower` as its engine; the same `answer` works at a
site (see `site`). Nothing else is new; what this file is about is that real sites come late,
vanish, restart and disagree. `sites.server` makes the engine for `fedlens run --engine flower`; an
app of the user's own makes it itself.

On the wire: a message travels in its own byte form, cut into pieces; a ConfigRecord carries what
the transport needs: versions, the recipe and its hash, the job, the round last heard (see
`records`). One Message is one RecordDict and back. Pieces, because Flower joins the chunks of an
array twice while it receives it.

Who is who: Flower's node ids are random. A site says which client it is in its answer to a "query"
message, and is asked with "train" messages from then on. Where keys are bound to numbers, a site is
let in only under the number of its key.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fedlens
from fedlens.core import heap
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import BadMessage, Message
from fedlens.core.replies import Arrival, Lost, most_bytes
from fedlens.core.rounds import Stalled
from fedlens.engines.flower.site import (
    PIECE_BYTES,
    MakeSite,
    answer_request,
    from_pieces,
    readable,
    sentence,
    to_pieces,
)
from fedlens.engines.worker import Worker
from fedlens.trust.accounting import tells_size
from fedlens.trust.receipts import Receipts

try:
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.app import Message as Envelope
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from httpx import HTTPError  # comes with it
except ImportError as e:
    raise ImportError('this needs Flower: pip install "fedlens[flower]"') from e

from fedlens.engines.flower.records import (
    Unpacked,
    take_fields,
    take_pieces,
    to_records,
    with_fields,
)

_MOST_EXAMPLES = 1 << 53  # of a site; what is computed from them then is exact
GREETING_BYTES = 1 << 20  # of what a site says of itself
# A reply may take so long to come once it was announced, and a second more for every PACE bytes.
STALL_SECONDS, PACE = 30.0, 16 << 10
RETRY_SECONDS = 30.0  # after which a site that was refused may have been put right
_FAILURES = {
    1: "could not load the app: is the same version of FedLens installed at the site?",
    3: "no answer within the time: the site did not even fetch its message",
    4: "no answer within the time",
    5: "has vanished: the site no longer reports to the SuperLink",
    7: "does not trust the app that was sent",
    8: "its process died while it worked",
}


class NoSites(Stalled):
    """Too few are there to be asked; one sentence for the server's operator."""


@dataclass(frozen=True)
class _Request:
    client: int
    round: int
    evaluating: bool


@dataclass
class Flower:
    """An engine around a Flower Grid.

    Args:
        clients: how many sites the recipe speaks of; their ids are 0 ... clients - 1, here or not.
        recipe: its hash.
        text: the recipe itself, for sites to name what differs.
        job: a name that stays the same when the run is resumed.
        timeout: seconds a round may take.
        wait: seconds to wait for sites, at the beginning until all are there and later until at
            least `least` are, and as many of a round's as its algorithm needs.
        late: replies up to so many rounds behind are still waited for.
        forgive: let a site that lost its memory begin anew.
        poll: seconds between two looks, at least: a look costs the SuperLink a request per open
            message, so they become fewer the longer a round takes and the more sites there are.
        classes: what labels mean (default: what they mean to most of the sites that are there when
            the first round begins).
        bindings: the public key of each client, as PEM; None: sites' own words are believed.
        receipts: keeps and countersigns the heads of the sites' ledgers.
        cohort_seed: decides who is asked in which round; the server's secret, or sites that know
            when others are asked could tell them apart in the sums.
    """

    grid: Grid
    algorithm: Algorithm
    clients: int
    recipe: str = ""
    text: str = ""
    job: str = "job"
    timeout: float | None = None
    wait: float = 600.0
    least: int = 1
    late: int = 0
    forgive: bool = False
    poll: float = 0.1
    classes: str = ""
    bindings: Mapping[int, bytes] | None = None
    receipts: Receipts | None = None
    cohort_seed: int | None = None
    log: Log = print
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    # client -> why it is not to be asked; whoever runs the job decides it anew for every round
    left_out: dict[int, str] = field(default_factory=dict)
    # node -> why it was not let in, and when
    refused: dict[int, tuple[str, float]] = field(default_factory=dict)
    _queries: dict[str, int] = field(default_factory=dict)  # message id -> node
    # by message id, of this exchange and earlier ones
    _pending: dict[str, _Request] = field(default_factory=dict)
    _online: dict[int, bytes] = field(default_factory=dict)  # node -> its public key
    _polled: float = 0.0
    _started: bool = False
    _most: int = 0  # bytes of a reply to what was sent last
    _sizes: dict[int, int] = field(default_factory=dict)  # examples, as each site said
    _meanings: dict[int, str] = field(default_factory=dict)  # classes, as each site said
    _agreed: bool = False  # on the classes

    def __post_init__(self) -> None:
        self._meter, self._agreed = _Meter(self.grid), bool(self.classes)

    def ids(self) -> Sequence[int]:
        return range(self.clients)

    def sizes(self) -> Mapping[int, int]:
        """How many examples each site has, of those that are here."""
        self._await_sites()
        return self._sizes

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        header = message.header
        needed = 0 if header.evaluate else self.algorithm.quorum(header.cohort or len(ids))
        self._await_sites(ids, min(needed, len(ids)))
        began = time.monotonic()
        # asks nobody here: it checks and folds what comes in, as every engine does
        worker = Worker(self.algorithm, Federation([]), Memory())
        worker.begin(message, self.algorithm.needs != "replies" and not self.late)
        self._most = most_bytes(worker.expected)
        place = {id: p for p, id in enumerate(sorted(ids))}
        earlier = set(self._pending)
        yield from self._send(message, sorted(ids), heard)
        mine = self._pending.keys() - earlier
        awaited = mine or earlier  # with everybody busy, a round is there to let them finish
        while awaited & self._pending.keys():
            wanted = mine if message.header.evaluate else self._pending
            for message_id, arrived in self._pull(wanted):
                outcome: Arrival = arrived
                if isinstance(outcome, Message) and message_id in mine:
                    outcome = worker.admit(place[outcome.sender], outcome, own=True)
                elif isinstance(outcome, Message) and self.algorithm.hides_singles:
                    continue  # of a trip that is over: its sum was opened without it
                elif isinstance(outcome, Message):
                    # a reply to an earlier round has no place among this round's sums
                    outcome = worker.check(outcome)
                if isinstance(outcome, Lost) and message_id not in mine:
                    outcome = replace(outcome, sent=False)
                yield outcome
            if not awaited & self._pending.keys():
                break
            self._poll_nodes()
            elapsed = time.monotonic() - began
            if self.timeout and elapsed > self.timeout:
                break
            time.sleep(min(3.0, max(self.poll, elapsed / 20, len(self._pending) / 50)))
        for message_id in mine & self._pending.keys():
            client = self._pending[message_id].client
            yield Lost(client, f"no answer within {self.timeout:g} s")
        yield worker.finish()

    def _send(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Lost]:
        busy = {request.client: request.round for request in self._pending.values()}
        shared = to_records({}, to_pieces(message))
        ttl = self.timeout * (1 + self.late) if self.timeout else None
        for id in ids:
            if id in busy:
                yield Lost(id, f"still busy with round {busy[id]}", sent=False)
            elif id in self.left_out:
                yield Lost(id, self.left_out[id], sent=False)
            elif id not in self.nodes:
                yield Lost(id, "has not joined", sent=False)
            elif self.nodes[id] not in self._online:
                yield Lost(id, "is offline", sent=False)
            else:
                known = {"heard": heard.get(id, NEVER), "forgive": self.forgive}
                receipt = self.receipts.fields(id) if self.receipts else {}
                content = with_fields(shared, {**self._fields(), **known, **receipt})
                envelope = Envelope(
                    content, self.nodes[id], "train", ttl=ttl, group_id=str(message.round)
                )
                (message_id,) = self.grid.push_messages([envelope]) or [None]
                if message_id:
                    request = _Request(id, message.round, message.header.evaluate)
                    self._pending[message_id] = request
                else:
                    yield Lost(id, "the SuperLink did not take its message", sent=False)

    def _fields(self) -> dict[str, Any]:
        recipe = {"recipe": self.recipe, "text": self.text}
        return {"version": fedlens.__version__, "job": self.job, **recipe}

    def _pull(self, wanted: Collection[str]) -> Iterator[tuple[str, Message | Lost]]:
        """One reply at a time: pulled, turned into a message, handed on and forgotten before the
        next.
        """
        for message_id in [m for m in self._pending if m in wanted]:
            request = self._pending[message_id]
            try:
                envelopes = self._fetch(message_id, self._most)
                outcomes = [self._read(request, envelope) for envelope in envelopes]
            except BadMessage as e:
                outcomes = [Lost(request.client, str(e), True, self._meter.bytes)]
            for outcome in outcomes:
                self._pending.pop(message_id, None)
                if message_id in wanted or not request.evaluating:
                    yield message_id, outcome

    def _fetch(self, message_id: str, most: int) -> list[Envelope]:
        """What answers a message, if anything does yet; BadMessage for what is too large, or cannot
        be put together: Flower takes apart whatever a site calls an object.
        """
        self._meter.begin(most)
        try:
            return list(self.grid.pull_messages([message_id]))
        except (BadMessage, OSError, HTTPError):
            raise
        except Exception as e:
            raise BadMessage(f"cannot be put together: {type(e).__name__}") from e

    def _see_head(self, client: int, envelope: Envelope) -> None:
        """Of the site's ledger, as its reply brings it."""
        fields = None if envelope.has_error() else take_fields(envelope.content)
        if self.receipts and fields and (odd := self.receipts.see(client, fields)):
            self.log(odd)

    def _read(self, request: _Request, envelope: Envelope) -> Message | Lost:
        client = request.client
        self._see_head(client, envelope)
        if why := _failure(envelope):
            return Lost(client, why)
        pieces = take_pieces(envelope.content)
        if sum(len(piece) for piece in pieces) > self._most:
            raise BadMessage(_too_large(self._most))
        reply = from_pieces(pieces)
        size = reply.count_bytes()
        if reply.sender != client:
            return Lost(client, f"answered as client {reply.sender}", refused=True, bytes=size)
        if reply.round != request.round:
            why = f"answered round {reply.round}, was asked in round {request.round}"
            return Lost(client, why, refused=True, bytes=size)
        return reply

    # -- who is there ------------------------------------------------------------------------------

    def _await_sites(self, asked: Collection[int] = (), needed: int = 0) -> None:
        """Before the first round wait for everybody, later for at least a few: a round without
        anyone is no round. needed: of those who are asked, where fewer could add up to nothing.
        """
        self._poll_nodes(now=True)
        wanted = self.least if self._started else self.clients
        until = time.monotonic() + self.wait
        while (
            self._count_present() < wanted or self._count_present(asked) < needed
        ) and time.monotonic() < until:
            time.sleep(self.poll)
            self._poll_nodes()
        if not self._agreed:
            self._agree_on_classes()
        self._started = True
        reasons = "; ".join(dict.fromkeys(why for why, _ in self.refused.values()))
        if (present := self._count_present()) < self.least:
            raise NoSites(
                f"{present} of {self.clients} sites joined within {self.wait:g} s"
                + (f" ({reasons})" if reasons else "")
            )
        if (present := self._count_present(asked)) < needed:
            absent = ", ".join(str(i) for i in sorted(asked) if not self._is_present(i))
            raise NoSites(
                f"a round needs {needed} of the {len(asked)} sites that it asks, and for"
                f" {self.wait:g} s there were {present}: without clients {absent}"
                + (f" ({reasons})" if reasons else "")
            )

    def _agree_on_classes(self) -> None:
        """What most sites say; whoever came first may be the one that is wrong, or lies."""
        votes = Counter(self._meanings[client] for client in self.nodes)
        (first, most), (_, second) = [*votes.most_common(2), ("", 0), ("", 0)][:2]
        if most and most == second:
            said = [f"client {i} has the classes {self._meanings[i][:100]}" for i in self.nodes]
            raise NoSites(
                f"sites disagree about what labels mean, and no side has more of them: "
                f"{'; '.join(sorted(said))}: let the server's [data] list the classes as names"
            )
        self.classes, self._agreed = first, bool(most)
        for client in [i for i in self.nodes if self._meanings[i] != first]:
            self._sizes.pop(client, None)
            self._turn_away(self.nodes.pop(client), self._differs(client, self._meanings[client]))

    def _differs(self, client: int, classes: str) -> str:
        return (
            f"client {client} has the classes {classes[:300]}, not {self.classes[:300]}: let"
            " everybody's [data] list all of them as names"
        )

    def _is_present(self, client: int) -> bool:
        return self.nodes.get(client) in self._online

    def _count_present(self, clients: Collection[int] | None = None) -> int:
        return sum(map(self._is_present, self.nodes if clients is None else clients))

    def _poll_nodes(self, now: bool = False) -> None:
        """At most once a second, query nodes that are new or were refused a while ago; register
        those that have answered.
        """
        if now or time.monotonic() - self._polled > 1.0:
            self._polled = time.monotonic()
            self._online = {n.node_id: n.public_key for n in self.grid.get_nodes()}
            for node in sorted(self._online.keys() - self._settled()):
                self._query(node)
        for message_id in list(self._queries):
            try:
                for envelope in self._fetch(message_id, GREETING_BYTES):
                    self._register(self._queries.pop(message_id), envelope)
            except BadMessage as e:
                self._turn_away(self._queries.pop(message_id), str(e))

    def _settled(self) -> set[int]:
        """Nodes that need not be queried: known, being queried, or refused a moment ago."""
        settled = {*self.nodes.values(), *self._queries.values()}
        for node, (_, when) in self.refused.items():
            if self._polled - when < RETRY_SECONDS:
                settled.add(node)
        return settled

    def _query(self, node: int) -> None:
        content = RecordDict({"fedlens": ConfigRecord(self._fields())})
        envelope = Envelope(content, node, "query", ttl=max(self.wait, 60.0))
        for message_id in self.grid.push_messages([envelope]):
            self._queries[message_id] = node

    def _register(self, node: int, envelope: Envelope) -> None:
        why = _failure(envelope)
        fields = {} if why else take_fields(envelope.content) or {}
        why = why or self._objection(node, fields)
        if why:
            self._turn_away(node, why)
        else:
            self.refused.pop(node, None)
            self.nodes[fields["client"]] = node
            self._see_head(fields["client"], envelope)
            self._meanings[fields["client"]] = str(fields.get("classes", ""))
            size = ""
            if tells_size(self.algorithm):
                self._sizes[fields["client"]] = fields["examples"]
                size = f" with {fields['examples']} examples"
            self.log(f"client {fields['client']} has joined{size}")

    def _turn_away(self, node: int, why: str) -> None:
        why = f"{self._name(node)} was not let in: {why}"
        if self.refused.get(node, ("", 0.0))[0] != why:
            self.log(why)
        self.refused[node] = (why, time.monotonic())

    def _bound(self, node: int) -> int | None:
        """The client that a node's key belongs to."""
        key = self._online.get(node)
        return next((i for i, k in (self.bindings or {}).items() if k == key), None)

    def _name(self, node: int) -> str:
        """A node by what is known of it for certain."""
        client = self._bound(node)
        return f"node {node}" if client is None else f"the site of client {client}"

    def _objection(self, node: int, fields: Mapping[str, Any]) -> str | None:
        client, classes = fields.get("client"), str(fields.get("classes", ""))
        examples = fields.get("examples") if tells_size(self.algorithm) else 1
        # somebody else's program: any type may come
        if type(client) is not int or type(examples) is not int:
            return (
                "does not say in numbers which client it is and how many examples it has: is it a"
                " FedLens site of the same version?"
            )
        if self.bindings is not None and self._bound(node) != client:
            known = self._bound(node)
            owner = "no client" if known is None else f"client {known}"
            return f"calls itself client {client}, but its key belongs to {owner}"
        if not 0 < examples < _MOST_EXAMPLES:
            return f"says that it has {examples} examples"
        if not readable(classes, 1 << 16):
            return "has classes whose names are too long or cannot be printed"
        if not 0 <= client < self.clients:
            return (
                f"calls itself client {client}, but there are {self.clients} (0 to"
                f" {self.clients - 1})"
            )
        if self.nodes.get(client, node) != node and self.nodes[client] in self._online:
            return f"calls itself client {client}, which is somebody else already"
        if self._agreed and classes != self.classes:
            return self._differs(client, classes)
        return None

    def snapshot(self) -> Mapping[int, Path]:
        return {}  # sites keep their own memory

    def restore(self, records: Mapping[int, Path]) -> None:
        pass

    def close(self) -> None:
        pass


class _Meter:
    """Counts what a reply brings while Flower's grid fetches it, an object at a time, and breaks
    off when that is more than it can be, as it comes or put together, or takes too long: a site may
    have stored hundreds of megabytes for us, or announced what it never sends, for which the grid
    would wait two hours."""

    def __init__(self, grid: Any) -> None:
        self.bytes = self.most = 0
        self.began = 0.0
        # Flower's own; a grid that does not fetch (in the same process) has none
        client = getattr(grid, "_runtime_client", None)
        if client is not None:
            self.fetch, client.PullObject = client.PullObject, self.pull

    def begin(self, most: int) -> None:
        self.bytes, self.most, self.began = 0, most, time.monotonic()
        self.unpacked = Unpacked()

    def pull(self, request: Any, *args: Any, **keys: Any) -> Any:
        # as slow as the front lets a piece come
        allowed = STALL_SECONDS + min(self.bytes + PIECE_BYTES, self.most) / PACE
        if time.monotonic() - self.began > allowed:
            raise BadMessage("was announced, and then came too slowly")
        response = self.fetch(request, *args, **keys)
        self.bytes += len(response.object_content)
        if response.object_content:  # else it has not come yet
            self.unpacked.add(request.object_id, response.object_content)
        if max(self.bytes, self.unpacked.bytes) > self.most:
            raise BadMessage(_too_large(self.most))
        return response


def _too_large(most: int) -> str:
    return f"is larger than {most / 1e6:.1f} MB, the most that it could be"


def _failure(envelope: Envelope) -> str | None:
    """Why an envelope carries no reply, in one sentence, or None if it carries one."""
    if envelope.has_error():  # its own words may hold anything, also of a site's files
        return _FAILURES.get(envelope.error.code, f"Flower error {envelope.error.code}")
    fields = take_fields(envelope.content)
    if fields is None:
        return "answered without the record by which FedLens sites are known"
    return sentence(fields["lost"], fields.get("detail", "")) if "lost" in fields else None


# -- an app ----------------------------------------------------------------------------------------


def make_server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """The ServerApp around a function of a grid and the run's config. What its user can put right
    (ValueError, OSError) is one line in the log, anything else a traceback.
    """
    app = ServerApp()

    def start(grid: Grid, context: Context) -> None:
        heap.return_at_once()
        _look_again_soon()
        if not os.environ.get("FEDLENS_DEBUG"):
            logging.getLogger("flwr").addFilter(_without_traceback)
        main(grid, dict(context.run_config))

    app.main()(start)
    return app


def _look_again_soon() -> None:
    """A reply is announced before its arrays have come, and Flower's Grid then waits a whole second
    before it looks for them again: here a twentieth. No other than this process is changed.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from flwr.superlink.grid import http_grid

        soon = functools.partial(pull_objects, initial_backoff=0.05, backoff_cap=1.0)
        http_grid.pull_objects = soon


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValueError | OSError):
        text = " ".join(str(error).split())
        record.msg, record.args, record.exc_info = f"the run ended: {text}", (), None
    return True


def make_client_app(make_site: MakeSite) -> ClientApp:
    """The ClientApp of a site at a stock SuperNode. `make_site` is called for every message, each
    of which is a new process, with the node's config and what it was asked.
    """
    app = ClientApp()

    def relay(envelope: Envelope, context: Context) -> Envelope:
        request = {**context.run_config, **(take_fields(envelope.content) or {})}
        header = {"kind": envelope.metadata.message_type, "request": request}
        node = {**context.node_config, "stock": True}
        pieces = take_pieces(envelope.content)
        answered = answer_request(header, pieces, node, make_site, _log_line)
        return Envelope(to_records(*answered), reply_to=envelope)

    app.query()(relay)
    app.train()(relay)
    return app


def _log_line(text: str) -> None:
    print(f"fedlens: {text}", flush=True)


def write_app(
    folder: Path, server: str, site: str, config: Mapping[str, bool | int | float | str]
) -> None:
    """A Flower app as `flwr run` wants it. server: "module:main" (see `make_server_app`); site:
    "module:make_site", for stock SuperNodes alone: a site of ours never asks for the app. Both must
    be installed where they run: weights and packages do not fit into what Flower ships."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, reference in (("server", server), ("client", site)):
        module, _, name = reference.partition(":")
        (folder / f"{kind}.py").write_text(
            f"from {module} import {name}\n\n"
            f"from fedlens.engines.flower.engine import make_{kind}_app\n\n"
            f"app = make_{kind}_app({name})\n"
        )
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in config.items()]
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

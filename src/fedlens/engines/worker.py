"""The worker: asks clients, checks their replies and sums them, inside whatever an engine runs its
workers in.

It knows nothing of processes or networks. Each process of the simulator and each actor of Ray holds
one `Worker` and sends its pool what `report` and `payload` make of the outcomes. `loopback`, and
the simulator without processes, call `work` directly. On a Flower server it checks and sums what
came over the wire (`admit`).
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedlens.core.algorithm import Algorithm
from fedlens.core.answer import answer
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Header, Message
from fedlens.core.replies import Fold, Heard, Lost, Nodes, Sum, in_order, leaves_ring, refuse
from fedlens.core.tree import Tree
from fedlens.trust.ledger import Ledgers

ReplyOutcome = Message | Heard | Lost  # of asking one client; Heard where its trees were folded
_PACKAGE = Path(__file__).parents[1]
IDLE = -1.0  # the position on a clock while no client is being asked


class Job(NamedTuple):
    """One client to ask.

    Args:
        position: in the sorted cohort.
        heard: the round in which the server last heard it.
        moved: another worker has written its memory since this one last held it.
    """

    position: int
    client: int
    heard: int = NEVER
    moved: bool = False


class Worker:
    """Holds one resident model (inside the algorithm) and the partial sums of the round at hand.

    Args:
        clock: the position of the client being asked, and since when.
        ledgers: where what leaves a client is written down.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        memory: Memory,
        clock: Any = None,
        ledgers: Ledgers | None = None,
    ) -> None:
        self.algorithm, self.federation, self.memory = algorithm, federation, memory
        self.ledgers = ledgers
        self.clock = [IDLE, 0.0] if clock is None else clock
        self.begin(Message(), True)

    def begin(self, message: Message, sums: bool) -> None:
        """A new round. With `sums`, trees are folded here and only scalars are handed out."""
        self.message, self.sums, self.fold = message, sums, Fold()
        # by position: replies whose scalars were reported and whose trees were not yet handed in
        self.singles: dict[int, Message] = {}

    def work(self, jobs: Sequence[Job]) -> list[ReplyOutcome]:
        """Ask these clients in turn. Whatever one does wrong costs its own reply only."""
        outcomes: list[ReplyOutcome] = []
        for position, id, heard, moved in jobs:
            if moved:
                self.memory.forget(id)
            self.clock[1] = time.monotonic()
            self.clock[0] = position
            try:
                reply = answer(
                    self.algorithm, self.message, id, self.federation, self.memory, heard
                )
                if self.ledgers:
                    self.ledgers.record_reply(reply, self.message.header)
            except Exception as e:  # somebody else's code and data: anything may come out of it
                reason = _first_line(f"{type(e).__name__}: {e}") + _own_line(e)
                outcomes.append(Lost(id, reason))
                if self.ledgers:
                    with contextlib.suppress(OSError):  # a full disk is the reason by itself
                        self.ledgers.record_failure(id, self.message.round, reason)
            else:
                outcomes.append(self.admit(position, reply))
                del reply  # as large as a model, and the next client needs the room
            self.clock[0] = IDLE
        return outcomes

    @property
    def expected(self) -> Mapping[str, Tree]:
        """What replies to the message at hand must look like."""
        return self.message.derived("expects", lambda: self.algorithm.answers(self.message))

    def check(self, reply: Message) -> Message | Lost:
        """The reply in the order in which it is expected, or why it must not count."""
        most, weighing = self.message.header.max_weight, self.algorithm.weighing()
        try:
            why = refuse(reply, self.expected, most, self.algorithm.declared(), weighing)
            why = why or leaves_ring(reply, self.expected, weighing)
            size = reply.count_bytes()
        except Exception as e:  # not even what a reply is made of
            why, size = _first_line(f"malformed ({type(e).__name__}: {e})"), 0
        if why:
            return Lost(reply.sender, why, refused=True, bytes=size)
        return in_order(reply, self.expected)

    def admit(self, position: int, reply: Message, own: bool = False) -> ReplyOutcome:
        """Check a reply and fold it. own: it came over a wire, so its arrays are nobody else's."""
        checked = self.check(reply)
        if isinstance(checked, Lost) or not self.sums:
            return checked
        self.fold.add(position, checked, own)
        return Heard.of(checked)

    def finish(self) -> Nodes:
        """The partial sums that are left; the round may go on afterwards."""
        nodes, self.fold = self.fold.nodes, Fold()
        return nodes

    # -- for a pool in another process -------------------------------------------------------------

    def report(self, jobs: Sequence[Job], outcomes: Sequence[ReplyOutcome]) -> dict[str, Any]:
        """Outcomes as a little JSON; trees stay here until the pool asks for the payload."""
        lost: list[list[Any]] = []
        heard: list[list[Any]] = []
        for (position, *_), outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Lost):
                lost.append([position, asdict(outcome)])
                continue
            if isinstance(outcome, Message):
                self.singles[position] = outcome
                outcome = Heard.of(outcome)
            heard.append([position, asdict(outcome)])
        return {"lost": lost, "heard": heard}

    def payload(self) -> tuple[Message, dict[str, Any]]:
        """Partial sums and single replies: their arrays as one message, and an index of them."""
        trees: dict[str, Tree] = {}
        nodes: list[list[Any]] = []
        for (level, place), sums in self.finish().items():
            for (tree, name), total in sums.items():
                trees[str(len(nodes))] = total.tree
                nodes.append([level, place, tree, name, total.weight, total.borrowed])
        singles: list[list[Any]] = []
        for position, reply in self.singles.items():
            trees |= {f"{position}:{n}": t for n, t in reply.trees.items()}
            weights = {tree: dict(named) for tree, named in reply.weights.items()}
            singles.append([position, weights, list(reply.trees)])
        self.singles = {}
        return Message(trees), {"nodes": nodes, "singles": singles}


def read_report(
    report: Mapping[str, Any], results: MutableMapping[int, ReplyOutcome], log: Log
) -> None:
    """The pool's side of `Worker.report`: outcomes go to `results`, by position."""
    for position, fields in report["lost"]:
        lost = results[position] = Lost(**fields)
        log(f"client {lost.sender}: {lost.reason}")
    for position, fields in report["heard"]:
        results[position] = Heard(**fields)


def read_payload(
    payload: Message, index: Mapping[str, Any], results: MutableMapping[int, ReplyOutcome]
) -> Nodes:
    """The pool's side of `Worker.payload`: returns the partial sums; single replies get their trees
    in `results`.
    """
    nodes: Nodes = {}
    for k, (level, place, tree, name, weight, borrowed) in enumerate(index["nodes"]):
        total = Sum(payload.trees[str(k)], weight, borrowed)
        nodes.setdefault((level, place), {})[tree, name] = total
    for position, weights, names in index["singles"]:
        heard = results[position]
        assert isinstance(heard, Heard)
        trees = {n: payload.trees[f"{position}:{n}"] for n in names}
        header = Header(round=heard.round)
        results[position] = Message(
            trees, heard.scalars, weights, heard.sender, header, heard.texts
        )
    return nodes


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300]


def _own_line(error: Exception) -> str:
    """Where in a user's own file something broke. What was raised as a sentence needs no place."""
    if isinstance(error, ValueError | OSError):
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        ours = file.is_relative_to(_PACKAGE) or "site-packages" in file.parts
        if file.is_file() and not ours:
            return f" ({file.name}, line {frame.lineno})"
    return ""


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Bits depend on the number of threads, so it is set where work is done, and put back."""
    before = torch.get_num_threads()
    if n != before:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n != before:
            torch.set_num_threads(before)

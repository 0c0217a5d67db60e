"""A crew: what engines with several workers have in common. The simulator's workers are processes,
Ray's are actors.

Clients stay with their worker: the sorted cohort is cut into one stretch per worker, and whoever
runs out of work takes from the end of the longest stretch left. Who computes what changes nothing
in the result (see `replies`). Client memory is written to files as it changes, so that another
worker can take over: a worker that dies or hangs is replaced, its unfinished work is done again
from the memory that was committed, and the client it died on has lost its reply. Where nobody can
tell which client that was, those it had in hand are asked again one at a time: the one a worker
dies on alone is the one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.core.replies import Arrival, Heard, Lost, Nodes
from fedlens.engines.worker import Log, Worker, pack, unpack

IDLE = -1.0
# position in the sorted cohort, client, round last heard, is its memory from another worker?
Job = tuple[int, int, int, bool]


class Gone(Exception):
    """A worker has died; why, in a few words."""


class Hand(ABC):
    """A worker, seen from here. `begin`, `work` and `finish` return at once; the last two are
    answered in their order.
    """

    @abstractmethod
    def begin(self, parcel: Any, sums: bool) -> None: ...

    @abstractmethod
    def work(self, jobs: list[Job]) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """The answer to `work`. Raises Gone."""

    @abstractmethod
    def harvest(self, sums: bool) -> tuple[Message, Mapping[str, Any]]:
        """The answer to `finish`, as `pack` made it. Raises Gone."""

    @abstractmethod
    def culprit(self, piece: Sequence[int]) -> int | None:
        """The position a dead worker was at; None: at none, or nobody knows."""

    @abstractmethod
    def overdue(self, piece: Sequence[int], limit: float) -> bool: ...

    @abstractmethod
    def kill(self) -> None: ...

    def dismiss(self) -> None:
        """At the end of the day."""
        self.kill()


H = TypeVar("H", bound=Hand)


class Crew(ABC, Generic[H]):
    """An engine with workers. `home`: which of them last held a client's memory."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, timeout: float | None, log: Log | None
    ) -> None:
        self.algorithm, self.federation, self.timeout = algorithm, federation, timeout
        self.log = log or (lambda text: None)
        self.keep_singles = False
        self.home: dict[int, int] = {}
        self.touched: set[int] = set()
        self.crew: list[H] = []
        self.folder: Path

    @abstractmethod
    def hire(self, number: int) -> H: ...

    @abstractmethod
    def post(self, message: Message) -> Any:
        """Put a message where all workers can read it; what `Hand.begin` needs to find it."""

    @abstractmethod
    def ready(self, busy: Sequence[int], seconds: float) -> Sequence[int]:
        """Which of these workers have answered or died, after at most so many seconds."""

    def ids(self) -> Sequence[int]:
        return range(len(self.federation))

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        order = sorted(ids)
        if not message.header.evaluate:
            self.touched.update(order)
        sums = self.algorithm.needs != "replies" and not self.keep_singles
        yield from self.carry(message, order, heard, sums)

    def carry(
        self, message: Message, order: list[int], heard: Mapping[int, int], sums: bool
    ) -> Iterator[Arrival]:
        yield from _Exchange(self, message, order, heard, sums).outcomes()

    def snapshot(self) -> Mapping[int, Path]:
        touched, self.touched = self.touched, set()
        paths = {i: self.folder / f"{i}.safetensors" for i in sorted(touched)}
        return {i: p for i, p in paths.items() if p.exists()}

    def restore(self, records: Mapping[int, Path]) -> None:
        Memory(self.folder).restore(records)
        self.home = dict.fromkeys(self.ids(), NEVER)  # whatever a worker still holds is out of date

    def close(self) -> None:
        for hand in self.crew:
            hand.dismiss()
        self.crew = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Exchange:
    """One exchange: hands out work, collects outcomes, replaces workers that die. Workers go by
    their number.
    """

    def __init__(
        self,
        owner: Crew[Any],
        message: Message,
        order: list[int],
        heard: Mapping[int, int],
        sums: bool,
    ) -> None:
        self.owner, self.order, self.heard, self.sums = owner, order, heard, sums
        self.parcel = owner.post(message)
        n = len(owner.crew)
        # Cuts at round numbers leave fewer partial sums to hand in; what they cost in balance is
        # evened out by taking over work.
        grain = max(1, 1 << (len(order) // n).bit_length() >> 4)
        cuts = [round(len(order) * k / n / grain) * grain for k in range(n)] + [len(order)]
        self.waiting = {k: deque(range(cuts[k], cuts[k + 1])) for k in range(n)}
        # positions that are asked alone, because a worker died on them or on a neighbour
        self.suspects: set[int] = set()
        self.begun: set[int] = set()
        # handed out and not yet returned as sums
        self.open: dict[int, list[int]] = {k: [] for k in range(n)}
        # worker -> what it has in hand; nothing: it is handing in
        self.busy: dict[int, list[int]] = {}
        self.results: dict[int, Message | Heard | Lost] = {}
        self.deaths = 0

    def outcomes(self) -> Iterator[Arrival]:
        for k in self.waiting:
            self.give(k)
        while self.busy:
            for k in self.owner.ready(list(self.busy), 0.2 if self.owner.timeout else 5.0):
                yield from self.hear(k)
            self.check_clocks()
        yield from self.results.values()

    def give(self, k: int) -> None:
        """The next piece of work, half of what is left in a stretch at a time; or, when there is
        none, the request to hand in.
        """
        mine, hand = self.waiting[k], self.owner.crew[k]
        if not mine:
            longest = max(self.waiting.values(), key=len)
            for _ in range((len(longest) + 1) // 2):
                mine.appendleft(longest.pop())
        if mine:
            piece = [mine.popleft()]
            while (
                piece[0] not in self.suspects
                and len(piece) < len(mine)
                and mine[0] not in self.suspects
            ):
                piece.append(mine.popleft())
            if k not in self.begun:
                hand.begin(self.parcel, self.sums)
                self.begun.add(k)
            hand.work([self.job(position, k) for position in piece])
            self.open[k] += piece
            self.busy[k] = piece
        elif self.open[k]:
            hand.finish()
            self.busy[k] = []

    def job(self, position: int, k: int) -> Job:
        id = self.order[position]
        moved = self.owner.home.get(id, k) != k
        self.owner.home[id] = k
        return position, id, self.heard.get(id, NEVER), moved

    def hear(self, k: int) -> Iterator[Nodes]:
        hand = self.owner.crew[k]
        try:
            if self.busy[k]:
                self.note(hand.report())
            else:
                payload, index = hand.harvest(self.sums)
                nodes = unpack(payload, index, self.results)
                self.open[k] = []
                if nodes:
                    yield nodes
        except Gone as e:
            self.bury(k, str(e))
            return
        del self.busy[k]
        self.give(k)

    def note(self, told: Mapping[str, Any]) -> None:
        for position, id, reason, refused in told["lost"]:
            self.results[position] = Lost(id, reason, refused)
            self.owner.log(f"client {id}: {reason}")
        for position, heard in told["heard"]:
            self.results[position] = Heard(**heard)

    def check_clocks(self) -> None:
        limit = self.owner.timeout
        for k, piece in list(self.busy.items()):
            if limit and piece and self.owner.crew[k].overdue(piece, limit):
                self.bury(k, f"took longer than {limit:g} s")

    def bury(self, k: int, why: str) -> None:
        """Replace a worker; do again what it had not handed in, without the client it died on."""
        piece, hand = self.busy.pop(k), self.owner.crew[k]
        hand.kill()
        culprit = hand.culprit(piece)
        again = [
            p
            for p in self.open[k]
            if p != culprit
            and not (isinstance(old := self.results.get(p), Lost) and not old.refused)
        ]
        whose = f"worker {k}" if culprit is None else f"client {self.order[culprit]}"
        self.owner.log(
            f"{whose}: {why}; worker {k} is replaced and {len(again)} clients are asked again"
        )
        self.deaths += 1
        if self.deaths > 2 * (len(self.owner.crew) + len(self.order)):
            raise RuntimeError(f"workers keep dying: {why}")
        if culprit is None:
            self.suspects.update(piece)
        else:
            self.results[culprit] = Lost(self.order[culprit], why)
        for p in again:
            self.results.pop(p, None)
            self.owner.home[self.order[p]] = (
                NEVER  # the file holds what is committed, whoever reads it
            )
        self.owner.crew[k] = self.owner.hire(k)
        self.begun.discard(k)
        self.waiting[k] = deque(sorted([*again, *self.waiting[k]]))
        self.open[k] = []
        self.give(k)


# -- inside a worker -------------------------------------------------------------------------------


class Desk:
    """The other end of a Hand: a `Worker`, and the single replies it has not handed in. clock: the
    position it is at, and since when.
    """

    def __init__(self, worker: Worker, clock: Any = None) -> None:
        self.worker, self.clock = worker, [IDLE, 0.0] if clock is None else clock
        self.singles: list[tuple[int, Message]] = []

    def begin(self, message: Message, sums: bool) -> None:
        self.worker.begin(message, sums)
        self.singles = []

    def work(self, jobs: Sequence[Job]) -> dict[str, Any]:
        lost, heard_of = [], []
        for position, id, heard, moved in jobs:
            if moved:
                self.worker.memory.forget(id)
            self.clock[1] = time.monotonic()
            self.clock[0] = position
            outcome = self.worker.work(position, id, heard)
            self.clock[0] = IDLE
            if isinstance(outcome, Lost):
                lost.append([position, id, outcome.reason, outcome.refused])
            else:
                known = Heard.of(outcome) if isinstance(outcome, Message) else outcome
                heard_of.append([position, asdict(known)])
                if isinstance(outcome, Message) and outcome.trees:
                    self.singles.append((position, outcome))
        return {"lost": lost, "heard": heard_of}

    def finish(self) -> tuple[Message, dict[str, Any]]:
        singles, self.singles = self.singles, []
        return pack(self.worker, singles)

"""The worker pool: what engines with several workers have in common. The simulator's workers are
processes, Ray's are actors.

The sorted cohort is cut into one stretch per worker, so that clients stay with their worker; a
worker that runs out of work takes over the second half of the longest stretch left. Who computes
what changes nothing in the result (see `core.replies`). Client memory is written to files as it
changes, so that another worker can go on with it: a worker that dies or hangs is replaced, its
unfinished work is done again from the memory that was committed, and the client it died on has lost
its reply. Where nobody can tell which client that was, all it had been given are suspects and are
asked again one at a time: the one a worker dies on alone is the one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.core.replies import Arrival, Lost, Nodes
from fedlens.engines.worker import Job, ReplyOutcome, read_payload, read_report


class WorkerDied(Exception):
    """How, in a few words."""


class WorkerHandle(ABC):
    """A worker, as its pool sees it. `begin`, `work` and `finish` return at once; `report` and
    `collect` fetch the answers to the last two, in their order.
    """

    @abstractmethod
    def begin(self, published: Any, sums: bool) -> None:
        """A new round. published: what `WorkerPool.publish` returned."""

    @abstractmethod
    def work(self, jobs: list[Job]) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """The answer to `work`, as `Worker.report` made it. Raises WorkerDied."""

    @abstractmethod
    def collect(self, sums: bool) -> tuple[Message, Mapping[str, Any]]:
        """The answer to `finish`, as `Worker.payload` made it. Raises WorkerDied."""

    @abstractmethod
    def suspect(self, piece: Sequence[int]) -> int | None:
        """The position a dead worker was at; None: at none, or nobody knows."""

    @abstractmethod
    def overdue(self, piece: Sequence[int], limit: float) -> bool:
        """Has a client of this piece taken longer than so many seconds?"""

    @abstractmethod
    def kill(self) -> None: ...

    def stop(self) -> None:
        """At the end of a run, when there is time to be asked."""
        self.kill()


H = TypeVar("H", bound=WorkerHandle)


class WorkerPool(ABC, Generic[H]):
    """An engine with workers. last_worker: which of them last held a client's memory. touched:
    whose memory may have changed since the last snapshot.
    """

    def __init__(
        self, algorithm: Algorithm, federation: Federation, timeout: float | None, log: Log | None
    ) -> None:
        self.algorithm, self.federation, self.timeout = algorithm, federation, timeout
        self.log = log or (lambda text: None)
        self.keep_singles = False
        self.last_worker: dict[int, int] = {}
        self.touched: set[int] = set()
        self.workers: list[H] = []
        self.folder: Path

    @abstractmethod
    def start(self, number: int) -> H:
        """A new worker."""

    @abstractmethod
    def publish(self, message: Message) -> Any:
        """Put a message where all workers can read it; what `WorkerHandle.begin` needs to find
        it.
        """

    @abstractmethod
    def ready(self, busy: Sequence[int], seconds: float) -> Sequence[int]:
        """Which of these workers have answered or died, after at most so many seconds."""

    def ids(self) -> Sequence[int]:
        return range(len(self.federation))

    @property
    def sums(self) -> bool:
        """Are replies summed by the workers?"""
        return self.algorithm.needs != "replies" and not self.keep_singles

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        self.touch(message, ids)
        current = _Exchange(self, message, sorted(ids), heard)
        for number in range(len(self.workers)):
            current.assign(number)
        while current.busy:
            for number in self.ready(list(current.busy), 0.2 if self.timeout else 5.0):
                yield from current.receive(number)
            current.replace_overdue()
        yield from current.results.values()

    def touch(self, message: Message, ids: Sequence[int]) -> None:
        if not (message.header.evaluate or message.header.trip):
            self.touched.update(ids)

    def snapshot(self) -> Mapping[int, Path]:
        touched, self.touched = self.touched, set()
        paths = {i: self.folder / f"{i}.safetensors" for i in sorted(touched)}
        return {i: p for i, p in paths.items() if p.exists()}

    def restore(self, records: Mapping[int, Path]) -> None:
        Memory(self.folder).restore(records)
        # whatever a worker still holds is out of date
        self.last_worker = dict.fromkeys(self.ids(), NEVER)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Exchange:
    """One exchange: assigns work, receives outcomes, replaces workers that die. Workers go by their
    number, clients by their position in the sorted cohort.
    """

    def __init__(
        self, pool: WorkerPool[Any], message: Message, order: list[int], heard: Mapping[int, int]
    ) -> None:
        self.pool, self.order, self.heard, self.sums = pool, order, heard, pool.sums
        self.published = pool.publish(message)
        stretches = _cut_cohort(len(order), len(pool.workers))
        # by worker: positions it is to ask
        self.waiting = {number: deque(stretch) for number, stretch in enumerate(stretches)}
        # by worker: positions it is asking now; none: it is handing in
        self.busy: dict[int, list[int]] = {}
        # by worker: positions it was given since it last handed in
        self.uncollected: dict[int, list[int]] = {number: [] for number in self.waiting}
        # asked alone, because a worker died on them or on a neighbour
        self.suspects: set[int] = set()
        self.begun: set[int] = set()  # workers that know of the message
        self.results: dict[int, ReplyOutcome] = {}
        self.deaths = 0

    def assign(self, number: int) -> None:
        """Give a worker its next piece of work or, when none is left, let it hand in."""
        worker = self.pool.workers[number]
        if not self.waiting[number]:
            self.take_over(number)
        if self.waiting[number]:
            if number not in self.begun:
                worker.begin(self.published, self.sums)
                self.begun.add(number)
            piece = self.next_piece(number)
            worker.work([self.job(position, number) for position in piece])
            self.uncollected[number] += piece
            self.busy[number] = piece
        elif self.uncollected[number]:
            worker.finish()
            self.busy[number] = []

    def take_over(self, number: int) -> None:
        """The second half of the longest stretch left becomes this worker's."""
        longest = max(self.waiting.values(), key=len)
        for _ in range((len(longest) + 1) // 2):
            self.waiting[number].appendleft(longest.pop())

    def next_piece(self, number: int) -> list[int]:
        """Half of what is left of a stretch, so that the rest can still be taken over; a suspect
        alone.
        """
        waiting = self.waiting[number]
        piece = [waiting.popleft()]
        if piece[0] in self.suspects:
            return piece
        while len(piece) < len(waiting) and waiting[0] not in self.suspects:
            piece.append(waiting.popleft())
        return piece

    def job(self, position: int, number: int) -> Job:
        id = self.order[position]
        moved = self.pool.last_worker.get(id, number) != number
        self.pool.last_worker[id] = number
        return Job(position, id, self.heard.get(id, NEVER), moved)

    def receive(self, number: int) -> Iterator[Nodes]:
        """What a worker has answered, and its next piece of work."""
        worker = self.pool.workers[number]
        try:
            if self.busy[number]:
                read_report(worker.report(), self.results, self.pool.log)
            else:
                payload, index = worker.collect(self.sums)
                nodes = read_payload(payload, index, self.results)
                self.uncollected[number] = []
                if nodes:
                    yield nodes
        except WorkerDied as e:
            self.replace(number, str(e))
            return
        del self.busy[number]
        self.assign(number)

    def replace_overdue(self) -> None:
        limit = self.pool.timeout
        if not limit:
            return
        for number, piece in list(self.busy.items()):
            if piece and self.pool.workers[number].overdue(piece, limit):
                self.replace(number, f"took longer than {limit:g} s")

    def replace(self, number: int, why: str) -> None:
        """A new worker, which does again what the old one had not handed in, without the client it
        died on.
        """
        piece, worker = self.busy.pop(number), self.pool.workers[number]
        worker.kill()
        suspect = worker.suspect(piece)
        again = [p for p in self.uncollected[number] if p != suspect and not self.has_failed(p)]
        whose = f"worker {number}" if suspect is None else f"client {self.order[suspect]}"
        self.pool.log(
            f"{whose}: {why}; worker {number} is replaced and {len(again)} clients are asked again"
        )
        self.deaths += 1
        if self.deaths > 2 * (len(self.pool.workers) + len(self.order)):
            raise RuntimeError(f"workers keep dying: {why}")
        if suspect is None:
            self.suspects.update(piece)
        else:
            self.results[suspect] = Lost(self.order[suspect], why)
        for p in again:
            self.results.pop(p, None)
            # the file holds what is committed, whoever reads it
            self.pool.last_worker[self.order[p]] = NEVER
        self.pool.workers[number] = self.pool.start(number)
        self.begun.discard(number)
        self.waiting[number] = deque(sorted([*again, *self.waiting[number]]))
        self.uncollected[number] = []
        self.assign(number)

    def has_failed(self, position: int) -> bool:
        """Lost for good: it raised, or a worker died on it."""
        result = self.results.get(position)
        return isinstance(result, Lost) and not result.refused


def _cut_cohort(clients: int, workers: int) -> list[range]:
    """Positions 0 ... clients - 1, one stretch per worker. Cuts at round numbers leave fewer
    partial sums to hand in; what they cost in balance is evened out by taking over work.
    """
    unit = max(1, 1 << (clients // workers).bit_length() >> 4)
    cuts = [round(clients * k / workers / unit) * unit for k in range(workers)]
    return [range(low, high) for low, high in pairwise([*cuts, clients])]

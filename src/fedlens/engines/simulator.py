"""Simulator: clients in worker processes on one machine. The embedded default.

The message of a round is written once into a file that all workers map; a worker keeps one resident model, folds the replies of
its clients into partial sums and hands those back through a mapped file of its own. Control messages are a few bytes of JSON.

Clients stay with their worker: the sorted cohort is cut into one stretch per worker, and whoever runs out of work takes from the end of
the longest stretch left. Who computes what changes nothing in the result (see `replies`). Client memory is written to files as it
changes, so that another worker can take over: a worker that dies or hangs is replaced, its unfinished work is done again from the
memory that was committed, and the client it died on has lost its reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import multiprocessing as mp
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.engines.worker import Log, Worker, keep_freed_memory, pack, threads, unpack
from fedlens.federation import Federation
from fedlens.memory import NEVER, Memory
from fedlens.message import Message
from fedlens.replies import Lost, Nodes

IDLE = -1.0


class Simulator:
    """workers: processes (default: cores); 0 works in this process: quickest for rounds of a few milliseconds, easiest to debug.
    threads: of torch, per worker. timeout: seconds a client may take. budget: bytes of client memory a worker keeps resident.
    folder: where client memory goes; a temporary one if not given."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        *,
        workers: int | None = None,
        threads: int = 1,
        timeout: float | None = None,
        budget: int = 1 << 30,
        folder: Path | None = None,
        log: Log | None = None,
    ) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.threads, self.timeout, self.budget = threads, timeout, budget
        self.keep_singles = False
        self.log = log or (lambda text: None)
        wanted = os.cpu_count() or 1 if workers is None else workers
        self.scratch, self.lock = make_scratch(Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()))
        self.folder = folder or self.scratch / "memory"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.inline = Worker(algorithm, federation, Memory(self.folder, budget)) if wanted == 0 else None
        self.inbox = Shared(self.scratch / "inbox")
        self.home: dict[int, int] = {}  # which worker last held a client's memory
        self.touched: set[int] = set()
        if algorithm.trains and wanted:
            # The first optimiser loads another thousand modules. Before the fork that happens once, and workers share the memory.
            import torch._dynamo  # noqa: F401
        self.crew = [_Process(self, k) for k in range(min(wanted, len(federation)))]

    def ids(self) -> Sequence[int]:
        return range(len(self.federation))

    def exchange(self, message: Message, ids: Sequence[int], heard: Mapping[int, int]) -> Iterator[Message | Lost | Nodes]:
        order = sorted(ids)
        sums = self.algorithm.needs == "sums" and not self.keep_singles
        if not message.scalars.get("evaluate"):
            self.touched.update(order)
        if self.inline:
            yield from self._inline(message, order, heard, sums)
        else:
            yield from _Round(self, message, order, heard, sums).outcomes()

    def _inline(self, message: Message, order: list[int], heard: Mapping[int, int], sums: bool) -> Iterator[Message | Lost | Nodes]:
        assert self.inline
        with threads(self.threads):
            self.inline.begin(message, sums)
            for position, id in enumerate(order):
                outcome = self.inline.work(position, id, heard.get(id, NEVER))
                if isinstance(outcome, Lost):
                    self.log(f"client {id}: {outcome.reason}")
                yield outcome
            yield self.inline.finish()

    def snapshot(self) -> Mapping[int, Path]:
        if self.inline:
            self.inline.memory.flush()
        touched, self.touched = self.touched, set()
        paths = {i: self.folder / f"{i}.safetensors" for i in sorted(touched)}
        return {i: p for i, p in paths.items() if p.exists()}

    def restore(self, records: Mapping[int, Path]) -> None:
        memory = self.inline.memory if self.inline else Memory(self.folder)
        memory.restore(records)
        self.home = dict.fromkeys(self.ids(), -1)  # whatever a worker still holds is out of date

    def close(self) -> None:
        for process in self.crew:
            process.stop()
        self.crew = []
        self.inbox.close()
        self.lock.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Round:
    """One exchange: hands out work, collects outcomes, replaces workers that die."""

    def __init__(self, owner: Simulator, message: Message, order: list[int], heard: Mapping[int, int], sums: bool) -> None:
        self.owner, self.order, self.heard, self.sums = owner, order, heard, sums
        self.size = owner.inbox.write(message)
        crew = owner.crew
        # Cuts at round numbers leave fewer partial sums to hand in; what they cost in balance is evened out by taking over work.
        grain = max(1, 1 << (len(order) // len(crew)).bit_length() >> 4)
        cuts = [round(len(order) * k / len(crew) / grain) * grain for k in range(len(crew))] + [len(order)]
        self.waiting = {p: deque(range(cuts[k], cuts[k + 1])) for k, p in enumerate(crew)}
        self.begun: set[_Process] = set()
        self.open: dict[_Process, list[int]] = {p: [] for p in crew}  # handed out and not yet returned as sums
        self.busy: set[_Process] = set()
        self.results: dict[int, Message | Lost] = {}
        self.restarts = 0

    def outcomes(self) -> Iterator[Message | Lost | Nodes]:
        for process in self.owner.crew:
            self.give(process)
        while self.busy:
            ready = wait([p.pipe for p in self.busy], timeout=0.2 if self.owner.timeout else 5.0)
            for process in [p for p in self.busy if p.pipe in ready]:
                yield from self.hear(process)
            self.check_clocks()
        yield from self.results.values()

    def give(self, process: _Process) -> None:
        """The next piece of work, half of what is left in a stretch at a time; or, when there is none, the request to hand in."""
        mine = self.waiting[process]
        if not mine:
            longest = max(self.waiting.values(), key=len)
            for _ in range((len(longest) + 1) // 2):
                mine.appendleft(longest.pop())
        if mine:
            piece = [mine.popleft() for _ in range((len(mine) + 1) // 2)]
            if process not in self.begun:
                process.send({"do": "begin", "size": self.size, "sums": self.sums})
                self.begun.add(process)
            jobs = []
            for position in piece:
                id = self.order[position]
                jobs.append([position, id, self.heard.get(id, NEVER), self.owner.home.get(id, process.number) != process.number])
                self.owner.home[id] = process.number
            self.open[process] += piece
            process.send({"do": "work", "jobs": jobs})
            self.busy.add(process)
        elif self.open[process]:
            process.send({"do": "finish"})
            self.busy.add(process)

    def hear(self, process: _Process) -> Iterator[Nodes]:
        self.busy.discard(process)
        try:
            told = process.receive()
        except (EOFError, OSError, json.JSONDecodeError):
            self.bury(process, None)
            return
        if "lost" in told or "scalars" in told:
            for position, id, reason, refused in told["lost"]:
                self.results[position] = Lost(id, reason, refused)
                self.owner.log(f"client {id}: {reason}")
            for position, id, scalars in told["scalars"]:
                self.results[position] = Message(scalars=scalars, sender=id)
        else:
            nodes = unpack(process.outbox.read(told["size"], copy=not self.sums), told, self.results)
            self.open[process] = []
            if nodes:
                yield nodes
        self.give(process)

    def check_clocks(self) -> None:
        limit = self.owner.timeout
        for process in list(self.busy):
            position, since = process.clock()
            if limit and position != IDLE and time.monotonic() - since > limit:
                process.kill()
                self.busy.discard(process)
                self.bury(process, f"took longer than {limit:g} s")

    def bury(self, process: _Process, reason: str | None) -> None:
        """Replace a dead worker; do its work again without the client it died on."""
        position, _ = process.clock()
        why = reason or f"its worker died ({process.how_it_died()})"
        again = [p for p in self.open.pop(process) if not (isinstance(old := self.results.get(p), Lost) and not old.refused)]
        if position != IDLE:
            culprit = self.order[int(position)]
            self.results[int(position)] = Lost(culprit, why)
            again = [p for p in again if p != int(position)]
            self.owner.log(f"client {culprit}: {why}; worker {process.number} is replaced and {len(again)} clients are asked again")
        self.restarts += 1
        if self.restarts > 2 * len(self.owner.crew) + len(self.order):
            raise RuntimeError(f"workers keep dying: {why}")
        fresh = _Process(self.owner, process.number)
        self.owner.crew[process.number] = fresh
        for p in again:
            self.results.pop(p, None)
            self.owner.home[self.order[p]] = NEVER  # the file holds what is committed, whoever reads it
        self.waiting[fresh] = deque(sorted([*again, *self.waiting.pop(process)]))
        self.open[fresh] = []
        process.stop()
        self.give(fresh)


def make_scratch(root: Path) -> tuple[Path, IO[str]]:
    """A folder of our own, locked as long as we live. What killed runs left behind goes now: nobody holds its lock any more."""
    for old in root.glob("fedlens-*"):
        with contextlib.suppress(OSError), (old / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=".fedlens-", dir=root))
    mine = (hidden / "lock").open("w")
    fcntl.flock(mine, fcntl.LOCK_EX)
    return hidden.rename(root / hidden.name[1:]), mine


class Shared:
    """A file that several processes map; it grows when something larger is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view: mmap.mmap | None = None

    def write(self, message: Message) -> int:
        size = message.write_into(memoryview(self.view) if self.view else memoryview(b""))
        if self.view is None or size > len(self.view):
            self._map(size)
            assert self.view
            message.write_into(memoryview(self.view))
        return size

    def read(self, size: int, copy: bool) -> Message:
        if self.view is None or len(self.view) < size:
            self._map(None)
        assert self.view
        return Message.from_bytes(memoryview(self.view)[:size], copy=copy)

    def _map(self, size: int | None) -> None:
        # The old mapping lives on as long as arrays point into it.
        with open(self.path, "r+b" if self.path.exists() else "w+b") as f:
            if size:
                f.truncate(size)
            self.view = mmap.mmap(f.fileno(), 0)

    def close(self) -> None:
        self.view = None


class _Process:
    """The parent's handle on a worker process."""

    def __init__(self, owner: Simulator, number: int) -> None:
        # A fork shares the data that is already loaded; CUDA does not survive one.
        fork = "fork" in mp.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context: Any = mp.get_context("fork" if fork else "spawn")
        self.number = number
        self.outbox = Shared(owner.scratch / f"outbox-{number}-{time.monotonic_ns()}")
        clock = owner.scratch / f"clock-{number}"
        clock.write_bytes(struct.pack("dd", IDLE, 0.0))
        self._clock = map_clock(clock)
        self.pipe, theirs = context.Pipe()
        setup = (owner.algorithm, owner.federation, owner.folder, owner.budget, owner.threads, owner.scratch, clock, self.outbox.path)
        self.process = context.Process(target=_serve, args=(theirs, os.getpid(), *setup), daemon=True, name=f"fedlens-{number}")
        self.process.start()
        theirs.close()

    def send(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is listened to
            self.pipe.send_bytes(json.dumps(what).encode())

    def receive(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        return told

    def clock(self) -> tuple[float, float]:
        return float(self._clock[0]), float(self._clock[1])

    def kill(self) -> None:
        self.process.kill()

    def how_it_died(self) -> str:
        self.process.join(1)
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self.send({"do": "stop"})
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.outbox.path.unlink(missing_ok=True)


def map_clock(path: Path) -> Any:
    with open(path, "r+b") as f:
        return torch.frombuffer(mmap.mmap(f.fileno(), 0), dtype=torch.float64)


def _serve(
    pipe: Connection, parent: int, algorithm: Algorithm, federation: Federation, folder: Path, budget: int, n: int,
    scratch: Path, clock_path: Path, outbox_path: Path,
) -> None:  # fmt: skip
    """A worker process."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(n)
    keep_freed_memory()
    worker = Worker(algorithm, federation, Memory(folder, budget, durable=True))
    inbox, outbox, clock = Shared(scratch / "inbox"), Shared(outbox_path), map_clock(clock_path)
    singles: list[tuple[int, Message]] = []
    while True:
        told = json.loads(pipe.recv_bytes())
        if told["do"] == "stop":
            return
        if told["do"] == "begin":
            worker.begin(inbox.read(told["size"], copy=True), told["sums"])
            singles = []
        elif told["do"] == "work":
            outcome = _work(worker, told["jobs"], clock, singles)
            pipe.send_bytes(json.dumps(outcome).encode())
        else:
            pipe.send_bytes(json.dumps(_hand_in(worker, outbox, singles)).encode())
            singles = []


def _work(worker: Worker, jobs: list[tuple[int, int, int, bool]], clock: Any, singles: list[tuple[int, Message]]) -> dict[str, Any]:
    lost, scalars = [], []
    for position, id, heard, moved in jobs:
        if moved:
            worker.memory.forget(id)
        clock[1] = time.monotonic()
        clock[0] = position
        outcome = worker.work(position, id, heard)
        clock[0] = IDLE
        if isinstance(outcome, Lost):
            lost.append([position, id, outcome.reason, outcome.refused])
        else:
            scalars.append([position, id, dict(outcome.scalars)])
            if outcome.trees:
                singles.append((position, outcome))
    return {"lost": lost, "scalars": scalars}


def _hand_in(worker: Worker, outbox: Shared, singles: list[tuple[int, Message]]) -> dict[str, Any]:
    payload, told = pack(worker, singles)
    return {"size": outbox.write(payload), **told}


def die_with(parent: int) -> None:
    """Exit within a second of the parent's death: by the kernel where it offers that, by looking twice a second elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Simulator: clients in worker processes on one machine. The embedded default.

The message of a round is written once into a file that all workers map; a worker keeps one resident
model, folds the replies of its clients into partial sums and hands those back through a mapped file
of its own. Control messages are a few bytes of JSON. A clock in shared memory says which client a
worker is at, and since when. Who works on whom, and what happens when a worker dies: see `crew`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch

from fedlens.core import heap
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.core.replies import Arrival, Lost
from fedlens.engines.pool import IDLE, Crew, Desk, Gone, Hand, Job
from fedlens.engines.worker import Log, Worker, threads

MEMORY = Path("/dev/shm")
SCRATCH = (  # nothing else may be called so: what lies there without an owner is deleted
    "fedlens-scratch-"
)


class Simulator(Crew["_Process"]):
    """workers: processes (default: cores); 0 works in this process: quickest for rounds of a few
    milliseconds, easiest to debug. threads: of torch, per worker. timeout: seconds a client may
    take. budget: bytes of client memory a worker keeps resident. folder: where client memory goes;
    a temporary one if not given."""

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
        super().__init__(algorithm, federation, timeout, log)
        self.threads, self.budget = threads, budget
        wanted = os.cpu_count() or 1 if workers is None else workers
        if timeout and not wanted:
            self.log("nobody watches the timeout without a worker process (workers=0)")
        disk = Path(tempfile.gettempdir())
        self.scratch, self.lock = make_scratch(MEMORY if os.access(MEMORY, os.W_OK) else disk)
        self.overflow, self.other_lock = make_scratch(disk)
        self.folder = folder or self.scratch / "memory"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.inline = (
            Worker(algorithm, federation, Memory(self.folder, budget)) if wanted == 0 else None
        )
        self.inbox = Shared(self.scratch / "inbox", self.overflow)
        if algorithm.trains and wanted:
            # The first optimiser loads another thousand modules. Before the fork that happens once,
            # and workers share the memory.
            import torch._dynamo  # noqa: F401
        self.crew = [self.hire(k) for k in range(min(wanted, len(federation)))]

    def hire(self, number: int) -> _Process:
        return _Process(self, number)

    def post(self, message: Message) -> int:
        return self.inbox.write(message)

    def ready(self, busy: Sequence[int], seconds: float) -> Sequence[int]:
        heard = wait([self.crew[k].pipe for k in busy], timeout=seconds)
        return [k for k in busy if self.crew[k].pipe in heard]

    def carry(
        self, message: Message, order: list[int], heard: Mapping[int, int], sums: bool
    ) -> Iterator[Arrival]:
        if not self.inline:
            yield from super().carry(message, order, heard, sums)
            return
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
        return super().snapshot()

    def restore(self, records: Mapping[int, Path]) -> None:
        if self.inline:
            self.inline.memory.restore(records)
        else:
            super().restore(records)

    def close(self) -> None:
        super().close()
        self.inbox.close()
        for folder, lock in ((self.scratch, self.lock), (self.overflow, self.other_lock)):
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)


def make_scratch(root: Path) -> tuple[Path, IO[str]]:
    """A folder of our own, locked as long as we live. What killed runs left behind goes now: nobody
    holds its lock any more.
    """
    for old in root.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError), (old / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}", dir=root))
    mine = (hidden / "lock").open("w")
    fcntl.flock(mine, fcntl.LOCK_EX)
    return hidden.rename(root / hidden.name[1:]), mine


class Shared:
    """A file that several processes map; it grows when something larger is written. Where there is
    no room for it (64 MB of shared memory are what a container has), it goes to the folder
    `overflow`, and a link takes its place."""

    def __init__(self, path: Path, overflow: Path) -> None:
        self.path, self.overflow = path, overflow
        self.view: mmap.mmap | None = None
        self.inode = 0

    def write(self, message: Message) -> int:
        size = message.write_into(memoryview(self.view) if self.view else memoryview(b""))
        if self.view is None or size > len(self.view):
            self._map(size)
            assert self.view
            message.write_into(memoryview(self.view))
        return size

    def read(self, size: int, copy: bool) -> Message:
        if self.view is None or len(self.view) < size or self.path.stat().st_ino != self.inode:
            self._map(None)
        assert self.view
        return Message.from_bytes(memoryview(self.view)[:size], copy=copy)

    def _map(self, size: int | None) -> None:
        # The old mapping lives on as long as arrays point into it.
        if size:
            try:
                reserve(self.path, size)
            except OSError as e:
                if e.errno != errno.ENOSPC or self.path.is_symlink():
                    raise
                target = self.overflow / self.path.name
                reserve(target, size)
                self.path.unlink()
                self.path.symlink_to(target)
        with self.path.open("r+b") as f:
            self.view, self.inode = mmap.mmap(f.fileno(), 0), os.fstat(f.fileno()).st_ino

    def close(self) -> None:
        self.view = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "view": None}


def reserve(path: Path, size: int) -> None:
    """A file of that size for which there is room: writing to a mapped file that lacks it would end
    the process with SIGBUS.
    """
    with path.open("r+b" if path.exists() else "w+b") as f:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(f.fileno(), 0, size)
        f.truncate(size)


class _Process(Hand):
    """The parent's handle on a worker process."""

    def __init__(self, owner: Simulator, number: int) -> None:
        # A fork shares the data that is already loaded; CUDA does not survive one.
        fork = "fork" in mp.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context: Any = mp.get_context("fork" if fork else "spawn")
        self.number = number
        self.outbox = Shared(
            owner.scratch / f"outbox-{number}-{time.monotonic_ns()}", owner.overflow
        )
        clock = owner.scratch / f"clock-{number}"
        clock.write_bytes(struct.pack("dd", IDLE, 0.0))
        self.clock = map_clock(clock)
        self.pipe, theirs = context.Pipe()
        setup = (
            owner.threads,
            owner.algorithm,
            owner.federation,
            owner.folder,
            owner.budget,
            owner.inbox,
            self.outbox,
            clock,
        )
        # the kernel counts the end of this thread as the parent's death
        lasting = threading.current_thread() is threading.main_thread()
        self.process = context.Process(
            target=_serve,
            args=(theirs, os.getpid(), lasting, *setup),
            daemon=True,
            name=f"fedlens-{number}",
        )
        self.process.start()
        theirs.close()

    def begin(self, parcel: int, sums: bool) -> None:
        self.send({"do": "begin", "size": parcel, "sums": sums})

    def work(self, jobs: list[Job]) -> None:
        self.send({"do": "work", "jobs": jobs})

    def finish(self) -> None:
        self.send({"do": "finish"})

    def send(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is listened to
            self.pipe.send_bytes(json.dumps(what).encode())

    def report(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError, json.JSONDecodeError) as e:
            raise Gone(f"its worker died ({self.how_it_died()})") from e
        return told

    def harvest(self, sums: bool) -> tuple[Message, dict[str, Any]]:
        told = self.report()
        if "full" in told:
            raise OSError(told["full"], os.strerror(told["full"]), str(self.outbox.overflow))
        return self.outbox.read(told["size"], copy=not sums), told

    def culprit(self, piece: Sequence[int]) -> int | None:
        position = float(self.clock[0])
        return None if position == IDLE else int(position)

    def overdue(self, piece: Sequence[int], limit: float) -> bool:
        return float(self.clock[0]) != IDLE and time.monotonic() - float(self.clock[1]) > limit

    def how_it_died(self) -> str:
        self.process.join(1)
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.outbox.path.unlink(missing_ok=True)

    def dismiss(self) -> None:
        self.send({"do": "stop"})
        self.process.join(0.5)
        self.kill()


def map_clock(path: Path) -> Any:
    with open(path, "r+b") as f:
        return torch.frombuffer(mmap.mmap(f.fileno(), 0), dtype=torch.float64)


def _serve(pipe: Connection, parent: int, lasting: bool, threads: int, *setup: Any) -> None:
    """A worker process."""
    die_with(parent, lasting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    heap.keep()
    if threads == 1:
        _listen(pipe, threads, *setup)
        return
    # OpenMP notes in a thread which others help it. A fork copies the note and not the helpers, and
    # would wait for them without end: a thread that is new finds its own.
    heap.share()
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(_listen, pipe, threads, *setup).result()


def _listen(
    pipe: Connection,
    threads: int,
    algorithm: Algorithm,
    federation: Federation,
    folder: Path,
    budget: int,
    inbox: Shared,
    outbox: Shared,
    clock: Path,
) -> None:
    torch.set_num_threads(threads)
    inbox.close()  # a fork finds the parent's mapping here; its own may grow at another time
    desk = Desk(
        Worker(algorithm, federation, Memory(folder, budget, durable=True)), map_clock(clock)
    )
    while True:
        told = json.loads(pipe.recv_bytes())
        if told["do"] == "stop":
            return
        if told["do"] == "begin":
            desk.begin(inbox.read(told["size"], copy=True), told["sums"])
        elif told["do"] == "work":
            pipe.send_bytes(json.dumps(desk.work(told["jobs"])).encode())
        else:
            pipe.send_bytes(json.dumps(_hand_in(desk, outbox)).encode())


def _hand_in(desk: Desk, outbox: Shared) -> dict[str, Any]:
    """For a moment the sums lie here and in the outbox: what training has freed makes room for
    them.
    """
    payload, index = desk.finish()
    heap.give_back()
    try:
        return {"size": outbox.write(payload), **index}
    except OSError as e:
        return {"full": e.errno}


def die_with(parent: int, lasting: bool) -> None:
    """Exit within a second of the parent's death: by the kernel where it offers that and the thread
    that forked us lasts as long as its process, by looking twice a second elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        if lasting:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

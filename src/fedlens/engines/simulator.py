"""Simulator: clients in worker processes on one machine. The default engine of `runs.job`.

The message of a round is written once into a file that all workers map; a worker keeps one resident
model, folds the replies of its clients into partial sums and hands those back through a mapped file
of its own. Control messages are a few bytes of JSON over a pipe. A clock in shared memory says
which client a worker is at, and since when. Who works on whom, and what happens when a worker dies:
see `pool`.
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
from typing import IO, Any, NamedTuple

import torch

from fedlens.core import heap, imports
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.core.replies import Arrival, Lost
from fedlens.engines.pool import WorkerDied, WorkerHandle, WorkerPool
from fedlens.engines.worker import IDLE, Job, Worker, threads
from fedlens.trust.ledger import Ledgers

MEMORY = Path("/dev/shm")
# nothing else may be called so: what lies there without an owner is deleted
SCRATCH = "fedlens-scratch-"


class Simulator(WorkerPool["_ProcessHandle"]):
    """
    Args:
        algorithm: the stack.
        federation: who holds what.
        workers: processes (default: cores); 0 works in this process: quickest for rounds of a few
            milliseconds, easiest to debug.
        threads: of torch, per worker.
        timeout: seconds a client may take.
        budget: bytes of client memory a worker keeps resident.
        folder: where client memory goes; a temporary one if not given.
        log: a function that takes a line.
        ledgers: where what leaves each client is written down.
    """

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
        ledgers: Ledgers | None = None,
    ) -> None:
        super().__init__(algorithm, federation, timeout, log)
        self.threads, self.budget, self.ledgers = threads, budget, ledgers
        wanted = os.cpu_count() or 1 if workers is None else workers
        if timeout and not wanted:
            self.log("nobody watches the timeout without a worker process (workers=0)")
        disk = Path(tempfile.gettempdir())
        self.scratch, self.lock = make_scratch(MEMORY if os.access(MEMORY, os.W_OK) else disk)
        self.overflow, self.other_lock = make_scratch(disk)
        self.folder = folder or self.scratch / "memory"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.inline: Worker | None = None
        if wanted == 0:
            memory = Memory(self.folder, budget)
            self.inline = Worker(algorithm, federation, memory, ledgers=ledgers)
        self.inbox = SharedFile(self.scratch / "inbox", self.overflow)
        if algorithm.trains and wanted:
            # The first optimiser loads another thousand modules. Before the fork that happens once,
            # and workers share the memory.
            import torch._dynamo  # noqa: F401
        self.workers = [self.start(k) for k in range(min(wanted, len(federation)))]

    def start(self, number: int) -> _ProcessHandle:
        return _ProcessHandle(self, number)

    def publish(self, message: Message) -> int:
        return self.inbox.write(message)

    def ready(self, busy: Sequence[int], seconds: float) -> Sequence[int]:
        answered = wait([self.workers[k].pipe for k in busy], timeout=seconds)
        return [k for k in busy if self.workers[k].pipe in answered]

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        if self.inline is None:
            return super().exchange(message, ids, heard)
        return self._exchange_inline(self.inline, message, ids, heard)

    def _exchange_inline(
        self, worker: Worker, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        self.touch(message, ids)
        with threads(self.threads):
            worker.begin(message, self.sums)
            for position, id in enumerate(sorted(ids)):
                (outcome,) = worker.work([Job(position, id, heard.get(id, NEVER))])
                if isinstance(outcome, Lost):
                    self.log(f"client {id}: {outcome.reason}")
                yield outcome
            yield worker.finish()

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


class SharedFile:
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
        return Message.from_bytes(memoryview(self.view)[:size], copy=copy, sealed=False)

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


class _ProcessHandle(WorkerHandle):
    """The parent's end of a worker process."""

    def __init__(self, pool: Simulator, number: int) -> None:
        # A fork shares the data that is already loaded; CUDA does not survive one.
        fork = "fork" in mp.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context: Any = mp.get_context("fork" if fork else "spawn")
        self.number = number
        outbox = pool.scratch / f"outbox-{number}-{time.monotonic_ns()}"
        self.outbox = SharedFile(outbox, pool.overflow)
        clock = pool.scratch / f"clock-{number}"
        clock.write_bytes(struct.pack("dd", IDLE, 0.0))
        self.clock = map_clock(clock)
        self.pipe, theirs = context.Pipe()
        setup = _Setup(
            pool.threads,
            pool.algorithm,
            pool.federation,
            pool.folder,
            pool.budget,
            pool.inbox,
            self.outbox,
            clock,
            pool.ledgers,
            imports.rules(),
        )
        # the kernel counts the end of this thread as the parent's death
        lasting = threading.current_thread() is threading.main_thread()
        self.process = context.Process(
            target=_run_process,
            args=(theirs, os.getpid(), lasting, setup),
            daemon=True,
            name=f"fedlens-{number}",
        )
        self.process.start()
        theirs.close()

    def begin(self, published: int, sums: bool) -> None:
        self.send({"do": "begin", "size": published, "sums": sums})

    def work(self, jobs: list[Job]) -> None:
        self.send({"do": "work", "jobs": jobs})

    def finish(self) -> None:
        self.send({"do": "finish"})

    def send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is read
            self.pipe.send_bytes(json.dumps(command).encode())

    def report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError, json.JSONDecodeError) as e:
            raise WorkerDied(f"its worker died ({self.how_it_died()})") from e
        return report

    def collect(self, sums: bool) -> tuple[Message, dict[str, Any]]:
        index = self.report()
        if "full" in index:
            raise OSError(index["full"], os.strerror(index["full"]), str(self.outbox.overflow))
        return self.outbox.read(index["size"], copy=not sums), index

    def suspect(self, piece: Sequence[int]) -> int | None:
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

    def stop(self) -> None:
        self.send({"do": "stop"})
        self.process.join(0.5)
        self.kill()


def map_clock(path: Path) -> Any:
    with open(path, "r+b") as f:
        return torch.frombuffer(mmap.mmap(f.fileno(), 0), dtype=torch.float64)


# -- in the worker process -------------------------------------------------------------------------


class _Setup(NamedTuple):
    """What a worker process needs to know."""

    threads: int
    algorithm: Algorithm
    federation: Federation
    folder: Path
    budget: int
    inbox: SharedFile
    outbox: SharedFile
    clock: Path
    ledgers: Ledgers | None
    rules: imports.Rules


def _run_process(pipe: Connection, parent: int, lasting: bool, setup: _Setup) -> None:
    exit_with_parent(parent, lasting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    heap.keep()
    if setup.threads == 1:
        _worker_loop(pipe, setup)
        return
    # OpenMP notes in a thread which others help it. A fork copies the note and not the helpers, and
    # would wait for them without end: a thread that is new finds its own.
    heap.share()
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(_worker_loop, pipe, setup).result()


def _worker_loop(pipe: Connection, setup: _Setup) -> None:
    """Carry out the commands of the parent's `_ProcessHandle`, until it says stop."""
    torch.set_num_threads(setup.threads)
    imports.set_rules(setup.rules)
    # a fork finds the parent's mapping here; its own may grow at another time
    setup.inbox.close()
    memory = Memory(setup.folder, setup.budget, durable=True)
    clock = map_clock(setup.clock)
    worker = Worker(setup.algorithm, setup.federation, memory, clock, setup.ledgers)
    while True:
        command = json.loads(pipe.recv_bytes())
        if command["do"] == "stop":
            return
        if command["do"] == "begin":
            worker.begin(setup.inbox.read(command["size"], copy=True), command["sums"])
            continue
        if command["do"] == "work":
            jobs = [Job(*job) for job in command["jobs"]]
            answered = worker.report(jobs, worker.work(jobs))
        else:
            answered = _write_payload(worker, setup.outbox)
        pipe.send_bytes(json.dumps(answered).encode())


def _write_payload(worker: Worker, outbox: SharedFile) -> dict[str, Any]:
    """For a moment the sums lie here and in the outbox: what training has freed makes room for
    them.
    """
    payload, index = worker.payload()
    heap.give_back()
    try:
        return {"size": outbox.write(payload), **index}
    except OSError as e:
        return {"full": e.errno}


def exit_with_parent(parent: int, lasting: bool) -> None:
    """Exit within a second of the parent's death: by the kernel where it offers that and the thread
    that forked us lasts as long as its process, by looking twice a second elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        if lasting:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()

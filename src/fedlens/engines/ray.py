"""Ray: clients on a cluster. The only file that imports ray.

Actors around `Worker`, as the simulator has processes around it. The message of a round goes into the object store once and reaches
each machine once; a worker folds its clients' replies into partial sums and only those come back. The data of a client is fetched by
the worker that first needs it and stays there; client memory is written to files, so that another worker can take over.

A worker may die with several clients in hand, and nobody can tell which of them it was. So they are all asked again, one at a
time, from the memory that was committed: the one a worker dies on alone has lost its reply. A client that takes too long is found likewise.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedlens.algorithm import Algorithm
from fedlens.engines.simulator import IDLE, _work
from fedlens.engines.worker import Log, Worker, pack, unpack
from fedlens.federation import Federation
from fedlens.memory import NEVER, Memory
from fedlens.message import Message
from fedlens.replies import Lost, Nodes

if TYPE_CHECKING:
    from fedlens.config import Settings

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers would give way to everything else on the machine
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers without a GPU share keep what the machine shows them
try:
    import ray
except ImportError as e:
    raise ImportError('this needs Ray: pip install "fedlens[ray]"') from e


class Ray:
    """workers: actors (default: as many as the cluster has cores for). threads: of torch, and cores reserved, per worker. gpus: of each
    worker, may be a share (default: what there is, dealt out evenly). address: of a running cluster ("auto", "host:6379"); without it
    one is started here. timeout: seconds a client may take. folder: where client memory goes; on a disk that all machines see, if there
    is more than one."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        *,
        workers: int | None = None,
        threads: int = 1,
        gpus: float | None = None,
        address: str | None = None,
        timeout: float | None = None,
        budget: int = 1 << 30,
        folder: Path | None = None,
        log: Log | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError("Ray needs at least one worker")
        self.algorithm, self.federation, self.timeout = algorithm, federation, timeout
        self.log = log or (lambda text: None)
        self.keep_singles = False
        self.mine = not ray.is_initialized()  # who starts it stops it
        if self.mine and address:
            connect(address)
        elif self.mine:
            start(max(os.cpu_count() or 1, (workers or 1) * threads))
        if folder is None and len([n for n in ray.nodes() if n["Alive"]]) > 1:
            raise ValueError("this Ray cluster has several machines: client memory needs a folder on a disk that all of them see")
        self.scratch = Path(tempfile.mkdtemp(prefix="fedlens-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.folder = (folder or self.scratch / "memory").absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        holdings = [ray.put(h) for h in federation.holdings]
        held_out = [ray.put(h) for h in federation.held_out]
        self.setup = ray.put((algorithm, _Holdings(holdings), _Holdings(held_out), self.folder, budget, threads))
        wanted = min(workers or max(1, int(ray.cluster_resources().get("CPU", 1) // threads)), len(federation))
        share = min(1.0, int(1e4 * ray.cluster_resources().get("GPU", 0) / wanted) / 1e4) if gpus is None else gpus
        self.options: dict[str, Any] = {"num_cpus": threads, "num_gpus": share, "max_restarts": 0, "max_task_retries": 0}
        self.home: dict[int, int] = {}  # which worker last held a client's memory
        self.touched: set[int] = set()
        self.crew = [self.hire() for _ in range(wanted)]
        self.await_crew()

    def hire(self) -> Any:
        return _Actor.options(**self.options).remote(self.setup)  # type: ignore[attr-defined]

    def await_crew(self, seconds: float = 300) -> None:
        wanted = {"CPU": len(self.crew) * self.options["num_cpus"], "GPU": len(self.crew) * self.options["num_gpus"]}
        have = {k: ray.cluster_resources().get(k, 0.0) for k in wanted}
        why = (
            f"Ray has {have['CPU']:g} cores and {have['GPU']:g} GPUs; {len(self.crew)} workers want {wanted['CPU']:g} and {wanted['GPU']:g}"
        )
        try:
            if any(wanted[k] > have[k] for k in wanted):
                raise ValueError(why)
            ray.get([a.ready.remote() for a in self.crew], timeout=seconds)
        except ray.exceptions.GetTimeoutError as e:
            self.close()
            raise ValueError(f"the workers did not start within {seconds:g} s, perhaps the cluster is busy: {why}") from e
        except ray.exceptions.RayError as e:
            self.close()
            raise ValueError(f"a Ray worker did not start: {str(e).strip().splitlines()[-1]}") from e
        except ValueError:
            self.close()
            raise

    def ids(self) -> Sequence[int]:
        return range(len(self.federation))

    def exchange(self, message: Message, ids: Sequence[int], heard: Mapping[int, int]) -> Iterator[Message | Lost | Nodes]:
        order = sorted(ids)
        if not message.scalars.get("evaluate"):
            self.touched.update(order)
        yield from _Round(self, message, order, heard, self.algorithm.needs == "sums" and not self.keep_singles).outcomes()

    def snapshot(self) -> Mapping[int, Path]:
        touched, self.touched = self.touched, set()
        paths = {i: self.folder / f"{i}.safetensors" for i in sorted(touched)}
        return {i: p for i, p in paths.items() if p.exists()}

    def restore(self, records: Mapping[int, Path]) -> None:
        Memory(self.folder).restore(records)
        self.home = dict.fromkeys(self.ids(), -1)  # whatever a worker still holds is out of date

    def close(self) -> None:
        for actor in self.crew:
            ray.kill(actor)
        self.crew = []
        if self.mine and ray.is_initialized():
            ray.shutdown()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make(algorithm: Algorithm, federation: Federation, *, settings: Settings, folder: Path, log: Log) -> Ray:
    """As `fedlens run --engine ray` wants it; the cluster is the one RAY_ADDRESS names, as everywhere with Ray, or a local one."""
    return Ray(algorithm, federation, workers=settings.workers, threads=settings.threads, address=os.environ.get("RAY_ADDRESS"),
               timeout=settings.timeout, folder=folder, log=log)  # fmt: skip


QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}


def connect(address: str) -> None:
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ValueError(f"no Ray cluster at {address!r}: {str(e).splitlines()[0]}") from e


def start(cores: int, gpus: int | None = None) -> None:
    """A cluster on this machine, whose workers find the same modules as this process (Ray passes on the script's folder only)."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        ray.init(address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, **QUIET)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Holdings(Sequence[Any]):
    """Everybody's data, of which a worker fetches what it is asked about."""

    def __init__(self, references: Sequence[Any]) -> None:
        self.references, self.here = references, dict[int, Any]()

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, index: Any) -> Any:
        if index not in self.here:
            self.here[index] = ray.get(self.references[index])
        return self.here[index]


@ray.remote
class _Actor:
    def __init__(self, setup: Any) -> None:
        algorithm, holdings, held_out, folder, budget, n = setup
        torch.set_num_threads(n)
        if algorithm.trains:
            importlib.import_module("torch._dynamo")  # the first optimiser would load it, at the cost of a client's time
        self.worker = Worker(algorithm, Federation(holdings, held_out), Memory(folder, budget, durable=True))
        self.singles: list[tuple[int, Message]] = []

    def ready(self) -> bool:
        return True

    def gpus(self) -> list[str]:
        found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return found

    def begin(self, data: Any, sums: bool) -> None:
        self.worker.begin(Message.from_bytes(memoryview(data), copy=True), sums)
        self.singles = []

    def work(self, jobs: list[tuple[int, int, int, bool]]) -> dict[str, Any]:
        return _work(self.worker, jobs, [IDLE, 0.0], self.singles)

    def finish(self) -> tuple[dict[str, Any], Any]:
        payload, told = pack(self.worker, self.singles)
        self.singles = []
        return told, np.frombuffer(payload.to_bytes(), np.uint8)


class _Round:
    """One exchange: hands out work, collects outcomes, replaces workers that die."""

    def __init__(self, owner: Ray, message: Message, order: list[int], heard: Mapping[int, int], sums: bool) -> None:
        self.owner, self.order, self.heard, self.sums = owner, order, heard, sums
        self.message = ray.put(np.frombuffer(message.to_bytes(), np.uint8))
        crew = range(len(owner.crew))
        cuts = [len(order) * k // len(crew) for k in range(len(crew) + 1)]
        self.waiting = {k: deque(range(cuts[k], cuts[k + 1])) for k in crew}
        self.suspects: set[int] = set()  # positions that are asked alone, because a worker died on them or on a neighbour
        self.begun: dict[int, Any] = {}  # worker -> the future that says it has the message
        self.open: dict[int, list[int]] = {k: [] for k in crew}  # handed out and not yet returned as sums
        self.busy: dict[Any, tuple[int, list[int], float]] = {}  # future -> worker, piece (empty: handing in), since
        self.results: dict[int, Message | Lost] = {}

    def outcomes(self) -> Iterator[Message | Lost | Nodes]:
        for k in self.waiting:
            self.give(k)
        while self.busy:
            ready, _ = ray.wait(list(self.busy), num_returns=1, timeout=0.2 if self.owner.timeout else 5.0)
            for future in ready:
                yield from self.hear(future)
            self.check_clocks()
        yield from self.results.values()

    def give(self, k: int) -> None:
        """Half of what is left in a stretch at a time, as the simulator does; suspects alone; then the request to hand in."""
        mine, actor = self.waiting[k], self.owner.crew[k]
        if not mine:
            longest = max(self.waiting.values(), key=len)
            for _ in range((len(longest) + 1) // 2):
                mine.appendleft(longest.pop())
        if mine:
            piece = [mine.popleft()]
            while piece[0] not in self.suspects and len(piece) < len(mine) and mine[0] not in self.suspects:
                piece.append(mine.popleft())
            if k not in self.begun:
                self.begun[k] = actor.begin.remote(self.message, self.sums)
            jobs = []
            for position in piece:
                id = self.order[position]
                jobs.append((position, id, self.heard.get(id, NEVER), self.owner.home.get(id, k) != k))
                self.owner.home[id] = k
            self.open[k] += piece
            self.busy[actor.work.remote(jobs)] = (k, piece, time.monotonic())
        elif self.open[k]:
            self.busy[actor.finish.remote()] = (k, [], time.monotonic())

    def hear(self, future: Any) -> Iterator[Nodes]:
        k, piece, _ = self.busy.pop(future)
        try:
            told = ray.get(future)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
            self.bury(k, piece, "its worker died")
            return
        if piece:
            for position, id, reason, refused in told["lost"]:
                self.results[position] = Lost(id, reason, refused)
                self.owner.log(f"client {id}: {reason}")
            for position, id, scalars in told["scalars"]:
                self.results[position] = Message(scalars=scalars, sender=id)
        else:
            index, data = told
            nodes = unpack(Message.from_bytes(memoryview(data), copy=True), index, self.results)  # the object store is read-only
            self.open[k] = []
            if nodes:
                yield nodes
        self.give(k)

    def check_clocks(self) -> None:
        limit = self.owner.timeout
        for future, (k, piece, since) in list(self.busy.items()):
            if limit and not ray.wait([self.begun[k]], timeout=0)[0]:
                self.busy[future] = (k, piece, time.monotonic())  # the worker is still starting: that is nobody's fault
            elif limit and piece and time.monotonic() - since > limit * len(piece):
                del self.busy[future]
                ray.kill(self.owner.crew[k])
                self.bury(k, piece, f"took longer than {limit:g} s")

    def bury(self, k: int, piece: list[int], why: str) -> None:
        """Replace a worker; do again what it had not handed in. What it did not survive with alone is lost."""
        again = [p for p in self.open[k] if not (isinstance(old := self.results.get(p), Lost) and not old.refused)]
        if len(piece) == 1:
            culprit = self.order[piece[0]]
            self.results[piece[0]] = Lost(culprit, why)
            again.remove(piece[0])
            self.owner.log(f"client {culprit}: {why}; worker {k} is replaced and {len(again)} clients are asked again")
        else:
            self.suspects.update(piece)
            self.owner.log(f"worker {k}: {why}; it is replaced and {len(again)} clients are asked again")
        self.owner.crew[k] = self.owner.hire()
        self.begun.pop(k, None)
        for p in again:
            self.results.pop(p, None)
            self.owner.home[self.order[p]] = NEVER  # the file holds what is committed, whoever reads it
        self.waiting[k] = deque(sorted([*again, *self.waiting[k]]))
        self.open[k] = []
        self.give(k)

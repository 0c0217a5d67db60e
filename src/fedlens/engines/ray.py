"""Ray: clients on a cluster. The only file that imports ray; `runs.engines` loads it on demand.

Actors around `Worker`, as the simulator has processes around it. The message of a round goes into
the object store once and reaches each machine once; a worker folds its clients' replies into
partial sums and only those come back. The data of a client is fetched by the worker that first
needs it and stays there; client memory is written to files, so that another worker can take over.

Who works on whom, and what happens when a worker dies: see `pool`. There is no shared clock here: a
worker may die, or take too long, with several clients to ask, and nobody can tell which of them it
was until they are asked alone.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.core import heap, imports
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.engines.pool import WorkerDied, WorkerHandle, WorkerPool
from fedlens.engines.worker import Job, Worker
from fedlens.trust.ledger import Ledgers

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers would give way to everything else on the machine
os.environ.setdefault("RAY_worker_niceness", "0")
# workers without a GPU share keep what the machine shows them
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
except ImportError as e:
    raise ImportError('this needs Ray: pip install "fedlens[ray]"') from e


class Ray(WorkerPool["_ActorHandle"]):
    """
    Args:
        algorithm: the stack.
        federation: who holds what.
        workers: actors (default: as many as the cluster has cores for).
        threads: of torch, and cores reserved, per worker.
        gpus: of each worker, may be a share (default: what there is, dealt out evenly).
        address: of a running cluster ("auto", "host:6379"); without it one is started here.
        timeout: seconds a client may take.
        budget: bytes of client memory a worker keeps resident.
        folder: where client memory goes; on a disk that all machines see, if there is more than
            one.
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
        gpus: float | None = None,
        address: str | None = None,
        timeout: float | None = None,
        budget: int = 1 << 30,
        folder: Path | None = None,
        log: Log | None = None,
        ledgers: Ledgers | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError("Ray needs at least one worker")
        super().__init__(algorithm, federation, timeout, log)
        self.mine = not ray.is_initialized()  # who starts it stops it
        if self.mine and address:
            connect_cluster(address)
        elif self.mine:
            start_cluster(max(os.cpu_count() or 1, (workers or 1) * threads))
        if folder is None and len([n for n in ray.nodes() if n["Alive"]]) > 1:
            raise ValueError(
                "this Ray cluster has several machines: client memory needs a folder on a disk that"
                " all of them see"
            )
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="fedlens-", dir=memory))
        self.folder = (folder or self.scratch / "memory").absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        holdings = [ray.put(h) for h in federation.holdings]
        held_out = [ray.put(h) for h in federation.held_out]
        self.setup = ray.put(
            (
                algorithm,
                _Holdings(holdings),
                _Holdings(held_out),
                self.folder,
                budget,
                threads,
                ledgers,
                imports.rules(),
            )
        )
        resources = ray.cluster_resources()
        wanted = workers or max(1, int(resources.get("CPU", 1) // threads))
        wanted = min(wanted, len(federation))
        if gpus is None:
            gpus = min(1.0, int(1e4 * resources.get("GPU", 0) / wanted) / 1e4)
        self.options: dict[str, Any] = {
            "num_cpus": threads,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self.workers = [self.start(k) for k in range(wanted)]
        self.await_workers()

    def start(self, number: int) -> _ActorHandle:
        return _ActorHandle(_Actor.options(**self.options).remote(self.setup))  # type: ignore[attr-defined]

    def publish(self, message: Message) -> Any:
        return ray.put(np.frombuffer(message.to_bytes(sealed=False), np.uint8))

    def ready(self, busy: Sequence[int], seconds: float) -> Sequence[int]:
        futures = {self.workers[k].future: k for k in busy}
        return [futures[f] for f in ray.wait(list(futures), num_returns=1, timeout=seconds)[0]]

    def await_workers(self, seconds: float = 300) -> None:
        wanted = {
            "CPU": len(self.workers) * self.options["num_cpus"],
            "GPU": len(self.workers) * self.options["num_gpus"],
        }
        have = {k: ray.cluster_resources().get(k, 0.0) for k in wanted}
        why = (
            f"Ray has {have['CPU']:g} cores and {have['GPU']:g} GPUs; {len(self.workers)} workers"
            f" want {wanted['CPU']:g} and {wanted['GPU']:g}"
        )
        try:
            if any(wanted[k] > have[k] for k in wanted):
                raise ValueError(why)
            ray.get([worker.actor.ready.remote() for worker in self.workers], timeout=seconds)
        except ray.exceptions.GetTimeoutError as e:
            self.close()
            raise ValueError(
                f"the workers did not start within {seconds:g} s, perhaps the cluster is busy:"
                f" {why}"
            ) from e
        except ray.exceptions.RayError as e:
            self.close()
            raise ValueError(
                f"a Ray worker did not start: {str(e).strip().splitlines()[-1]}"
            ) from e
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self.mine and ray.is_initialized():
            ray.shutdown()
        shutil.rmtree(self.scratch, ignore_errors=True)


class _ActorHandle(WorkerHandle):
    """The driver's end of an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def begin(self, published: Any, sums: bool) -> None:
        self.begun = self.actor.begin.remote(published, sums)

    def work(self, jobs: list[Job]) -> None:
        self.future, self.since = self.actor.work.remote(jobs), time.monotonic()

    def finish(self) -> None:
        self.future = self.actor.finish.remote()

    def report(self) -> Any:
        try:
            return ray.get(self.future)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as e:
            raise WorkerDied("its worker died") from e

    def collect(self, sums: bool) -> tuple[Message, dict[str, Any]]:
        data, index = self.report()
        # a copy: the object store is read-only
        return Message.from_bytes(memoryview(data), copy=True, sealed=False), index

    def suspect(self, piece: Sequence[int]) -> int | None:
        return piece[0] if len(piece) == 1 else None

    def overdue(self, piece: Sequence[int], limit: float) -> bool:
        if not ray.wait([self.begun], timeout=0)[0]:
            self.since = time.monotonic()  # the worker is still starting: that is nobody's fault
        return time.monotonic() - self.since > limit * len(piece)

    def kill(self) -> None:
        ray.kill(self.actor)


_QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}


def connect_cluster(address: str) -> None:
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ValueError(f"no Ray cluster at {address!r}: {str(e).splitlines()[0]}") from e


def start_cluster(cores: int, gpus: int | None = None) -> None:
    """A cluster on this machine, whose workers find the same modules as this process (Ray passes on
    the script's folder only).
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        ray.init(address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, **_QUIET)
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
    """Carries out what its `_ActorHandle` asks for, as the simulator's worker loop does."""

    def __init__(self, setup: Any) -> None:
        algorithm, holdings, held_out, folder, budget, threads, ledgers, rules = setup
        imports.set_rules(rules)
        torch.set_num_threads(threads)
        heap.keep()
        if algorithm.trains:
            # the first optimiser would load it, at the cost of a client's time
            importlib.import_module("torch._dynamo")
        memory = Memory(folder, budget, durable=True)
        federation = Federation(holdings, held_out)
        self.worker = Worker(algorithm, federation, memory, ledgers=ledgers)

    def ready(self) -> bool:
        return True

    def gpus(self) -> list[str]:
        found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return found

    def begin(self, data: Any, sums: bool) -> None:
        self.worker.begin(Message.from_bytes(memoryview(data), copy=True, sealed=False), sums)

    def work(self, jobs: list[Job]) -> dict[str, Any]:
        return self.worker.report(jobs, self.worker.work(jobs))

    def finish(self) -> tuple[Any, dict[str, Any]]:
        payload, index = self.worker.payload()
        return np.frombuffer(payload.to_bytes(sealed=False), np.uint8), index

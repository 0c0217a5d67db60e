from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from namespaces import NO_NAMESPACE
from toy import Toy, toy_federation

from fedlens import run
from fedlens.algorithms import FedAvg
from fedlens.engines.simulator import Simulator

ORPHANS = textwrap.dedent("""
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from toy import Toy, toy_federation
    from fedlens.algorithms import FedAvg
    from fedlens.engines.simulator import Simulator
    engine = Simulator(FedAvg(Toy()), toy_federation(4), workers=2)
    print(*[p.process.pid for p in engine.workers], engine.scratch, flush=True)
    time.sleep(60)
""")

WIDE = textwrap.dedent("""
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from namespaces import small_disk
    if {memory!r}:
        small_disk(Path({memory!r}), 200_000)
    import torch
    from torch import nn
    from toy import Toy, same_bits, toy_federation
    from fedlens import run
    from fedlens.algorithms import FedAvg
    from fedlens.engines import simulator

    class Wide(Toy):
        def model(self):
            return nn.Sequential(nn.Linear(8, 65536), nn.ReLU(), nn.Linear(65536, 3))

    if {memory!r}:
        simulator.MEMORY = Path({memory!r})
    torch.set_num_threads(2)
    torch.randn(1 << 20).sum()  # now this process has an OpenMP helper, which no fork inherits
    states, moved = [], 0
    for workers in (0, 1, 2):
        algorithm = FedAvg(Wide(), lr=0.01, batch=8)
        everyone = toy_federation(4)
        with simulator.Simulator(algorithm, everyone, workers=workers, threads=2) as engine:
            states.append(run(algorithm, engine, 2))
            boxes = engine.inbox, *(p.outbox for p in engine.workers)
            moved += sum(s.path.is_symlink() for s in boxes)
        assert not engine.scratch.exists() and not engine.overflow.exists()
    print(all(same_bits(states[0], s) for s in states[1:]), moved)
""")


def wide(memory: str = "") -> str:
    code = WIDE.format(tests=str(Path(__file__).parents[1]), memory=memory)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    if done.returncode == NO_NAMESPACE:
        pytest.skip("needs a mount namespace")
    return done.stdout.strip() or done.stderr


def test_workers_with_several_threads_each() -> None:
    """Two threads a worker, forked from a process that has computed with two: same bits as without
    workers, and no waiting for helpers.
    """
    assert wide() == "True 0"


def test_what_does_not_fit_into_shared_memory_lies_on_disk(tmp_path: Path) -> None:
    """A model of 3 MB with 200 kB of shared memory (a container often has 64 MB): the inboxes of
    two runs and three outboxes move.
    """
    assert wide(str(tmp_path)) == "True 5"


def test_an_engine_outlives_the_thread_that_made_it() -> None:
    """The kernel takes the end of that thread for the death of the parent."""
    algorithm = FedAvg(Toy(), batch=8)
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(Simulator, algorithm, toy_federation(4), workers=2).result()
    pids = [p.process.pid for p in engine.workers]
    run(algorithm, engine, 1)
    assert [p.process.pid for p in engine.workers] == pids
    engine.close()


def test_workers_exit_when_their_parent_is_killed() -> None:
    code = ORPHANS.format(tests=str(Path(__file__).parents[1]))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    *pids, scratch = parent.stdout.readline().split()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    time.sleep(1.0)
    alive = [
        p
        for p in map(int, pids)
        if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
    ]
    assert not alive
    subprocess.run(["rm", "-rf", scratch], check=True)


def test_one_resident_model_per_worker_and_nothing_left_behind() -> None:
    algorithm = FedAvg(Toy(), batch=8)
    engine = Simulator(algorithm, toy_federation(6), workers=2)
    pids = [p.process.pid for p in engine.workers]
    run(algorithm, engine, 3)
    assert [p.process.pid for p in engine.workers] == pids  # the same processes, round after round
    scratch = engine.scratch
    engine.close()
    assert not scratch.exists()
    assert not any(psutil.pid_exists(p) for p in pids if p)


def test_clients_stay_with_their_worker_when_the_cohort_does() -> None:
    algorithm = FedAvg(Toy(), batch=8)
    with Simulator(algorithm, toy_federation(6), workers=2) as engine:
        run(algorithm, engine, 1)
        first = dict(engine.last_worker)
        assert set(first) == set(range(6)) and set(first.values()) == {0, 1}

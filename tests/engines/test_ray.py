"""Ray: the simulator's bits from actors, and the same manners when a client or a worker
misbehaves.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from losing import LOST, Failing, Losing
from stacks import STACKS
from toy import Toy, same_bits, toy_federation

from fedlens import Client, Message, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import Scaffold
from fedlens.trust import SecureSum

ray = pytest.importorskip("ray")
from fedlens.engines.ray import Ray, start_cluster  # noqa: E402

# Ray leaves sockets and log files open
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
FEDERATION = toy_federation(7)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One small cluster for all tests of this file: starting one takes seconds."""
    start_cluster(cores=4, gpus=1)
    yield
    with warnings.catch_warnings():  # processes that Ray has told to end and not waited for
        warnings.simplefilter("ignore")
        ray.shutdown()
        gc.collect()


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_reaches_a_worker_whole(name: str) -> None:
    """What Ray sends to its workers is a pickled copy: it must do what the original does.
    Everything else a worker does is the pool's.
    """
    case, ends = STACKS[name], []
    for algorithm in (case.make(), ray.cloudpickle.loads(ray.cloudpickle.dumps(case.make()))):
        ends.append(run(algorithm, Loopback(algorithm, case.federation), 1, seed=3))
    assert same_bits(*ends)


# Sums; single replies; a private head; randomness at the server.
@pytest.mark.parametrize(
    "name",
    [
        "scaffold",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("median", "fedvssl", "fedgen")),
    ],
)
def test_the_same_bits_as_the_loopback(cluster: None, name: str) -> None:
    """On more clients than workers, and the same bytes in every round."""
    expected, federation = STACKS[name].make(), STACKS[name].federation
    sent: list[tuple[int, int]] = []
    note = lambda p, r: sent.append((r.bytes_down, r.bytes_up))  # noqa: E731
    wanted = run(expected, Loopback(expected, federation), 3, cohort=5, seed=3, after_round=note)
    algorithm = STACKS[name].make()
    with Ray(algorithm, federation, workers=2) as engine:
        assert same_bits(run(algorithm, engine, 3, cohort=5, seed=3, after_round=note), wanted)
    assert sent[:3] == sent[3:]


class Trouble(FedAvg):
    """Client 2 raises, 4 kills its process, 5 hangs."""

    def client_step(self, message: Message, client: Client) -> Message:
        if client.id == 2:
            raise RuntimeError("the disk of this hospital is full")
        if client.id == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if client.id == 5:
            time.sleep(600)
        return super().client_step(message, client)


@pytest.mark.slow
def test_a_client_that_kills_its_worker_costs_its_own_reply_only(cluster: None) -> None:
    rounds: list[Round] = []
    said: list[str] = []
    algorithm = stack(Trouble(Toy(), batch=8), Scaffold())
    with Ray(algorithm, FEDERATION, workers=2, timeout=5, log=said.append) as engine:
        run(algorithm, engine, 1, after_round=lambda p, r: rounds.append(r))
    for r in rounds:
        assert list(r.scalars) == [0, 1, 3, 6]
        assert [x.sender for x in r.lost] == [2, 4, 5]
    reasons = {x.sender: x.reason for x in rounds[0].lost}
    assert reasons[2].startswith("RuntimeError: the disk of this hospital is full (test_ray.py, ")
    assert reasons[4] == "its worker died" and reasons[5] == "took longer than 5 s"


def test_a_lost_worker_changes_no_bits(cluster: None) -> None:
    """The worker is killed between rounds, with control variates resident in it; its successor
    finds them on disk.
    """
    expected = STACKS["scaffold"].make()
    wanted = run(expected, Loopback(expected, FEDERATION), 3, seed=3)
    algorithm = STACKS["scaffold"].make()
    with Ray(algorithm, FEDERATION, workers=2) as engine:
        state = run(
            algorithm,
            engine,
            3,
            seed=3,
            after_round=lambda p, r: engine.workers[r.number % 2].kill(),
        )
        assert same_bits(state, wanted)


@pytest.mark.slow
def test_workers_share_a_gpu(cluster: None) -> None:
    """Half a GPU each: both workers fit on the cluster's only (logical) one."""
    algorithm = STACKS["fedavg"].make()
    with Ray(algorithm, FEDERATION, workers=2) as engine:
        assert engine.options["num_gpus"] == 0.5
        assert ray.get([worker.actor.gpus.remote() for worker in engine.workers]) == [["0"], ["0"]]


@pytest.mark.slow
def test_snapshots_bring_a_run_back(cluster: None, tmp_path: Path) -> None:
    """Round 2 again, on a new engine, from the memories of round 1."""
    from fedlens import Progress

    expected = STACKS["scaffold"].make()
    wanted = run(expected, Loopback(expected, FEDERATION), 2, seed=3)
    algorithm = STACKS["scaffold"].make()
    kept: list[Progress] = []
    with Ray(algorithm, FEDERATION, workers=2, folder=tmp_path / "a") as engine:
        run(algorithm, engine, 1, seed=3, after_round=lambda p, r: kept.append(p))
        records = engine.snapshot()
        assert sorted(records) == list(range(7))
    with Ray(algorithm, FEDERATION, workers=2, folder=tmp_path / "b") as other:
        other.restore(records)
        assert same_bits(run(algorithm, other, 2, seed=3, progress=kept[0]), wanted)


def test_what_cannot_be_placed_is_refused(cluster: None) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        Ray(STACKS["fedavg"].make(), FEDERATION, workers=0)
    with pytest.raises(ValueError, match="Ray has 4 cores and 1 GPUs; 2 workers want 6 and 1"):
        Ray(STACKS["fedavg"].make(), FEDERATION, workers=2, threads=3)


@pytest.mark.slow
def test_a_recipe_on_ray_leaves_the_simulators_files(tmp_path: Path) -> None:
    from fedlens.runs.job import experiment

    small = {
        "clients": 2,
        "rounds": 2,
        "data.clips": 4,
        "data.groups": 2,
        "data.height": 64,
        "data.width": 64,
        "data.crop": 32,
        "cohort": 2,
    }
    for engine in ("simulator", "ray"):
        experiment("fedvsr", out=tmp_path / engine, engine=engine, workers=2, **small)
    files = [
        (tmp_path / engine / "model.safetensors").read_bytes() for engine in ("simulator", "ray")
    ]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["all at once", "at work"])
def test_secure_sum_has_the_simulators_bits_whoever_is_lost(cluster: None, when: str) -> None:
    """Messages and replies lost in every trip of a round; clients that break at work while workers
    add up what others sent."""
    plan, base = LOST.get(when, {}), FedAvg if when in LOST else Failing
    ends, heard = [], []
    for kind, workers in ((Simulator, 0), (Ray, 2)):
        algorithm = stack(base(Toy(), batch=8, lr=0.05), Scaffold(), SecureSum("recover"))
        seen: list[Round] = []
        with kind(algorithm, FEDERATION, workers=workers) as engine:
            used = Losing(engine, plan) if plan else engine
            ends.append(run(algorithm, used, 4, after_round=lambda _, r, s=seen: s.append(r)))
        heard.append([sorted(r.heard) for r in seen])
    assert heard[0] == heard[1] and any(len(ids) < 7 for ids in heard[0])
    assert all(
        same_bits(*(Message({name: state.trees[name]}) for state in ends)) for name in ends[0].trees
    )

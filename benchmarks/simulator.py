"""What does the simulator cost on top of a bare PyTorch loop, and how does it compare with Flower's simulation?

1000 clients x 50 images of 3x32x32, cohort 50, batch 10, one local epoch, SGD 0.1, a CNN with 1,626,442 parameters. The bare loop does the
same steps on the same data in the same number of processes and sums the same updates; nothing else. Rounds of both alternate, so that a
busy machine hurts both alike. Ends by printing one JSON object.

    python benchmarks/simulator.py [--rounds 12] [--workers 2] [--skip-flower]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from measure import PeakMemory, summary
from torch import Tensor, nn

from fedlens import Federation, Progress, run
from fedlens.algorithms import FedAvg
from fedlens.client import Batch, Data, Output, generator
from fedlens.data.tensors import Tensors
from fedlens.engines.simulator import Simulator
from fedlens.run import sample
from fedlens.tasks.task import LearningTask

CLIENTS, IMAGES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Pixels(LearningTask):
    def model(self) -> nn.Module:
        return network()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        return {}


def make_federation(clients: int = CLIENTS) -> Federation:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(clients, IMAGES, 3, 32, 32, generator=rng)
    y = torch.randint(10, (clients, IMAGES), generator=rng)
    x += torch.randn(10, 3, 32, 32, generator=rng)[y]  # something to learn
    return Federation([Tensors({"x": x[i], "y": y[i]}) for i in range(clients)])


# -- the bare loop ---------------------------------------------------------------------------------------------------------------


class Bare:
    """The shortest loop that does the same work: resident model per process, weights in shared memory, updates added in place."""

    def __init__(self, federation: Federation, start: dict[str, Tensor], workers: int, channels_last: bool) -> None:
        self.model = {n: t.clone().share_memory_() for n, t in start.items()}
        self.sums = [{n: torch.zeros_like(t).share_memory_() for n, t in self.model.items()} for _ in range(workers)]
        self.pipes, self.processes = [], []
        context = mp.get_context("fork")
        for k in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=bare_worker, args=(theirs, federation, self.model, self.sums[k], channels_last), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.number = 0
        self.loss = 0.0

    def round(self) -> None:
        ids = sample(range(CLIENTS), COHORT, 0, self.number)
        cut = len(ids) // len(self.pipes)
        for k, pipe in enumerate(self.pipes):
            pipe.send((self.number, ids[k * cut : (k + 1) * cut if k < len(self.pipes) - 1 else None]))
        answers = [pipe.recv() for pipe in self.pipes]
        weight, self.loss = sum(w for w, _ in answers), sum(x for _, x in answers) / len(ids)
        for name, t in self.model.items():
            for s in self.sums:
                t.add_(s[name], alpha=1 / weight)
        self.number += 1

    def close(self) -> None:
        for p in self.processes:
            p.kill()
            p.join()


def bare_worker(pipe: Connection, federation: Federation, shared: dict[str, Tensor], sums: dict[str, Tensor], channels_last: bool) -> None:
    torch.set_num_threads(1)
    model = network()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    local = model.state_dict()
    while True:
        number, ids = pipe.recv()
        for s in sums.values():
            s.zero_()
        total, losses = 0.0, 0.0
        for i in ids:
            data = federation.holdings[i]
            with torch.no_grad():
                for name, t in shared.items():
                    local[name].copy_(t)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            rng = generator(0, number, i)
            torch.randint(2**31 - 1, (), generator=rng)  # the simulator seeds torch with this one; then both shuffle alike
            order = torch.randperm(len(data), generator=rng)
            batch_losses = []
            for index in torch.split(order, BATCH):
                x, y = data.columns["x"][index], data.columns["y"][index]
                if channels_last:
                    x = x.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                batch_losses.append(loss.detach())
            for name, t in shared.items():
                sums[name].add_(local[name] - t, alpha=len(data))
            total += len(data)
            losses += float(torch.stack(batch_losses).mean())
        pipe.send((total, losses))


# -- measurements ----------------------------------------------------------------------------------------------------------------


def compare_with_bare(federation: Federation, rounds: int, workers: int, channels_last: bool) -> dict[str, Any]:
    algorithm = FedAvg(Pixels(), lr=LR, batch=BATCH, channels_last=channels_last, device="cpu")
    bare = Bare(federation, algorithm.init().trees["model"], workers, channels_last)
    began = time.perf_counter()
    engine = Simulator(algorithm, federation, workers=workers)
    here, losses = Progress(algorithm.init()), []
    ours, theirs = [], []
    for number in range(rounds + 1):
        t0 = time.perf_counter()
        run(algorithm, engine, number + 1, cohort=COHORT, progress=here, after_round=lambda p, r: losses.append(r.loss))
        t1 = time.perf_counter()
        bare.round()
        t2 = time.perf_counter()
        if number == 0:
            first = t1 - began  # the first round also pays for starting up, on both sides
        else:
            ours.append(t1 - t0)
            theirs.append(t2 - t1)
    engine.close()
    bare.close()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "round_seconds": summary(ours), "bare_seconds": summary(theirs), "ratio_to_bare": summary(ratios)["median"],
        "ratio_interval": [summary(ratios)["low"], summary(ratios)["high"]], "start_to_end_of_first_round_seconds": first,
        "final_loss": losses[-1], "final_loss_bare": bare.loss, "rounds": rounds,
    }  # fmt: skip


def peak_memory(federation: Federation, cohort: int, workers: int) -> int:
    algorithm = FedAvg(Pixels(), lr=LR, batch=BATCH, device="cpu")
    with PeakMemory() as memory, Simulator(algorithm, federation, workers=workers) as engine:
        run(algorithm, engine, 1, cohort=cohort)
    return memory.peak


FLOWER = r"""
import json, sys, time
import torch
sys.path.insert(0, {here!r})
from simulator import BATCH, CLIENTS, COHORT, LR, make_federation, network
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr.common import ndarrays_to_parameters
from fedlens.client import generator
federation = None
def holdings(i):
    global federation
    if federation is None:
        federation = make_federation()
    return federation.holdings[i]
class Site(NumPyClient):
    def __init__(self, i): self.i = i
    def fit(self, parameters, config):
        torch.set_num_threads(1)
        data, model = holdings(self.i), network()
        model.load_state_dict({{n: torch.from_numpy(a) for n, a in zip(model.state_dict(), parameters)}})
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for index in torch.split(torch.randperm(len(data), generator=generator(0, 0, self.i)), BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data.columns["x"][index]), data.columns["y"][index]).backward()
            optimizer.step()
        return [t.numpy() for t in model.state_dict().values()], len(data), {{}}
def client_fn(context):
    return Site(int(context.node_config["partition-id"])).to_client()
stamps = []
class Timed(FedAvg):
    def aggregate_fit(self, *a):
        out = super().aggregate_fit(*a)
        stamps.append(time.perf_counter())
        return out
def server_fn(context):
    torch.manual_seed(0)
    start = ndarrays_to_parameters([t.numpy() for t in network().state_dict().values()])
    strategy = Timed(fraction_fit=COHORT / CLIENTS, fraction_evaluate=0.0, min_fit_clients=COHORT, min_available_clients=CLIENTS,
                     initial_parameters=start)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds={rounds}))
from flwr.client import ClientApp as OldClientApp
backend = {{"client_resources": {{"num_cpus": 1, "num_gpus": 0.0}}, "init_args": {{"num_cpus": {workers}, "log_to_driver": False}}}}
run_simulation(server_app=ServerApp(server_fn=server_fn), client_app=OldClientApp(client_fn=client_fn), num_supernodes=CLIENTS,
               backend_config=backend)
print("STAMPS", json.dumps(stamps))
"""


def flower_round(rounds: int, workers: int) -> list[float] | str:
    """Seconds a round of Flower's Ray simulation on the same work, or why it could not be measured."""
    from pathlib import Path

    code = FLOWER.format(here=str(Path(__file__).parent), rounds=rounds, workers=workers)
    env = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    import os

    try:
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, env={**os.environ, **env})
    except subprocess.TimeoutExpired:
        return "Flower's simulation took longer than 15 minutes"
    line = next((x for x in out.stdout.splitlines() if x.startswith("STAMPS")), None)
    if line is None:
        return (out.stderr.strip().splitlines() or ["no output"])[-1][:300]
    stamps = json.loads(line.removeprefix("STAMPS"))
    return [b - a for a, b in pairwise(stamps)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--skip-flower", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    federation = make_federation()
    result = {"parameters": sum(p.numel() for p in network().parameters()), "workers": args.workers}
    result |= compare_with_bare(federation, args.rounds, args.workers, args.channels_last)
    if not args.skip_memory:
        small, large = peak_memory(federation, 10, args.workers), peak_memory(federation, 500, args.workers)
        result |= {"peak_memory_cohort_10": small, "peak_memory_cohort_500": large, "memory_ratio_500_to_10": large / small}
    if not args.skip_flower:
        seconds = flower_round(args.rounds + 1, args.workers)
        if isinstance(seconds, str):
            result |= {"speedup_over_flower": None, "flower": seconds}
        else:
            ours = result["round_seconds"]["median"]
            result |= {"flower_round_seconds": summary(seconds), "speedup_over_flower": summary(seconds)["median"] / ours}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""What does the simulator cost on top of a bare PyTorch loop, and how does it compare with Flower's
simulation?

1000 clients x 50 images of 3x32x32, cohort 50, batch 10, one local epoch, SGD 0.1, a CNN with
1,626,442 parameters. The bare loop does the same steps on the same data in the same number of
processes and sums the same updates; nothing else. Flower does the same steps in its Ray simulation,
as it is without settings (`speedup_over_flower`) and with as many actors as we have workers
(`..._one_processor_each`); its data is built before the rounds that count. Rounds alternate, so
that a busy machine hurts all alike. Ends by printing one JSON object.

    python benchmarks/simulator.py [--rounds 12] [--workers 2] [--skip-flower]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import PeakMemory, summary
from torch import Tensor, nn

from fedlens import Federation, Progress, run
from fedlens.algorithms import FedAvg
from fedlens.core.client import Batch, Data, Output, generator
from fedlens.core.rounds import sample
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.simulator import Simulator

CLIENTS, IMAGES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1
WARM = 2  # rounds of the comparison with Flower that do not count


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


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


# -- the bare loop ---------------------------------------------------------------------------------


class Bare:
    """The shortest loop that does the same work: resident model per process, weights in shared
    memory, updates added in place.
    """

    def __init__(
        self, federation: Federation, start: dict[str, Tensor], workers: int, channels_last: bool
    ) -> None:
        self.model = {n: t.clone().share_memory_() for n, t in start.items()}
        self.sums = [
            {n: torch.zeros_like(t).share_memory_() for n, t in self.model.items()}
            for _ in range(workers)
        ]
        self.pipes, self.processes = [], []
        context = mp.get_context("fork")
        for k in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=bare_worker,
                args=(theirs, federation, self.model, self.sums[k], channels_last),
                daemon=True,
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.number = 0
        self.loss = 0.0

    def round(self) -> None:
        ids = sample(range(CLIENTS), COHORT, 0, self.number)
        cut = len(ids) // len(self.pipes)
        for k, pipe in enumerate(self.pipes):
            pipe.send(
                (self.number, ids[k * cut : (k + 1) * cut if k < len(self.pipes) - 1 else None])
            )
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


def bare_worker(
    pipe: Connection,
    federation: Federation,
    shared: dict[str, Tensor],
    sums: dict[str, Tensor],
    channels_last: bool,
) -> None:
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
            # the simulator seeds torch with this one; then both shuffle alike
            torch.randint(2**31 - 1, (), generator=rng)
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


# -- measurements ----------------------------------------------------------------------------------


def compare_with_bare(
    federation: Federation, rounds: int, workers: int, channels_last: bool
) -> dict[str, Any]:
    algorithm = FedAvg(Pixels(), lr=LR, batch=BATCH, channels_last=channels_last, device="cpu")
    bare = Bare(federation, algorithm.init().trees["model"], workers, channels_last)
    began = time.perf_counter()
    engine = Simulator(algorithm, federation, workers=workers)
    here, losses = Progress(algorithm.init()), []
    ours, theirs = [], []
    for number in range(rounds + 1):
        t0 = time.perf_counter()
        run(
            algorithm,
            engine,
            number + 1,
            cohort=COHORT,
            progress=here,
            after_round=lambda p, r: losses.append(r.loss),
        )
        t1 = time.perf_counter()
        bare.round()
        t2 = time.perf_counter()
        if number == 0:
            # the first round also pays for starting up, on both sides
            ready, first = (
                t0 - began,
                t1 - began,
            )
        else:
            ours.append(t1 - t0)
            theirs.append(t2 - t1)
    engine.close()
    bare.close()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "round_seconds": summary(ours),
        "bare_seconds": summary(theirs),
        "ratio_to_bare": summary(ratios)["median"],
        "ratio_interval": [summary(ratios)["low"], summary(ratios)["high"]],
        "start_to_first_round_seconds": ready,
        "start_to_end_of_first_round_seconds": first,
        "final_loss": losses[-1],
        "final_loss_bare": bare.loss,
        "rounds": rounds,
    }


def peak_memory(federation: Federation, cohort: int, workers: int) -> int:
    algorithm = FedAvg(Pixels(), lr=LR, batch=BATCH, device="cpu")
    with PeakMemory() as memory, Simulator(algorithm, federation, workers=workers) as engine:
        run(algorithm, engine, 1, cohort=cohort)
    return memory.peak


class Flower:
    """Flower's Ray simulation in a process of its own (`flower_peer.py`), one round at a time."""

    def __init__(self, rounds: int, workers: int) -> None:
        here = Path(__file__).parent
        env = {
            "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
            "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
            **({"OMP_NUM_THREADS": "1"} if workers else {}),
            # Ray would run its workers at nice 15: on a busy machine they would lose to everything
            # else
            "RAY_worker_niceness": "0",
        }  # fmt: skip
        command = [sys.executable, str(here / "flower_peer.py"), str(rounds), str(workers)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **env},
        )

    def round(self) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ROUND"):
                said: dict[str, float] = json.loads(line.removeprefix("ROUND"))
                if said["failed"]:
                    raise RuntimeError(
                        f"{said['failed']} of Flower's clients failed: its round cannot be compared"
                    )
                return said
        self.errors.seek(0)
        raise RuntimeError(f"Flower's simulation ended: {self.errors.read()[-2000:]}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def compare_with_flower(federation: Federation, rounds: int, workers: int) -> dict[str, Any]:
    """Once as it is without settings, which gives an actor two processors; once set to as many
    actors as we have workers, one processor each, which is what somebody who knows Flower well
    would do for small networks."""
    plain, tuned = (
        flower_rounds(federation, rounds, workers, 0),
        flower_rounds(federation, rounds, workers, workers),
    )
    return plain | {
        "speedup_over_flower_one_processor_each": tuned["speedup_over_flower"],
        "flower_one_processor_each": tuned,
    }


def flower_rounds(federation: Federation, rounds: int, workers: int, actors: int) -> dict[str, Any]:
    """Rounds of both alternate; the first of each only starts things up (Flower's actors build
    their data in it).
    """
    algorithm = FedAvg(Pixels(), lr=LR, batch=BATCH, device="cpu")
    flower = Flower(rounds + WARM, actors)
    ours, theirs = [], []
    with Simulator(algorithm, federation, workers=workers) as engine:
        here, losses = Progress(algorithm.init()), []
        for number in range(rounds + WARM):
            began = time.perf_counter()
            run(
                algorithm,
                engine,
                number + 1,
                cohort=COHORT,
                progress=here,
                after_round=lambda p, r: losses.append(r.loss),
            )
            spent, said = time.perf_counter() - began, flower.round()
            if number >= WARM:
                ours.append(spent)
                theirs.append(said["seconds"])
    flower.close()
    ratios = summary([b / a for a, b in zip(ours, theirs, strict=True)])
    return {
        "flower_round_seconds": summary(theirs),
        "round_seconds_beside_flower": summary(ours),
        "speedup_over_flower": ratios["median"],
        "speedup_interval": [ratios["low"], ratios["high"]],
        "final_loss_flower": said["loss"],
        "final_loss_beside_flower": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--skip-flower", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-bare", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    federation = make_federation()
    result = {"parameters": sum(p.numel() for p in network().parameters()), "workers": args.workers}
    if not args.skip_bare:
        result |= compare_with_bare(federation, args.rounds, args.workers, args.channels_last)
    if not args.skip_memory:
        small, large = (
            peak_memory(federation, 10, args.workers),
            peak_memory(federation, 500, args.workers),
        )
        result |= {
            "peak_memory_cohort_10": small,
            "peak_memory_cohort_500": large,
            "memory_ratio_500_to_10": large / small,
        }
    if not args.skip_flower:
        if importlib.util.find_spec("flwr") and importlib.util.find_spec("ray"):
            result |= compare_with_flower(federation, args.rounds, args.workers)
        else:
            result |= {
                "speedup_over_flower": None,
                "flower": "not measured: flwr[simulation] is not installed",
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""What each method costs on top of FedAvg: seconds, bytes, memory. All methods take turns in one
run, round by round, so that a busy machine slows all of them alike; ratios are medians over rounds
of one method's round against FedAvg's round of the same turn.

    python benchmarks/overhead.py [--rounds 10] [--methods FedAvg,Scaffold] [--model cnn]

Loopback engine: one process, one thread, every message through its byte form. Memory: what the
server's state and the clients' memories hold after the last round (exact), and the peak of a child
process that plays two rounds of one method (resident set).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from typing import Any

import torch
from measure import summary

from fedlens import Algorithm, Federation, Layer, Progress, run, stack
from fedlens.algorithms import FedAvg
from fedlens.data import Synthetic
from fedlens.engines.loopback import Loopback
from fedlens.layers import (
    Bulyan,
    FedAdam,
    FedAvgM,
    FedCDA,
    FedDyn,
    FedGen,
    FedNova,
    FedNTD,
    FedProx,
    FedYogi,
    GeometricMedian,
    Krum,
    LossAware,
    Median,
    Moon,
    MultiKrum,
    NormClip,
    Scaffold,
    TrimmedMean,
)  # fmt: skip
from fedlens.tasks import Classification

PLAIN: tuple[type[Layer], ...] = (
    FedProx,
    FedNova,
    FedDyn,
    Moon,
    FedNTD,
    FedGen,
    FedCDA,
    FedAvgM,
    FedAdam,
    FedYogi,
    LossAware,
    Median,
    TrimmedMean,
    Krum,
    MultiKrum,
    Bulyan,
    GeometricMedian,
    NormClip,
)
LAYERS: dict[str, list[Layer]] = {
    "FedAvg": [],
    "Scaffold": [Scaffold()],
    "Scaffold option I": [Scaffold("I")],
    **{kind.__name__: [kind()] for kind in PLAIN},
}
CLIENTS, IMAGES, LR = 10, 40, 0.01


def make(name: str, model: str) -> Algorithm:
    return stack(FedAvg(Classification(model=model), lr=LR, batch=10, device="cpu"), *LAYERS[name])


class Turn:
    """One method under way: plays a round when asked and remembers what it took."""

    def __init__(self, name: str, model: str, federation: Federation) -> None:
        self.algorithm = make(name, model)
        self.engine = Loopback(self.algorithm, federation)
        self.progress = Progress(self.algorithm.init())
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.down = self.up = 0
        self.loss: float | None = None

    def play(self) -> None:
        began, worked = time.perf_counter(), time.process_time()
        run(
            self.algorithm,
            self.engine,
            self.progress.done + 1,
            progress=self.progress,
            after_round=self._heard,
        )
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - worked)

    def _heard(self, _: Progress, r: Any) -> None:
        if r.lost:
            raise RuntimeError(f"a client was lost: {r.lost[0]}")
        self.down, self.up, self.loss = r.bytes_down // r.asked, r.bytes_up // r.asked, r.loss

    @property
    def memory(self) -> tuple[int, int]:
        kept = self.engine.worker.memory
        return (
            self.progress.state.count_bytes(),
            sum(kept.load(i).count_bytes() for i in range(CLIENTS)) // CLIENTS,
        )


def peak(name: str, model: str, federation: Federation) -> int:
    """Peak resident set of a fresh fork that plays two rounds, in bytes."""
    context = multiprocessing.get_context("fork")
    result = context.Value("q", 0)

    def child() -> None:
        turn = Turn(name, model, federation)
        turn.play()
        turn.play()
        result.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    process = context.Process(target=child)
    process.start()
    process.join()
    return int(result.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--methods", default=",".join(LAYERS))
    parser.add_argument("--model", default="cnn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(dict.fromkeys(["FedAvg", *options.methods.split(",")]))
    federation = Synthetic(images=CLIENTS * IMAGES, test_images=10).federation(CLIENTS, 0)
    peaks = {n: peak(n, options.model, federation) for n in names}
    turns = {n: Turn(n, options.model, federation) for n in names}
    for k in range(options.rounds + 2):
        for name in names:
            turns[name].play()
        print(
            f"turn {k + 1} of {options.rounds + 2}:"
            f" {sum(t.seconds[-1] for t in turns.values()):.1f} s",
            flush=True,
        )
    for t in turns.values():  # methods with memory cost nothing extra in their first rounds
        t.seconds, t.cpu = t.seconds[2:], t.cpu[2:]
    base = turns["FedAvg"]
    table = {}
    for name, t in turns.items():
        state, memory = t.memory
        table[name] = {
            "seconds": summary(t.seconds),
            "ratio": statistics.median(a / b for a, b in zip(t.seconds, base.seconds)),
            "cpu_ratio": statistics.median(a / b for a, b in zip(t.cpu, base.cpu)),
            "bytes_down_per_client": t.down,
            "bytes_up_per_client": t.up,
            "server_state_bytes": state,
            "client_memory_bytes": memory,
            "peak_bytes": peaks[name],
            "peak_over_fedavg": peaks[name] - peaks["FedAvg"],
            "loss": t.loss,
        }
    print(
        json.dumps(
            {
                "clients": CLIENTS,
                "images_per_client": IMAGES,
                "model": options.model,
                "rounds": options.rounds,
                "torch": torch.__version__,
                "methods": table,
            }
        )
    )


if __name__ == "__main__":
    main()

"""What does `fedlens.fit` cost, against the same work through a recipe?

The same network, loss, examples, seed and rounds three times: `fit` with objects from Python
(TensorDatasets), a recipe that names these objects as module:name ("named"), and a recipe with a
task and a source of the library's kind ("own": Classification on columns of tensors). Each is a
whole run: checks, rounds, evaluation, checkpoints, pictures, report. They take turns, and what
counts is the median over turns of fit's time against a recipe's of the same turn: time of the
processor, workers included, which a busy machine hardly changes, and time on the clock. All three
must end in the same weights.
Ends by printing one JSON object.

    python benchmarks/fit.py [--turns 7] [--rounds 4] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import summary
from safetensors.torch import load_file
from torch.nn import functional as F

import fedlens

PARTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedlens import Facts, Federation
from fedlens.data.images.tensors import Tensors
from fedlens.data.source import Source

CLIENTS, EXAMPLES = 10, 200


class Net(nn.Module):
    def __init__(self, classes=10, channels=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(32 * 8 * 8, classes)

    def forward(self, x):
        return self.head(self.features(x))


def columns(seed, n=EXAMPLES):
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=rng)
    means = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(1000))
    return (means[y] + 0.3 * torch.randn(n, 3, 32, 32, generator=rng)).clamp(0, 1), y


CLIENT_SETS = [TensorDataset(*columns(k)) for k in range(CLIENTS)]
TEST_SET = TensorDataset(*columns(99, 500))


class Columns(Source):
    def federation(self, clients, seed):
        held = [Tensors({"x": d.tensors[0], "y": d.tensors[1]}) for d in CLIENT_SETS]
        counts = tuple(tuple(torch.bincount(d.columns["y"], minlength=10).tolist()) for d in held)
        facts = Facts(tuple(map(str, range(10))), counts, (3, 32, 32))
        return Federation(held, test=Tensors(dict(zip("xy", TEST_SET.tensors))), facts=facts)
"""
TABLES = {
    "named": """
[task]
name = "Custom"
model = "fit_parts:Net"
loss = "cross_entropy"
[data]
name = "TorchDatasets"
clients = "fit_parts:CLIENT_SETS"
test = "fit_parts:TEST_SET"
""",
    "own": """
[task]
name = "Classification"
model = "fit_parts:Net"
[data]
name = "fit_parts:Columns"
""",
}
REST = """
[federation]
clients = 10
[[algorithm]]
name = "FedAvg"
[[algorithm]]
name = "FedProx"
mu = 0.01
"""


def jobs(folder: Path, rounds: int, workers: int) -> dict[str, Callable[[Path], object]]:
    (folder / "fit_parts.py").write_text(PARTS)
    sys.path.insert(0, str(folder))
    import fit_parts  # type: ignore[import-not-found]

    same = {"rounds": rounds, "workers": workers, "lr": 0.05, "batch": 20}
    for name, tables in TABLES.items():
        (folder / f"{name}.toml").write_text(tables + REST)

    def through_fit(out: Path) -> object:
        return fedlens.fit(
            fit_parts.Net, F.cross_entropy, fit_parts.CLIENT_SETS, test=fit_parts.TEST_SET,
            algorithm="fedprox", mu=0.01, verbose=False, out=out, **same,
        )  # fmt: skip

    def through(recipe: Path) -> Callable[[Path], object]:
        return lambda out: fedlens.experiment(recipe, out=out, **same)

    return {"fit": through_fit, **{n: through(folder / f"{n}.toml") for n in TABLES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = jobs(folder, options.rounds, options.workers)
        clock: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.turns + 1):
            order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
            for way in order:
                began, worked = time.perf_counter(), processor_seconds()
                ways[way](folder / f"{way}-{turn}")
                if turn:  # the first one loads modules
                    clock[way].append(time.perf_counter() - began)
                    cpu[way].append(processor_seconds() - worked)
            last = [f"{way} {s[-1]:.2f} s" for way, s in cpu.items() if s]
            print(f"turn {turn}: {', '.join(last)}", flush=True)
        ended = [load_file(folder / f"{way}-1" / "model.safetensors") for way in ways]
    for other in ended[1:]:
        assert all(torch.equal(t, other[n]) for n, t in ended[0].items())
    print(
        json.dumps(
            {
                "rounds": options.rounds,
                "workers": options.workers,
                "turns": options.turns,
                "torch": torch.__version__,
                "cpu_seconds": {way: summary(s) for way, s in cpu.items()},
                "seconds": {way: summary(s) for way, s in clock.items()},
                **{f"fit_over_{way}_cpu": ratio(cpu, way) for way in TABLES},
                **{f"fit_over_{way}": ratio(clock, way) for way in TABLES},
            }
        )
    )


def processor_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def ratio(times: dict[str, list[float]], way: str) -> float:
    return statistics.median(a / b for a, b in zip(times["fit"], times[way]))


if __name__ == "__main__":
    main()

"""What each method costs beyond FedAvg (FedVSR, Table 5): time of training and of aggregation,
memory, bytes, energy where readable.

    python experiments/fedvsr/overhead.py [--repeats 5]

Made-up clips, the light network, the local work of four clients and one server step over their
replies, the methods taking turns; the best of the repeats counts. Time is processor time, so that
waiting for a core does not count. Memory is the peak of a process of its own that does the same
once. Energy is read from the kernel's RAPL counters; most virtual machines have none. Ends with one
JSON object, also kept in results/overhead.json, of which `run.py --table` makes the README's table
in per cent of FedAvg.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Algorithm, Layer, stack
from fedlens.core.answer import answer
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.core.replies import gather
from fedlens.data.video.moving_textures import MovingTextures
from fedlens.layers import FedProx, FedSR, HighFrequency, LossAware, Median, Scaffold
from fedlens.tasks.super_resolution import SuperResolution

METHODS: dict[str, list[Layer]] = {
    "FedAvg": [],
    "FedVSR": [HighFrequency(), LossAware()],
    "SCAFFOLD": [Scaffold()],
    "FedProx": [FedProx(mu=1e-3)],
    "FedSR": [FedSR()],
    "FedMedian": [Median()],
}
RESULT = Path(__file__).resolve().parent / "results" / "overhead.json"
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


def joules() -> float | None:
    try:
        return int(RAPL.read_text()) / 1e6
    except OSError:
        return None


def measured(job: Callable[[], Any]) -> tuple[Any, float, float | None]:
    before, began = joules(), time.process_time()
    out = job()
    seconds, after = time.process_time() - began, joules()
    return out, seconds, None if before is None or after is None else after - before


def one(algorithm: Algorithm, federation: Any) -> dict[str, float | None]:
    clients = len(federation)
    notes = {"round": 0, "rounds": 10, "seed": 0, "population": clients, "cohort": clients}
    state = algorithm.init().note(**notes)
    message = algorithm.broadcast(state).note(**notes)
    replies: list[Message] = []
    seconds, energy = 0.0, 0.0 if joules() is not None else None
    for i in range(clients):
        reply, s, e = measured(lambda i=i: answer(algorithm, message, i, federation, Memory(None)))  # type: ignore[misc]
        replies.append(reply)
        seconds += s
        energy = None if energy is None or e is None else energy + e
    harvest, _ = gather(replies, range(clients))
    _, merging, _ = measured(lambda: algorithm.server_step(state, harvest))
    up, down = replies[0].count_bytes(), message.count_bytes()
    return {
        "train_s": seconds,
        "merge_s": merging,
        "energy_j": energy,
        "bytes_up": float(up),
        "bytes_down": float(down),
    }


def own_peak() -> int:
    """In kB. Not getrusage's figure where there is a better one: that starts at the size of the
    parent.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(
        int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )


def peak(name: str) -> float:
    """Peak resident size, in kB, of a process that runs this method once."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", name], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def table() -> str:
    """Markdown, in per cent of FedAvg."""
    found = json.loads(RESULT.read_text())
    lines = [
        "| | training time | aggregation time | memory | bytes up | bytes down | energy |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        cells = []
        for key in ("train_s", "merge_s", "memory_kb", "bytes_up", "bytes_down", "energy_j"):
            value, zero = row[key], found["FedAvg"][key]
            cells.append(
                "not readable"
                if value is None or not zero
                else f"{100 * (value / zero - 1):+.1f} %"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--repeats", type=int, default=5)
    parse.add_argument("--memory", help=argparse.SUPPRESS)
    options = parse.parse_args()
    torch.set_num_threads(1)
    federation = MovingTextures(
        clips=4, groups=4, split="groups", crop=64, length=6, repeat=2
    ).federation(4, 0)
    task = SuperResolution("light")
    made = {
        n: stack(FedAvg(task, lr=1e-3, optimizer="adam", batch=4), *layers)
        for n, layers in METHODS.items()
    }
    if options.memory:
        one(made[options.memory], federation)
        print(own_peak())
        return
    best: dict[str, dict[str, float | None]] = {}
    for turn in range(options.repeats + 1):
        for name, algorithm in made.items():
            found = one(algorithm, federation)
            if turn == 1:
                best[name] = found
            elif turn:
                best[name] = {
                    k: v if v is None or best[name][k] is None else min(v, best[name][k] or v)
                    for k, v in found.items()
                }
    for name, row in best.items():
        row["memory_kb"] = min(peak(name) for _ in range(3))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(best, indent=1))
    print(table())
    print(json.dumps(best))


if __name__ == "__main__":
    main()

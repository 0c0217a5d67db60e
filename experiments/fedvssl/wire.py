"""What BackboneOnly saves on the wire, for the three heads on R3D-18: bytes of real messages, down
and up, of one client's round.

    python experiments/fedvssl/wire.py

One client trains one step on one made-up video, through the engine that carries bytes; the lengths
are those of the byte strings, headers included. Ends by printing one JSON object, also kept in
results/bytes.json, of which `run.py --table` makes the README's table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import stack
from fedlens.core.rounds import run
from fedlens.data.video.moving_shapes import MovingShapes
from fedlens.engines.loopback import Loopback
from fedlens.layers import BackboneOnly
from fedlens.tasks.ctp import CtP
from fedlens.tasks.speed import Speed
from fedlens.tasks.vcop import VCOP
from fedlens.tasks.video_ssl import VideoSSL

RESULT = Path(__file__).resolve().parent / "results" / "bytes.json"


def table() -> str:
    """Markdown."""
    lines = [
        "| head | whole model down | up | backbone down | up | saved |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in json.loads(RESULT.read_text()).items():
        numbers = " | ".join(f"{n:,}" for n in (*found["full"], *found["backbone"]))
        lines.append(f"| {name} | {numbers} | {found['saved_percent']:.2f} % |")
    return "\n".join(lines)


def measure(task: VideoSSL, private: bool) -> tuple[int, int]:
    federation = task.admit(
        MovingShapes(videos=2, tests=0, length=72, side=112, actions=2).federation(1, 0)
    )
    algorithm = stack(FedAvg(task, batch=2, steps=1), *([BackboneOnly()] if private else []))
    engine = Loopback(algorithm, federation)
    run(algorithm, engine, 1)
    down, up = engine.traffic
    return len(down), len(up)


def main() -> None:
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for task in (CtP(), VCOP(), Speed()):
        whole, backbone = measure(task, False), measure(task, True)
        saved = 100 * (1 - sum(backbone) / sum(whole))
        out[type(task).__name__] = {
            "full": whole,
            "backbone": backbone,
            "saved_percent": round(saved, 2),
        }
        print(type(task).__name__, out[type(task).__name__], flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(out, indent=1))
    print(json.dumps(out))


if __name__ == "__main__":
    main()

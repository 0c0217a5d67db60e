"""The server half of `toy_app`: imported by ServerApp processes only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import toy_app
from stacks import STACKS

from fedlens import Message, Progress, Round, run
from fedlens.engines.flower.engine import Flower

assert toy_app  # one thread


def main(grid: Any, config: Mapping[str, Any]) -> None:
    out = Path(str(config["out"]))
    algorithm = STACKS[str(config["stack"])].make()
    engine = Flower(
        grid,
        algorithm,
        int(config["clients"]),
        recipe=str(config["stack"]),
        job=str(config["job"]),
        timeout=float(config["timeout"]) or None,
        wait=float(config["wait"]),
        bindings={int(k): v.encode() for k, v in json.loads(str(config["bindings"])).items()},
    )
    progress = None
    if (out / "state").exists():
        facts = json.loads((out / "progress.json").read_text())
        progress = Progress(
            Message.from_bytes((out / "state").read_bytes()),
            facts["done"],
            {int(k): v for k, v in facts["heard"].items()},
        )

    def after(here: Progress, done: Round) -> None:
        (out / "state.part").write_bytes(here.state.to_bytes())
        (out / "progress.json").write_text(json.dumps({"done": here.done, "heard": here.heard}))
        (out / "state.part").rename(out / "state")
        lost = [[x.sender, x.reason] for x in done.lost]
        line = {
            "round": done.number,
            "seconds": done.seconds,
            "heard": list(done.scalars),
            "lost": lost,
            "up": done.bytes_up,
            "down": done.bytes_down,
            "metrics": dict(done.metrics),
        }
        with open(out / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    try:
        run(
            algorithm,
            engine,
            int(config["rounds"]),
            seed=3,
            progress=progress,
            personal=bool(config["personal"]),
            evaluate_every=1 if config["personal"] else 0,
            after_round=after,
        )
        (out / "done").touch()
    except Exception as e:
        (out / "failed").write_text(str(e))
        raise

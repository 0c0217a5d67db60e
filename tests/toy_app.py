"""The toy stacks as a Flower app: what tests submit to a real SuperLink. Imported by ServerApp and ClientApp processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from stacks import STACKS
from toy import toy_federation

from fedlens import Algorithm, Client, Message, Progress, Round, run
from fedlens.engines.flower import Flower, Site, alone, client_app

torch.set_num_threads(1)


def make_site(context: Context) -> Site:
    node, config = context.node_config, context.run_config
    everyone = toy_federation(int(config["clients"]))
    id = int(node["client"])
    algorithm = STACKS[str(config["stack"])]()
    return Site(id, Slow(algorithm, config), alone(id, everyone.holdings[id], everyone.held_out_of(id)), Path(str(node["folder"])),
                recipe=str(node.get("recipe", config["stack"])))  # fmt: skip


def Slow(algorithm: Algorithm, config: Any) -> Algorithm:
    """Client steps that leave a trace when they begin and take a while, so that tests can hit the middle of a round."""
    inner = algorithm.client_step

    def step(message: Message, client: Client) -> Message:
        (Path(str(config["out"])) / f"working-{client.id}-{message.round}-{os.getpid()}").touch()
        time.sleep(float(config["delay"]))
        return inner(message, client)

    algorithm.client_step = step  # type: ignore[method-assign]
    return algorithm


client = client_app(make_site)
server = ServerApp()


@server.main()  # type: ignore[misc]
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    out = Path(str(config["out"]))
    algorithm = STACKS[str(config["stack"])]()
    engine = Flower(grid, algorithm, int(config["clients"]), recipe=str(config["stack"]), job=str(config["job"]),
                    timeout=float(config["timeout"]) or None, patience=float(config["patience"]))  # fmt: skip
    progress = None
    if (out / "state").exists():
        facts = json.loads((out / "progress.json").read_text())
        progress = Progress(Message.from_bytes((out / "state").read_bytes()), facts["done"], {int(k): v for k, v in facts["heard"].items()})

    def after(here: Progress, done: Round) -> None:
        (out / "state.part").write_bytes(here.state.to_bytes())
        (out / "progress.json").write_text(json.dumps({"done": here.done, "heard": here.heard}))
        (out / "state.part").rename(out / "state")
        lost = [[x.sender, x.reason] for x in done.lost]
        line = {"round": done.number, "seconds": done.seconds, "heard": list(done.scalars), "lost": lost, "up": done.bytes_up,
                "down": done.bytes_down, "metrics": dict(done.metrics)}  # fmt: skip
        with open(out / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    try:
        run(algorithm, engine, int(config["rounds"]), seed=3, progress=progress, personal=bool(config["personal"]),
            evaluate_every=1 if config["personal"] else 0, after_round=after)  # fmt: skip
        (out / "done").touch()
    except Exception as e:
        (out / "failed").write_text(str(e))
        raise

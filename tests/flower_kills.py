"""Kills at random moments of a run over real sites: a site, the SuperLink with its front, or the
ServerApp. Whatever dies is started again as an operator would, the run with `--resume`. In the end
the state has the bits of a federation in which each round heard just those that were heard.

    python tests/flower_kills.py [--kills 100] [--seed 0] [--minutes 60]

Prints a line a kill, and ends with one JSON object. The simulator has kills of its own in
tests/runs/test_resume.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from deployment import Deployment, deployment
from toy import Replay, same_bits

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config
from fedlens.core.log import Log
from fedlens.core.rounds import Engine, Progress
from fedlens.engines.flower.engine import write_app
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.folder import read_records
from fedlens.runs.job import Interrupted, run_job
from fedlens.runs.setup import Setup

VICTIMS = ("site 0", "site 1", "SuperLink", "ServerApp")
PAUSE = 4.0  # seconds at most between a round's end and the next kill
STUCK = 60.0  # seconds without a round after which the run is resumed
# SCAFFOLD keeps a control variate at each site, which a lost reply must not spoil
SETTINGS = [
    "clients=2", "cohort=2", "rounds=1000000", "evaluate_every=0", "patience=1000", "timeout=120",
    "images=60", "test_images=6", "epochs=1", "schedule=constant",
]  # fmt: skip


def kill_often(folder: Path, kills: int, seed: int = 0, minutes: float = 60) -> dict[str, Any]:
    """What was killed how often, in so many minutes at most, and whether the bits are right."""
    until = time.monotonic() + 60 * minutes
    config = recipes.read("demo", SETTINGS, "scaffold")
    rng = random.Random(seed)
    with deployment(folder) as here:
        run = Run(here, config)
        here.serve()
        for site in (0, 1):
            here.site(site)
        run.submit()
        run.await_round()
        killed: Counter[str] = Counter()
        for number in range(kills):
            time.sleep(rng.uniform(0, PAUSE))
            victim = rng.choice(VICTIMS)
            run.kill(victim)
            killed[victim] += 1
            run.await_round()
            print(f"{number + 1}: {victim} killed, {run.done} rounds are done", flush=True)
            if time.monotonic() > until:
                break
        run.end_serverapp()
    real = run.progress()
    lines = read_records(run.out / "metrics.jsonl")[: real.done]
    simulated = replay(config, lines, folder / "replayed")
    return {
        "kills": dict(killed),
        "rounds": real.done,
        "resumed": run.resumed,
        "lost": sum(len(line["lost"]) for line in lines),
        "reasons": dict(Counter(x["reason"] for line in lines for x in line["lost"])),
        "same_bits": same_bits(real.state, simulated.state) and real.done == simulated.done,
    }


class Run:
    """A run at the SuperLink of a deployment, which its operator does not give up."""

    def __init__(self, here: Deployment, config: Config) -> None:
        self.here, self.out = here, here.folder / "out"
        self.resumed, self.submitted = 0, 0.0
        self.facts: dict[str, Any] = {
            "name": "kills",
            "text": config.to_toml(),
            "out": str(self.out),
            "fresh": False,
            "wait": 300.0,
            "least": 1,
            "forgive": False,
            "bindings": json.dumps({k: v.decode() for k, v in here.bindings().items()}),
        }

    @property
    def done(self) -> int:
        return len(read_records(self.out / "metrics.jsonl"))

    def progress(self) -> Progress:
        found = Checkpoint(self.out / "checkpoint").load()
        assert found is not None
        return found[0]

    def submit(self) -> None:
        """From the beginning, or from the last checkpoint."""
        resume = (self.out / "config.toml").exists()
        app = self.here.folder / f"app-{self.resumed}"
        server, site = "fedlens.sites.server:run_server", "fedlens.sites.site:make_site"
        write_app(app, server, site, {**self.facts, "resume": resume})
        self.here.submit(app, f"run-{self.resumed}")
        self.submitted = time.monotonic()

    def kill(self, victim: str) -> None:
        if victim == "ServerApp":
            self.end_serverapp()
        elif victim == "SuperLink":
            self.here.stop("server")
            self.here.serve()
        else:
            site = int(victim.split()[1])
            self.here.stop(f"site-{site}")
            self.here.site(site)

    def await_round(self) -> None:
        """One more round, by this run or, if it died or hangs, by one that goes on with it."""
        before, until = self.done, time.monotonic() + 600
        moved = time.monotonic()
        while self.done <= before:
            if time.monotonic() > until:
                self.here.wait_for(lambda: False, 0, "a round")  # says why
            if not self.serverapps() and not self.starting():
                self.resumed += 1
                self.submit()
                moved = time.monotonic()
            elif time.monotonic() - moved > STUCK:
                self.end_serverapp()
            time.sleep(0.2)

    def starting(self) -> bool:
        """Has the run just been submitted, and its ServerApp not begun?"""
        process = self.here.running.get(f"run-{self.resumed}")
        alive = process is not None and process.poll() is None
        return alive and time.monotonic() - self.submitted < 30

    def serverapps(self) -> list[psutil.Process]:
        """Of this deployment; one that outlived its SuperLink among them."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if "flwr-serverapp" in command and f":{self.here.inner}" in command:
                found.append(process)
        return found

    def end_serverapp(self) -> None:
        while found := self.serverapps():  # its parent may leave a zombie, which is as good as gone
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        for name in [n for n in self.here.running if n.startswith("run-")]:
            self.here.stop(name)  # it only shows the log


def replay(config: Config, lines: list[dict[str, Any]], folder: Path) -> Progress:
    """The same rounds in one process, hearing the same clients."""

    def make(setup: Setup, folder: Path, log: Log) -> Engine:
        engine = Replay(setup.algorithm, setup.federation, folder=folder / "memory")
        lost = [{x["client"] for x in line["lost"]} for line in lines]
        engine.heard = [[i for i in engine.ids() if i not in missing] for missing in lost]
        return engine

    with contextlib.suppress(Interrupted):  # at the end of what there is to replay
        run_job(config, folder, engine=make)
    found = Checkpoint(folder / "checkpoint").load()
    assert found is not None
    return found[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedlens-kills-") as scratch:
        found = kill_often(Path(scratch), options.kills, options.seed, options.minutes)
        print(json.dumps(found))
        sys.exit(not found["same_bits"])

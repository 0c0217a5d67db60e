"""`kill -9` at any moment, then --resume: the same bits as if nothing had happened. SCAFFOLD,
because its clients remember.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import same_bits
from toy_job import write_recipe

import fedlens
from fedlens import Message
from fedlens.cli import main as cli
from fedlens.core.memory import Record
from fedlens.runs.checkpoint import Checkpoint

TESTS = Path(__file__).parent


def in_child(work: Callable[[], Any]) -> int:
    """A real process of its own, but one that need not load torch again."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def final_state(folder: Path) -> Message:
    found = Checkpoint(folder / "checkpoint").load()
    assert found
    return found[0].state


def die_at(call: int) -> None:
    """From now on, the n-th change of the file system does not happen: the process is gone before
    it.
    """
    left = [call]

    def deadly(f: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kwargs)

        return wrapped

    for name in ("replace", "unlink", "link"):
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_death_before_every_change_of_the_file_system(tmp_path: Path, step: int) -> None:
    """Every rename, link and removal of a short run in turn is the one that never happens. Two of
    four clients work in a round, so that checkpoints mix files of different rounds."""
    recipe = write_recipe(tmp_path)
    job: dict[str, Any] = {"clients": 4, "cohort": 2, "rounds": 3, "evaluate_every": 0}
    whole = fedlens.experiment(recipe, out=tmp_path / "whole", **job).state
    out = tmp_path / "cut"
    for call in range(0, 1000, step):

        def first(call: int = call) -> None:
            die_at(call)
            fedlens.experiment(recipe, out=out, fresh=True, **job)

        if wait_for(in_child(first)) == 0:
            break
        if (out / "config.toml").exists():
            fedlens.experiment(recipe, out=out, resume=True, **job)
            assert same_bits(final_state(out), whole), f"call {call}"
    assert call > 40  # a checkpoint alone changes the file system ten times


@pytest.mark.parametrize("wanted", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_death_at_random_moments_with_workers(tmp_path: Path, wanted: int) -> None:
    """Runs, each killed again and again wherever it is, workers and all; a hundred times in the
    slow part."""
    recipe = write_recipe(tmp_path)
    job: dict[str, Any] = {
        "rounds": 6,
        "cohort": 4,
        "workers": 2,
        "pause": 0.004,
        "checkpoint_every": 2,
    }
    whole = fedlens.experiment(recipe, out=tmp_path / "whole", **job).state
    began = time.monotonic()  # now that everything is loaded, as it is in a fork
    fedlens.experiment(recipe, out=tmp_path / "again", **job)
    length, rng, killed = time.monotonic() - began, random.Random(5), 0
    for number in itertools.count():
        out, kills = tmp_path / f"cut-{number}", 0
        while True:
            resume = (out / "config.toml").exists()
            child = in_child(lambda: fedlens.experiment(recipe, out=out, resume=resume, **job))  # noqa: B023
            if kills < 5:
                time.sleep(rng.uniform(0, length))
                os.kill(child, signal.SIGKILL)
            if (code := wait_for(child)) == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
        assert same_bits(final_state(out), whole), f"run {number}, killed {kills} times"
        killed += kills
        if killed >= wanted:
            break


def test_death_before_the_first_checkpoint_leaves_no_memories_behind(tmp_path: Path) -> None:
    """Clients that worked twice hold committed control variates; a run that begins again must not
    start from them.
    """
    recipe, job = write_recipe(tmp_path), {"rounds": 3, "cohort": 4}
    whole = fedlens.experiment(recipe, out=tmp_path / "whole", **job).state
    out = tmp_path / "cut"
    (out / "memory").mkdir(parents=True)
    shutil.copy(tmp_path / "whole" / "config.toml", out)
    control = {n: torch.ones_like(t) for n, t in whole.trees["control"].items()}
    for client in range(6):
        (out / "memory" / f"{client}.safetensors").write_bytes(
            Record({"control": control}, round=1).to_message().to_bytes()
        )
    assert same_bits(fedlens.experiment(recipe, out=out, resume=True, **job).state, whole)


@pytest.mark.slow
def test_the_command_itself_killed_many_times(tmp_path: Path) -> None:
    """Ten runs of the real command, each killed up to four times, every other time with one file of
    the newest checkpoint damaged too.
    """
    recipe = write_recipe(tmp_path)
    path = os.pathsep.join([str(TESTS), *sys.path])
    rng = random.Random(1)

    def start(out: Path) -> subprocess.Popen[bytes]:
        args = [
            sys.executable,
            "-m",
            "fedlens.cli.main",
            "run",
            str(recipe),
            "--out",
            str(out),
            "rounds=14",
            "workers=2",
            "pause=0.01",
            "cohort=4",
        ]
        args += ["--resume"] if (out / "config.toml").exists() else []
        return subprocess.Popen(
            args,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    began = time.monotonic()
    with start(tmp_path / "whole") as process:
        assert process.wait() == 0
    length, whole = time.monotonic() - began, final_state(tmp_path / "whole")
    for number in range(10):
        out, kills, damaged = tmp_path / f"cut-{number}", 0, False
        while True:
            with start(out) as process:
                if kills < 4:
                    time.sleep(rng.uniform(length / 4, length))
                    process.kill()
                said = process.communicate()[1]
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, said.decode()
            kills += 1
            manifests = sorted((out / "checkpoint").glob("manifest-*.json"))
            if len(manifests) == 2 and not damaged and kills % 2 == 0:
                damaged = True
                stamp = manifests[-1].stem.split("-")[1]
                victim = rng.choice(sorted((out / "checkpoint").glob(f"*{stamp}*")))
                data = bytearray(victim.read_bytes())
                data[rng.randrange(len(data))] ^= 1
                victim.write_bytes(data)
        assert same_bits(final_state(out), whole), f"run {number}"


def test_a_checkpoint_of_an_older_format_is_refused_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest as format 1 had it, with its seal over the sorted JSON. --fresh gets rid of it."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    fedlens.experiment(recipe, out=out, rounds=2)
    checkpoint = out / "checkpoint"
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "state-000002.safetensors").write_bytes(b"old")
    body = {
        "format": 1,
        "done": 2,
        "heard": "[[0, 1]]",
        "state": "state-000002.safetensors",
        "clients": {},
        "sha256": {"state-000002.safetensors": hashlib.sha256(b"old").hexdigest()},
    }
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (checkpoint / "manifest-000002.json").write_text(json.dumps({**body, "seal": seal}))
    capsys.readouterr()
    assert cli.invoke(["run", str(out), "--resume"]) == 2
    said = capsys.readouterr().err.split()
    words = "was written by another version of FedLens (format 1, this one reads 3):"
    assert " ".join(said).count(words) == 1 and " ".join(said).endswith("start over with --fresh.")
    assert (checkpoint / "state-000002.safetensors").read_bytes() == b"old"
    assert cli.invoke(["run", str(out), "--fresh", "rounds=2"]) == 0

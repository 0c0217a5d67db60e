"""Flower for real: a SuperLink and SuperNodes on 127.0.0.1, TLS and node authentication on, and the simulator's bits at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, deployment
from stacks import STACKS
from toy import same_bits, toy_federation

from fedlens import Message, run
from fedlens.engines.loopback import Loopback

pytest.importorskip("flwr")
from fedlens.engines import flower


def job(here: Deployment, name: str, **config: Any) -> Path:
    """Write the app of one run; returns its output folder."""
    out = here.folder / name
    out.mkdir(exist_ok=True)
    facts = {"stack": "scaffold", "clients": 2, "rounds": 2, "delay": 0.0, "timeout": 0.0, "patience": 60.0, "personal": False,
             "job": name, "out": str(out), **config}  # fmt: skip
    flower.write_app(here.folder / f"app-{name}", "toy_server:main", "toy_app:make_site", facts)
    return out


def finished(here: Deployment, out: Path, seconds: float = 120) -> Message:
    here.wait_for(lambda: (out / "done").exists() or (out / "failed").exists(), seconds, f"the end of {out.name}")
    assert (out / "done").exists(), (out / "failed").read_text()
    return Message.from_bytes((out / "state").read_bytes())


def rounds(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def expected(stack: str, clients: int, number: int) -> Message:
    algorithm = STACKS[stack]()
    return run(algorithm, Loopback(algorithm, toy_federation(clients)), number, seed=3)


def test_scaffold_ends_in_the_simulators_bits(tmp_path: Path) -> None:
    """Two rounds: in the second one the control variates come from the sites' own disks."""
    with deployment(tmp_path) as here:
        here.superlink()
        here.supernode(0)
        here.supernode(1)
        out = job(here, "short")
        here.submit(here.folder / "app-short")
        assert same_bits(finished(here, out), expected("scaffold", 2, 2))
        assert [r["heard"] for r in rounds(out)] == [[0, 1], [0, 1]] and not any(r["lost"] for r in rounds(out))

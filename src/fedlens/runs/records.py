"""What a run writes down: a line for every round, who holds what, curves, the memory it took."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.core.federation import Federation
from fedlens.core.files import name_in_errors
from fedlens.core.replies import Lost
from fedlens.core.rounds import Round


def describe(r: Round) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "round": r.number,
        "seconds": round(r.seconds, 4),
        "loss": r.loss,
        "metrics": {k: v if math.isfinite(v) else None for k, v in r.metrics.items()},
        "bytes_down": r.bytes_down,
        "bytes_up": r.bytes_up,
        "asked": r.asked,
        "heard": len(r.scalars),
        "refused": sum(x.refused for x in r.lost),
        "lost": [_missing(x) for x in r.lost],
        "unevaluated": [_missing(x) for x in r.unevaluated],
        "clients": {str(i): facts for i, facts in _client_facts(r).items()},
        "state": {
            k: v
            for k, v in r.state.scalars.items()
            if k not in ("round", "rounds", "seed", "population") and math.isfinite(v)
        },
    }


def _missing(x: Lost) -> dict[str, Any]:
    return {"client": x.sender, "reason": x.reason, "refused": x.refused}


def _client_facts(r: Round) -> dict[int, dict[str, float]]:
    """Loss, examples and weight (the share in the mean) of every client that was heard."""
    weights = shares(r)
    facts = {}
    for id, s in r.scalars.items():
        facts[id] = {
            k: s[k] for k in ("loss", "examples", "made", "generated", "generating") if k in s
        }
        if id in weights:
            facts[id]["weight"] = weights[id]
    return facts


def shares(r: Round) -> dict[int, float]:
    """How much each client counted. Where a reply carries two named weights, the state's `mix` is
    the share of the one called loss.
    """
    named: dict[str, dict[int, float]] = {}
    for id, s in r.scalars.items():
        for key, value in s.items():
            if key.startswith("weight:"):
                named.setdefault(key.removeprefix("weight:"), {})[id] = value
    normal = {
        name: {i: w / total for i, w in ws.items()}
        for name, ws in named.items()
        if (total := sum(ws.values())) > 0
    }
    if len(normal) == 2 and "loss" in normal and "mix" in r.state.scalars:
        mix = r.state.scalars["mix"]
        other = next(n for n in normal if n != "loss")
        return {
            i: (1 - mix) * normal[other].get(i, 0.0) + mix * normal["loss"].get(i, 0.0)
            for i in r.scalars
        }
    return next(iter(normal.values()), {})


def describe_federation(federation: Federation) -> dict[str, Any]:
    def size(data: Any) -> int | None:
        try:
            return len(data)
        except TypeError:
            return None

    facts = {}
    for key, value in federation.facts.items():
        # facts are for people: what JSON cannot hold stays out
        with contextlib.suppress(TypeError, ValueError):
            facts[key] = json.loads(json.dumps(value))
    return {
        "clients": len(federation),
        "examples": [size(h) for h in federation.holdings],
        "held_out": (
            [size(federation.held_out_of(i)) for i in range(len(federation))]
            if federation.held_out
            else []
        ),
        "test": size(federation.test),
        "facts": facts,
    }


def versions() -> dict[str, str]:
    import fedlens

    found = {"fedlens": fedlens.__version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "numpy", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}


class Curves:
    """TensorBoard events, written as they come and without a thread, so that a full disk is noticed
    here. A resumed run says from which round on older events are void."""

    def __init__(self, folder: Path, done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.event, self.summary = Event, Summary
        now = time.time()
        self.file = (folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}").open("ab")
        self.writer = RecordWriter(self.file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if done:
            self._write(
                Event(wall_time=now, step=done, session_log=SessionLog(status=SessionLog.START))
            )

    def add(self, record: Mapping[str, Any]) -> None:
        values = {
            "loss": record["loss"],
            "seconds": record["seconds"],
            "heard": record["heard"],
            **record["metrics"],
        }
        entries = [
            self.summary.Value(tag=k, simple_value=v) for k, v in values.items() if v is not None
        ]
        self._write(
            self.event(
                wall_time=time.time(), step=record["round"], summary=self.summary(value=entries)
            )
        )

    def _write(self, event: Any) -> None:
        with name_in_errors(Path(self.file.name)):
            self.writer.write(event.SerializeToString())
            self.file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


class Peak:
    """The most memory this process and its workers held together, looked at twice a second. Pages
    they share count once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.done = threading.Event()

    def __enter__(self) -> Peak:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()

    def look(self) -> int:
        self.bytes = max(self.bytes, memory_in_use())
        return self.bytes

    def _watch(self) -> None:
        while not self.done.wait(0.5):
            self.look()


def memory_in_use() -> int:
    import psutil

    me, total = psutil.Process(), 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            info = process.memory_full_info()
            total += getattr(info, "pss", 0) or info.uss
    return total

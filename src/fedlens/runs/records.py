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
from typing import IO, Any

from fedlens.core.algorithm import Algorithm
from fedlens.core.extras import is_installed
from fedlens.core.federation import Federation
from fedlens.core.files import name_in_errors
from fedlens.core.replies import Lost
from fedlens.core.rounds import Round


def describe(done: Round, algorithm: Algorithm) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "round": done.number,
        "seconds": round(done.seconds, 4),
        "loss": done.loss,
        "metrics": {k: v if math.isfinite(v) else None for k, v in done.metrics.items()},
        "bytes_down": done.bytes_down,
        "bytes_up": done.bytes_up,
        "evaluation_bytes": done.evaluation_bytes,
        "asked": done.asked,
        "heard": len(done.heard),
        "refused": sum(lost.refused for lost in done.lost),
        "skipped": done.skipped,
        "lost": [_missing(lost) for lost in done.lost],
        "unevaluated": [_missing(lost) for lost in done.unevaluated],
        "clients": _by_client(done, algorithm),
        "state": {k: v for k, v in done.state.scalars.items() if math.isfinite(v)},
    }


def _missing(lost: Lost) -> dict[str, Any]:
    return {"client": lost.sender, "reason": lost.reason, "refused": lost.refused}


def _by_client(done: Round, algorithm: Algorithm) -> dict[str, dict[str, float]]:
    """The scalars that the stack wants recorded, and `weight`, the share in the mean; nothing where
    a layer hides what single clients sent.
    """
    if algorithm.hides_singles:
        return {}
    wanted = [name for name, scalar in algorithm.declared().items() if scalar.record]
    weights = algorithm.shares(done.heard, done.state)
    rows = {}
    for id, heard in done.heard.items():
        row = {name: heard.scalars[name] for name in wanted if name in heard.scalars}
        rows[str(id)] = {**row, "weight": weights[id]} if id in weights else row
    return rows


def describe_federation(federation: Federation) -> dict[str, Any]:
    def size(data: Any) -> int | None:
        try:
            return len(data)
        except TypeError:
            return None

    facts = {}
    for key, value in federation.facts.table().items():
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
    here. A resumed run says from which round on older events are void. Without tensorboard there
    are none: `metrics.jsonl` has it all."""

    def __init__(self, folder: Path, done: int) -> None:
        self.file: IO[bytes] | None = None
        if not is_installed("tensorboard"):
            return
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
        if self.file is None:
            return
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
        assert self.file is not None
        with name_in_errors(Path(self.file.name)):
            self.writer.write(event.SerializeToString())
            self.file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.file:
                self.file.close()


class Peak:
    """The most memory this process and its workers held together, looked at twice a second. Pages
    they share count once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.done = threading.Event()

    def __enter__(self) -> Peak:
        threading.Thread(target=self._measure, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()

    def look(self) -> int:
        self.bytes = max(self.bytes, memory_in_use())
        return self.bytes

    def _measure(self) -> None:
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

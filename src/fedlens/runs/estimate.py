"""What a job will take, found out by doing a little of it: a typical client works on a few batches,
the rest is multiplication.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from fedlens.algorithms.fedavg import FedAvg
from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Batch, Data
from fedlens.core.federation import Federation
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.core.rounds import answer
from fedlens.engines.worker import threads
from fedlens.runs.records import memory_in_use
from fedlens.runs.setup import Setup

FEW = 4  # batches that the client works on
SLOW = 2.0  # seconds: what takes longer is not done on more to know it better


@dataclass(frozen=True)
class Estimate:
    """seconds and bytes for the whole run; `client_seconds` for one client of mean size; memory for
    all processes together. left_out: what the figures do not count."""

    seconds: float
    client_seconds: float
    memory: int
    bytes_down: int
    bytes_up: int
    parameters: int
    workers: int
    left_out: str = ""


@dataclass(frozen=True)
class Beginning:
    """The first `size` examples of somebody's data."""

    data: Data
    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        return self.data.batch(index, rng)


def estimate(setup: Setup) -> Estimate:
    s, algorithm, federation = setup.settings, setup.algorithm, setup.federation
    cohort = s.cohort or len(federation)
    workers = max(1, min(os.cpu_count() or 1 if s.workers is None else s.workers, len(federation)))
    with threads(s.threads):
        before = memory_in_use()
        state = algorithm.init().note(
            round=0, rounds=s.rounds, seed=s.seed, population=len(federation)
        )
        message = algorithm.broadcast(state).note(**state.scalars, cohort=cohort, rehearsal=1)
        seconds, reply = time_client(setup, message)
        growth = max(0, memory_in_use() - before)
        evaluation = time_evaluation(setup, message)
    evaluations = (s.rounds + s.evaluate_every - 1) // s.evaluate_every if s.evaluate_every else 0
    held_out = sum(len(d) for d in federation.held_out if d is not None) if s.personal else 0
    share = (
        held_out / len(federation.test)
        if held_out and federation.test is not None and len(federation.test)
        else 0.0
    )
    work = cohort * seconds / min(workers, cohort)
    return Estimate(
        seconds=s.rounds * work + evaluations * evaluation * (1 + share / workers),
        client_seconds=seconds,
        memory=before + growth * (workers + 1),
        bytes_down=message.count_bytes() * cohort * s.rounds,
        bytes_up=reply.count_bytes() * cohort * s.rounds,
        parameters=sum(t.numel() for t in message.trees.get("model", {}).values()),
        workers=workers,
        left_out=", without the time to generate images" if reply.scalars.get("made") else "",
    )


def time_client(setup: Setup, message: Message) -> tuple[float, Message]:
    """Seconds a client of mean size takes, and its reply. The first go warms up, the second counts,
    on more batches where they are quick."""
    holdings, base = setup.federation.holdings, setup.algorithm.base
    if not all(isinstance(h, Data) for h in holdings):
        return _timed(setup, message, setup.federation, 0)
    mean = sum(len(h) for h in holdings) / len(holdings)
    typical = min(range(len(holdings)), key=lambda i: abs(len(holdings[i]) - mean))
    batch = int(getattr(base, "batch", 32))
    few = min(len(holdings[typical]), batch)
    small: Any = {typical: Beginning(holdings[typical], few)}
    with shortened(setup.algorithm) as times:
        warm, _ = _timed(setup, message, Federation(small, setup.federation.held_out), typical)
        if warm < SLOW:
            few = min(len(holdings[typical]), FEW * batch)
            small = {typical: Beginning(holdings[typical], few)}
        seconds, reply = _timed(
            setup, message, Federation(small, setup.federation.held_out), typical
        )
    # A fixed number of local steps takes as long on little data as on much.
    return seconds * times * (1 if getattr(base, "steps", None) else mean / max(1, few)), reply


@contextmanager
def shortened(algorithm: Algorithm) -> Iterator[float]:
    """Inside, local training is one epoch or a few steps; gives what it really is a multiple of."""
    base = algorithm.base
    if not isinstance(base, FedAvg):
        yield 1.0
        return
    epochs, steps = base.epochs, base.steps
    base.epochs, base.steps = 1, min(steps, FEW) if steps else None
    try:
        yield steps / min(steps, FEW) if steps else float(epochs)
    finally:
        base.epochs, base.steps = epochs, steps


def _timed(
    setup: Setup, message: Message, federation: Federation, id: int
) -> tuple[float, Message]:
    began = time.perf_counter()
    reply = answer(setup.algorithm, message, id, federation, Memory())
    return time.perf_counter() - began, reply


def time_evaluation(setup: Setup, message: Message) -> float:
    """Seconds to evaluate on the server's test set: on one example, and on more where that was
    quick.
    """
    test = setup.federation.test
    if test is None:
        return 0.0
    seconds = 0.0
    for few in (1, 16, 256) if hasattr(test, "subset") else (len(test),):
        part = test.subset(range(few)) if few < len(test) else test
        began = time.perf_counter()
        with torch.no_grad():
            setup.algorithm.evaluate(message.note(evaluate=1), part, {})
        spent = time.perf_counter() - began
        seconds = spent * len(test) / max(1, len(part))
        if part is test or spent > SLOW:
            break
    return seconds

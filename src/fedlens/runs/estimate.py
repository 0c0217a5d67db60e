"""What a job will take, found out by doing a little of it: a typical client works on a few batches,
the rest is multiplication.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from fedlens.core.algorithm import Algorithm
from fedlens.core.answer import answer
from fedlens.core.client import Batch, Data
from fedlens.core.federation import Federation
from fedlens.core.memory import Memory
from fedlens.core.message import Header, Message
from fedlens.engines.worker import threads
from fedlens.runs.records import memory_in_use
from fedlens.runs.setup import Setup

_FEW = 4  # batches that the client works on
_SLOW = 2.0  # seconds: what takes longer is not done on more to know it better


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
    settings, algorithm, federation = setup.settings, setup.algorithm, setup.federation
    cohort = settings.cohort or len(federation)
    workers = max(
        1,
        min(os.cpu_count() or 1 if settings.workers is None else settings.workers, len(federation)),
    )
    with threads(settings.threads):
        before = memory_in_use()
        header = Header(0, settings.rounds, settings.seed, len(federation), cohort, rehearsal=True)
        message = algorithm.broadcast(algorithm.init().with_header(header)).with_header(header)
        seconds, reply = time_client(setup, message)
        growth = max(0, memory_in_use() - before)
        evaluation = time_evaluation(setup, message)
    evaluations = (
        (settings.rounds + settings.evaluate_every - 1) // settings.evaluate_every
        if settings.evaluate_every
        else 0
    )
    held_out = sum(len(d) for d in federation.held_out if d is not None) if setup.personal else 0
    share = (
        held_out / len(federation.test)
        if held_out and federation.test is not None and len(federation.test)
        else 0.0
    )
    work = cohort * seconds / min(workers, cohort)
    missing = [part.unrehearsed(reply) for part in algorithm.parts()]
    return Estimate(
        seconds=settings.rounds * work + evaluations * evaluation * (1 + share / workers),
        client_seconds=seconds,
        memory=before + growth * (workers + 1),
        # clients evaluate what is sent to all of them for that
        bytes_down=message.count_bytes()
        * (cohort * settings.rounds + (evaluations * len(federation) if settings.personal else 0)),
        bytes_up=reply.count_bytes() * cohort * settings.rounds,
        parameters=sum(t.numel() for t in message.trees.get("model", {}).values()),
        workers=workers,
        left_out="".join(f", without {what}" for what in missing if what),
    )


def time_client(setup: Setup, message: Message) -> tuple[float, Message]:
    """Seconds a client of mean size takes, and its reply. The first go warms up, the second counts,
    on more batches where they are quick."""
    algorithm, everyone = setup.algorithm, setup.federation
    holdings = everyone.holdings
    if not all(isinstance(h, Data) for h in holdings):
        return _timed(algorithm, message, everyone, 0)
    mean = sum(len(h) for h in holdings) / len(holdings)
    typical = min(range(len(holdings)), key=lambda i: abs(len(holdings[i]) - mean))
    short = algorithm.shortened(_FEW)

    def timed(examples: int) -> tuple[float, Message]:
        part: Any = {typical: Beginning(holdings[typical], examples)}
        return _timed(short.algorithm, message, Federation(part, everyone.held_out), typical)

    few = min(len(holdings[typical]), short.batch)
    warm, _ = timed(few)
    if warm < _SLOW:
        few = min(len(holdings[typical]), _FEW * short.batch)
    seconds, reply = timed(few)
    # A fixed number of local steps takes as long on little data as on much.
    of_data = mean / max(1, few) if short.by_data else 1
    return seconds * short.times * of_data, reply


def _timed(
    algorithm: Algorithm, message: Message, federation: Federation, id: int
) -> tuple[float, Message]:
    began = time.perf_counter()
    reply = answer(algorithm, message, id, federation, Memory())
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
            setup.algorithm.evaluate(message.with_header(evaluate=True), part, {})
        spent = time.perf_counter() - began
        seconds = spent * len(test) / max(1, len(part))
        if part is test or spent > _SLOW:
            break
    return seconds

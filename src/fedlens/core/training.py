"""The one training loop, and what an algorithm offers that learns a network with it."""

from __future__ import annotations

import faulthandler
import functools
import math
import multiprocessing as mp
import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Batch, Data
from fedlens.core.task import LearningTask

# The loss that is reported, and what else steers the weights
Objective = Callable[[Batch], tuple[Tensor, Tensor | None]]


class Learner(Algorithm):
    """A base that learns a network: one resident in each process, filled anew for every client."""

    task: LearningTask
    trains: ClassVar[bool] = True

    @property
    @abstractmethod
    def resident(self) -> nn.Module:
        """The network of this process."""

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The resident network with these weights."""


@dataclass(frozen=True)
class Trained:
    """What a stretch of training was like."""

    loss: float
    steps: int
    lr_sum: float


def train(
    parameters: list[nn.Parameter],
    batches: Iterable[Batch],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None = None,
    amp: AbstractContextManager[Any] | None = None,
    after_step: Callable[[float], None] | None = None,
    differentiate: Callable[[Batch], Tensor] | None = None,
) -> Trained:
    """The loop. `objective` gives the loss that is reported and what else steers the weights (or
    None). `after_step` is called with the learning rate of the step. `differentiate` fills in
    gradients of its own making instead, and gives the loss: see `noisy_steps.py`.
    """
    losses: list[Tensor] = []
    lr_sum = 0.0
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        if differentiate is not None:
            loss = differentiate(batch)
        else:
            with amp or nullcontext():
                loss, pull = objective(batch)
            (loss if pull is None else loss + pull.to(loss.dtype)).backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        losses.append(loss.detach())
        group = optimizer.param_groups[0]
        # of the common rate: a group's own is a multiple of it
        lr = group["lr"] / group.get("factor", 1.0)
        if after_step:
            after_step(lr)
        lr_sum += lr
    if not losses:
        raise ValueError("nothing to train on")
    return Trained(float(torch.stack(losses).double().mean()), len(losses), lr_sum)


def shuffled(
    data: Data, size: int, rng: Generator, *, epochs: int = 1, steps: int | None = None
) -> Iterator[Batch]:
    """Shuffled batches: `epochs` passes, or exactly `steps` of them."""
    if not len(data):
        return
    done, passes = 0, 0
    while (done < steps) if steps else (passes < epochs):
        order = torch.randperm(len(data), generator=rng)
        for index in _split(order, size):
            if steps and done == steps:
                return
            yield data.batch(index, rng)
            done += 1
        passes += 1


def _split(order: Tensor, size: int) -> list[Tensor]:
    """A last batch of one joins the one before it: BatchNorm cannot train on a single sample."""
    pieces = list(torch.split(order, size))
    if len(pieces) > 1 and len(pieces[-1]) == 1:
        pieces[-2:] = [torch.cat(pieces[-2:])]
    return pieces


@functools.cache
def find_device(name: str) -> torch.device:
    """A device by its name, or an error. It is not tried out: workers are forked later, and a
    process that has used a GPU cannot be.
    """
    try:
        device = torch.device(name)
        module: Any = torch.get_device_module(device)
        here = module.is_available() and (device.index or 0) < module.device_count()
    except RuntimeError:
        here = False
    if not here:
        raise ValueError(f"there is no device {name!r} here, but device=cpu always works")
    return device


def survives(work: Callable[[], None], seconds: float = 120.0) -> str | None:
    """Try work that may end its process: None if a child process comes through it, else what it
    ended with, in a word. Where nothing can be found out (no fork, a GPU in use), None too."""
    if "fork" not in mp.get_all_start_methods() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    child = mp.get_context("fork").Process(target=_alone, args=(work,), daemon=True)
    child.start()
    child.join(seconds)
    if child.is_alive():  # slow, which is nobody's fault
        child.kill()
        child.join()
        return None
    code = child.exitcode or 0
    return signal.Signals(-code).name if code < 0 else None


def _alone(work: Callable[[], None]) -> None:
    """In the child. Without helpers: those that OpenMP remembers stayed with the parent. What only
    raises will be said by whoever does the work in earnest."""
    torch.set_num_threads(1)
    faulthandler.disable()  # the parent says what happened, in a word
    try:
        work()
    finally:
        os._exit(0)


def lr_factor(schedule: str, number: int, rounds: int, step_every: int, decay: float) -> float:
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * number / max(1, rounds)))
    if schedule == "step":
        return float(decay ** (number // step_every))
    return 1.0

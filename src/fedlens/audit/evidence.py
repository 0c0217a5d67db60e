"""Where the messages of an audit come from: recorded while a run was under way (`fedlens run
--record-messages`), or replayed afterwards. Rounds are pure functions of recipe and seed, so that a
replay sends, bit for bit, what the run has sent.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.message import Message
from fedlens.core.rounds import Progress, Round, run
from fedlens.engines.loopback import Loopback
from fedlens.engines.recorder import Exchange, Recorder, read_exchanges
from fedlens.engines.simulator import Simulator
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.setup import Setup, make_setup

MESSAGES = "messages"  # the folder in a run folder


class _Enough(Exception):
    """The rounds that were asked for are over."""


@dataclass(frozen=True)
class Messages:
    """The messages of an audit. recorded: are they from the run itself?"""

    exchanges: Sequence[Exchange]
    recorded: bool


def open_run(folder: Path) -> Setup:
    """The objects of a run, without the layers that hide single replies: an audit has to see what
    they hide, and then shows what is left of it behind them.
    """
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.toml")
    setup = make_setup(recipes.read(folder))
    return replace(setup, algorithm=without_hiding(setup.algorithm))


def hides_singles(setup: Setup) -> bool:
    """Did the run itself hide single replies?"""
    return setup.config.build_algorithm(setup.task).hides_singles


def without_hiding(algorithm: Algorithm) -> Algorithm:
    if not isinstance(algorithm, Layer):
        return algorithm
    inner = without_hiding(algorithm.inner)
    if algorithm.hides_replies:
        return inner
    layer = copy.copy(algorithm)
    layer.inner = inner
    return layer


def collect(folder: Path, setup: Setup, rounds: int) -> Messages:
    """What was recorded, or else a replay: the first `rounds` rounds of a run that trains nothing;
    of one that trains, its first round and one more from its last checkpoint. What was recorded
    under a mask says nothing about what the mask hides, so such a run is replayed without it.
    """
    if (folder / MESSAGES).is_dir() and not hides_singles(setup):
        found = read_exchanges(folder / MESSAGES)
        if not found:
            raise ValueError(f"{folder / MESSAGES} holds no rounds")
        return Messages(found, True)
    if not any(h is not None for h in setup.federation.holdings):
        raise ValueError(
            f"the data of {folder} is not here, so nothing can be replayed: run it with"
            " --record-messages"
        )
    if not setup.algorithm.trains:
        return replay(setup, rounds)
    first = replay(setup, 1)
    last = Checkpoint(folder / "checkpoint").load()
    if last is None or last[0].done < 2:
        return first
    again = replay(
        setup, 1, Progress(last[0].state, last[0].done - 1, dict(last[0].heard)), last[1]
    )
    return Messages([*first.exchanges, *again.exchanges], False)


def replay(
    setup: Setup,
    rounds: int,
    progress: Progress | None = None,
    memories: dict[int, Path] | None = None,
) -> Messages:
    """So many rounds with the real stack, every message through its byte form."""
    engine = Recorder(Loopback(setup.algorithm, setup.federation, threads=setup.settings.threads))
    if memories:
        engine.restore(memories)
    here = progress or Progress(setup.algorithm.init())
    until = here.done + rounds
    _go_on(setup, engine, here, lambda: here.done >= until)
    return Messages(engine.exchanges, False)


def last_state(setup: Setup, rounds: int, seconds: float) -> Message | None:
    """The server's state after so many rounds, or after the run has stopped by itself; None where
    that takes longer.
    """
    here = Progress(setup.algorithm.init())
    ends = time.perf_counter() + seconds
    threads = setup.settings.threads
    with Simulator(setup.algorithm, setup.federation, workers=0, threads=threads) as engine:
        _go_on(setup, engine, here, lambda: here.done >= rounds or time.perf_counter() > ends)
    return here.state if here.done >= rounds or here.state.header.stop else None


def finish(setup: Setup, seconds: float) -> dict[str, float] | None:
    """What the whole run ends with on the server's test data; None where it takes longer, {} where
    there is no such data.
    """
    state = last_state(setup, setup.settings.rounds, seconds)
    if state is None:
        return None
    test = setup.federation.test
    message = setup.algorithm.broadcast(state).with_header(state.header, evaluate=True)
    return setup.algorithm.evaluate(message, test, {}) if test is not None else {}


def _go_on(setup: Setup, engine: Any, here: Progress, enough: Callable[[], bool]) -> None:
    """Rounds from here, until the run is over or that is enough."""

    def stop(now: Progress, finished: Round) -> None:
        if enough():
            raise _Enough

    with contextlib.suppress(_Enough):
        run(
            setup.algorithm, engine, setup.settings.rounds, cohort=setup.settings.cohort,
            seed=setup.settings.seed, progress=here, after_round=stop,
        )  # fmt: skip

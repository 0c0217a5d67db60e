"""One round loop for every algorithm and engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedlens.core.algorithm import Algorithm, Trip, Trips
from fedlens.core.client import generator
from fedlens.core.datasets import as_data
from fedlens.core.direction import smaller_is_better
from fedlens.core.message import Header, Message
from fedlens.core.replies import Arrival, Heard, Lost, Replies, Scalar, Weightless, gather


class Engine(Protocol):
    """Carries messages, nothing else."""

    def ids(self) -> Sequence[int]:
        """The clients that can be asked."""
        ...

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterable[Arrival]:
        """Ask these clients; `heard` tells in which round the server last heard each. Yields
        replies and who got lost and why; for an algorithm that does not need single replies, what
        was heard of each and partial sums of their trees instead."""
        ...

    def snapshot(self) -> Mapping[int, Path]:
        """Files of the client memories that changed since the last snapshot; empty where clients
        keep their own.
        """
        ...

    def restore(self, records: Mapping[int, Path]) -> None:
        """Go back to these memories."""
        ...

    def close(self) -> None: ...


@dataclass
class Progress:
    """Where a run stands: everything a checkpoint needs besides the clients' memories. `done`
    rounds are behind us.
    """

    state: Message
    done: int = 0
    heard: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """What is known about a finished round; `metrics.jsonl` holds one of these a line.

    loss: mean of the clients' losses. unevaluated: whose held-out parts are missing from the
    metrics, often just the clients that do worst."""

    number: int
    seconds: float
    heard: Mapping[int, Heard]
    asked: int
    lost: Sequence[Lost]
    bytes_down: int
    bytes_up: int
    loss: float | None
    metrics: Mapping[str, float]
    state: Message = field(repr=False)  # whoever prints a round does not mean the model
    unevaluated: Sequence[Lost] = ()

    @property
    def scalars(self) -> Mapping[int, Mapping[str, float]]:
        """What every client that was heard reported."""
        return {i: h.scalars for i, h in self.heard.items()}


def sample(ids: Sequence[int], cohort: int | None, seed: int, number: int) -> list[int]:
    """Who is asked in a round: a pure function of seed and round, so that a resumed run asks the
    same clients.
    """
    if cohort is not None and not 1 <= cohort <= len(ids):
        raise ValueError(
            f"a cohort is between 1 and the number of clients, {len(ids)}, not {cohort}"
        )
    if cohort is None or cohort == len(ids):
        return sorted(ids)
    order = torch.randperm(len(ids), generator=generator(seed, number, 0xC0))
    return sorted(ids[int(k)] for k in order[:cohort])


def run(
    algorithm: Algorithm,
    engine: Engine,
    rounds: int,
    *,
    cohort: int | None = None,
    seed: int = 0,
    late: int = 0,
    progress: Progress | None = None,
    test: Any | None = None,
    evaluate_every: int = 0,
    personal: bool = False,
    after_round: Callable[[Progress, Round], bool | None] | None = None,
) -> Message:
    """Run to `rounds` rounds and return the final state. `progress` continues an earlier run.
    Replies up to `late` rounds behind are used. Every `evaluate_every` rounds, and at the end, the
    state is evaluated on `test` and, if `personal`, on the clients' held-out parts. `after_round`
    hears of every round: logging, checkpoints, pictures; if it says True, that was the last."""
    if late and algorithm.hides_singles:
        raise ValueError("late replies have no place in a sum that is opened in its own round")
    here = progress or Progress(algorithm.init())
    test = as_data(test)
    while here.done < rounds:
        began, number = time.perf_counter(), here.done
        ids = engine.ids()
        asked = sample(ids, cohort, seed, number)
        header = Header(number, rounds, seed, population=len(ids))
        state = here.state.with_header(header)
        # What every client may know about the run travels in the message, because nothing else
        # reaches it.
        upcoming = sample(ids, cohort, seed, here.done + 1) if here.done + 1 < rounds else ()
        trips = make_trips(algorithm, engine, state, Trips(asked, upcoming), here.heard, late)
        state, replies, lost = algorithm.read(state, trips)
        replies = replies.limited_to(algorithm.needs, {"loss": _LOSS, **algorithm.declared()})
        try:
            new = algorithm.server_step(state, replies) if len(replies) else state
            state = new.with_header(header, stop=new.header.stop)
        except Weightless as e:  # nobody is left: the round is skipped, and nobody was heard
            lost += [Lost(i, str(e), refused=True) for i in replies.senders]
            replies = Replies()
        # The round a reply answers is the round its client remembers: a late one confirms the draft
        # of that earlier round.
        here.heard.update({i: h.round for i, h in replies.heard.items()})
        here.state, here.done = state, number + 1
        stop = state.header.stop
        last = here.done == rounds or stop
        due = bool(evaluate_every) and (here.done % evaluate_every == 0 or last)
        scored = evaluate(algorithm, engine, here, test, personal) if due else ({}, [])
        finished = Round(
            number=number,
            seconds=time.perf_counter() - began,
            heard=replies.heard,
            asked=len(asked),
            lost=lost,
            bytes_down=sum(trip.message.count_bytes() * len(trip.ids) for trip in trips.made),
            bytes_up=sum(h.bytes for r in trips.replies for h in r.heard.values()),
            loss=replies.average("loss"),
            metrics=scored[0],
            state=state,
            unevaluated=scored[1],
        )
        # its sums are as large as a model, and the next round needs the room
        del replies, trips
        ended = after_round(here, finished) if after_round else False
        if stop or ended:
            break
    return here.state


def make_trips(
    algorithm: Algorithm,
    engine: Engine,
    state: Message,
    trips: Trips,
    heard: Mapping[int, int],
    late: int = 0,
) -> Trips:
    """Every message of a round or an evaluation, in turn: mostly one."""
    header = state.header
    cohort = 0 if trips.evaluate else len(trips.asked)
    while (trip := algorithm.next_trip(state, trips)) is not None:
        message = trip.message.with_header(
            header, cohort=cohort, evaluate=trips.evaluate, trip=trip.number
        )
        arrived = engine.exchange(message, trip.ids, heard)
        replies, lost = gather((_in_time(item, header.round, late) for item in arrived), trip.ids)
        trips.made.append(Trip(message, trip.ids, trip.number))
        trips.replies.append(replies)
        trips.lost.append(lost)
    return trips


_LOSS = Scalar("mean", weight="examples")  # of an algorithm that does not declare its loss


def evaluate(
    algorithm: Algorithm, engine: Engine, here: Progress, test: Any | None, personal: bool
) -> tuple[dict[str, float], list[Lost]]:
    """Metrics on the server's test set, and mean, spread and worst over the clients' held-out
    parts; who is missing from these, and why.
    """
    state = here.state
    message = algorithm.broadcast(state).with_header(state.header, evaluate=True)
    metrics = algorithm.evaluate(message, test, {}) if test is not None else {}
    if not personal:
        return metrics, []
    trips = Trips(list(engine.ids()), evaluate=True)
    make_trips(algorithm, engine, state, trips, here.heard)
    here.state, replies, lost = algorithm.read(state, trips)
    known = [*replies.totals, *(n for h in replies.heard.values() for n in h.scalars)]
    for name in dict.fromkeys(n for n in known if n != "examples"):
        if algorithm.hides_singles:
            if (mean := replies.average(name)) is not None:
                metrics[f"client_{name}"] = mean
            continue
        values = replies.values(name)
        metrics[f"client_{name}"] = float(np.mean(values))
        worst = max(values) if smaller_is_better(name) else min(values)
        metrics[f"client_{name}_spread"] = float(np.std(values))
        metrics[f"client_{name}_worst"] = worst
    return metrics, lost


def _in_time(item: Arrival, number: int, late: int) -> Arrival:
    if isinstance(item, Message | Heard) and item.round < number - late:
        return Lost(item.sender, f"too late: answers round {item.round}")
    return item

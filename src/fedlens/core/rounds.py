"""One round loop for every algorithm and engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedlens.core.algorithm import Algorithm, Trip, Trips
from fedlens.core.client import generator
from fedlens.core.datasets import as_data
from fedlens.core.direction import smaller_is_better
from fedlens.core.limits import MOST_WEIGHT
from fedlens.core.message import Header, Message
from fedlens.core.replies import (
    LOSS,
    SIZE,
    Arrival,
    Heard,
    Lost,
    Replies,
    Scalar,
    Weightless,
    gather,
)
from fedlens.core.tree import is_finite

MOST_SKIPPED = 3  # rounds in a row whose new state could not be used
# what numbers and texts of clients may lead to; an error of another kind is one of the program
LED_NOWHERE = (ArithmeticError, ValueError, RuntimeError)


class Stalled(ValueError):
    """A run that gets nowhere: nobody answers, or what they answer leads to no usable state."""


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
    """Where a run stands: everything a checkpoint needs besides the clients' memories.

    Args:
        state: of the algorithm.
        done: rounds that are behind us.
        heard: for each client the round in which it was last heard.
    """

    state: Message
    done: int = 0
    heard: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """What is known about a finished round; `metrics.jsonl` holds one of these a line.

    Args:
        number: from 0.
        seconds: that it took.
        heard: the replies that counted, by sender.
        asked: how many clients were asked.
        lost: replies that did not count.
        bytes_down: of arrays, as the engine sent them.
        bytes_up: of arrays, as the engine received them, those of evaluation and of replies that
            did not count among them.
        loss: mean of the clients' losses.
        metrics: of the evaluation after it, if there was one.
        state: after it.
        unevaluated: whose held-out parts are missing from the metrics, often just the clients that
            do worst.
        evaluation_bytes: both ways.
        skipped: why the round changed nothing although replies came.
    """

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
    evaluation_bytes: int = 0
    skipped: str = ""

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
    order = torch.randperm(len(ids), generator=generator(*_words(seed), number, 0xC0))
    return sorted(ids[int(k)] for k in order[:cohort])


def _words(seed: int) -> list[int]:
    """In pieces of 32 bits: of a long secret no bit is dropped."""
    return [seed & 0xFFFFFFFF, *(_words(seed >> 32) if seed >> 32 else ())]


def run(
    algorithm: Algorithm,
    engine: Engine,
    rounds: int,
    *,
    cohort: int | None = None,
    seed: int = 0,
    cohort_seed: int | None = None,
    late: int = 0,
    max_weight: float = MOST_WEIGHT,
    patience: int = 1,
    progress: Progress | None = None,
    test: Any | None = None,
    evaluate_every: int = 0,
    personal: bool = False,
    before_round: Callable[[int, Sequence[int]], Mapping[str, float] | None] | None = None,
    after_round: Callable[[Progress, Round], bool | None] | None = None,
) -> Message:
    """Run to `rounds` rounds and return the final state.

    Args:
        algorithm: both halves of what is run.
        engine: carries its messages.
        rounds: how many there are in all, those of `progress` among them.
        cohort: how many clients are asked in a round; all, if not given.
        seed: every random number follows from it; everybody gets it.
        cohort_seed: decides who is asked, and is never sent; `seed`, if not given.
        late: replies up to so many rounds behind are used.
        max_weight: the largest weight that a reply may claim.
        patience: so many rounds in a row without a single reply end the run.
        progress: continues an earlier run.
        test: a test set that the state is evaluated on.
        evaluate_every: rounds between two evaluations; at the end there is always one.
        personal: whether clients evaluate too, on their held-out parts.
        before_round: hears who is about to be asked. What it gives is noted in the state; None ends
            the run before anybody is.
        after_round: hears of every round: logging, checkpoints, pictures; if it says True, that was
            the last.

    Raises:
        Stalled: the run gets nowhere. The round at hand is not counted as done.
    """
    if late and algorithm.hides_singles:
        raise ValueError("late replies have no place in a sum that is opened in its own round")
    if late and any(getattr(part, "protects", None) == "client" for part in algorithm.parts()):
        raise ValueError(
            "late replies were clipped for another round's noise: set federation.late=0"
        )
    here = progress or Progress(algorithm.init())
    test = as_data(test)
    silent = skipped = 0  # rounds in a row
    while here.done < rounds:
        began, number = time.perf_counter(), here.done
        ids = engine.ids()
        drawn_by = seed if cohort_seed is None else cohort_seed
        asked = sample(ids, cohort, drawn_by, number)
        noted = before_round(number, asked) if before_round else {}
        if noted is None:
            break
        header = Header(number, rounds, seed, len(ids), len(asked), max_weight=max_weight)
        state = here.state.with_header(header).note(**noted)
        # What every client may know about the run travels in the message, because nothing else
        # reaches it.
        upcoming = sample(ids, cohort, drawn_by, here.done + 1) if here.done + 1 < rounds else ()
        trips = make_trips(algorithm, engine, state, Trips(asked, upcoming), here.heard, late)
        state, replies, lost, why = _take_step(algorithm, state, trips)
        traffic = _traffic(trips)
        silent = 0 if len(replies) or why else silent + 1
        if silent >= patience + late:
            raise Stalled(_nobody(number, silent, lost))
        skipped = skipped + 1 if why else 0
        if skipped >= MOST_SKIPPED:
            raise Stalled(f"{skipped} rounds in a row came to nothing, the last because {why}")
        # The round a reply answers is the round its client remembers: a late one confirms the draft
        # of that earlier round.
        here.heard.update({i: h.round for i, h in replies.heard.items()})
        here.state, here.done = state, number + 1
        stop = state.header.stop
        last = here.done == rounds or stop
        if last and not here.heard:
            raise Stalled(why or _nobody(number, silent, lost))
        due = bool(evaluate_every) and (here.done % evaluate_every == 0 or last)
        scored = evaluate(algorithm, engine, here, test, personal) if due else Scored()
        finished = Round(
            number=number,
            seconds=time.perf_counter() - began,
            heard=replies.heard,
            asked=len(asked),
            lost=lost,
            bytes_down=traffic[0] + scored.traffic[0],
            bytes_up=traffic[1] + scored.traffic[1],
            loss=replies.average(LOSS),
            metrics=scored.metrics,
            state=state,
            unevaluated=scored.missing,
            evaluation_bytes=sum(scored.traffic),
            skipped=why,
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
    while (trip := _next_trip(algorithm, state, trips)) is not None:
        message = trip.message.with_header(
            header, cohort=cohort, evaluate=trips.evaluate, trip=trip.number
        )
        arrived = engine.exchange(message, trip.ids, heard)
        replies, lost = gather((_in_time(item, header.round, late) for item in arrived), trip.ids)
        trips.made.append(Trip(message, trip.ids, trip.number))
        trips.replies.append(replies)
        trips.lost.append(lost)
    return trips


def _next_trip(algorithm: Algorithm, state: Message, trips: Trips) -> Trip | None:
    try:
        return algorithm.next_trip(state, trips)
    except LED_NOWHERE as e:
        if not trips.made:  # nothing of a client's was looked at
            raise
        trips.broken = _in_a_line(e)
        return None


def _in_a_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".strip().splitlines()[0]


def _take_step(
    algorithm: Algorithm, state: Message, trips: Trips
) -> tuple[Message, Replies, list[Lost], str]:
    """The next state, who was heard, who was lost; and why the round is skipped, if it is. Then the
    state is the one before, and nobody was heard: clients forget what they did.

    What clients send is checked for its form (`replies.refuse`), but numbers of the right form can
    still lead nowhere.
    """
    if trips.broken:
        return state, Replies(), trips.without_effect(trips.broken), trips.broken
    try:
        state, replies, lost, why = algorithm.read(state, trips)
        replies = replies.limited_to(
            algorithm.needs, {LOSS: _UNDECLARED_LOSS, **algorithm.declared()}
        )
        if why or not len(replies):
            return state, replies, lost, why
        new = algorithm.server_step(state, replies)
        sent = trips.made[trips.last(0) or 0].message.trees if trips.made else {}
        why = unusable(new, state, sent)
    except Weightless as e:
        why = str(e)
    except LED_NOWHERE as e:
        why = _in_a_line(e)
    if not why:
        return new.with_header(state.header, stop=new.header.stop), replies, lost, ""
    return state, Replies(), trips.without_effect(why), why


def unusable(new: Message, old: Message, sent: Iterable[str] | None = None) -> str:
    """Why a state must not replace the one before it, or nothing: every number must be finite, and
    trees that clients are sent (without `sent`: all) must keep what they held, with its shapes and
    types. What a server's half notes for itself may grow and shrink.
    """
    for tree in old.trees if sent is None else [n for n in sent if n in old.trees]:
        after = new.trees.get(tree, {})
        for name, t in old.trees[tree].items():
            if name not in after or after[name].shape != t.shape or after[name].dtype != t.dtype:
                return f"the state's tree {tree!r} would lose {name} or change its shape or type"
    for tree, arrays in new.trees.items():
        if arrays is not old.trees.get(tree) and not is_finite(arrays):
            return f"the state's tree {tree!r} would hold NaN or Inf"
    for name, value in new.scalars.items():
        if not math.isfinite(value) and math.isfinite(old.scalars.get(name, 0.0)):
            return f"the state's number {name!r} would be {value}"
    return ""


def _nobody(number: int, silent: int, lost: Sequence[Lost]) -> str:
    """Who was lost first, and why."""
    when = f"in round {number + 1}" if silent <= 1 else f"in {silent} rounds up to {number + 1}"
    if not lost:
        return f"nobody was heard {when}"
    others = f", and {len(lost) - 1} more were lost" if len(lost) > 1 else ""
    return f"nobody was heard {when}: client {lost[0].sender}: {lost[0].reason}{others}"


def _traffic(trips: Trips) -> tuple[int, int]:
    """Bytes of arrays down to those the engine sent a message to, and up from whoever answered,
    whether it counted or not.
    """
    down = up = 0
    for trip, replies, lost in zip(trips.made, trips.replies, trips.lost, strict=True):
        answered = sum(h.round == trip.message.round for h in replies.heard.values())
        down += trip.message.count_bytes() * (answered + sum(x.sent for x in lost))
        up += sum(h.bytes for h in replies.heard.values()) + sum(x.bytes for x in lost)
    return down, up


_UNDECLARED_LOSS = Scalar("mean", weight=SIZE)  # of an algorithm that does not declare its loss


@dataclass(frozen=True)
class Scored:
    """What an evaluation found. missing: whose held-out parts are not in it. traffic: bytes down
    and up.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    missing: Sequence[Lost] = ()
    traffic: tuple[int, int] = (0, 0)


def evaluate(
    algorithm: Algorithm, engine: Engine, here: Progress, test: Any | None, personal: bool
) -> Scored:
    """Metrics on the server's test set, and mean, spread and worst over the clients' held-out
    parts.
    """
    state = here.state
    message = algorithm.broadcast(state).with_header(state.header, evaluate=True)
    metrics = algorithm.evaluate(message, test, {}) if test is not None else {}
    if not personal:
        return Scored(metrics)
    trips = Trips(list(engine.ids()), evaluate=True)
    make_trips(algorithm, engine, state, trips, here.heard)
    here.state, replies, lost = _read_scores(algorithm, state, trips)
    replies, misnamed = _without_misnamed(replies)
    return Scored(metrics | _summary(replies), [*lost, *misnamed], _traffic(trips))


def _read_scores(
    algorithm: Algorithm, state: Message, trips: Trips
) -> tuple[Message, Replies, list[Lost]]:
    """What an evaluation brought. One that led nowhere costs its metrics, not the run."""
    why = trips.broken
    if not why:
        try:
            return algorithm.read(state, trips)[:3]
        except LED_NOWHERE as e:
            why = _in_a_line(e)
    return state, Replies(), trips.without_effect(why)


def _summary(replies: Replies) -> dict[str, float]:
    """Of clients' metrics; only the mean where single ones are hidden."""
    means = {n: replies.average(n) for n in replies.totals if n != SIZE}
    found = {f"client_{n}": mean for n, mean in means.items() if mean is not None}
    voices = _voices(replies)
    for name in (n for n in voices if n not in _clashing(voices)):
        values = replies.values(name)
        worst = max(values) if smaller_is_better(name) else min(values)
        found[f"client_{name}"] = float(np.mean(values))
        found[f"client_{name}_spread"] = float(np.std(values))
        found[f"client_{name}_worst"] = worst
    return found


def _voices(replies: Replies) -> Counter[str]:
    """How many clients have each metric."""
    return Counter(n for h in replies.heard.values() for n in h.scalars if n != SIZE)


def _clashing(names: Collection[str]) -> dict[str, str]:
    """Metrics that are called as the spread or the worst of another one is: name -> the other."""
    ends = [(f"{name}_{end}", name) for name in names for end in ("spread", "worst")]
    return {long: name for long, name in ends if long in names}


def _without_misnamed(replies: Replies) -> tuple[Replies, list[Lost]]:
    """Without those clients whose metric would be mistaken for one that more of them have. Which
    names are right nobody declares: honest clients' differ with the classes they hold."""
    voices, odd = _voices(replies), dict[int, str]()
    for pair in _clashing(voices).items():
        fewer, more = sorted(pair, key=lambda name: voices[name])
        if voices[fewer] < voices[more]:
            odd |= {i: fewer for i, h in replies.heard.items() if fewer in h.scalars}
    why = "its metric {!r} could be mistaken for one of the others': none of its metrics count"
    lost = [Lost(i, why.format(odd[i]), True, replies.heard[i].bytes) for i in sorted(odd)]
    kept = {i: h for i, h in replies.heard.items() if i not in odd}
    return replace(replies, heard=kept), lost


def _in_time(item: Arrival, number: int, late: int) -> Arrival:
    """A reply that is too old to be used, or answers what nobody has asked yet, is lost."""
    if isinstance(item, Message | Heard) and not number - late <= item.round <= number:
        size = item.bytes if isinstance(item, Heard) else item.count_bytes()
        why = f"too late: answers round {item.round}"
        if item.round > number:
            why = f"answers round {item.round}, which has not begun"
        return Lost(item.sender, why, item.round > number, size, sent=item.round > number)
    return item

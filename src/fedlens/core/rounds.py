"""One round loop for every algorithm and engine, and the one place where a client half is
entered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Client, generator, seeded
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Draft, Memory, Record
from fedlens.core.message import Message
from fedlens.core.replies import Lost, Nodes, Replies, Weightless, gather


class Engine(Protocol):
    """Carries messages, nothing else."""

    def ids(self) -> Sequence[int]:
        """The clients that can be asked."""
        ...

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterable[Message | Lost | Nodes]:
        """Ask these clients; `heard` tells in which round the server last heard each. Yields
        replies, who got lost and why, and, for an algorithm that needs only sums, partial sums in
        place of the replies' trees."""
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


_UNUSED = torch.Generator()  # of a client half that draws no random numbers


def answer(
    algorithm: Algorithm,
    message: Message,
    id: int,
    federation: Federation,
    memory: Memory,
    heard: int = NEVER,
) -> Message:
    """The client's end of every engine: settle the memory, work with seeded random numbers, leave a
    draft, reply.
    """
    record = memory.load(id)
    kept = record.settle(heard)
    evaluating = bool(message.scalars.get("evaluate"))
    draws = evaluating or algorithm.draws
    rng = generator(int(message.scalars.get("seed", 0)), message.round, id) if draws else _UNUSED
    draft = Draft(kept, read_only=evaluating)
    client = Client(id, federation.holdings[id], rng, draft, federation.held_out_of(id))
    with seeded(rng) if draws else nullcontext():
        if evaluating:
            held_out = client.held_out
            metrics = (
                algorithm.evaluate(message, held_out, draft)
                if held_out is not None and len(held_out)
                else {}
            )
            return Message(
                scalars={
                    **metrics,
                    "examples": float(len(held_out) if held_out is not None else 0),
                },
                sender=id,
            )
        reply = algorithm.client_step(message, client)
    memory.save(id, Record(kept, draft.written, message.round))
    # How much a client counts is worth knowing, and where trees are summed on the way nobody else
    # could tell.
    counts = {
        f"weight:{name}": float(w) for name, w in next(iter(reply.weights.values()), {}).items()
    }
    known = {"round": message.round, "bytes_up": reply.count_bytes(), **counts}
    return replace(reply, scalars={**reply.scalars, **known}, sender=id)


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
    """What is known about a finished round; `metrics.jsonl` holds one of these a line."""

    number: int
    seconds: float
    scalars: Mapping[int, Mapping[str, float]]
    asked: int
    lost: Sequence[Lost]
    bytes_down: int
    bytes_up: int
    metrics: Mapping[str, float]
    state: Message = field(repr=False)  # whoever prints a round does not mean the model
    # their held-out parts are missing from the metrics: often just the clients that do worst
    unevaluated: Sequence[Lost] = ()

    @property
    def loss(self) -> float | None:
        """Mean of the clients' losses, weighted by their examples."""
        pairs = [(s["loss"], s.get("examples", 1.0)) for s in self.scalars.values() if "loss" in s]
        total = sum(w for _, w in pairs)
        return sum(x * w for x, w in pairs) / total if total else None


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
    after_round: Callable[[Progress, Round], None] | None = None,
) -> Message:
    """Run to `rounds` rounds and return the final state. `progress` continues an earlier run.
    Replies up to `late` rounds behind are used. Every `evaluate_every` rounds, and at the end, the
    state is evaluated on `test` and, if `personal`, on the clients' held-out parts. `after_round`
    hears of every round: logging, checkpoints, pictures."""
    here = progress or Progress(algorithm.init())
    while here.done < rounds:
        began, number = time.perf_counter(), here.done
        ids = engine.ids()
        asked = sample(ids, cohort, seed, number)
        state = here.state.note(round=number, rounds=rounds, seed=seed, population=len(ids))
        # What every client may know about the run travels in the message, because nothing else
        # reaches it.
        message = algorithm.broadcast(state).note(
            round=number, rounds=rounds, seed=seed, population=len(ids), cohort=len(asked)
        )
        arrived = (
            _in_time(item, number, late) for item in engine.exchange(message, asked, here.heard)
        )
        replies, lost = gather(arrived, asked)
        try:
            state = algorithm.server_step(state, replies) if len(replies) else state
        except Weightless as e:  # nobody is left: the round is skipped, and nobody was heard
            lost, replies = (
                [*lost, *(Lost(i, str(e), refused=True) for i in replies.senders)],
                Replies(),
            )
        # The round a reply answers is the round its client remembers: a late one confirms the draft
        # of that earlier round.
        here.heard.update({i: int(s.get("round", number)) for i, s in replies.scalars.items()})
        here.state, here.done = state, number + 1
        stop = bool(state.scalars.get("stop"))
        due = bool(evaluate_every) and (
            here.done % evaluate_every == 0 or here.done == rounds or stop
        )
        metrics, unevaluated = (
            evaluate(algorithm, engine, here, test, personal) if due else ({}, [])
        )
        up = int(sum(s.get("bytes_up", 0) for s in replies.scalars.values()))
        finished = Round(
            number,
            time.perf_counter() - began,
            replies.scalars,
            len(asked),
            lost,
            message.count_bytes() * len(asked),
            up,
            metrics,
            state,
            unevaluated,
        )
        del replies  # its sums are as large as a model, and the next round needs the room
        if after_round:
            after_round(here, finished)
        if stop:
            break
    return here.state


def evaluate(
    algorithm: Algorithm, engine: Engine, here: Progress, test: Any | None, personal: bool
) -> tuple[dict[str, float], list[Lost]]:  # fmt: skip
    """Metrics on the server's test set, and mean, spread and worst over the clients' held-out
    parts; who is missing from these, and why.
    """
    message = algorithm.broadcast(here.state).note(
        **{k: here.state.scalars[k] for k in ("round", "seed")}, evaluate=1
    )
    metrics = algorithm.evaluate(message, test, {}) if test is not None else {}
    if not personal:
        return metrics, []
    asked = engine.ids()
    replies, lost = gather(engine.exchange(message, asked, here.heard), asked)
    names = dict.fromkeys(
        n for s in replies.scalars.values() for n in s if n not in ("examples", "round", "bytes_up")
    )
    for name in names:
        values = replies.values(name)
        worst = max(values) if name.endswith("loss") else min(values)
        metrics |= {
            f"client_{name}": float(np.mean(values)),
            f"client_{name}_spread": float(np.std(values)),
            f"client_{name}_worst": worst,
        }
    return metrics, lost


def _in_time(item: Message | Lost | Nodes, number: int, late: int) -> Message | Lost | Nodes:
    if isinstance(item, Message) and item.scalars.get("round", number) < number - late:
        return Lost(item.sender, f"too late: answers round {item.round}")
    return item

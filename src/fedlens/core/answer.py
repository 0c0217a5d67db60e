"""The client's end of every engine: the one place where a client half is entered."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Client, generator, seeded
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Draft, Memory, Record
from fedlens.core.message import Header, Message

_UNUSED = torch.Generator()  # of a client half that draws no random numbers


def answer(
    algorithm: Algorithm,
    message: Message,
    id: int,
    federation: Federation,
    memory: Memory,
    heard: int = NEVER,
) -> Message:
    """A client's end of a message: settle the memory, work with seeded random numbers, leave a
    draft, reply. A message with `evaluate` in its header is answered with metrics, one with a
    `trip` belongs to a wire layer: neither leaves a draft, and the draft of the round at hand
    stays.

    Args:
        algorithm: the stack.
        message: what the server sent.
        id: of the client.
        federation: who holds what.
        memory: of all clients of this process.
        heard: the round in which the server last heard this client.
    """
    header = message.header
    record = memory.load(id)
    kept = record.settle(heard)
    draws = header.evaluate or algorithm.draws
    rng = generator(header.seed, header.round, id) if draws else _UNUSED
    works = not (header.evaluate or header.trip)
    draft = Draft(kept, read_only=not works)
    client = Client(id, federation.holdings[id], rng, draft, federation.held_out_of(id))
    with seeded(rng) if draws else nullcontext():
        if header.evaluate and not header.trip:
            return algorithm.score(message, client)
        reply = algorithm.client_step(message, client)
    if works:
        memory.save(id, Record(kept, draft.written, header.round))
    return as_sent(algorithm, reply, id, header.round)


def as_sent(algorithm: Algorithm, reply: Message, id: int, round: int) -> Message:
    """A reply as it leaves its client: signed, and without the scalars that stay there."""
    local = {n for n, scalar in algorithm.declared().items() if scalar.read == "local"}
    scalars = {n: v for n, v in reply.scalars.items() if n not in local}
    return replace(reply, scalars=scalars, sender=id, header=Header(round=round))

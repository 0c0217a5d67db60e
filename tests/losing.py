"""Clients that are lost in a round of SecureSum, by plan: the same plan on any engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens import Client, Message
from fedlens.algorithms import FedAvg
from fedlens.core.replies import Arrival, Lost
from fedlens.trust.secure_sum import GREET, OPEN_SUM, WORK

# (round, trip, client) -> "before" or "after" the client has worked
Plan = Mapping[tuple[int, int, int], str]

LOST: dict[str, Plan] = {
    # before masking: client 1 never greets, client 2 never deals
    "before": {(0, GREET, 1): "before", (1, WORK, 2): "before", (2, WORK, 2): "before"},
    # masked replies that do not arrive, after clients have changed their memory
    "during": {(0, WORK, 3): "after", (1, WORK, 4): "after", (1, WORK, 5): "after"},
    # after their masked replies have arrived: the others' shares open them all the same
    "after": {(0, OPEN_SUM, 0): "before", (1, OPEN_SUM, 1): "after", (2, OPEN_SUM, 2): "before"},
}
LOST["all at once"] = {**LOST["before"], **LOST["during"], **LOST["after"]}


class Losing:
    """An engine that loses messages or replies."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        engine.keep_singles = True
        self.trips: list[tuple[int, int]] = []
        self.fate: dict[int, str | None] = {}  # of the trip at hand, by client

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        number, trip = message.round, message.header.trip
        if not message.header.evaluate:
            self.trips.append((number, trip))
        fate = self.fate = {i: self.plan.get((number, trip, i)) for i in ids}
        yield from (Lost(i, "unreachable") for i in ids if fate[i] == "before")
        asked = [i for i in ids if fate[i] != "before"]
        for item in self.engine.exchange(message, asked, heard):
            if isinstance(item, Message) and fate[item.sender] == "after":
                yield Lost(item.sender, "reply lost on the way")
            else:
                yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Failing(FedAvg):
    """Clients that break at work, (round, client): their masks are in no reply, and what others
    sent is already part of sums when the server hears of it."""

    failures: tuple[tuple[int, int], ...] = ((0, 3), (1, 0), (1, 6))

    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        if (message.round, client.id) in self.failures:
            raise RuntimeError("broke")
        return reply

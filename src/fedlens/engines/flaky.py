"""Flaky: any engine, with a bad network in front of it, for tests and experiments. Seeded, so that
a bad day can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedlens.core.client import generator
from fedlens.core.limits import Limited, Share
from fedlens.core.message import Message
from fedlens.core.replies import Arrival, Lost


class Flaky(metaclass=Limited):
    """Another engine behind a bad network. What is on its way is nowhere on disk, so a run with
    delays cannot be checkpointed: it is refused at the first attempt.

    Args:
        engine: what carries the messages.
        before: share of clients that never get the message.
        after: share whose reply is lost once they have worked, when their memory has already
            changed.
        delay: share whose reply arrives late; nobody is asked again while a reply is on its way.
        by: how many rounds late.
        seed: of who is lost.
    """

    def __init__(
        self,
        engine: Any,
        *,
        before: Share = 0.0,
        after: Share = 0.0,
        delay: Share = 0.0,
        by: int = 1,
        seed: int = 0,
    ) -> None:
        self.engine, self.seed = engine, seed
        self.before, self.after, self.delay, self.by = before, after, delay, by
        self.delayed: dict[int, tuple[int, Message]] = {}  # sender -> (arrives in round, reply)
        if after or delay:
            engine.keep_singles = True  # a reply that was already summed cannot get lost any more

    def ids(self) -> Sequence[int]:
        ids: Sequence[int] = self.engine.ids()
        return ids

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        if message.header.evaluate:
            yield from self.engine.exchange(message, ids, heard)
            return
        arriving = sorted(s for s, (when, _) in self.delayed.items() if when <= message.round)
        busy = set(self.delayed)
        late = [self.delayed.pop(s)[1] for s in arriving]
        chance = {i: self._draw(message.round, i, message.header.trip) for i in ids}
        asked = []
        for i in ids:
            if chance[i][0] < self.before:
                yield Lost(i, "unreachable", sent=False)
            elif i in busy:
                yield Lost(i, "still busy with an earlier round", sent=False)
            else:
                asked.append(i)
        for item in self.engine.exchange(message, asked, heard):
            if isinstance(item, Message) and chance[item.sender][1] < self.after:
                yield Lost(item.sender, "reply lost on the way")
            elif isinstance(item, Message) and chance[item.sender][2] < self.delay:
                self.delayed[item.sender] = (message.round + self.by, item)
                yield Lost(item.sender, f"reply delayed by {self.by}")
            else:
                yield item
        yield from late

    def _draw(self, number: int, id: int, trip: int) -> torch.Tensor:
        """Three numbers in [0, 1): against `before`, `after` and `delay`. Every trip of a round has
        its own.
        """
        words = (self.seed, number, id, 0xF1) + ((trip,) if trip else ())
        return torch.rand(3, generator=generator(*words))

    def snapshot(self) -> Mapping[int, Path]:
        if self.delay:
            raise ValueError(
                "a run with delayed replies cannot be checkpointed: those on their way would be"
                " lost (set delay to 0)"
            )
        records: Mapping[int, Path] = self.engine.snapshot()
        return records

    def restore(self, records: Mapping[int, Path]) -> None:
        self.engine.restore(records)

    def close(self) -> None:
        self.engine.close()

"""Loopback: every client in this process, every message through its byte form. The reference that
the tests hold other engines against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, Memory
from fedlens.core.message import Message
from fedlens.core.replies import Arrival
from fedlens.engines.worker import Job, Worker, threads


class Loopback:
    """Every message as bytes and back, in this process. `traffic` keeps the bytes of the last
    round, down first: what an observer of the network would have seen.

    Args:
        algorithm: the stack.
        federation: who holds what.
        threads: of torch.
        folder: where client memory goes; a temporary one if not given.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        *,
        threads: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.worker = Worker(algorithm, federation, Memory(folder))
        self.threads = threads
        self.traffic: list[bytes] = []

    def ids(self) -> Sequence[int]:
        return range(len(self.worker.federation))

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        down = bytes(message.to_bytes())
        self.traffic = [down]
        for position, id in enumerate(sorted(ids)):
            self.worker.begin(Message.from_bytes(down, copy=True), sums=False)
            with threads(self.threads):
                (reply,) = self.worker.work([Job(position, id, heard.get(id, NEVER))])
            if isinstance(reply, Message):
                self.traffic.append(bytes(reply.to_bytes()))
                reply = Message.from_bytes(self.traffic[-1], copy=True)
            yield reply

    def snapshot(self) -> Mapping[int, Path]:
        memory = self.worker.memory
        return {i: memory.path(i) for i in memory.flush()} if memory.folder else {}

    def restore(self, records: Mapping[int, Path]) -> None:
        self.worker.memory.restore(records)

    def close(self) -> None:
        pass

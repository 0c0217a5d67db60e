"""What every engine with workers of its own runs inside them: answer, check, fold. It knows nothing of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from fedlens.algorithm import Algorithm
from fedlens.federation import Federation
from fedlens.memory import Memory
from fedlens.message import Message
from fedlens.replies import Fold, Lost, Nodes, refuse
from fedlens.run import answer


class Worker:
    """Holds one resident model (inside the algorithm) and the partial sums of the round at hand."""

    def __init__(self, algorithm: Algorithm, federation: Federation, memory: Memory) -> None:
        self.algorithm, self.federation, self.memory = algorithm, federation, memory
        self.begin(Message(), True)

    def begin(self, message: Message, sums: bool) -> None:
        """A new round. With `sums`, trees are folded here and only scalars are handed out."""
        self.message, self.sums, self.fold = message, sums, Fold()
        self.evaluating = bool(message.scalars.get("evaluate"))

    def work(self, position: int, id: int, heard: int) -> Message | Lost:
        """One client. Whatever it does wrong costs its own reply only."""
        try:
            reply = answer(self.algorithm, self.message, id, self.federation, self.memory, heard)
        except Exception as e:  # a client is somebody else's code and data: anything may come out of it
            return Lost(id, f"{type(e).__name__}: {e}".strip().splitlines()[0][:300])
        return self.admit(position, reply)

    def admit(self, position: int, reply: Message) -> Message | Lost:
        expected = {} if self.evaluating else self.message.derived("expects", lambda: self.algorithm.expects(self.message))
        if why := refuse(reply, expected):
            return Lost(reply.sender, why, refused=True)
        if not self.sums:
            return reply
        self.fold.add(position, reply)
        return Message(scalars=reply.scalars, sender=reply.sender)

    def finish(self) -> Nodes:
        """The partial sums that are left; the round may go on afterwards."""
        nodes, self.fold = self.fold.nodes, Fold()
        return nodes


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Bits depend on the number of threads, so it is set where work is done, and put back."""
    before = torch.get_num_threads()
    if n != before:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n != before:
            torch.set_num_threads(before)


Log = Callable[[str], None]

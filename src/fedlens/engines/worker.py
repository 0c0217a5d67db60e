"""What every engine with workers of its own runs inside them: answer, check, fold. It knows nothing
of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from fedlens.core.algorithm import Algorithm
from fedlens.core.answer import answer
from fedlens.core.federation import Federation
from fedlens.core.memory import Memory
from fedlens.core.message import Header, Message
from fedlens.core.replies import Fold, Heard, Lost, Nodes, Sum, refuse
from fedlens.core.tree import Tree


class Worker:
    """Holds one resident model (inside the algorithm) and the partial sums of the round at hand."""

    def __init__(self, algorithm: Algorithm, federation: Federation, memory: Memory) -> None:
        self.algorithm, self.federation, self.memory = algorithm, federation, memory
        self.begin(Message(), True)

    def begin(self, message: Message, sums: bool) -> None:
        """A new round. With `sums`, trees are folded here and only scalars are handed out."""
        self.message, self.sums, self.fold = message, sums, Fold()

    def work(self, position: int, id: int, heard: int) -> Message | Heard | Lost:
        """One client. Whatever it does wrong costs its own reply only."""
        try:
            reply = answer(self.algorithm, self.message, id, self.federation, self.memory, heard)
        except (
            Exception
        ) as e:  # a client is somebody else's code and data: anything may come out of it
            return Lost(id, f"{type(e).__name__}: {e}".strip().splitlines()[0][:300])
        return self.admit(position, reply)

    def admit(self, position: int, reply: Message, own: bool = False) -> Message | Heard | Lost:
        """Check a reply and fold it. own: it came over a wire, so its arrays are nobody else's."""
        expected = (
            {}
            if self.message.header.evaluate
            else self.message.derived("expects", lambda: self.algorithm.expects(self.message))
        )
        try:
            why = refuse(reply, expected)
        except Exception as e:  # not even what a reply is made of
            why = f"malformed ({type(e).__name__}: {e})".splitlines()[0][:300]
        if why:
            return Lost(reply.sender, why, refused=True)
        if not self.sums:
            return reply
        self.fold.add(position, reply, own)
        return Heard.of(reply)

    def finish(self) -> Nodes:
        """The partial sums that are left; the round may go on afterwards."""
        nodes, self.fold = self.fold.nodes, Fold()
        return nodes


def pack(worker: Worker, singles: Sequence[tuple[int, Message]]) -> tuple[Message, dict[str, Any]]:
    """What a worker hands in: its arrays as one message, and a few words that say which array is
    what.
    """
    index: list[list[Any]] = []
    trees: dict[str, Tree] = {}
    for (level, place), sums in worker.finish().items():
        for (tree, name), total in sums.items():
            trees[str(len(index))] = total.tree
            index.append([level, place, tree, name, total.weight, total.borrowed])
    for position, reply in singles:
        trees |= {f"{position}:{n}": t for n, t in reply.trees.items()}
    told = [
        [position, {t: dict(w) for t, w in reply.weights.items()}, list(reply.trees)]
        for position, reply in singles
    ]
    return Message(trees), {"nodes": index, "singles": told}


def unpack(
    payload: Message, told: Mapping[str, Any], results: MutableMapping[int, Message | Heard | Lost]
) -> Nodes:
    """The partial sums of `pack`; single replies get their trees in `results`."""
    nodes: Nodes = {}
    for k, (level, index, tree, name, weight, borrowed) in enumerate(told["nodes"]):
        nodes.setdefault((level, index), {})[tree, name] = Sum(
            payload.trees[str(k)], weight, borrowed
        )
    for position, weights, names in told["singles"]:
        heard = results[position]
        assert isinstance(heard, Heard)
        trees = {n: payload.trees[f"{position}:{n}"] for n in names}
        header = Header(round=heard.round)
        results[position] = Message(trees, heard.scalars, weights, heard.sender, header)
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

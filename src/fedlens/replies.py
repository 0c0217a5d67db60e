"""Replies: what a round brought, summed in an order that does not depend on who did the summing.

The asked clients, sorted by id, are the leaves of a fixed binary tree. A node adds its left child to its right one, an absent
leaf counts for nothing, and whoever holds both children of a node may add them. So one worker, N workers and a real network
give the same bits, and a process holds at most log2(cohort) partial sums, whatever the cohort.

Where leaves meet, w_l T_l + w_r T_r is a product and then a fused multiply-add; torch fuses in vector and tail code alike, so that
chunks, whole arrays and any number of threads round the same way (a test holds it to that).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlens.message import MEAN, Message
from fedlens.tree import Tree, is_finite, mismatch

CHUNK = 1 << 17  # elements summed at a time: small enough for the cache, large enough that calling torch costs little beside it


@dataclass(frozen=True)
class Lost:
    """A reply that did not count: who, and why in a few words. `refused` if it came but was malformed."""

    sender: int
    reason: str
    refused: bool = False


def refuse(reply: Message, expected: Mapping[str, Tree]) -> str | None:
    """Why a reply must not enter a sum, or None. Shared by all engines, applied before anything is added."""
    for name, value in reply.scalars.items():
        if not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
            return f"scalar {name!r} is not finite"
    for tree, arrays in reply.trees.items():
        if tree not in expected:
            return f"unexpected tree {tree!r}"
        if why := mismatch(arrays, expected[tree]):
            return f"tree {tree!r}: {why}"
        if not is_finite(arrays):
            return f"tree {tree!r} holds NaN or Inf"
        for name, w in reply.weights.get(tree, {}).items():
            if not (0 <= w < float("inf")):
                return f"weight {name!r} of {tree!r} is {w}"
    if missing := expected.keys() - reply.trees.keys():
        return f"tree {min(missing)!r} is missing"
    return None


@dataclass
class Sum:
    """Sum of w T and sum of w, for one tree and one named weight.

    A leaf is `pending`: its arrays are the reply's own, which the client may also remember, and count that many times. They are first
    read, and never written, when the leaf meets another node; a product of its own is then needed on the left side only."""

    tree: Tree
    weight: float
    pending: float | None = None

    def absorb(self, right: Sum) -> Sum:
        """self + right, in place where the arrays are private to the process that folds."""
        for name, t in self.tree.items():
            self.tree[name] = _added(t, self.pending, right.tree[name], right.pending)
        self.weight, self.pending = self.weight + right.weight, None
        return self

    def settled(self) -> Tree:
        """The sum itself, also where there was only one leaf."""
        return self.tree if self.pending is None else {n: _counted(t) * self.pending for n, t in self.tree.items()}


def _added(left: Tensor, times: float | None, right: Tensor, right_times: float | None) -> Tensor:
    """times left + right_times right. Multiplying and adding the right side is one operation, with one rounding, everywhere."""
    alpha = 1.0 if right_times is None else right_times
    if times is None:
        return left.add_(_counted(right), alpha=alpha)
    if times == 1:
        return torch.add(_counted(left), _counted(right), alpha=alpha)
    return (_counted(left) * times).add_(_counted(right), alpha=alpha)


def _counted(t: Tensor) -> Tensor:
    return t if t.is_floating_point() or t.is_complex() else t.double()


Key = tuple[str, str]  # (tree, weight name)
Node = tuple[int, int]  # (level, index): covers the leaves index * 2**level ... (index + 1) * 2**level - 1
Nodes = dict[Node, dict[Key, "Sum"]]


def _weights(reply: Message, tree: str) -> Mapping[str, float]:
    return reply.weights.get(tree) or {MEAN: 1.0}


class Fold:
    """A worker's partial sums: add leaves, in any order; `nodes` are what is left to be added elsewhere."""

    def __init__(self) -> None:
        self.nodes: Nodes = {}

    def add(self, position: int, reply: Message) -> None:
        leaf = {
            (tree, name): Sum(dict(arrays), w, pending=w)
            for tree, arrays in reply.trees.items()
            for name, w in _weights(reply, tree).items()
        }
        self.merge((0, position), leaf)

    def merge(self, node: Node, sums: dict[Key, Sum]) -> None:
        """Climb: while the sibling is here, add the two. Which siblings meet here changes nothing but where they are added."""
        level, index = node
        while (level, index ^ 1) in self.nodes:
            other = self.nodes.pop((level, index ^ 1))
            sums = _join(sums, other) if index % 2 == 0 else _join(other, sums)
            level, index = level + 1, index // 2
        self.nodes[level, index] = sums

    def total(self) -> dict[Key, Sum]:
        """All nodes into one, absent siblings skipped: a lone node climbs as it is."""
        while len(self.nodes) > 1:
            level = min(level for level, _ in self.nodes)
            index = min(i for lv, i in self.nodes if lv == level)
            self.merge((level + 1, index // 2), self.nodes.pop((level, index)))
        return next(iter(self.nodes.values()), {})


def _join(left: dict[Key, Sum], right: dict[Key, Sum]) -> dict[Key, Sum]:
    for key, value in right.items():
        left[key] = left[key].absorb(value) if key in left else value
    return left


@dataclass
class Replies:
    """A round's harvest, as `server_step` sees it: scalars one by one, trees as weighted means.

    `singles` holds the replies themselves; it is empty where an engine summed on the way, which it may do only for an algorithm
    that needs "sums". A layer hands its inner algorithm a changed mean with `put`.
    """

    scalars: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by sender, sorted
    sums: Mapping[Key, Sum] = field(default_factory=dict)
    singles: Mapping[int, Message] = field(default_factory=dict)  # by position in the sorted cohort
    means: Mapping[str, Tree] = field(default_factory=dict)  # put there by layers

    def __len__(self) -> int:
        return len(self.scalars)

    def __iter__(self) -> Iterator[Message]:
        """The single replies, sorted by sender."""
        if self.scalars and not self.singles:
            raise ValueError("single replies were asked for, but only their sums are known")
        return (self.singles[p] for p in sorted(self.singles))

    @property
    def senders(self) -> Sequence[int]:
        return list(self.scalars)

    def values(self, scalar: str) -> list[float]:
        """One scalar of every reply that has it, in order of sender."""
        return [s[scalar] for s in self.scalars.values() if scalar in s]

    def trees(self) -> list[str]:
        names = [t for t, _ in self.sums] + [t for m in self.singles.values() for t in m.trees] + list(self.means)
        return list(dict.fromkeys(names))

    def weight(self, tree: str, name: str = MEAN) -> float:
        """The sum of one named weight."""
        if (tree, name) in self.sums:
            return self.sums[tree, name].weight
        leaves = _leaves(self.singles, tree, name)
        weights = [w for _, _, w in leaves]
        for left, right in _plan([p for p, _, _ in leaves]):
            weights[left] += weights[right]
        return weights[0]

    def mean(self, tree: str, name: str = MEAN) -> Tree:
        """Weighted mean; integers come back as float64: `tree.cast` returns them to their type."""
        if name == MEAN and tree in self.means:
            return dict(self.means[tree])
        weight = self.weight(tree, name)
        if weight == 0:
            raise ZeroDivisionError(f"the weights {name!r} of {tree!r} sum to zero")
        if (tree, name) in self.sums:
            return {n: t / weight for n, t in self.sums[tree, name].settled().items()}
        return sum_singles(_leaves(self.singles, tree, name), over=weight)

    def put(self, **means: Tree) -> Replies:
        """The same replies with other means: the inner algorithm sees one reply that is already averaged."""
        singles = {p: m.drop(*means) for p, m in self.singles.items()}
        return Replies(self.scalars, self.sums, singles, {**self.means, **means})


Leaf = tuple[int, Tree, float]  # position, arrays, weight


def _leaves(singles: Mapping[int, Message], tree: str, name: str) -> list[Leaf]:
    found = [(p, m.trees[tree], _weights(m, tree)[name]) for p, m in sorted(singles.items()) if tree in m.trees]
    if not found:
        raise KeyError(f"no reply carries the tree {tree!r} with a weight {name!r}")
    return found


def sum_singles(leaves: Sequence[Leaf], over: float) -> Tree:
    """Sum of w T, divided by `over`: the additions of `Fold`, one cache-sized chunk of all replies at a time, so that each is read once."""
    plan = _plan([p for p, _, _ in leaves])
    weights: list[float | None] = [w for _, _, w in leaves]
    out: Tree = {}
    for key, first in leaves[0][1].items():
        chunks = [torch.split(arrays[key].reshape(-1), CHUNK) for _, arrays, _ in leaves]
        total = torch.empty(first.numel(), dtype=_counted(first).dtype)
        for k, space in enumerate(torch.split(total, CHUNK)):
            parts, pending = [c[k] for c in chunks], list(weights)
            for left, right in plan:
                parts[left] = _added(parts[left], pending[left], parts[right], pending[right])
                pending[left] = None
            whole = parts[0] if pending[0] is None else _counted(parts[0]) * pending[0]
            torch.div(whole, over, out=space)
        out[key] = total.reshape(first.shape)
    return out


def _plan(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The additions (left += right) that the fixed tree makes of these leaves; the total ends up in the first one."""
    steps: list[tuple[int, int]] = []
    level = {p: i for i, p in enumerate(positions)}
    while len(level) > 1:
        above: dict[int, int] = {}
        for p, i in level.items():
            if p // 2 in above:
                steps.append((above[p // 2], i))
            else:
                above[p // 2] = i
        level = above
    return steps


def gather(arrived: Iterable[Message | Lost | Nodes], ids: Sequence[int]) -> tuple[Replies, list[Lost]]:
    """Everything an engine yields in a round, in whatever order, into sorted replies and a list of who is missing and why."""
    place = {i: p for p, i in enumerate(sorted(ids))}
    came: list[Message] = []
    lost: list[Lost] = []
    fold = Fold()
    for item in arrived:
        if isinstance(item, Lost):
            lost.append(item)
        elif isinstance(item, Message):
            came.append(item)
        else:
            for node, sums in item.items():
                fold.merge(node, sums)
    came.sort(key=lambda m: (m.sender, m.round))
    # A late reply of a client that was not asked this round stands behind those that were.
    late = [m.sender for m in came if m.sender not in place]
    place.update({sender: len(ids) + k for k, sender in enumerate(late)})
    singles = {place[m.sender]: m for m in came if m.trees}
    return Replies({m.sender: m.scalars for m in came}, fold.total(), singles), sorted(lost, key=lambda x: x.sender)

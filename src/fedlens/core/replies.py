"""Replies: what a round brought, averaged in an order that does not depend on who did it.

The asked clients, sorted by id, are the leaves of a fixed binary tree. A node joins its two
children, an absent leaf counts for nothing, and whoever holds both children of a node may join
them. So one worker, N workers and a real network give the same bits, and a process holds at most
log2(cohort) partial results, whatever the cohort.

A sum is kept as a mean and its weight. Joining (A, a) and (B, b) is one operation, A + b/(a+b) (B -
A): no products beforehand, no division afterwards, and nothing can overflow. torch rounds it alike
in vector and tail code, so that chunks, whole arrays and any number of threads give the same bits
(a test holds it to that).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.core.limits import MOST_WEIGHT
from fedlens.core.message import MEAN, RING, Message
from fedlens.core.tree import Tree, is_finite, mismatch, squared_length

# What a server's half looks at: weighted sums only; trees as sums and scalars one by one; or single
# replies. Each asks for more than the one before.
Needs = Literal["sums", "scalars", "replies"]
NEEDS: tuple[Needs, ...] = ("sums", "scalars", "replies")
# elements joined at a time: small enough for the cache, large enough that calling torch costs
# little beside it
CHUNK = 1 << 17
# No number of a reply is larger, and no array longer: nothing honest is, and the squares of what
# is shorter can still be added up in float32.
LONGEST = 1e15
MOST_SCALARS = 100  # in a reply
MOST_WEIGHTS = 10  # of one tree
NAME_LENGTH = 100  # of a scalar
REASON_LENGTH = 400  # that a reply was lost for
# The two scalars that the core itself reads: what a round reports as its loss, and how much data a
# client has worked on or was evaluated on.
LOSS, SIZE = "loss", "examples"


@dataclass(frozen=True)
class Scalar:
    """A number that a reply carries, and how the server may read it.

    Args:
        read: "mean" and "sum" are read over all clients together (`Replies.average`,
            `Replies.total`); "each" one by one (`Replies.values`), which an algorithm may do only
            if it needs "scalars"; "local" never leaves the client: layers further out read it
            there.
        weight: for a mean, the scalar that says how much a client counts.
        record: a column per client in `metrics.jsonl`, where single values are known.
    """

    read: Literal["mean", "sum", "each", "local"] = "each"
    weight: str | None = None
    record: bool = False


@dataclass(frozen=True)
class Lost:
    """A reply that did not count.

    Args:
        sender: the client's number.
        reason: why, in a few words.
        refused: it came, but must not count.
        bytes: of its arrays, if it came.
        sent: did the message of this round go down to the client?
    """

    sender: int
    reason: str
    refused: bool = False
    bytes: int = 0
    sent: bool = True

    def __post_init__(self) -> None:
        """A reason may quote what a client sent: one printable line is left of it."""
        line = "".join(c if c.isprintable() else "?" for c in self.reason.strip()[:REASON_LENGTH])
        object.__setattr__(self, "reason", line)


@dataclass(frozen=True)
class Heard:
    """A reply that counted, without its trees: what the server's end of an engine saw of it.

    Args:
        sender: the client's number.
        round: the round it answers.
        scalars: what it reported.
        bytes: of its arrays.
        weights: how much its first tree counts in each sum, by name: what was used, not something
            said beside it.
        texts: as they came.
    """

    sender: int
    round: int
    scalars: Mapping[str, float]
    bytes: int
    weights: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(reply: Message) -> Heard:
        first = next(iter(reply.trees), "")
        weights = {n: float(w) for n, w in reply.weights.get(first, {}).items()}
        size = reply.count_bytes()
        return Heard(reply.sender, reply.round, reply.scalars, size, weights, reply.texts)


class Weightless(ValueError):
    """A round that brought replies of which none counts."""


def refuse(
    reply: Message,
    expected: Mapping[str, Tree],
    max_weight: float = MOST_WEIGHT,
    declared: Mapping[str, Scalar] | None = None,
    weighing: Mapping[str, Sequence[str]] | None = None,
) -> str | None:
    """Why a reply must not enter a sum, or None. Shared by all engines, applied before anything is
    added.

    max_weight: that it may claim, in a tree's weight and in a scalar by which others are weighted.
    declared, weighing: the stack's scalars, and the names of its trees' weights.
    """
    weights_of = {scalar.weight for scalar in (declared or {}).values()}
    if len(reply.scalars) > MOST_SCALARS:
        return f"it has more than {MOST_SCALARS} scalars"
    for name, value in reply.scalars.items():
        if not is_name(name):
            return "a scalar's name is too long or not printable"
        if not _is_number(value) or abs(value) > LONGEST:
            return f"scalar {name!r} is not a finite number of at most {LONGEST:g}"
        if name in weights_of and (why := _odd_weight(value, max_weight)):
            return f"scalar {name!r} is {why}"
    for tree, arrays in reply.trees.items():
        if tree not in expected:
            return f"unexpected tree {_shown(tree)}"
        if why := mismatch(arrays, expected[tree]) or _odd_type(arrays, expected[tree]):
            return f"tree {tree!r}: {why}"
        if why := _too_long(arrays):
            return f"tree {tree!r} {why}"
    for tree, weights in reply.weights.items():
        if tree not in reply.trees:
            return f"weights of a tree {_shown(tree)} that it does not have"
        names = (weighing or {}).get(tree, weights)
        # of a sum in a ring, `leaves_ring` knows more
        if len(weights) > MOST_WEIGHTS or (RING not in names and weights.keys() ^ names):
            return f"tree {tree!r} has other weights than it should"
        for name, weight in weights.items():
            if why := _odd_weight(weight, max_weight):
                return f"weight {_shown(name)} of {tree!r} is {why}"
    if missing := expected.keys() - reply.trees.keys():
        return f"tree {min(missing)!r} is missing"
    return None


def leaves_ring(
    reply: Message, expected: Mapping[str, Tree], weighing: Mapping[str, Sequence[str]]
) -> str | None:
    """Why a tree that is to be added in a ring could not be, or None. Its type is the ring: here
    other integers will not do. Its weight's name says that it is added and not averaged."""
    for tree in (t for t, names in weighing.items() if RING in names and t in reply.trees):
        if dict(reply.weights.get(tree, {})) != {RING: 1}:
            return f"tree {tree!r} must have one weight, {RING!r}, of 1"
        for name, t in reply.trees[tree].items():
            if t.dtype != expected[tree][name].dtype:
                return f"tree {tree!r}: {name} is {t.dtype}, expected {expected[tree][name].dtype}"
    return None


def in_order(reply: Message, expected: Mapping[str, Tree]) -> Message:
    """A reply that was not refused, with its trees and their arrays in the order in which they are
    expected: what depends on an order must not depend on its sender."""
    trees = {tree: {n: reply.trees[tree][n] for n in like} for tree, like in expected.items()}
    return replace(reply, trees=trees, _derived={})


def most_bytes(expected: Mapping[str, Tree]) -> int:
    """A reply that is larger than this, header and all, is refused before it is put together."""
    # Integers may come as float64. The rest is for names, which a header has twice, and numbers.
    arrays = [(len(n), t) for like in expected.values() for n, t in like.items()]
    return (1 << 20) + sum(
        t.numel() * max(t.element_size(), _counts_as(t).itemsize) + 8 * length + 400
        for length, t in arrays
    )


def is_name(name: str) -> bool:
    """Of a scalar: short, and safe to print."""
    return len(name) <= NAME_LENGTH and name.isprintable()


def _shown(name: str) -> str:
    """Somebody else's name for something, in a message of ours."""
    return repr(name[:NAME_LENGTH])


def _odd_weight(weight: Any, most: float) -> str | None:
    if not _is_number(weight) or weight < 0:
        return f"{weight if isinstance(weight, float) else 'odd'}, not a number of at least 0"
    if weight > most:
        return f"{weight:g}, more than one client may claim (federation.max_weight = {most:g})"
    return None


def _too_long(arrays: Tree) -> str | None:
    if all(squared_length(t) <= LONGEST**2 for t in arrays.values()):
        return None
    if not is_finite(arrays):
        return "holds NaN or Inf"
    return f"is longer than {LONGEST:g}: no update is"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -math.inf < value < math.inf


def _odd_type(arrays: Tree, like: Tree) -> str | None:
    """Two types cannot be joined, except that all integers are averaged as float64."""
    for name, t in arrays.items():
        if not isinstance(t, Tensor):
            return f"{name} is a {type(t).__name__}, not a tensor"
        if _counts_as(t) != _counts_as(like[name]):
            return f"{name} is {t.dtype}, expected {like[name].dtype}"
        if t.requires_grad:
            return f"{name} still carries its gradient: detach it"
    return None


@dataclass
class Sum:
    """Sum of w T and sum of w, for one tree and one named weight, kept as the mean and its weight.

    A leaf's arrays are `borrowed`: they are the reply's own, which the client may also remember,
    and are never written to."""

    tree: Tree
    weight: float
    borrowed: bool = False

    def absorb(self, right: Sum, spare: list[Tree], ring: bool = False) -> Sum:
        """self + right, written where nobody else looks: over self, or over what an earlier join
        has left in `spare`. ring: whole numbers, added exactly and modulo 2^bits.
        """
        share = _share(self.weight, right.weight)
        space = self.tree if not self.borrowed else spare.pop() if spare else {}
        for name, t in self.tree.items():
            if ring:
                place = space[name] if name in space else _apart(t)
                self.tree[name] = torch.add(t, right.tree[name], out=place)
            else:
                self.tree[name] = _toward(t, right.tree[name], share, space.get(name))
        if not right.borrowed:
            spare.append(right.tree)
        self.weight, self.borrowed = self.weight + right.weight, False
        return self


def _share(left: float, right: float) -> float:
    """How far the mean moves towards the right side; nothing moves nothing."""
    return right / (left + right) if right else 0.0


def _toward(left: Tensor, right: Tensor, share: float, space: Tensor | None) -> Tensor:
    left, right = counted(left), counted(right)
    return torch.lerp(
        left,
        right,
        share,
        out=_apart(left) if space is None or space.dtype != left.dtype else space,
    )


def _apart(like: Tensor) -> Tensor:
    """An empty array; a large one lies outside malloc's heap, where it would outlive its neighbours
    and leave holes that nothing fits.
    """
    if like.numel() < CHUNK or like.device.type != "cpu":
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def counted(t: Tensor) -> Tensor:
    """Integers are averaged as float64."""
    return t.to(_counts_as(t))


def _counts_as(t: Tensor) -> torch.dtype:
    return t.dtype if t.is_floating_point() or t.is_complex() else torch.float64


Key = tuple[str, str]  # (tree, weight name)
# (level, index): covers the leaves index * 2**level ... (index + 1) * 2**level - 1
Node = tuple[int, int]
Nodes = dict[Node, dict[Key, "Sum"]]


def _weights(reply: Message, tree: str) -> Mapping[str, float]:
    return reply.weights.get(tree) or {MEAN: 1.0}


class Fold:
    """A worker's partial sums: add leaves, in any order; `nodes` are what is left to be added
    elsewhere. Arrays that a join leaves over serve the next one: malloc would rather grow than fit
    large aligned blocks into the holes they left."""

    def __init__(self) -> None:
        self.nodes: Nodes = {}
        self.spare: dict[Key, list[Tree]] = {}

    def add(self, position: int, reply: Message, own: bool = False) -> None:
        """own: nobody else has this reply's arrays, they may be written over. Two sums of one tree
        still need two places.
        """
        leaf = {
            (tree, name): Sum(dict(arrays), w, borrowed=not own or len(_weights(reply, tree)) > 1)
            for tree, arrays in reply.trees.items()
            for name, w in _weights(reply, tree).items()
        }
        self.merge((0, position), leaf)

    def merge(self, node: Node, sums: dict[Key, Sum]) -> None:
        """Climb: while the sibling is here, add the two. Which siblings meet here changes nothing
        but where they are added.
        """
        level, index = node
        while (level, index ^ 1) in self.nodes:
            other = self.nodes.pop((level, index ^ 1))
            sums = self.join(sums, other) if index % 2 == 0 else self.join(other, sums)
            level, index = level + 1, index // 2
        self.nodes[level, index] = sums

    def join(self, left: dict[Key, Sum], right: dict[Key, Sum]) -> dict[Key, Sum]:
        for key, value in right.items():
            if key in left:
                spare = self.spare.setdefault(key, [])
                left[key] = left[key].absorb(value, spare, ring=key[1] == RING)
            else:
                left[key] = value
        return left

    def total(self) -> dict[Key, Sum]:
        """All nodes into one, absent siblings skipped: a lone node climbs as it is."""
        while len(self.nodes) > 1:
            level = min(level for level, _ in self.nodes)
            index = min(i for lv, i in self.nodes if lv == level)
            self.merge((level + 1, index // 2), self.nodes.pop((level, index)))
        return next(iter(self.nodes.values()), {})


@dataclass
class Replies:
    """What a round brought, as `server_step` sees it: scalars one by one, trees as weighted means.
    A layer hands its inner algorithm a changed mean with `put`.

    Args:
        heard: the replies that counted, by sender, sorted.
        sums: weighted sums of trees.
        singles: the replies themselves, by position in the sorted cohort; empty where an engine
            summed on the way, which it may do only for an algorithm that does not need "replies".
        means: put there by layers.
        allowed: what the algorithm said it looks at; more is refused.
        declared: scalars of the stack.
        totals: of scalars whose single values nobody knows, the sum of value x weight, and of the
            weight.
    """

    heard: Mapping[int, Heard] = field(default_factory=dict)
    sums: Mapping[Key, Sum] = field(default_factory=dict)
    singles: Mapping[int, Message] = field(default_factory=dict)
    means: Mapping[str, Tree] = field(default_factory=dict)
    allowed: Needs = "replies"
    declared: Mapping[str, Scalar] = field(default_factory=dict)
    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.heard)

    def __iter__(self) -> Iterator[Message]:
        """The single replies, sorted by sender."""
        self._permit("replies")
        if self.heard and not self.singles:
            raise ValueError("single replies were asked for, but only their sums are known")
        return (self.singles[p] for p in sorted(self.singles))

    @property
    def senders(self) -> Sequence[int]:
        return list(self.heard)

    @property
    def scalars(self) -> Mapping[int, Mapping[str, float]]:
        """What every client reported, by sender. For an algorithm that needs "scalars"."""
        self._permit("scalars")
        return {i: h.scalars for i, h in self.heard.items()}

    def values(self, scalar: str) -> list[float]:
        """One scalar of every reply that has it, in order of sender. For an algorithm that needs
        "scalars".
        """
        self._permit("scalars")
        return self._each(scalar)

    def total(self, scalar: str) -> float:
        """The sum of one scalar over the replies that have it."""
        if scalar in self.totals:
            return self.totals[scalar][0]
        return sum(self._each(scalar))

    def average(self, scalar: str) -> float | None:
        """The mean of one scalar over the replies that have it; None where nobody has it. What it
        is weighted by is declared with it: another scalar, 1 where a reply lacks that.
        """
        if scalar in self.totals:
            value, whole = self.totals[scalar]
            return value / whole if whole else None
        weight = self.declared[scalar].weight if scalar in self.declared else None
        if weight is None:
            return self.total(scalar) / n if (n := len(self._each(scalar))) else None
        pairs = [
            (h.scalars[scalar], h.scalars.get(weight, 1.0))
            for h in self.heard.values()
            if scalar in h.scalars
        ]
        whole = sum(w for _, w in pairs)
        return sum(x * w for x, w in pairs) / whole if whole else None

    def _each(self, scalar: str) -> list[float]:
        return [h.scalars[scalar] for h in self.heard.values() if scalar in h.scalars]

    def limited_to(self, needs: Needs, declared: Mapping[str, Scalar]) -> Replies:
        """The same, for a stack that said what it looks at and what its scalars are."""
        return replace(self, allowed=needs, declared=declared)

    def _permit(self, wanted: Needs) -> None:
        if NEEDS.index(self.allowed) < NEEDS.index(wanted):
            raise PermissionError(
                f'server_step looks at {wanted}, but the stack says that it needs "{self.allowed}":'
                f' a layer that does so has own_needs = "{wanted}"'
            )

    def trees(self) -> list[str]:
        names = (
            [t for t, _ in self.sums]
            + [t for m in self.singles.values() for t in m.trees]
            + list(self.means)
        )
        return list(dict.fromkeys(names))

    def weight(self, tree: str, name: str = MEAN) -> float:
        """The sum of one named weight."""
        if (tree, name) in self.sums:
            return self.sums[tree, name].weight
        positions, weights = self._positions(tree), self._weights(tree, name)
        for left, right in _plan(positions):
            weights[left] += weights[right]
        return weights[0]

    def mean(self, tree: str, name: str = MEAN) -> Tree:
        """Weighted mean; integers come back as float64: `tree.cast` returns them to their type."""
        if name == MEAN and tree in self.means:
            return dict(self.means[tree])
        if self.weight(tree, name) == 0:
            raise Weightless(f"the weights {name!r} of {tree!r} sum to zero")
        if (tree, name) in self.sums:
            # Of its own: a worker's sums lie in a mapped file that the next round writes to.
            return {n: counted(t).clone() for n, t in self.sums[tree, name].tree.items()}
        return self._folded(tree, [self._weights(tree, name)])

    def ring_sum(self, tree: str) -> Tree:
        """Whole numbers, added exactly and modulo 2^bits, of an array of one's own."""
        if (tree, RING) in self.sums:
            return {n: t.clone() for n, t in self.sums[tree, RING].tree.items()}
        found = [self.singles[p].trees[tree] for p in self._positions(tree)]
        total = {n: t.clone() for n, t in found[0].items()} if found else {}
        for other in found[1:]:
            for n, t in total.items():
                t.add_(other[n])
        return total

    def blend(
        self, tree: str, first: str, second: str, share: float, needs: Needs = "sums"
    ) -> Tree:
        """(1 - share) of one mean and share of another; single replies are read once for both, and
        an unused mean is not made.

        An algorithm that `needs` replies gets them from every engine, so one mean with blended
        weights will do: half the work of two means, in other last bits than those two have, which
        is why an algorithm that needs only sums cannot have it."""
        if share in (0, 1):
            return self.mean(tree, second if share else first)
        if (tree, first) in self.sums:
            right = self.mean(tree, second)
            return {
                n: torch.lerp(left, right[n], share) for n, left in self.mean(tree, first).items()
            }
        a, b = self._weights(tree, first), self._weights(tree, second)
        if needs != "replies":
            return self._folded(tree, [a, b], share)
        whole = self.weight(tree, first), self.weight(tree, second)
        pairs = zip(a, b, strict=True)
        blended = [(1 - share) * x / whole[0] + share * y / whole[1] for x, y in pairs]
        return self._folded(tree, [blended])

    def _positions(self, tree: str) -> list[int]:
        return [p for p in sorted(self.singles) if tree in self.singles[p].trees]

    def _weights(self, tree: str, name: str) -> list[float]:
        """A reply without this weight does not count in this sum, as in a fold."""
        found = [_weights(self.singles[p], tree) for p in self._positions(tree)]
        if not any(name in w for w in found):
            raise Weightless(f"no reply carries the tree {tree!r} with a weight {name!r}")
        return [w.get(name, 0.0) for w in found]

    def _folded(self, tree: str, weights: Sequence[list[float]], share: float = 0.0) -> Tree:
        """The joins of `Fold`, one cache-sized chunk of all replies at a time, so that each is read
        once; two means are blended.
        """
        positions = self._positions(tree)
        steps = [_steps(positions, of_replies) for of_replies in weights]
        trees = [self.singles[p].trees[tree] for p in positions]
        out: Tree = {}
        for key, first in trees[0].items():
            total = torch.empty(first.numel(), dtype=counted(first).dtype)
            chunks = zip(
                torch.split(total, CHUNK),
                *(torch.split(t[key].reshape(-1), CHUNK) for t in trees),
                strict=True,
            )
            spare = [
                torch.empty(min(CHUNK, len(total)), dtype=total.dtype)
                for _ in range(len(trees).bit_length() + 2)
            ]
            for space, *parts in chunks:
                _fold(parts, steps[0], space, spare[1:])
                if len(steps) > 1:
                    space.lerp_(_fold(parts, steps[1], spare[0][: len(space)], spare[1:]), share)
            out[key] = total.reshape(first.shape)
        return out

    def put(self, **means: Tree) -> Replies:
        """The same replies with other means: the inner algorithm sees one reply that is already
        averaged.
        """
        singles = {p: m.drop(*means) for p, m in self.singles.items()}
        return replace(self, singles=singles, means={**self.means, **means})


Step = tuple[int, int, float]  # left moves towards right by so much


def _steps(positions: Sequence[int], weights: list[float]) -> list[Step]:
    steps, weights = [], list(weights)
    for left, right in _plan(positions):
        steps.append((left, right, _share(weights[left], weights[right])))
        weights[left] += weights[right]
    return steps


def _fold(
    parts: Sequence[Tensor], steps: Sequence[Step], space: Tensor, spare: Sequence[Tensor]
) -> Tensor:
    """One chunk of every reply into one mean, written to `space`; what the replies own is not
    touched. Partial means lie in `spare`.
    """
    parts, free = [counted(p) for p in parts], [s[: len(space)] for s in spare]
    if not steps:
        return space.copy_(parts[0])
    held: dict[int, Tensor] = {}
    for left, right, share in steps[:-1]:
        if left not in held:
            held[left] = free.pop()
        parts[left] = torch.lerp(parts[left], parts[right], share, out=held[left])
        if right in held:
            free.append(held.pop(right))
    left, right, share = steps[-1]
    return torch.lerp(parts[left], parts[right], share, out=space)


def _plan(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The joins (left with right) that the fixed tree makes of these leaves, a branch at a time, so
    that few partial results are alive at once; the total ends up in the first one."""
    steps: list[tuple[int, int]] = []

    def climb(leaves: Sequence[int], level: int) -> int:
        if len(leaves) == 1:
            return leaves[0]
        cut = next(
            (k for k, i in enumerate(leaves) if positions[i] >> (level - 1) & 1), len(leaves)
        )
        if cut in (0, len(leaves)):
            return climb(leaves, level - 1)
        left, right = climb(leaves[:cut], level - 1), climb(leaves[cut:], level - 1)
        steps.append((left, right))
        return left

    if positions:
        climb(range(len(positions)), max(positions).bit_length())
    return steps


Arrival = Message | Heard | Lost | Nodes  # what an engine yields in a round, in any order


def gather(arrived: Iterable[Arrival], ids: Sequence[int]) -> tuple[Replies, list[Lost]]:
    """Everything an engine yields in a round, in whatever order, into sorted replies and a list of
    who is missing and why.
    """
    place = {i: p for p, i in enumerate(sorted(ids))}
    whole: list[Message] = []
    heard: list[Heard] = []
    lost: list[Lost] = []
    fold = Fold()
    for item in arrived:
        if isinstance(item, Lost):
            lost.append(item)
        elif isinstance(item, Heard):
            heard.append(item)
        elif isinstance(item, Message):
            heard.append(Heard.of(item))
            whole.append(item)
        else:
            for node, sums in item.items():
                fold.merge(node, sums)
    heard.sort(key=lambda h: (h.sender, h.round))
    whole.sort(key=lambda m: (m.sender, m.round))
    # A late reply of a client that was not asked this round stands behind those that were.
    late = [h.sender for h in heard if h.sender not in place]
    place.update({sender: len(ids) + k for k, sender in enumerate(late)})
    singles = {place[m.sender]: m for m in whole if m.trees}
    replies = Replies({h.sender: h for h in heard}, fold.total(), singles)
    return replies, sorted(lost, key=lambda x: x.sender)

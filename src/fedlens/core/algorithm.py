"""An algorithm is what happens at both ends of a message. A layer is an algorithm around an
algorithm.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from fedlens.core.client import Client, generator
from fedlens.core.federation import Federation
from fedlens.core.message import Message
from fedlens.core.picture import Picture
from fedlens.core.replies import Needs as Needs
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree

Stage = Literal["learn", "share", "merge", "wire"]


class StackError(ValueError):
    """A stack that cannot work, refused when it is built."""


class Algorithm(ABC):
    """Two functions at each end, and a few beside them. `state` lives on the server,
    `client.memory` on the clients.
    """

    needs: Needs = (
        "sums"  # does server_step look at single replies, or only at their weighted sums?
    )
    draws: ClassVar[bool] = (
        # does client_step use random numbers, `client.rng` or hidden ones? Making them takes 100 us
        # a client
        True
    )
    trains: ClassVar[bool] = (
        # does client_step run the training loop, so that terms can be added to its objective?
        False
    )
    # what a real site decides for itself when it joins, not the recipe: name -> one line of help
    site_options: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def init(self) -> Message:
        """The state before the first round."""

    @abstractmethod
    def broadcast(self, state: Message) -> Message:
        """What goes down to the clients of this round."""

    @abstractmethod
    def client_step(self, message: Message, client: Client) -> Message:
        """What a client makes of it: the reply."""

    @abstractmethod
    def server_step(self, state: Message, replies: Replies) -> Message:
        """The next state."""

    def given(self, facts: Mapping[str, Any]) -> Algorithm:
        """This algorithm, told before the first round what is public about the federation
        (`Federation.facts`: the size of a scene, its noise). For the server's half: what a client
        must know of it travels in a message."""
        return self

    def at_site(self, options: Mapping[str, str]) -> Algorithm:
        """This algorithm as one real site runs it, with what the site chose of the `site_options`
        of all parts.
        """
        return self

    def expects(self, message: Message) -> Mapping[str, Tree]:
        """For every tree of a reply, a tree with the same names, shapes and types. Whatever does
        not fit is refused before the sum.
        """
        return {}

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        """Metrics of what was broadcast, on a client's held-out part (with its memory) or on the
        server's test set (with none).
        """
        return {}

    def result(self, state: Message) -> Any:
        """What was learned or restored, as the task understands it: a network, an image."""
        return state

    def pictures(
        self, state: Message, federation: Federation, memory: Callable[[int], Mapping[str, Tree]]
    ) -> Sequence[Picture]:
        """What an algorithm itself has to show, beside the task's pictures. `memory` gives what a
        client keeps, where that is known: in a simulation, never at a real site."""
        return ()

    @property
    def paced_by(self) -> str | None:
        """The setting by which what a round does depends on how many are planned, if there is one:
        that number cannot change on the way.
        """
        return None

    @property
    def base(self) -> Algorithm:
        return self

    def parts(self) -> Iterator[Algorithm]:
        """The base, then every layer from the inside out."""
        yield self


class Layer(Algorithm):
    """Override the halves that change; everything else goes to `inner`. Constructor arguments are
    the configuration.
    """

    stage: ClassVar[Stage] = "learn"
    own_needs: ClassVar[Needs] = "sums"
    hides_replies: ClassVar[bool] = (
        False  # single replies are not visible further in (secure aggregation)
    )
    merges: ClassVar[bool] = (
        False  # decides how single deltas become one: a stack can do that only once
    )
    of_mean: ClassVar[bool] = (
        # changes the merged update, so whatever looks at single ones must come before it, further
        # out
        False
    )
    steers: ClassVar[bool] = (
        False  # adds a pull, so that local steps are no longer plain gradients of the loss
    )
    # its one own parameter, and what `compare --tune` tries for it
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    inner: Algorithm

    def around(self, inner: Algorithm) -> Layer:
        """This layer around `inner`, or a StackError that says why not."""
        name = type(self).__name__
        if any(type(part) is type(self) for part in inner.parts()):
            raise StackError(
                f"{name} is in this stack twice: both would write the same trees and the same"
                " memory"
            )
        if self.stage == "learn" and not inner.trains:
            raise StackError(
                f"{name} changes how clients train, but {type(inner.base).__name__} does not train"
            )
        for part in inner.parts():
            if isinstance(part, Layer) and part.stage == "wire" and self.stage != "wire":
                raise StackError(
                    f"{name} stands outside {type(part).__name__}, which decides what goes on the"
                    f" wire: put {name} before it in the stack"
                )
        if self.hides_replies and inner.needs == "replies":
            who = next(
                type(p).__name__
                for p in inner.parts()
                if getattr(p, "own_needs", p.needs) == "replies"
            )
            raise StackError(f"{name} hides single replies, but {who} needs them")
        self._check_merging(inner)
        layer = copy.copy(self)
        layer.inner = inner
        layer.needs = "replies" if "replies" in (self.own_needs, inner.needs) else "sums"
        layer.check(inner)
        return layer

    def _check_merging(self, inner: Algorithm) -> None:
        """The outermost layer sees the replies first: single updates must be looked at before they
        are one.
        """
        if not (self.merges or self.of_mean):
            return
        name = type(self).__name__
        for part in inner.parts():
            if not isinstance(part, Layer):
                continue
            other = type(part).__name__
            if self.merges and part.merges:
                raise StackError(
                    f"{name} and {other} both decide how replies become one: keep one of them"
                )
            if part.merges or (part.stage == "merge" and part.own_needs == "replies"):
                raise StackError(
                    f"{name} works on the merged update, {other} on single ones: put {name} before"
                    f" {other} in the stack"
                )

    def check(self, inner: Algorithm) -> None:
        """Refuse an inner algorithm this layer cannot work on: raise a StackError."""

    @property
    def trains(self) -> bool:  # type: ignore[override]
        return self.inner.trains

    def init(self) -> Message:
        return self.inner.init()

    def broadcast(self, state: Message) -> Message:
        return self.inner.broadcast(state)

    def client_step(self, message: Message, client: Client) -> Message:
        return self.inner.client_step(message, client)

    def server_step(self, state: Message, replies: Replies) -> Message:
        return self.inner.server_step(state, replies)

    def given(self, facts: Mapping[str, Any]) -> Algorithm:
        layer = copy.copy(self)
        layer.inner = self.inner.given(facts)
        return layer

    def at_site(self, options: Mapping[str, str]) -> Algorithm:
        layer = copy.copy(self)
        layer.inner = self.inner.at_site(options)
        return layer

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return self.inner.expects(message)

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        return self.inner.evaluate(message, data, memory)

    def result(self, state: Message) -> Any:
        return self.inner.result(state)

    def pictures(
        self, state: Message, federation: Federation, memory: Callable[[int], Mapping[str, Tree]]
    ) -> Sequence[Picture]:
        return self.inner.pictures(state, federation, memory)

    @property
    def base(self) -> Algorithm:
        return self.inner.base

    def parts(self) -> Iterator[Algorithm]:
        yield from self.inner.parts()
        yield self


def stack(base: Algorithm, *layers: Layer) -> Algorithm:
    """Base first, wire last: what is learned, what is shared, how replies are merged, what goes on
    the wire.
    """
    if isinstance(base, Layer):
        raise StackError(
            f"{type(base).__name__} is a layer: a stack begins with a base such as FedAvg"
        )
    algorithm = base
    for layer in layers:
        if not isinstance(layer, Layer):
            raise StackError(
                f"{type(layer).__name__} is a base of its own: it cannot stand on"
                f" {type(base).__name__}"
            )
        algorithm = layer.around(algorithm)
    return algorithm


def server_rng(state: Message, layer: str) -> Any:
    """Server randomness depends on the seed, the round and the layer's name, never on what ran
    before.
    """
    seed, turn = int(state.scalars.get("seed", 0)), state.round
    return generator(seed, turn, *layer.encode())

"""An algorithm is what happens at both ends of a message. A layer is an algorithm around an
algorithm.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from fedlens.core.client import Client, generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Limited
from fedlens.core.message import Header, Message
from fedlens.core.picture import Picture
from fedlens.core.privacy import Mechanism, Unit
from fedlens.core.replies import NEEDS, SIZE, Heard, Lost, Needs, Replies, Scalar
from fedlens.core.tree import Tree

Stage = Literal["learn", "share", "merge", "wire"]


class StackError(ValueError):
    """A stack that cannot work, refused when it is built."""


class Trip(NamedTuple):
    """A message, and who gets it. number: `Header.trip`; 0 is the one that clients work on."""

    message: Message
    ids: Sequence[int]
    number: int = 0


@dataclass
class Trips:
    """A round or an evaluation under way, as the server's half sees it.

    asked: whom it is about. upcoming: who will be asked in the next round, where that is decided.
    made: the trips so far; replies and lost: what each of them brought. broken: why there can be no
    further one, if what they brought led nowhere.
    """

    asked: Sequence[int]
    upcoming: Sequence[int] = ()
    evaluate: bool = False
    made: list[Trip] = field(default_factory=list)
    replies: list[Replies] = field(default_factory=list)
    lost: list[list[Lost]] = field(default_factory=list)
    broken: str = ""

    def last(self, number: int) -> int | None:
        """Where in `made` the trip of that number stands, if it was made."""
        places = [k for k, trip in enumerate(self.made) if trip.number == number]
        return places[-1] if places else None

    def without_effect(self, why: str) -> list[Lost]:
        """Everybody who answered, as lost: it came to nothing. Who was lost before stays so."""
        found = {x.sender: x for some in self.lost for x in some}
        for id in (id for some in self.replies for id in some.heard):
            found.setdefault(id, Lost(id, why, refused=True))
        return [found[id] for id in sorted(found)]


class Brought(NamedTuple):
    """What the trips of a round come to. state: with what a wire layer has to remember of them.
    skipped: why they come to nothing, if so.
    """

    state: Message
    replies: Replies
    lost: list[Lost]
    skipped: str = ""


class SiteSettings(NamedTuple):
    """What a real site decides for itself and holds.

    options: what it chose of the `site_options` of all parts. client: its number, of `clients`.
    folder: its own. key, peers: its private key, and a folder with the public keys of all sites,
    where its operator named them. least: clients in a sum that its policy wants. recipe: hash of
    what it agreed to. asked: the header that a message of round 0 then has; None: nobody said.
    """

    options: Mapping[str, str]
    client: int = 0
    clients: int = 1
    folder: Path = Path()
    key: Path | None = None
    peers: Path | None = None
    least: int = 1
    recipe: str = ""
    asked: Header | None = None


class Shortened(NamedTuple):
    """An algorithm that does less, and what follows for the whole of it.

    times: how many times longer the real clients work. batch: examples of a local step. by_data:
    does the work grow with a client's data, or is it a number of steps?
    """

    algorithm: Algorithm
    times: float = 1.0
    batch: int = 32
    by_data: bool = True


class Algorithm(metaclass=Limited):
    """Four functions: `init`, `broadcast` and `server_step` on the server, `client_step` on a
    client. `state` lives on the server, `client.memory` on the clients.

    Attributes:
        needs: what `server_step` looks at.
        reports: the scalars of its replies; one that is not declared counts as "each".
        weighs: the names of a tree's weights, where it is not just one.
        site_options: what a real site decides for itself when it joins, not the recipe, each with a
            line of help.
        draws: does `client_step` use random numbers, `client.rng` or hidden ones? Making them takes
            100 us a client.
        trains: does it run the training loop, so that terms can be added to its objective?
        loss_name: what its scalar "loss" is called where people read it.
    """

    needs: Needs = "sums"
    reports: ClassVar[Mapping[str, Scalar]] = {}
    weighs: ClassVar[Mapping[str, Sequence[str]]] = {}
    site_options: ClassVar[Mapping[str, str]] = {}
    draws: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    loss_name: ClassVar[str] = "training loss"

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

    def next_trip(self, state: Message, trips: Trips) -> Trip | None:
        """A round is one message and its replies. A wire layer may need more than one, before it
        (to agree on keys) or after it (to open a sum); None: no more.
        """
        return None if trips.made else Trip(self.broadcast(state), trips.asked)

    def read(self, state: Message, trips: Trips) -> Brought:
        """What a round brought, once all its trips are made."""
        return Brought(state, trips.replies[0], trips.lost[0])

    def score(self, message: Message, client: Client) -> Message:
        """A client's metrics on its held-out part, as a reply."""
        held_out = client.held_out
        size = len(held_out) if held_out is not None else 0
        metrics = self.evaluate(message, held_out, client.memory) if size else {}
        if SIZE in metrics:
            raise ValueError(
                f"a metric is called {SIZE!r}, which is how much data it was measured on: give it"
                " another name"
            )
        scalars = {**metrics, SIZE: float(size)}
        header = Header(round=message.round)
        return Message(scalars=scalars, sender=client.id, header=header)

    def given(self, facts: Facts) -> Algorithm:
        """This algorithm, told before the first round what is public about the federation
        (`Federation.facts`: the size of a scene, its noise). For the server's half: what a client
        must know of it travels in a message."""
        return self

    def check_cohort(self, asked: int) -> None:
        """Raise a ValueError where so few clients cannot make a round; called of every part, before
        any work."""

    def at_site(self, site: SiteSettings) -> Algorithm:
        """This algorithm as one real site runs it, with what is that site's own; a ValueError where
        the site lacks what it needs.
        """
        return self

    def deployed(self) -> Algorithm:
        """This algorithm where a run is real, at a server or a site: what must be secret is drawn
        from the operating system, not from the run's seed.
        """
        return self

    def with_known(self, keys: Mapping[int, Any]) -> Algorithm:
        """This algorithm at a server that knows with which public key each client signs."""
        return self

    def mechanism(self, examples: int, population: int, cohort: int) -> Mechanism | None:
        """What a round costs in differential privacy, for a client with so many examples; None for
        a part that promises none.
        """
        return None

    def noise_shares(self, cohort: int) -> int:
        """How many clients' noise must be in a sum, where each adds a share of what is promised."""
        return 0

    def quorum(self, asked: int) -> int:
        """Of so many clients that are asked, how many must answer for a round to count."""
        return 1

    def share_noise(self, message: Message) -> float:
        """The least deviation of the noise that this client adds to a number; infinite where it
        adds none."""
        return math.inf

    def expects(self, message: Message) -> Mapping[str, Tree]:
        """For every tree of a reply, a tree with the same names, shapes and types. Whatever does
        not fit is refused before the sum.
        """
        return {}

    def answers(self, message: Message) -> Mapping[str, Tree]:
        """The same for any message: what a reply must look like where clients only evaluate, or in
        a wire layer's own trip.
        """
        return {} if message.header.evaluate or message.header.trip else self.expects(message)

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

    def shares(self, heard: Mapping[int, Heard], state: Message) -> Mapping[int, float]:
        """How much each client counted in the round that led to `state`, as far as that is one
        number: its share of the first weight that its reply names.
        """
        return share_of(heard, next((n for h in heard.values() for n in h.weights), ""))

    def rehearse(self, federation: Federation) -> None:
        """Try one example before the first round, so that what does not fit is found out once and
        not by every client on its own: raise a ValueError.
        """

    def shortened(self, steps: int) -> Shortened:
        """A copy whose clients work for one epoch or `steps` steps at most. For estimates."""
        return Shortened(self)

    def unrehearsed(self, reply: Message) -> str:
        """What a rehearsal left out of a client's work, for estimates: "the time to ..."."""
        return ""

    @property
    def place(self) -> torch.device:
        """The device the work is done on."""
        return torch.device("cpu")

    @property
    def paced_by(self) -> str | None:
        """The setting by which what a round does depends on how many are planned, if there is one:
        that number cannot change on the way.
        """
        return None

    @property
    def generates(self) -> bool:
        """Does this part run a generator of images at a client?"""
        return False

    @property
    def base(self) -> Algorithm:
        return self

    def parts(self) -> Iterator[Algorithm]:
        """The base, then every layer from the inside out."""
        yield self

    def declared(self) -> dict[str, Scalar]:
        """The scalars of a reply of the whole stack."""
        return {name: s for part in self.parts() for name, s in part.reports.items()}

    def weighing(self) -> dict[str, Sequence[str]]:
        """The names of each tree's weights in a reply of the whole stack, where that is not "mean"
        alone. What stands further out decides.
        """
        return {tree: names for part in self.parts() for tree, names in part.weighs.items()}

    @property
    def hides_singles(self) -> bool:
        """Does a layer hide what single clients sent? Then there is no worst client, no spread and
        no table per client.
        """
        return bool(self.hiding_layer)

    @property
    def hiding_layer(self) -> str:
        """The name of the layer that does, if one does."""
        hiding = (p for p in self.parts() if isinstance(p, Layer) and p.hides_replies)
        return next((type(part).__name__ for part in hiding), "")

    def as_saved(self, state: Message) -> Message:
        """The state as the task saves it, where the model that travels is not the one users take
        away.
        """
        return state

    @property
    def personalises(self) -> bool:
        """Is a model for each client what this stack is after?"""
        return any(isinstance(part, Layer) and part.personal for part in self.parts())

    @property
    def keeps_secrets(self) -> bool:
        """At a real site: is what must be secret there drawn and kept by the site itself?"""
        return True

    def private_weights(self, memory: Mapping[str, Tree]) -> Tree:
        """What of the model a client keeps to itself, from its memory."""
        return {}


def share_of(heard: Mapping[int, Heard], weight: str) -> dict[int, float]:
    """How much each client counts in the sum with this weight."""
    named = {i: h.weights[weight] for i, h in heard.items() if weight in h.weights}
    whole = sum(named.values())
    return {i: w / whole for i, w in named.items()} if whole > 0 else {}


class Layer(Algorithm):
    """Override the halves that change; everything else goes to `inner`. Constructor arguments are
    the configuration.

    Attributes:
        stage: where in a stack it stands: "learn", "share", "merge" or "wire".
        own_needs: what this layer itself looks at.
        hides_replies: single replies are not visible further in (secure aggregation).
        merges: decides how single deltas become one, which a stack can do only once.
        of_mean: changes the merged update, so whatever looks at single ones must come before it,
            further out.
        steers: adds a pull, so that local steps are no longer plain gradients of the loss.
        keeps_private: decides which part of the model each client keeps as its own, which only one
            layer can.
        personal: what it is after is a model for each client, so that a run evaluates those,
            whether `federation.personal` is set or not.
        tuned: its one own parameter, and what `compare --tune` tries for it.
        protects: whose presence its noise hides, if it is there for that.
        post_processes: its client half looks at the message and at the reply that it is handed,
            never at data or losses, so that it takes nothing away from noise further in.
        by_example: what it adds to the objective is a mean over the examples of a batch, each by
            itself.
        inner: the algorithm that it goes around.
    """

    stage: ClassVar[Stage] = "learn"
    own_needs: ClassVar[Needs] = "sums"
    hides_replies: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    of_mean: ClassVar[bool] = False
    steers: ClassVar[bool] = False
    keeps_private: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    protects: ClassVar[Unit | None] = None
    post_processes: ClassVar[bool] = False
    by_example: ClassVar[bool] = False
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
            if not isinstance(part, Layer):
                continue
            if part.hides_replies or (part.stage == "wire" and self.stage != "wire"):
                raise StackError(
                    f"{name} stands outside {type(part).__name__}, which decides what goes on the"
                    f" wire: put {name} before it in the stack"
                )
        if self.hides_replies and inner.needs != "sums":
            who = next(p for p in inner.parts() if getattr(p, "own_needs", p.needs) == inner.needs)
            what = "single replies" if inner.needs == "replies" else "the scalars of single replies"
            raise StackError(f"{name} hides {what}, but {type(who).__name__} needs them")
        self._check_merging(inner)
        self._check_noise(inner)
        layer = copy.copy(self)
        layer.inner = inner
        self._check_reports(layer, inner)
        layer.needs = max(self.own_needs, inner.needs, key=NEEDS.index)
        layer.check(inner)
        return layer

    @staticmethod
    def _check_reports(layer: Layer, inner: Algorithm) -> None:
        """A scalar means one thing in a stack."""
        known = inner.declared()
        for name, scalar in layer.reports.items():
            if known.get(name, scalar) != scalar:
                raise StackError(
                    f"{type(layer).__name__} declares the scalar {name!r} otherwise than the stack"
                    " below it: give it another name"
                )

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

    @property
    def looks_at_data(self) -> bool:
        return type(self).client_step is not Layer.client_step and not self.post_processes

    def _check_noise(self, inner: Algorithm) -> None:
        """What a layer sends beside noisy updates would not be noisy; and noise that is added to a
        sum is meant for its parts as they are.
        """
        name, acts = type(self).__name__, type(self).client_step is not Layer.client_step
        for part in inner.parts():
            if not isinstance(part, Layer) or not part.protects:
                continue
            noisy = type(part).__name__
            if self.protects:
                raise StackError(f"{name} and {noisy} each state an epsilon: keep one of them")
            if self.looks_at_data:
                raise StackError(
                    f"{name} looks at a client's data or losses by itself, and {noisy} makes noisy"
                    f" only what comes from further in: leave one of them out"
                )
            changes = self.stage == "merge" and (acts or self.own_needs == "replies")
            if part.protects == "client" and changes:
                raise StackError(
                    f"{name} changes single updates after {noisy} has clipped them, so that its"
                    " noise would no longer fit them: leave one of them out"
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

    def given(self, facts: Facts) -> Algorithm:
        layer = copy.copy(self)
        layer.inner = self.inner.given(facts)
        return layer

    def shares(self, heard: Mapping[int, Heard], state: Message) -> Mapping[int, float]:
        return self.inner.shares(heard, state)

    def rehearse(self, federation: Federation) -> None:
        self.inner.rehearse(federation)

    def shortened(self, steps: int) -> Shortened:
        short = self.inner.shortened(steps)
        layer = copy.copy(self)
        layer.inner = short.algorithm
        return short._replace(algorithm=layer)

    def private_weights(self, memory: Mapping[str, Tree]) -> Tree:
        return self.inner.private_weights(memory)

    def as_saved(self, state: Message) -> Message:
        return self.inner.as_saved(state)

    @property
    def place(self) -> torch.device:
        return self.inner.place

    def at_site(self, site: SiteSettings) -> Algorithm:
        layer = copy.copy(self)
        layer.inner = self.inner.at_site(site)
        return layer

    def deployed(self) -> Algorithm:
        layer = copy.copy(self)
        layer.inner = self.inner.deployed()
        return layer

    def quorum(self, asked: int) -> int:
        return self.inner.quorum(asked)

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


def mixed_shares(
    heard: Mapping[int, Heard], first: str, second: str, mix: float
) -> dict[int, float]:
    """How much each client counts in (1 - mix) of one mean and mix of another."""
    a, b = share_of(heard, first), share_of(heard, second)
    return {i: (1 - mix) * a.get(i, 0.0) + mix * b.get(i, 0.0) for i in heard}


def stack(base: Algorithm, *layers: Layer) -> Algorithm:
    """Layers around a base: what is learned, what is shared, how replies are merged, what goes on
    the wire.

    Args:
        base: the algorithm that the layers go around.
        layers: from the inside out.

    Raises:
        StackError: for a combination that cannot work.
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
    return generator(state.header.seed, state.round, *layer.encode())

"""The place where a client half runs: its data, its random numbers, its memory, and what layers
added to its objective.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Generator, Tensor, nn

from fedlens.core.tree import Tree

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Output:
    """What the model said about a batch; computed once and shared by all terms.

    Args:
        prediction: of the network.
        features: what its head was given, where the network has a head.
    """

    prediction: Any
    features: Tensor | None = None


Term = Callable[[nn.Module, Batch, Output], Tensor]
Pull = Callable[[nn.Module], Tensor]


@runtime_checkable
class Data(Protocol):
    """What a client owns. `batch` without a generator is what evaluation sees: no augmentation."""

    def __len__(self) -> int: ...
    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch: ...


@dataclass(frozen=True)
class NoisySteps:
    """Differentially private steps of the local optimiser (Abadi et al., 2016).

    clip: the largest norm of one example's gradient. noise: its deviation over clip. microbatch:
    examples whose gradients are in memory together. rng: of batches and noise; None for the
    operating system's.
    """

    clip: float
    noise: float
    microbatch: int = 32
    rng: Generator | None = None


@dataclass(frozen=True)
class Client:
    """Where a client's half runs. Layers do not change a client, they hand their inner algorithm a
    richer copy.

    Args:
        id: its number.
        data: a `Data` for everything that trains; whatever the algorithm understands otherwise.
        rng: its random numbers of this round.
        memory: what it keeps between rounds, by name.
        held_out: what it evaluates on.
        terms: added to the loss, and counted in it (`plus`).
        pulls: added to the objective without being counted (`pull`).
        adapters: modules between features and head (`adapt`).
        holds: functions of a parameter's name; where one says True, the parameter does not change.
        drifts: added to every gradient.
        noisy: how gradients are clipped and noised, if they are.
    """

    id: int
    data: Any
    rng: Generator
    memory: MutableMapping[str, Tree]
    held_out: Data | None = None
    terms: Sequence[Term] = ()
    pulls: Sequence[Pull] = ()
    adapters: Mapping[str, nn.Module] = field(default_factory=dict)
    holds: Sequence[Callable[[str], bool]] = ()
    drifts: Sequence[Tree] = ()
    noisy: NoisySteps | None = None

    def plus(self, term: Term) -> Client:
        """Add (model, batch, output) -> loss to the objective; it counts in the reported loss."""
        return replace(self, terms=(*self.terms, term))

    def pull(self, term: Pull) -> Client:
        """Add (model) -> scalar to the objective; it steers the weights and is not part of the
        reported loss.
        """
        return replace(self, pulls=(*self.pulls, term))

    def drift(self, direction: Tree) -> Client:
        """After every step of the optimiser, lr times this is taken off the parameters it names:
        outside momentum, clipping, weight decay and Adam's scaling.
        """
        return replace(self, drifts=(*self.drifts, direction))

    def adapt(self, name: str, module: nn.Module) -> Client:
        """Put (features, batch) -> features between feature extractor and head. Its parameters
        train with the model's optimiser, live in `memory[name]` and never enter a reply."""
        return replace(self, adapters={**self.adapters, name: module})

    def hold(self, still: Callable[[str], bool]) -> Client:
        """Parameters whose name `still` is true of do not learn in this stretch of training."""
        return replace(self, holds=(*self.holds, still))

    def with_noise(self, steps: NoisySteps) -> Client:
        """Local steps clip the gradient of each example and add noise to their sum."""
        return replace(self, noisy=steps)

    def holding(self, data: Any) -> Client:
        """The same client with other data: a layer that samples, fills or degrades."""
        return replace(self, data=data)


def generator(*words: int) -> Generator:
    """A stream of its own for every tuple of numbers: (seed, round, client), (seed, round, layer),
    ...
    """
    seed = int(
        np.random.SeedSequence([w & 0xFFFFFFFF for w in words]).generate_state(1, np.uint64)[0]
    )
    return Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)


# numpy's hidden stream while a client works: swapping a pointer is quicker than copying a state
_SCRATCH = np.random.MT19937(0)


@contextmanager
def seeded(rng: Generator) -> Iterator[None]:
    """Hidden random state (dropout, a user's numpy call) follows the client's stream too, and is
    put back afterwards.
    """
    seed = int(torch.randint(2**31 - 1, (), generator=rng))
    before = torch.default_generator.get_state(), np.random.get_bit_generator(), random.getstate()  # type: ignore[attr-defined]
    # nested: the outer one is in use
    mine = _SCRATCH if before[1] is not _SCRATCH else np.random.MT19937(0)
    np.random.set_bit_generator(mine)  # type: ignore[attr-defined]
    np.random.seed(seed)
    random.seed(seed)
    # torch.manual_seed looks for every kind of accelerator, which takes longer than a small
    # client's work.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_bit_generator(before[1])  # type: ignore[attr-defined]
        random.setstate(before[2])

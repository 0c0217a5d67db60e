"""What an attack is given, and what it leaves: plain data that the page, the tables and the tests
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import stdev
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedlens.core.files import find_in_data_folder
from fedlens.core.message import MEAN, Message
from fedlens.core.tree import Tree
from fedlens.engines.recorder import Exchange
from fedlens.metrics.image import psnr, ssim
from fedlens.runs.setup import Setup

if TYPE_CHECKING:
    from fedlens.audit.protections import Protection


MARGIN = 1.0  # dB by which an image has to be better than what can be had without a message


@dataclass(frozen=True)
class Probe:
    """A client of whom a picture is sought: how many of its examples, in one batch, and how many
    local steps on them. noise: on every number, relative to the message. together: the server sees
    the sum over the clients only.
    """

    examples: int
    steps: int
    noise: float = 0.0
    together: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a curious server holds: what the run is (recipe, stack, public facts) and what was sent.
    The clients' data is in `setup.federation` too, where it is known: attacks use it for scores
    only.

    clients: whose messages are attacked. minutes: how long an attack may search. probe: instead of
    what clients sent, what they would send who have little and do little. over_rounds: also how
    leakage goes over the rounds. seen: what the server sees of any rounds, for attacks that play
    some of their own.
    """

    setup: Setup
    exchanges: Sequence[Exchange]
    clients: Sequence[int]
    minutes: float = 2.0
    probe: Probe | None = None
    over_rounds: bool = False
    seen: Callable[[Sequence[Exchange]], Sequence[Exchange]] = list


@dataclass(frozen=True)
class Comparison:
    """Truth, reconstruction and what somebody would show who learned nothing: images (C, H, W) in
    [0, 1] with their scores. truth is None where nobody here knows it.
    """

    label: str
    guess: Tensor
    truth: Tensor | None = None
    unrelated: Tensor | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Histogram:
    """Shares of classes of one client: the truth, and what the attacker says."""

    label: str
    truth: Sequence[float]
    guess: Sequence[float]


@dataclass(frozen=True)
class Finding:
    """What one attack found.

    sentence: the result for people. measure: the name of `score`, `score` and `baseline` the
    attack's one number and what it is for somebody who learned nothing; more is worse for the
    client unless `smaller_leaks`. margin: by how much chance alone could exceed the baseline.
    numbers: everything else worth a line. curve: (round, score) pairs: leakage over the rounds.
    histograms: where classes are counted. budget: what was spent. unrelated: what the third column
    of the pictures is.
    """

    attack: str
    sentence: str
    measure: str
    score: float
    baseline: float
    smaller_leaks: bool = False
    margin: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    comparisons: Sequence[Comparison] = ()
    histograms: Sequence[Histogram] = ()
    curve: Sequence[tuple[int, float]] = ()
    budget: str = ""
    unrelated: str = "nearest unrelated image"
    seconds: float = 0.0

    @property
    def leaks(self) -> bool:
        """Is the score beyond the baseline, by more than chance?"""
        gain = self.baseline - self.score if self.smaller_leaks else self.score - self.baseline
        return gain > self.margin


class Attack(Protocol):
    """name: on the command line. title: on the page. paper: whose idea it is. protections: under
    which it is tried again.
    """

    name: str
    title: str
    paper: str

    @property
    def protections(self) -> Sequence[Protection]: ...

    def applies(self, setup: Setup) -> str:
        """Empty where this attack can be tried on this stack, otherwise why not."""
        ...

    def run(self, evidence: Evidence) -> Finding: ...


# -- scores ----------------------------------------------------------------------------------------


def score_images(guess: Tensor, truth: Tensor) -> dict[str, float]:
    """PSNR, SSIM where the image is large enough, LPIPS where its weights are on this machine.
    Images are (C, H, W) in [0, 1].
    """
    guess = guess.detach().float().clamp(0, 1)
    truth = truth.detach().float()
    scores = {"psnr": psnr(guess, truth, 1.0)}
    if min(truth.shape[-2:]) >= 11:
        scores["ssim"] = ssim(guess, truth, 1.0)
    if min(truth.shape[-2:]) >= 32 and find_in_data_folder("weights/lpips") is not None:
        from fedlens.metrics.perceptual import lpips

        pair = [x.expand(3, -1, -1)[None] if len(x) == 1 else x[:3][None] for x in (guess, truth)]
        scores["lpips"] = float(lpips(pair[0], pair[1]))
    return scores


def nearest(truth: Tensor, others: Tensor) -> Tensor:
    """Of (N, C, H, W), the image with the smallest squared error to the truth: the best that
    somebody could show who has such images but learned nothing.
    """
    errors = torch.stack([(x - truth).square().mean() for x in others])
    return others[int(errors.argmin())]


def two_errors(gains: Sequence[float]) -> float:
    """Two standard errors of a mean gain: what chance alone may bring. 0 of a single one, of which
    nobody can say.
    """
    return 2 * stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0


def lucky_share(count: int, chance: float, alarms: float = 0.05) -> float:
    """The share of right guesses among so many, each right by this chance, that luck exceeds in at
    most `alarms` of all cases.
    """
    tail = 0.0
    for right in range(count, -1, -1):
        tail += math.comb(count, right) * chance**right * (1 - chance) ** (count - right)
        if tail > alarms:
            return right / count
    return 0.0


# -- what SecureSum leaves to see ------------------------------------------------------------------


def summed(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """The same rounds with every client's reply replaced by the weighted mean of all: what a server
    behind secure aggregation has to go on.
    """
    return [replace(e, replies=_all_alike(e.replies)) for e in exchanges]


def _all_alike(replies: Mapping[int, Message]) -> dict[int, Message]:
    if not replies:
        return {}
    first = next(iter(replies.values()))
    trees = {}
    for name in first.trees:
        weights = {i: r.weights.get(name, {}).get(MEAN, 1.0) for i, r in replies.items()}
        whole = sum(weights.values()) or 1.0
        trees[name] = {
            key: sum(weights[i] / whole * r.trees[name][key].double() for i, r in replies.items())
            for key in first.trees[name]
        }
    together = Message({n: _as_in(first.trees[n], t) for n, t in trees.items()})
    return {i: replace(together, sender=i, header=r.header) for i, r in replies.items()}


def _as_in(sent: Tree, mean: Mapping[str, Any]) -> Tree:
    """A mean as tensors: of counts, such as BatchNorm's of batches, a count again."""
    return {
        k: t if sent[k].is_floating_point() else t.round().to(sent[k].dtype)
        for k, t in ((k, torch.as_tensor(v)) for k, v in mean.items())
    }

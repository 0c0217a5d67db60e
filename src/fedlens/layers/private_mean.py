"""PrivateMean: differential privacy for whole clients (McMahan et al., 2018), with a clip that
finds its own size (Andrew et al., 2021).

A client clips its update: d_k min(1, C / |d_k|), over all that it sends. The server's mean is
(sum_k d_k + N(0, (z C)^2)) / m: every client counts alike, and m is the cohort that was asked,
never the number that answered. Nothing else of a client leaves, neither loss nor examples.

quantile: a client also says whether it was within the clip, b_k = +-1/2; the server adds N(0, s^2)
to their sum and C <- C exp(-rate (sum / m + 1/2 - quantile)): down while more than that share fit,
up while fewer do. For the whole to have the multiplier z, updates get (z^-2 - (2 s)^-2)^(-1/2).

where = "server": the server adds the noise, and sees the sum without it. where = "clients": each
client adds a share, N(0, (z C)^2 / t), and SecureSum adds up: nobody ever holds a sum without
noise. t is the number of shares that must be in it: by default more than half of the cohort.
SecureSum opens no sum with fewer, and none of fewer than two thirds. If more answer, there is more
noise than was counted on; shares of liars do not count.

Under SecureSum everybody knows who takes part, so a cohort is no secret and hides nobody: q = 1.
secret_cohort = true counts on the cohort of each round being the server's secret.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, StackError, Stage, server_rng
from fedlens.core.client import Client, generator
from fedlens.core.limits import Count, Positive, ProperShare
from fedlens.core.message import Message
from fedlens.core.noise import draw_normal
from fedlens.core.privacy import Mechanism, Unit
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree

_STREAM = 0x9A
FEWEST = 20  # clients for each deviation of the count's noise, as in the paper


@dataclass
class PrivateMean(TrainingLayer):
    """A mean in which no client can be noticed.

    Args:
        noise: multiplier z: the deviation of the noise over the clip.
        clip: C, the largest norm of a client's update; the first one, if it adapts.
        quantile: the share of updates that the clip should let pass; None keeps it fixed.
        rate: how quickly it adapts.
        where: who adds the noise.
        least: shares of noise that must be in a sum, of clients that keep to the rules.
        secret_cohort: who is asked in a round is known to the server alone.
        delta: the chance that is left to the guarantee to fail; below 1 / clients.
        max_epsilon: the run ends before a client would have spent more.
    """

    noise: Positive = 1.0
    clip: Positive = 0.1
    quantile: ProperShare | None = None
    rate: Positive = 0.2
    where: Literal["server", "clients"] = "server"
    least: Count | None = None
    secret_cohort: bool = False
    delta: ProperShare = 1e-5
    max_epsilon: Positive | None = None
    stage: ClassVar[Stage] = "merge"
    merges: ClassVar[bool] = True
    protects: ClassVar[Unit | None] = "client"
    post_processes: ClassVar[bool] = True
    _real: bool = field(default=False, init=False, repr=False, compare=False)

    def check(self, inner: Algorithm) -> None:
        base = self.under(inner)
        for part in inner.parts():
            if isinstance(part, Layer) and _reads_numbers(part):
                raise StackError(
                    f"{type(part).__name__}'s server half reads numbers of the clients, which"
                    " PrivateMean does not let out: leave one of them out"
                )
        if inner.needs != "sums" or "delta" in inner.weighing():
            who = [type(p).__name__ for p in inner.parts() if p.needs != "sums" or p.weighs]
            raise StackError(
                f"in PrivateMean every client counts alike and nothing else of it is read, but"
                f" {who[-1] if who else 'the stack'} asks for more: leave it out"
            )
        learned = {n for n, _ in base.resident.named_parameters()}
        if found := [n for n in base.resident.state_dict() if n not in learned]:
            raise StackError(
                f"the network keeps statistics of a client's data ({found[0]}), which PrivateMean"
                " does not clip: set task.norm=group, or use a network without"
            )

    # -- the server's half -------------------------------------------------------------------------

    def init(self) -> Message:
        state = self.inner.init()
        if odd := [n for n in self.inner.expects(self.inner.broadcast(state)) if n != "delta"]:
            raise StackError(
                f"a reply would hold {odd[0]!r} beside the update, without noise: leave the layer"
                " out that sends it"
            )
        return state.note(clip=self.clip)

    def broadcast(self, state: Message) -> Message:
        return self.inner.broadcast(state).note(clip=state.scalars["clip"])

    def expects(self, message: Message) -> Mapping[str, Tree]:
        count = {"below": {"bit": torch.zeros(1)}} if self.quantile is not None else {}
        return {**self.inner.expects(message), **count}

    def server_step(self, state: Message, replies: Replies) -> Message:
        m, clip = _cohort(state), state.scalars["clip"]
        total = tree.scale(replies.mean("delta"), replies.weight("delta"))
        rng = None if self._real else server_rng(state, type(self).__name__)
        if self.where == "server":
            total = add_noise(total, self.update_noise(m) * clip, rng)
        replies = replies.put(delta=tree.scale(total, 1 / m))
        state = self.inner.server_step(state, replies)
        if self.quantile is None:
            return state
        bits = float(replies.mean("below")["bit"]) * replies.weight("below")
        if self.where == "server":
            bits += float(draw_normal(1, self.count_noise(m), rng))
        within = bits / m + 0.5
        return state.note(clip=clip * math.exp(-self.rate * (within - self.quantile)))

    # -- a client's half ---------------------------------------------------------------------------

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        clip, delta = self._clip(message), reply.trees["delta"]
        length = tree.norm(delta)
        within = length <= clip
        if not math.isfinite(length):
            delta = tree.zeros_like(delta)
        elif not within:
            delta = tree.scale(delta, clip / length)
        sent: dict[str, Tree] = {"delta": delta}
        if self.quantile is not None:
            sent["below"] = {"bit": torch.tensor([0.5 if within else -0.5])}
        if self.where == "clients":
            sent = self._with_shares(sent, message, client)
        kept = {n for n, scalar in self.declared().items() if scalar.read == "local"}
        scalars = {n: v for n, v in reply.scalars.items() if n in kept}
        return replace(reply.put(**sent), scalars=scalars, weights={n: {"mean": 1.0} for n in sent})

    def _with_shares(
        self, sent: Mapping[str, Tree], message: Message, client: Client
    ) -> dict[str, Tree]:
        seeded = generator(message.header.seed, message.round, client.id, _STREAM)
        rng = None if self._real else seeded
        deviations = self._share_noises(message)
        return {n: add_noise(arrays, deviations[n], rng) for n, arrays in sent.items()}

    def _clip(self, message: Message) -> float:
        """One that does not adapt is the recipe's, whatever a server says."""
        return self.clip if self.quantile is None else message.scalars["clip"]

    # -- how much noise ----------------------------------------------------------------------------

    def shares_of(self, cohort: int) -> int:
        """How many shares of noise are counted on."""
        return self.least or cohort // 2 + 1

    def noise_shares(self, cohort: int) -> int:
        return self.shares_of(cohort) if self.where == "clients" else 0

    def check_cohort(self, asked: int) -> None:
        if self.noise_shares(asked) > asked:
            raise ValueError(
                f"least={self.least} shares of noise must be in a sum, but {asked} clients are"
                " asked: set a smaller one, or a larger cohort"
            )

    def share_noise(self, message: Message) -> float:
        return min(self._share_noises(message).values()) if self.where == "clients" else math.inf

    def _share_noises(self, message: Message) -> dict[str, float]:
        """Deviations of what one client adds, by tree."""
        m = _cohort(message)
        share = 1 / math.sqrt(self.shares_of(m))
        found = {"delta": share * self.update_noise(m) * self._clip(message)}
        return found if self.quantile is None else {**found, "below": share * self.count_noise(m)}

    def count_noise(self, cohort: int) -> float:
        """s, the deviation of the noise on the count of those within the clip."""
        return max(cohort / FEWEST, self.noise)

    def update_noise(self, cohort: int) -> float:
        """The multiplier for updates, such that with the count it is `noise` for both."""
        if self.quantile is None:
            return self.noise
        return float((self.noise**-2 - (2 * self.count_noise(cohort)) ** -2) ** -0.5)

    def mechanism(self, examples: int, population: int, cohort: int) -> Mechanism:
        hidden = self.secret_cohort and cohort < population
        return Mechanism(
            unit="client",
            noise=self.noise,
            rate=cohort / population if hidden else 1.0,
            sampling="fixed" if hidden else "none",
            steps=1,
            delta=self.delta,
            max_epsilon=self.max_epsilon,
            seeded=not self._real,
            where=self.where,
        )

    def deployed(self) -> Algorithm:
        layer = copy.copy(self)
        layer.inner, layer._real = self.inner.deployed(), True
        return layer


def add_noise(arrays: Tree, deviation: float, rng: torch.Generator | None) -> Tree:
    """Independent noise on every number."""
    counts: Sequence[int] = [t.numel() for t in arrays.values()]
    drawn = torch.split(draw_normal(sum(counts), deviation, rng), list(counts))
    return {n: t + z.view(t.shape).to(t) for (n, t), z in zip(arrays.items(), drawn, strict=True)}


def _reads_numbers(part: Layer) -> bool:
    sent = any(scalar.read != "local" for scalar in part.reports.values())
    return sent and type(part).server_step is not Layer.server_step


def _cohort(message: Message) -> int:
    return message.header.cohort or message.header.population

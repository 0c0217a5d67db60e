r"""Membership inference: was this image in the training data? (Zarifzadeh, Liu and Shokri, "Low-
cost high-power membership inference attacks", RMIA, 2024, offline; Carlini et al., "Membership
inference attacks from first principles", LiRA, 2022, for how it is reported; Nasr, Shokri and
Houmansadr, 2019, for asking what a client sent.)

What is asked is the model that a client sent, received + delta: it has seen that client's images
last. Behind a sum that is everybody's mean, so the model of the next round or the final one.
Shadow runs of the same recipe, through the simulator, on images that the attacker has (half of the
server's test set; as many clients, as large, with the same classes) tell how probable the right
class of an image x is for a model that never saw it, p_out. RMIA holds the ratio
    Lambda(x) = p(x) / Pr(x),   Pr(x) = ((1 + a) p_out(x) + 1 - a) / 2
against that of other images z; with one set of z for all x the order of the scores, hence the whole
ROC curve, is that of Lambda. Members are a client's training images, non-members those of the other
half of the test set, as many of each class: a model that prefers a client's classes would otherwise
seem to know its images. Somebody who learned nothing has an AUC of 0.5 and finds 1 % of the members
at 1 % false alarms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fedlens.audit.attack import Evidence, Finding
from fedlens.audit.evidence import last_state
from fedlens.audit.probe import Few, fedavg_of, labelled
from fedlens.audit.protections import SECURE_SUM, Protection
from fedlens.core.answer import answer
from fedlens.core.client import Data, generator
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.engines.recorder import Exchange
from fedlens.runs.setup import Setup

SHADOWS = 4
_MOST = 1000  # images of a client, and as many others
_ENDS = torch.tensor([0.025, 0.975], dtype=torch.float64)  # of a 95 % interval
SLOPE = 0.3  # a of RMIA: how much more members profit than others


@dataclass(frozen=True)
class Rates:
    """Area under the ROC curve and true positives at 1 % false ones, with 95 % intervals."""

    auc: float
    auc_low: float
    auc_high: float
    tpr: float
    tpr_low: float
    tpr_high: float


class Membership:
    name = "membership"
    title = "Which images a model was trained on"
    paper = "Zarifzadeh et al. 2024 (RMIA, offline); Carlini et al. 2022 (LiRA); Nasr et al. 2019"
    protections: ClassVar[tuple[Protection, ...]] = (SECURE_SUM,)

    def applies(self, setup: Setup) -> str:
        if why := labelled(setup):
            return why
        if not isinstance(setup.federation.test, Data) or len(setup.federation.test) < 40:
            return "there is no test set, from which shadow models and non-members would come"
        return ""

    def run(self, evidence: Evidence) -> Finding:
        began = time.perf_counter()
        test = evidence.setup.federation.test
        assert isinstance(test, Data)
        order = torch.randperm(len(test), generator=generator(0, 0x3E3B))
        own, strangers = Few(test, order[: len(test) // 2]), Few(test, order[len(test) // 2 :])
        target = last_heard(evidence)
        shadows = play_shadows(evidence, target, own, 60 * evidence.minutes)
        if not shadows:
            return Finding(
                self.name,
                f"No shadow run came to its end in {60 * evidence.minutes:.0f} s, so nothing is"
                " said about membership.",
                "AUC", math.nan, 0.5, budget="no shadow run",
            )  # fmt: skip
        whom = [c for c in evidence.clients if c in target.replies]
        asked = [ask(evidence.setup, [target, *shadows], c, strangers) for c in whom]
        return self._finding(
            Answers(*(torch.cat([a[k] for a in asked]) for k in range(3))),
            Answers(*(torch.cat([a[k] for a in asked]) for k in range(3, 6))),
            f"{len(shadows)} shadow runs of {target.round + 1} rounds",
            time.perf_counter() - began,
        )

    def _finding(self, inside: Answers, outside: Answers, budget: str, seconds: float) -> Finding:
        members, others = inside.score, outside.score
        rates = roc(members, others)
        dealt = relabelled(members, others)
        low, high = dealt.quantile(_ENDS).tolist()
        return Finding(
            self.name,
            f"Whether an image was trained on is told with AUC {rates.auc:.3f}"
            f" ({rates.auc_low:.3f} to {rates.auc_high:.3f}); 0.5 is a coin.",
            "AUC",
            rates.auc,
            0.5,
            margin=max(0.0, rates.auc - rates.auc_low),
            numbers={
                "95 % interval of the AUC": f"{rates.auc_low:.3f} to {rates.auc_high:.3f}",
                "found at 1 % false alarms": f"{100 * rates.tpr:.1f} % of the members"
                f" ({100 * rates.tpr_low:.1f} to {100 * rates.tpr_high:.1f}); a coin: 1 %",
                "classified right": f"{100 * float(inside.right.mean()):.0f} % of the members,"
                f" {100 * float(outside.right.mean()):.0f} % of the others",
                "without shadow models": f"AUC {auc(inside.p, outside.p):.3f}",
                "members dealt out at random": f"AUC {float(dealt.mean()):.3f}"
                f" ({low:.3f} to {high:.3f})",
                "members and others swapped": f"AUC {auc(others, members):.3f}",
                "members and non-members": f"{len(members)} and {len(others)}",
            },
            budget=budget,
            seconds=seconds,
        )


@dataclass(frozen=True)
class Answers:
    """Of some images: the probability p of the right class, the same under the shadows, and whether
    the class was told right.
    """

    p: Tensor
    out: Tensor
    right: Tensor

    @property
    def score(self) -> Tensor:
        return ratio(self.p, self.out)


def last_heard(evidence: Evidence) -> Exchange:
    """The last round in which one of the attacked clients was heard."""
    whom = set(evidence.clients)
    return next(e for e in reversed(evidence.exchanges) if whom & set(e.replies))


def play_shadows(
    evidence: Evidence, target: Exchange, pool: Data, seconds: float
) -> list[Exchange]:
    """The round of the target, played by shadow federations whose clients hold as many images of
    each class, but the attacker's own. Those that are not ready in time do not count.
    """
    setup, ends = evidence.setup, time.perf_counter() + seconds
    played: list[Exchange] = []
    for k in range(SHADOWS):
        rng = generator(k, 0x5AD0)
        holdings = [stand_in(held, pool, rng) for held in setup.federation.holdings]
        federation = replace(setup.federation, holdings=holdings, held_out=(), test=None)
        settings = replace(setup.settings, seed=1000 + k)
        shadow = replace(setup, federation=federation, settings=settings)
        state: Message | None = setup.algorithm.init()
        if target.round:
            state = last_state(shadow, target.round, ends - time.perf_counter())
        if state is None:
            break
        header = replace(target.down.header, seed=1000 + k)
        down = setup.algorithm.broadcast(state).with_header(header)
        sent = {c: answer(setup.algorithm, down, c, federation, Memory()) for c in target.replies}
        played += evidence.seen([Exchange(down, sent)])
    return played


def stand_in(held: Data, pool: Data, rng: Generator) -> Few:
    """As many images of the pool as a client holds, of the same classes where the pool has them."""
    have = classes_of(pool)
    chosen = []
    for wanted in classes_of(held):
        fitting = (have == wanted).nonzero()[:, 0]
        fitting = fitting if len(fitting) else torch.arange(len(have))
        chosen.append(fitting[torch.randint(len(fitting), (1,), generator=rng)])
    return Few(pool, torch.cat(chosen))


def classes_of(data: Data) -> Tensor:
    return torch.cat([data.batch(index)["y"] for index in torch.arange(len(data)).split(1000)])


def ask(
    setup: Setup, exchanges: Sequence[Exchange], client: int, strangers: Data
) -> tuple[Tensor, ...]:
    """What the model that this client sent, and its stand-ins of the shadows, say of the client's
    images and of as many others of each class: the fields of two `Answers`.
    """
    held = setup.federation.holdings[client]
    both = as_many_of_each(classes_of(held), classes_of(strangers))
    found: list[Tensor] = []
    for data, index in zip((held, strangers), both, strict=True):
        few = Few(data, index[:_MOST])
        said = [right_class(setup, sent_model(e, client), few) for e in exchanges]
        out = torch.stack([p for p, _ in said[1:]]).mean(0)
        found += [said[0][0], out, said[0][1]]
    return tuple(found)


def as_many_of_each(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Places in both, of each class the same number."""
    first, second = [], []
    for label in a.unique():
        here, there = ((t == label).nonzero()[:, 0] for t in (a, b))
        count = min(len(here), len(there))
        first.append(here[:count])
        second.append(there[:count])
    return torch.cat(first), torch.cat(second)


def sent_model(exchange: Exchange, client: int) -> Tree:
    """The client's own model, as its reply tells it."""
    delta = exchange.replies[client].trees["delta"]
    received = exchange.down.trees["model"]
    return {n: t + delta[n].to(t.dtype) if n in delta else t for n, t in received.items()}


def relabelled(members: Tensor, others: Tensor, draws: int = 200) -> Tensor:
    """AUC of the same scores dealt out at random, many times: nobody may find anything in them."""
    scores, rng = torch.cat([members, others]), generator(0, 0xDEA1)
    found = []
    for _ in range(draws):
        dealt = scores[torch.randperm(len(scores), generator=rng)]
        found.append(auc(dealt[: len(members)], dealt[len(members) :]))
    return torch.tensor(found, dtype=torch.float64)


def right_class(setup: Setup, model: Tree, data: Data) -> tuple[Tensor, Tensor]:
    """Probability of the right class, and whether it is the most probable one."""
    base = fedavg_of(setup)
    assert base is not None
    network = base.result(Message({"model": model}))
    p, right = [], []
    with torch.no_grad():
        for index in torch.arange(len(data)).split(250):
            batch = data.batch(index)
            said = base.task.forward(network, batch).prediction.double().softmax(1)
            p.append(said.gather(1, batch["y"][:, None])[:, 0])
            right.append((said.argmax(1) == batch["y"]).double())
    return torch.cat(p), torch.cat(right)


def ratio(p: Tensor, out: Tensor) -> Tensor:
    """Lambda of RMIA."""
    return p / (((1 + SLOPE) * out + 1 - SLOPE) / 2).clamp_min(1e-12)


def auc(members: Tensor, others: Tensor) -> float:
    """Mann-Whitney: how often a member scores higher than another; ties count half."""
    everything = torch.cat([members, others])
    _, place, count = everything.unique(return_inverse=True, return_counts=True)
    ranks = count.cumsum(0) - (count - 1) / 2
    total = float(ranks[place[: len(members)]].sum())
    n = len(members)
    return (total - n * (n + 1) / 2) / (n * len(others))


def found_at(members: Tensor, others: Tensor, alarms: float = 0.01) -> float:
    """Share of members above the score that only a share `alarms` of the others exceeds."""
    allowed = int(alarms * len(others))
    limit = others.sort(descending=True).values[allowed]
    return float((members > limit).double().mean())


def roc(members: Tensor, others: Tensor, draws: int = 300) -> Rates:
    """Both rates with bootstrap intervals."""
    rng = generator(0, 0xB007)
    areas, rates = [], []
    for _ in range(draws):
        a = members[torch.randint(len(members), (len(members),), generator=rng)]
        b = others[torch.randint(len(others), (len(others),), generator=rng)]
        areas.append(auc(a, b))
        rates.append(found_at(a, b))
    low, high = torch.tensor(areas, dtype=torch.float64).quantile(_ENDS).tolist()
    least, most = torch.tensor(rates, dtype=torch.float64).quantile(_ENDS).tolist()
    return Rates(auc(members, others), low, high, found_at(members, others), least, most)

r"""Membership inference: was this image in the training data? (Zarifzadeh, Liu and Shokri, "Low-
cost high-power membership inference attacks", RMIA, 2024, offline; Carlini et al., "Membership
inference attacks from first principles", LiRA, 2022, for how it is reported.)

Shadow runs of the same recipe, through the simulator, on images that the attacker has (half of the
server's test set), tell how probable the right class of an image x is for a model that never saw
it, p_out. RMIA holds the ratio
    Lambda(x) = p(x) / Pr(x),   Pr(x) = ((1 + a) p_out(x) + 1 - a) / 2
against that of other images z; with one set of z for all x the order of the scores, hence the whole
ROC curve, is that of Lambda. Members are the clients' training images, non-members the other half
of the test set. Somebody who learned nothing has an AUC of 0.5 and finds 1 % of the members at 1 %
false alarms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.audit.attack import Evidence, Finding
from fedlens.audit.evidence import last_state
from fedlens.audit.probe import Few, fedavg_of, labelled
from fedlens.audit.protections import Protection
from fedlens.core.client import Data, generator
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.runs.setup import Setup

SHADOWS = 4
_MOST = 2000  # images on each side
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
    title = "Which images the model was trained on"
    paper = "Zarifzadeh et al. 2024 (RMIA, offline); Carlini et al. 2022 (LiRA)"
    protections: ClassVar[tuple[Protection, ...]] = ()

    def applies(self, setup: Setup) -> str:
        if why := labelled(setup):
            return why
        if not isinstance(setup.federation.test, Data) or len(setup.federation.test) < 40:
            return "there is no test set, from which shadow models and non-members would come"
        return ""

    def run(self, evidence: Evidence) -> Finding:
        began = time.perf_counter()
        setup = evidence.setup
        test = setup.federation.test
        assert isinstance(test, Data)
        order = torch.randperm(len(test), generator=generator(0, 0x3E3B))
        attacker, outside = order[: len(test) // 2], order[len(test) // 2 :][:_MOST]
        last = evidence.exchanges[-1]
        model = last.down.trees["model"]
        rounds = max(1, last.round)
        shadows = train_shadows(setup, Few(test, attacker), rounds, 60 * evidence.minutes)
        if not shadows:
            return Finding(
                self.name,
                f"No shadow run came to its end in {60 * evidence.minutes:.0f} s, so nothing is"
                " said about membership.",
                "AUC", math.nan, 0.5, budget="no shadow run",
            )  # fmt: skip
        members = [setup.federation.holdings[c] for c in evidence.clients]
        inside_p, inside_out = _both(setup, model, shadows, members)
        outside_p, outside_out = _both(setup, model, shadows, [Few(test, outside)])
        inside, outside_scores = ratio(inside_p, inside_out), ratio(outside_p, outside_out)
        rates = roc(inside, outside_scores)
        dealt = roc(*relabelled(inside, outside_scores))
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
                "without shadow models": f"AUC {auc(inside_p, outside_p):.3f}",
                "members dealt out at random": f"AUC {dealt.auc:.3f}"
                f" ({dealt.auc_low:.3f} to {dealt.auc_high:.3f})",
                "members and others swapped": f"AUC {auc(outside_scores, inside):.3f}",
                "members and non-members": f"{len(inside_p)} and {len(outside_p)}",
                "SecureSum": "changes nothing: what is asked is the model itself",
            },
            budget=f"{len(shadows)} shadow runs of {rounds} rounds",
            seconds=time.perf_counter() - began,
        )


def relabelled(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The same scores, dealt out at random: nobody may find anything in them."""
    scores = torch.cat([members, others])
    dealt = scores[torch.randperm(len(scores), generator=generator(0, 0xDEA1))]
    return dealt[: len(members)], dealt[len(members) :]


def train_shadows(setup: Setup, pool: Data, rounds: int, seconds: float) -> list[Tree]:
    """Models of the same recipe on the attacker's own images: as many clients, as large. Those that
    are not ready in time do not count.
    """
    ends = time.perf_counter() + seconds
    models: list[Tree] = []
    for k in range(SHADOWS):
        rng = generator(k, 0x5AD0)
        holdings = [
            Few(pool, torch.randint(len(pool), (len(held),), generator=rng))
            for held in setup.federation.holdings
        ]
        federation = replace(setup.federation, holdings=holdings, held_out=(), test=None)
        settings = replace(setup.settings, seed=1000 + k)
        shadow = replace(setup, federation=federation, settings=settings)
        state = last_state(shadow, rounds, ends - time.perf_counter())
        if state is None:
            break
        models.append(dict(state.trees["model"]))
    return models


def _both(
    setup: Setup, model: Tree, shadows: Sequence[Tree], held: Sequence[Data]
) -> tuple[Tensor, Tensor]:
    """Probability of the right class, under the model and under the shadows."""
    own = right_class(setup, model, held)
    out = torch.stack([right_class(setup, shadow, held) for shadow in shadows]).mean(0)
    return own, out


def right_class(setup: Setup, model: Tree, held: Sequence[Data]) -> Tensor:
    base = fedavg_of(setup)
    assert base is not None
    network = base.result(Message({"model": model}))
    found = []
    with torch.no_grad():
        for data in held:
            for index in torch.arange(min(len(data), _MOST)).split(250):
                batch = data.batch(index)
                p = base.task.forward(network, batch).prediction.double().softmax(1)
                found.append(p.gather(1, batch["y"][:, None])[:, 0])
    return torch.cat(found)[:_MOST]


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
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(areas, dtype=torch.float64).quantile(ends).tolist()
    least, most = torch.tensor(rates, dtype=torch.float64).quantile(ends).tolist()
    return Rates(auc(members, others), low, high, found_at(members, others), least, most)

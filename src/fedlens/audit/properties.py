r"""Property inference (Melis et al., "Exploiting unintended feature leakage in collaborative
learning", 2019): what kind of data a client has, from what it sent.

Leave one out: the server knows the property of all clients but one (they told it, or it is public)
and reads the last one's from how its message differs from theirs. No image is reconstructed.

Whoever knows the other clients' counts could also say their mean, without any message: that, or all
classes alike, whichever is closer to the truth, is the baseline.

- `ClassCounts`, for stacks that balance classes before they train, where the bias of the last layer
  no longer shows them: one ridge regression for all classes, from (how far a class's bias, row and
  row along itself have moved) to the class's share.
- `Resolution`, for clients with images of different sizes: whose message is nearest by the norms of
  what each tensor has moved, normalised. Compared are stand-ins of every resolution that the server
  plays with its own test people, so that it needs to know nothing about the other clients; where it
  has none, the other clients themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from fedlens.audit.attack import Evidence, Finding, Histogram, lucky_share, two_errors
from fedlens.audit.labels import BIAS, MEASURE, distance, flat, true_shares
from fedlens.audit.probe import labelled
from fedlens.audit.protections import TRAINING
from fedlens.core.answer import answer
from fedlens.core.client import generator
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.data.pose.people import People
from fedlens.engines.recorder import Exchange
from fedlens.layers.balance import Balance
from fedlens.layers.multi_resolution import Size
from fedlens.runs.setup import Setup

RIDGE = 1e-2
_LEAST = 3  # clients
_STAND_INS = 2  # of each resolution, for each client


class ClassCounts:
    name = "counts"
    title = "Class counts behind FBL's balancing"
    paper = "Melis et al. 2019"
    protections = TRAINING

    def applies(self, setup: Setup) -> str:
        if not any(isinstance(part, Balance) for part in setup.algorithm.parts()):
            return "no layer balances classes, so `labels` reads them directly"
        return labelled(setup)

    def run(self, evidence: Evidence) -> Finding:
        replies = last_replies(evidence.exchanges)
        if len(replies) < _LEAST:
            return Finding(
                self.name, f"Fewer than {_LEAST} clients were heard.", MEASURE, 1, 1, True
            )
        shares = {}
        features = {}
        for client, (down, reply) in replies.items():
            features[client] = class_features(down, reply)
            shares[client] = true_shares(evidence.setup, client, len(features[client]))
        found: list[Histogram] = []
        naive: list[float] = []
        for client in [c for c in evidence.clients if c in replies]:
            rest = [c for c in replies if c != client]
            guess = ridge(
                torch.cat([features[c] for c in rest]),
                torch.cat([shares[c] for c in rest]),
                features[client],
            ).clamp_min(0)
            guess = guess / guess.sum().clamp_min(1e-9)
            told = Histogram(f"client {client}", shares[client].tolist(), guess.tolist())
            usual = torch.stack([shares[c] for c in rest]).mean(0).tolist()
            naive.append(min(distance(replace(told, guess=g)) for g in (flat(told), usual)))
            found.append(told)
        errors = [distance(h) for h in found]
        score, base = mean(errors), mean(naive)
        return Finding(
            self.name,
            f"Who knows the other clients' class counts gets {100 * (1 - score):.0f} % of a"
            f" client's right; from these counts alone it would be {100 * (1 - base):.0f} %.",
            MEASURE,
            score,
            base,
            smaller_leaks=True,
            margin=two_errors([b - e for b, e in zip(naive, errors, strict=True)]),
            numbers={"clients": str(len(found))},
            histograms=found,
            budget="one ridge regression a client",
        )


class Resolution:
    name = "resolution"
    title = "Which resolution a client's camera has"
    paper = "Melis et al. 2019"
    protections = TRAINING

    def applies(self, setup: Setup) -> str:
        if len(set(setup.federation.facts.resolutions)) < 2:
            return "all clients have one resolution"
        return ""

    def run(self, evidence: Evidence) -> Finding:
        sizes = evidence.setup.federation.facts.resolutions
        replies = last_replies(evidence.exchanges)
        marks = {c: movement(reply) for c, (_, reply) in replies.items()}
        whom = [c for c in evidence.clients if c in replies]
        if len(replies) < _LEAST or not whom:
            return Finding(self.name, f"Fewer than {_LEAST} clients were heard.", "accuracy", 0, 0)
        right, lucky = [], []
        for client in whom:
            down, _ = replies[client]
            rest = [(sizes[c], marks[c]) for c in marks if c != client]
            known = played_at_each(evidence.setup, down, client) or rest
            near = min(known, key=lambda k: float((k[1] - marks[client]).norm()))
            right.append(near[0] == sizes[client])
            common = Counter(size for size, _ in rest).most_common(1)[0][0]
            lucky.append(common == sizes[client])
        score, base = mean(map(float, right)), max(mean(map(float, lucky)), 1 / len(set(sizes)))
        return Finding(
            self.name,
            f"Of {len(whom)} clients the resolution is told right for {100 * score:.0f} %; naming"
            f" the commonest one is right for {100 * base:.0f} %.",
            "accuracy",
            score,
            base,
            margin=lucky_share(len(whom), base) - base,
            numbers={"resolutions": ", ".join(f"{h}x{w}" for h, w in sorted(set(sizes)))},
            budget=f"{_STAND_INS} stand-ins of each resolution a client",
        )


def played_at_each(setup: Setup, down: Message, client: int) -> list[tuple[Size, Tensor]]:
    """Of each resolution, how a message moves of people that the server has itself; nothing where
    it has no people. A client's weight tells how many it has.
    """
    test = setup.federation.test
    if not isinstance(test, People):
        return []
    count = min(len(setup.federation.holdings[client]), len(test))
    played: list[tuple[Size, Tensor]] = []
    for k in range(_STAND_INS):
        rng = generator(client, k, 0x5125)
        some = test.subset(torch.randperm(len(test), generator=rng)[:count].tolist())
        for size in sorted(set(setup.federation.facts.resolutions)):
            holdings = list(setup.federation.holdings)
            holdings[client] = some.at(size)
            federation = replace(setup.federation, holdings=holdings)
            asked = down.with_header(seed=2000 + k)
            reply = answer(setup.algorithm, asked, client, federation, Memory())
            played.append((size, movement(reply)))
    return played


def last_replies(exchanges: Sequence[Exchange]) -> dict[int, tuple[Message, Message]]:
    """The last reply of every client, with what it answers."""
    found: dict[int, tuple[Message, Message]] = {}
    for exchange in exchanges:
        for client, reply in exchange.replies.items():
            if "delta" in reply.trees:
                found[client] = (exchange.down, reply)
    return found


def class_features(down: Message, reply: Message) -> Tensor:
    """(classes, 3): how far bias and row have moved, and how far along the row itself; each
    relative to the largest of its kind.
    """
    moved, held = reply.trees["delta"], down.trees["model"]["head.weight"].double()
    row = moved["head.weight"].double()
    columns = torch.stack(
        [moved[BIAS].double(), row.norm(dim=1), (row * held).sum(1) / held.norm(dim=1)], dim=1
    )
    return columns / columns.abs().amax(0).clamp_min(1e-12)


def ridge(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """Least squares with a little shrinkage, fitted to (x, y), evaluated at `at`."""
    a = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    b = torch.cat([at, torch.ones(len(at), 1, dtype=at.dtype)], dim=1)
    gram = a.T @ a + RIDGE * len(a) * torch.eye(a.shape[1], dtype=a.dtype)
    found: Tensor = b @ torch.linalg.solve(gram, a.T @ y)
    return found


def movement(reply: Message) -> Tensor:
    """Log norms of what each tensor has moved, their mean taken off: how it moved, not how far."""
    norms = [t.double().norm() for t in reply.trees["delta"].values() if t.is_floating_point()]
    logs = torch.stack(norms).clamp_min(1e-12).log()
    return logs - logs.mean()

r"""FedCDA (Wang et al., ICLR 2024): average models of different rounds, chosen so that they agree.

The server keeps the last K local models of every client and picks one w_n for each such that sum_n
p_n |w_n - w|^2 is smallest, where w = sum_n p_n w_n is the new global model. As the p_n sum to one
this is sum p_n |w_n|^2 - |w|^2: inner products are enough. With `smoothness` L the local losses
take part, sum p_n (F_n(w_n) + L/2 |w_n|^2) - L/2 |w|^2, as other implementations read Eq. 8 (there
is no official code); F_n is the loss reported with the model.

Only the clients heard in a round choose anew, the others keep their choice; clients never heard do
not count. All combinations of the heard are tried where there are at most `exact` of them; beyond
that, groups of B clients are optimised exactly in turn, the rest held fixed, starting from
everybody's newest model, until nothing changes (the paper does one pass). In the first `warmup`
rounds it is FedAvg and models are only collected. It sees single models and stores K of them per
client on the server: no secure aggregation, and memory grows with the population.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, StackError, Stage
from fedlens.core.limits import Count, Natural, Positive
from fedlens.core.message import MEAN, Message
from fedlens.core.replies import Needs, Replies
from fedlens.core.tree import Tree
from fedlens.layers.robust.merge import flatten, weighted_mean


@dataclass
class FedCDA(TrainingLayer):
    """
    Args:
        keep: models per client (K; 3 in the paper).
        group: clients optimised together (B; 3).
        warmup: rounds of plain averaging.
        exact: up to how many combinations are all tried.
        smoothness: L above; None leaves the losses out.
    """

    keep: Count = 3
    group: Count = 3
    warmup: Natural = 0
    exact: Natural = 4096
    smoothness: Positive | None = None
    stage: ClassVar[Stage] = "merge"
    own_needs: ClassVar[Needs] = "replies"
    merges: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"keep": (2, 5, 8)}

    def check(self, inner: Algorithm) -> None:
        if self.under(inner).server_lr != 1:
            raise StackError(
                "FedCDA replaces the model by a mean of local ones: it needs FedAvg with"
                " server_lr = 1"
            )

    def server_step(self, state: Message, replies: Replies) -> Message:
        model = state.trees["model"]
        pools, losses, weights, chosen = _remembered(state)
        heard = []
        for reply in replies:
            i = reply.sender
            local = {n: t + reply.trees["delta"][n] for n, t in model.items()}
            pools[i] = [local, *pools.get(i, [])][: self.keep]
            losses[i] = [reply.scalars["loss"], *losses.get(i, [])][: self.keep]
            weights[i] = reply.weights.get("delta", {}).get(MEAN, 1.0)
            chosen[i] = 0
            heard.append(i)
        kept = _to_trees(pools, losses, weights)
        if state.round < self.warmup:
            return self.inner.server_step(state, replies).put(**kept).note(**_choices(chosen))
        everyone = sorted(pools)
        picked = self._select(model, pools, losses, weights, chosen, heard)
        mean = weighted_mean(
            [pools[i][picked[i]] for i in everyone], [weights[i] for i in everyone]
        )
        delta = {n: mean[n] - t for n, t in model.items()}
        return (
            self.inner.server_step(state, replies.put(delta=delta))
            .put(**kept)
            .note(**_choices(picked))
        )

    def _select(
        self,
        model: Tree,
        pools: dict[int, list[Tree]],
        losses: dict[int, list[float]],
        weights: dict[int, float],
        chosen: dict[int, int],
        heard: list[int],
    ) -> dict[int, int]:
        """The fixed clients enter only through their weighted sum. Everything is measured from the
        current model: less cancellation.
        """
        origin = flatten(model)
        total = sum(weights.values())
        fixed = torch.zeros_like(origin)
        for i in pools.keys() - set(heard):
            fixed += weights[i] / total * (flatten(pools[i][chosen[i]]) - origin)
        options = [[flatten(t) - origin for t in pools[i]] for i in heard]
        by = 2 / self.smoothness if self.smoothness else 0.0
        extra = [[by * loss for loss in losses[i]] for i in heard]
        shares = [weights[i] / total for i in heard]
        found = choose_models(options, shares, fixed, self.group, self.exact, extra)
        return {**chosen, **dict(zip(heard, found, strict=True))}


def choose_models(
    options: Sequence[Sequence[Tensor]],
    p: Sequence[float],
    fixed: Tensor,
    group: int,
    exact: int,
    extra: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """One option each, minimising sum p_n (|w_n|^2 + extra_n) - |fixed + sum p_n w_n|^2. Works on
    the Gram matrix of all options.
    """
    rows = torch.stack([*(v for pool in options for v in pool), fixed])
    gram: list[list[float]] = (rows @ rows.T).tolist()
    starts = list(itertools.accumulate((len(pool) for pool in options), initial=0))
    sizes = [len(pool) for pool in options]

    def cost(choice: Sequence[int]) -> float:
        at = [starts[n] + k for n, k in enumerate(choice)]
        own = sum(w * gram[a][a] for w, a in zip(p, at, strict=True))
        if extra:
            own += sum(w * extra[n][k] for n, (w, k) in enumerate(zip(p, choice, strict=True)))
        pairs = [*zip(p, at, strict=True), (1.0, len(gram) - 1)]
        return own - sum(w * v * gram[a][b] for w, a in pairs for v, b in pairs)

    best = [0] * len(options)
    every = 1
    for s in sizes:
        every *= s
    blocks = (
        [range(len(options))]
        if every <= exact
        else [range(k, min(k + group, len(options))) for k in range(0, len(options), group)]
    )
    changed = True
    while changed:
        changed = False
        for block in blocks:
            trial = [
                _with(best, block, ks)
                for ks in itertools.product(*(range(sizes[n]) for n in block))
            ]
            winner = min(trial, key=cost)
            if winner != best and cost(winner) < cost(best):
                best, changed = winner, len(blocks) > 1
    return best


def _with(choice: list[int], block: Sequence[int], values: Sequence[int]) -> list[int]:
    new = list(choice)
    for n, k in zip(block, values, strict=True):
        new[n] = k
    return new


# -- the server's memory of clients: trees "cda:CLIENT:AGE" and scalars, as a state is a message ---


def _to_trees(
    pools: dict[int, list[Tree]], losses: dict[int, list[float]], weights: dict[int, float]
) -> dict[str, Tree]:
    models = {f"cda:{i}:{k}": t for i, pool in pools.items() for k, t in enumerate(pool)}
    sizes = {str(i): torch.tensor(w, dtype=torch.float64) for i, w in sorted(weights.items())}
    found = {str(i): torch.tensor(losses[i], dtype=torch.float64) for i in sorted(losses)}
    return {**models, "cda": sizes, "cda_loss": found}


def _remembered(
    state: Message,
) -> tuple[dict[int, list[Tree]], dict[int, list[float]], dict[int, float], dict[int, int]]:
    weights = {int(i): float(w) for i, w in state.trees.get("cda", {}).items()}
    losses = {int(i): t.tolist() for i, t in state.trees.get("cda_loss", {}).items()}
    pools: dict[int, list[Tree]] = {}
    for i in weights:
        names = (f"cda:{i}:{k}" for k in itertools.count())
        pools[i] = [state.trees[n] for n in itertools.takewhile(lambda n: n in state.trees, names)]
    return pools, losses, weights, {i: int(state.scalars[f"cda:{i}"]) for i in weights}


def _choices(chosen: dict[int, int]) -> dict[str, float]:
    return {f"cda:{i}": float(k) for i, k in chosen.items()}

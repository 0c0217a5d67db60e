r"""Label counts from the bias of the last layer (Zhao, Mopuri and Bilen, "iDLG", 2020; Wainakh et
al., "User-level label leakage from gradients", 2022).

With cross-entropy, the gradient of the head's bias is mean_i (p_i - onehot(y_i)). After S steps of
SGD with learning rate lr and momentum m the bias has moved by -lr S / (1 - m) times the mean of
that, so
    n_c / N = pbar_c + delta_c / (lr R),   R = sum over k = 1..S of (1 - m^k) / (1 - m)
pbar, the mean prediction, is what the server sees when it asks the model halfway (received + delta
/ 2) about images of its own. With one step on one image the smallest entry of the gradient is the
label.

What somebody would say who learned nothing: all classes alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from fedlens.audit.attack import Evidence, Finding, Histogram, two_errors
from fedlens.audit.probe import Caught, catch, fedavg_of, flat_image, labelled, others
from fedlens.audit.protections import TRAINING
from fedlens.runs.setup import Setup

BIAS = "head.bias"


class LabelCounts:
    name = "labels"
    title = "How many images of each class a client has"
    paper = "Zhao et al. 2020 (iDLG); Wainakh et al. 2022 (LLG)"
    protections = TRAINING

    def applies(self, setup: Setup) -> str:
        return labelled(setup)

    def run(self, evidence: Evidence) -> Finding:
        curve = []
        errors: list[float] = []
        naive: list[float] = []
        first: list[Histogram] = []
        for k, exchange in enumerate(evidence.exchanges):
            whom = [c for c in evidence.clients if c in exchange.replies]
            if not whom or BIAS not in exchange.replies[whom[0]].trees.get("delta", {}):
                continue
            found = [self._of_client(evidence, c, k) for c in whom]
            both = [(distance(h), distance(replace(h, guess=flat(h)))) for h in found]
            curve.append((exchange.round, mean(e for e, _ in both)))
            errors += [e for e, _ in both]
            naive += [b for _, b in both]
            first = first or found
        if not errors:
            return Finding(
                self.name, "The last layer never left a client.", MEASURE, 1.0, 1.0, True
            )
        score, base = mean(errors), mean(naive)
        return Finding(
            self.name,
            f"Of a client's class histogram the server gets {100 * (1 - score):.0f} % right from"
            f" one reply; guessing all classes alike gets {100 * (1 - base):.0f} % right.",
            MEASURE,
            score,
            base,
            smaller_leaks=True,
            margin=two_errors([b - e for b, e in zip(naive, errors, strict=True)]),
            numbers={"replies attacked": str(len(errors)), "best": f"{min(errors):.3f}"},
            histograms=first,
            curve=curve,
            budget="closed form",
        )

    def _of_client(self, evidence: Evidence, client: int, number: int) -> Histogram:
        shares = estimate_shares(evidence.setup, catch(evidence, client, number))
        truth = true_shares(evidence.setup, client, len(shares))
        return Histogram(f"client {client}", truth.tolist(), shares.tolist())


MEASURE = "wrong share of the class histogram"


def estimate_shares(setup: Setup, caught: Caught) -> Tensor:
    base = fedavg_of(setup)
    assert base is not None
    received = caught.down.trees["model"]
    halfway = {
        n: t + caught.delta[n].to(t.dtype) / 2 if n in caught.delta and t.is_floating_point() else t
        for n, t in received.items()
    }
    like = flat_image(caught.truth["x"][0])
    model = base.load(halfway).eval()
    with torch.no_grad():
        mean_prediction = model(others(setup, like, 200)).softmax(1).mean(0).double()
    reach = caught.lr * momentum_reach(caught.steps, base.momentum)
    return shares_of(caught.delta[BIAS].double(), mean_prediction, reach)


def momentum_reach(steps: int, momentum: float) -> float:
    """How far S steps along one gradient go: sum over k = 1..S of (1 - m^k) / (1 - m)."""
    return sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))


def shares_of(moved: Tensor, prediction: Tensor, reach: float) -> Tensor:
    """n_c / N from how far the bias moved, the mean prediction, and lr times `momentum_reach`."""
    shares = (prediction + moved / reach).clamp_min(0)
    whole = float(shares.sum())
    return shares / whole if whole > 0 else torch.ones_like(shares) / len(shares)


def true_shares(setup: Setup, client: int, classes: int) -> Tensor:
    data = setup.federation.holdings[client]
    index = torch.arange(len(data)).split(1000)
    counts = sum(torch.bincount(data.batch(i)["y"], minlength=classes) for i in index)
    return torch.as_tensor(counts).double() / len(data)


def distance(found: Histogram) -> float:
    """Total variation: the share of the histogram that is in the wrong place."""
    return sum(abs(a - b) for a, b in zip(found.truth, found.guess, strict=True)) / 2


def flat(found: Histogram) -> list[float]:
    """All classes alike."""
    return [1 / len(found.truth)] * len(found.truth)


def single_label(delta: Mapping[str, Tensor]) -> Tensor:
    """iDLG: of one image, the class whose bias rose."""
    return delta[BIAS].argmax()[None]

"""One stack for every layer, over the toy task: the conformance suite runs over all of them. Add yours here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toy import Toy

from fedlens import Algorithm, Layer, stack
from fedlens.algorithms import FedAvg
from fedlens.layers import BackboneOnly, FedBN, FedProx, LossAware, Median, MixedWeights, MovingMean, Scaffold


def over(*layers: Layer, **fedavg: Any) -> Callable[[], Algorithm]:
    return lambda: stack(FedAvg(Toy(), **{"batch": 8, **fedavg}), *layers)


STACKS: dict[str, Callable[[], Algorithm]] = {
    "fedavg": over(),
    "fedavg uniform, Adam, cosine": over(weights="uniform", optimizer="adam", lr=0.01, schedule="cosine", steps=3),
    "fedprox": over(FedProx(0.1)),
    "scaffold": over(Scaffold()),
    "scaffold, option I": over(Scaffold(), momentum=0.9, lr=0.02),
    "fedprox in scaffold": over(FedProx(0.1), Scaffold()),
    "fedbn": over(FedBN()),
    "fedvssl": over(BackboneOnly(), MixedWeights(0.9), MovingMean(1)),
    "private heads with scaffold": over(BackboneOnly(), Scaffold()),
    "loss-aware": over(LossAware(tau=0.0)),
    "loss-aware, greedy": over(LossAware(greedy=True)),
    "median": over(Median()),
}

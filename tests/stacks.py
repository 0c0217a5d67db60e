"""One stack for every layer, with something to run it on: the conformance suite goes over all of
them. Add yours here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scenes import small_federation
from toy import Blobs, Denoise, GroupToy, Toy, dense_federation, toy_federation

from fedlens import Algorithm, Federation, Layer, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.deblur import CenDeblur, FedAvgDeblur, FedDeblur, FedGDDeblur, LocDeblur
from fedlens.layers import (
    DPSGD,
    Adapters,
    BackboneOnly,
    Balance,
    Bulyan,
    Distances,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedBN,
    FedCDA,
    FedDyn,
    FedGen,
    FedNova,
    FedNTD,
    FedPer,
    FedProx,
    FedRep,
    FedSR,
    FedU,
    FedYogi,
    FineTune,
    GeometricMedian,
    HighFrequency,
    Krum,
    LGFedAvg,
    LossAware,
    Median,
    MixedWeights,
    Moon,
    MovingMean,
    MultiKrum,
    MultiResolution,
    NormClip,
    PFedMe,
    PrivateMean,
    Scaffold,
    TrimmedMean,
    UploadFailures,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    make: Callable[[], Algorithm]
    federation: Federation


VECTORS, CLIPS, IMAGES = toy_federation(7), dense_federation(2, 3, 8, 8), dense_federation(3, 8, 8)


def over(
    *layers: Layer, task: type[LearningTask] = Toy, on: Federation = VECTORS, **fedavg: Any
) -> Case:
    return Case(lambda: stack(FedAvg(task(), **{"batch": 8, **fedavg}), *layers), on)


SCENE, FIELDS = small_federation(False, 7, seed=1), small_federation(True, 7, seed=1)


def deblur(kind: type[FedDeblur], on: Federation, **keys: Any) -> Case:
    return Case(lambda: kind(eta=2.0, rho=0.3, **keys).given(on.facts), on)


STACKS: dict[str, Case] = {
    "fedavg": over(),
    "fedavg uniform, Adam, cosine": over(
        weights="uniform", optimizer="adam", lr=0.01, schedule="cosine", steps=3
    ),
    "fedprox": over(FedProx(0.1)),
    "scaffold": over(Scaffold()),
    "scaffold, option I": over(Scaffold(), momentum=0.9, lr=0.02),
    "fedprox in scaffold": over(FedProx(0.1), Scaffold()),
    "fedbn": over(FedBN()),
    "fedper, private heads": over(FedPer()),
    "fedrep, private heads": over(FedProx(0.1), FedRep(times=2)),
    "lg-fedavg": over(LGFedAvg()),
    "ditto": over(FedProx(0.1), Ditto(0.5)),
    "pfedme": over(PFedMe(lam=5.0, eta=0.1, steps=2), lr=0.02),
    "fine-tuning": over(FineTune()),
    "adapters": over(Adapters(rank=2), FedProx(0.1), Scaffold()),
    "adapters, private heads": over(Adapters(rank=2), FedPer()),
    "fedvssl": over(BackboneOnly(), MixedWeights(0.9), MovingMean(1)),
    "fedu": over(FedU(mu=0.05)),
    "fedu, loss weights": over(FedU(mu=0.05), MixedWeights(1.0)),
    "fedvssl, distances": over(
        Distances(), BackboneOnly(), MixedWeights(0.0), MovingMean(2), lr=0.05, server_lr=0.7
    ),
    "private heads with scaffold": over(BackboneOnly(), Scaffold()),
    "loss-aware": over(LossAware(tau=0.0)),
    "loss-aware, by replies": over(LossAware(tau=0.0, by="replies")),
    "loss-aware, greedy": over(LossAware(greedy=True)),
    "median": over(Median()),
    "fedvsr": over(
        HighFrequency(), LossAware(tau=0.0), task=Denoise, on=CLIPS, optimizer="adam", lr=0.01
    ),
    "fedsr": over(FedSR(layer="conv"), task=Denoise, on=CLIPS),
    "upload failures": over(Scaffold(), UploadFailures(0.5)),
    "raf with fedprox": over(
        FedProx(0.1), MultiResolution(((8, 8), (4, 4))), task=Denoise, on=IMAGES
    ),
    "fednova": over(FedNova()),
    "fedprox in fednova, momentum": over(FedProx(0.1), FedNova(), momentum=0.9, lr=0.02),
    "feddyn": over(FedDyn(0.1)),
    "moon": over(Moon()),
    "fedntd": over(FedNTD()),
    "fedgen": over(FedGen(noise=4, hidden=8, steps=4)),
    "fedcda": over(FedCDA()),
    "fedavgm": over(FedAvgM()),
    "fedadagrad": over(FedAdagrad()),
    "fedadam": over(FedAdam()),
    "fedyogi, as Flower": over(FedYogi(bias="flower")),
    "trimmed mean": over(TrimmedMean()),
    "krum": over(Krum()),
    "multi-krum": over(MultiKrum()),
    "geometric median": over(GeometricMedian()),
    "bulyan": over(Bulyan(liars=1)),
    "norm clip, then median": over(Median(), NormClip()),
    "balance": over(Balance(Blobs(), cache="")),
    "balance, all kinds of clients, anew every round": over(
        Balance(Blobs(), period=1, replay=0.5, unconstrained=0.3, weak=0.3, cache=""),
        momentum=0.9,
        lr=0.02,
    ),
    "fedprox and moon in balance, at random": over(
        FedProx(0.1), Moon(), Balance(Blobs(), "random", period=2, cache="")
    ),
    "balance, private heads, scaffold": over(
        Balance(Blobs(), cache=""), BackboneOnly(), Scaffold()
    ),
    "norm clip on clients": over(NormClip(0.1, where="client")),
    "noisy steps": over(DPSGD(), task=GroupToy),
    "noisy steps, private heads": over(
        DPSGD(noise=0.5, microbatch=3), FedPer(), task=GroupToy, optimizer="adam", lr=0.01
    ),
    "noisy mean": over(FedProx(0.1), PrivateMean(), task=GroupToy),
    "noisy mean, adaptive, by clients": over(
        PrivateMean(quantile=0.5, where="clients"), task=GroupToy
    ),
}

# Bases that restore scenes instead of learning a model: for what holds of any algorithm.
SCENES: dict[str, Case] = {
    "feddeblur": deblur(FedDeblur, SCENE),
    "feddeblur, partial, measured": deblur(FedDeblur, FIELDS, measure_every=2),
    "feddeblur, wavelets": deblur(FedDeblur, FIELDS, prior="wavelet"),
    "feddeblur, box": deblur(FedDeblur, SCENE, prior="box"),
    "cendeblur": deblur(CenDeblur, FIELDS),
    "locdeblur": deblur(LocDeblur, FIELDS),
    "fedavgdeblur": deblur(FedAvgDeblur, SCENE),
    "fedgddeblur": deblur(FedGDDeblur, FIELDS, step=0.3),
}

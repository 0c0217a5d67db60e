"""The names people know from papers, each a stack of parts. `fedlens run RECIPE --algorithm NAME`
puts one in place of the recipe's own.

A part is a class name, or (class name, arguments) where the name stands for certain arguments.
Whatever is not given here keeps the recipe's value or the class's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Piece = str | tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Named:
    """A stack and one line about it.

    Args:
        about: the line.
        parts: names of classes, or (name, arguments), base first.
    """

    about: str
    parts: tuple[Piece, ...]

    def tables(self) -> list[dict[str, Any]]:
        """As a recipe file would have them: one table a part."""
        return [{"name": p} if isinstance(p, str) else {"name": p[0], **p[1]} for p in self.parts]


def named(about: str, *parts: Piece) -> Named:
    return Named(about, parts)


def _fbl(sampling: str, **keys: Any) -> Piece:
    """The paper's Table III, its columns read as its text explains them (their ticks are
    shifted).
    """
    return "Balance", {"sampling": sampling, **keys}


NAMED: dict[str, Named] = {
    "fedavg": named("McMahan et al. 2017: local training, averaged by samples", "FedAvg"),
    "fedprox": named(
        "Li et al. 2020: local training stays near the global model", "FedAvg", "FedProx"
    ),
    "scaffold": named(
        "Karimireddy et al. 2020: control variates against client drift", "FedAvg", "Scaffold"
    ),
    "fedbn": named(
        "Li et al. 2021: every client keeps its own normalisation layers", "FedAvg", "FedBN"
    ),
    "fedper": named("Arivazhagan et al. 2019: every client keeps its own head", "FedAvg", "FedPer"),
    "fedrep": named(
        "Collins et al. 2021: own heads, fitted before the common body learns", "FedAvg", "FedRep"
    ),
    "lg-fedavg": named(
        "Liang et al. 2020: every client keeps its own body, the head is common",
        "FedAvg",
        "LGFedAvg",
    ),
    "ditto": named(
        "Li et al. 2021: an own model beside the common one, held near it", "FedAvg", "Ditto"
    ),
    "pfedme": named(
        "Dinh et al. 2020: own models around Moreau envelopes, their centres are averaged",
        "FedAvg",
        "PFedMe",
    ),
    "finetune": named(
        "FedAvg, and in the last round every client goes on alone", "FedAvg", "FineTune"
    ),
    "median": named(
        "Yin et al. 2018: coordinate-wise median, half of the clients may lie", "FedAvg", "Median"
    ),
    "lossaware": named(
        "FedVSR's server half alone: clients with a small loss count more", "FedAvg", "LossAware"
    ),
    "raf": named(
        "Lim et al. 2025: low resolution learns from high, inside each client",
        "FedAvg",
        "MultiResolution",
    ),
    "raf-fedprox": named("RAF on FedProx", "FedAvg", "FedProx", "MultiResolution"),
    "fedvsr": named(
        "FedVSR 2025: high-frequency loss on clients, loss-aware server",
        "FedAvg",
        "HighFrequency",
        "LossAware",
    ),
    "fedsr": named(
        "Yang et al. 2025: contrastive term on shallow features, layer-wise averages",
        "FedAvg",
        "FedSR",
    ),
    "f-hifr": named("FedVSR's ablation: the high-frequency loss alone", "FedAvg", "HighFrequency"),
    "f-ala": named("FedVSR's ablation: adaptive loss-aware weights alone", "FedAvg", "LossAware"),
    "f-gla": named(
        "FedVSR's ablation: greedy inverse-loss weights", "FedAvg", ("LossAware", {"greedy": True})
    ),
    "fbl": named(
        "Li et al.: every client balances its classes, by sampling and generating",
        "FedAvg",
        "Balance",
    ),
    "fbl-fedprox": named("FBL on FedProx", "FedAvg", "FedProx", "Balance"),
    "fbl-moon": named("FBL on MOON", "FedAvg", "Moon", "Balance"),
    "fbl-m1": named(
        "FBL's ablation: random samples, no alignment",
        "FedAvg",
        _fbl("random", align=False, replay=0.0),
    ),
    "fbl-m2": named(
        "FBL's ablation: samples by loss, no alignment",
        "FedAvg",
        _fbl("loss", align=False, replay=0.0),
    ),
    "fbl-m3": named(
        "FBL's ablation: M2 with alignment, no drop",
        "FedAvg",
        _fbl("loss", align=True, drop=0.0, replay=0.0),
    ),
    "fbl-m4": named("FBL's ablation: M3 with drop", "FedAvg", _fbl("loss", align=True, replay=0.0)),
    "fbl-m5": named(
        "FBL's ablation: M4 with 70 % replay", "FedAvg", _fbl("loss", align=True, replay=0.7)
    ),
    "fbl-m6": named(
        "FBL's ablation: M4 with 90 % replay", "FedAvg", _fbl("loss", align=True, replay=0.9)
    ),
    "fbl-m7": named(
        "FBL's ablation: M4 with 10 % replay, the method itself",
        "FedAvg",
        _fbl("loss", align=True, replay=0.1),
    ),
    **{
        f"fbl-{k}": named(
            f"FBL where {k} % of clients fill up to their largest class",
            "FedAvg",
            ("Balance", {"unconstrained": k / 100}),
        )
        for k in (10, 25, 40, 50, 75)
    },
    "fbl-extreme": named(
        "FBL where 30 % of the clients cannot generate", "FedAvg", ("Balance", {"weak": 0.3})
    ),
    "fedvssl": named(
        "Rehman et al. 2022: only the backbone travels, loss and sample weights mixed, moving mean",
        "FedAvg",
        "BackboneOnly",
        "MixedWeights",
        "MovingMean",
    ),
    **{
        f"fedvssl-{alpha:g}-{beta}": named(
            f"FedVSSL's Table 4: alpha = {alpha:g} of loss weights, beta = {beta}",
            "FedAvg",
            "BackboneOnly",
            ("MixedWeights", {"alpha": alpha}),
            ("MovingMean", {"beta": beta}),
        )
        for alpha in (0.0, 1.0, 0.9)
        for beta in (0, 1)
    },
    "loss": named(
        "Gao et al. 2021: averaged by exp(-loss)", "FedAvg", ("MixedWeights", {"alpha": 1.0})
    ),
    "fedu": named(
        "Zhuang et al. 2021: a client that has drifted keeps its own head", "FedAvg", "FedU"
    ),
}

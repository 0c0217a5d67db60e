"""Layers: one idea per file, both halves in it."""

from fedlens.layers.adapters import Adapters
from fedlens.layers.balance import Balance
from fedlens.layers.distances import Distances
from fedlens.layers.ditto import Ditto
from fedlens.layers.dpsgd import DPSGD
from fedlens.layers.fedcda import FedCDA
from fedlens.layers.feddyn import FedDyn
from fedlens.layers.fedgen import FedGen
from fedlens.layers.fednova import FedNova
from fedlens.layers.fedntd import FedNTD
from fedlens.layers.fedprox import FedProx
from fedlens.layers.fedrep import FedRep
from fedlens.layers.fedsr import FedSR
from fedlens.layers.fedu import FedU
from fedlens.layers.fine_tune import FineTune
from fedlens.layers.high_frequency import HighFrequency
from fedlens.layers.loss_aware import LossAware
from fedlens.layers.mixed_weights import MixedWeights
from fedlens.layers.moon import Moon
from fedlens.layers.moving_mean import MovingMean
from fedlens.layers.multi_resolution import MultiResolution
from fedlens.layers.pfedme import PFedMe
from fedlens.layers.private import BackboneOnly, FedBN, FedPer, LGFedAvg
from fedlens.layers.private_mean import PrivateMean
from fedlens.layers.robust.bulyan import Bulyan
from fedlens.layers.robust.geometric_median import GeometricMedian
from fedlens.layers.robust.krum import Krum, MultiKrum
from fedlens.layers.robust.median import Median
from fedlens.layers.robust.norm_clip import NormClip
from fedlens.layers.robust.trimmed_mean import TrimmedMean
from fedlens.layers.scaffold import Scaffold
from fedlens.layers.server_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedlens.layers.upload_failures import UploadFailures

__all__ = [
    "DPSGD",
    "Adapters",
    "BackboneOnly",
    "Balance",
    "Bulyan",
    "Distances",
    "Ditto",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedBN",
    "FedCDA",
    "FedDyn",
    "FedGen",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSR",
    "FedU",
    "FedYogi",
    "FineTune",
    "GeometricMedian",
    "HighFrequency",
    "Krum",
    "LGFedAvg",
    "LossAware",
    "Median",
    "MixedWeights",
    "Moon",
    "MovingMean",
    "MultiKrum",
    "MultiResolution",
    "NormClip",
    "PFedMe",
    "PrivateMean",
    "Scaffold",
    "TrimmedMean",
    "UploadFailures",
]

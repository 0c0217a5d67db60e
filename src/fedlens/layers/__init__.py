"""Layers: one idea per file, both halves in it."""

from fedlens.layers.fedprox import FedProx
from fedlens.layers.fedsr import FedSR
from fedlens.layers.high_frequency import HighFrequency
from fedlens.layers.loss_aware import LossAware
from fedlens.layers.median import Median
from fedlens.layers.mixed_weights import MixedWeights
from fedlens.layers.moving_mean import MovingMean
from fedlens.layers.multi_resolution import MultiResolution
from fedlens.layers.private import BackboneOnly, FedBN
from fedlens.layers.scaffold import Scaffold
from fedlens.layers.upload_failures import UploadFailures

__all__ = [
    "BackboneOnly",
    "FedBN",
    "FedProx",
    "FedSR",
    "HighFrequency",
    "LossAware",
    "Median",
    "MixedWeights",
    "MovingMean",
    "MultiResolution",
    "Scaffold",
    "UploadFailures",
]

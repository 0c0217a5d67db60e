"""Bases: algorithms that a stack begins with."""

from fedlens.algorithms.deblur_baselines import CenDeblur, FedAvgDeblur, FedGDDeblur, LocDeblur
from fedlens.algorithms.fedavg import FedAvg
from fedlens.algorithms.feddeblur import FedDeblur

__all__ = ["CenDeblur", "FedAvg", "FedAvgDeblur", "FedDeblur", "FedGDDeblur", "LocDeblur"]

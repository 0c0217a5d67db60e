"""Bases: algorithms that a stack begins with."""

from fedlens.algorithms.fedavg import FedAvg
from fedlens.algorithms.feddeblur import FedDeblur

__all__ = ["FedAvg", "FedDeblur"]

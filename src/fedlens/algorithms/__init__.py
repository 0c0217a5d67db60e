"""Bases: algorithms that a stack begins with."""

from fedlens.algorithms.fedavg import FedAvg

__all__ = ["FedAvg"]

"""Bases that a stack begins with; `named` has the stacks that papers gave a name."""

from fedlens.algorithms.fedavg import FedAvg

__all__ = ["FedAvg"]

"""Bases that a stack begins with; `named` has the stacks that papers gave a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedlens.core.lazy import lazily

if TYPE_CHECKING:
    from fedlens.algorithms.fedavg import FedAvg

_WHERE = {"FedAvg": "fedavg"}
__all__ = ["FedAvg"]
__getattr__, __dir__ = lazily(__name__, _WHERE)

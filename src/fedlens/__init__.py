"""FedLens: federated vision. Images stay with their owners; a message goes down, a reply comes
up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedlens.core.lazy import lazily

if TYPE_CHECKING:
    from fedlens.core.algorithm import Algorithm, Layer, StackError, stack
    from fedlens.core.answer import answer
    from fedlens.core.client import Batch, Client, Data, Output
    from fedlens.core.facts import Facts
    from fedlens.core.federation import Federation
    from fedlens.core.message import Header, Message
    from fedlens.core.replies import Heard, Lost, Replies, Scalar
    from fedlens.core.rounds import Engine, Progress, Round, run
    from fedlens.core.tree import Tree
    from fedlens.runs.fit import FitResult, fit
    from fedlens.runs.job import experiment

__version__ = "0.1.0"

# Loaded on first use: `fedlens --help` must not wait for torch.
_WHERE = {
    "Algorithm": "core.algorithm",
    "Layer": "core.algorithm",
    "Scalar": "core.replies",
    "StackError": "core.algorithm",
    "stack": "core.algorithm",
    "Batch": "core.client",
    "Client": "core.client",
    "Data": "core.client",
    "Output": "core.client",
    "Facts": "core.facts",
    "Federation": "core.federation",
    "experiment": "runs.job",
    "fit": "runs.fit",
    "FitResult": "runs.fit",
    "Header": "core.message",
    "Message": "core.message",
    "Heard": "core.replies",
    "Lost": "core.replies",
    "Replies": "core.replies",
    "Engine": "core.rounds",
    "Progress": "core.rounds",
    "Round": "core.rounds",
    "answer": "core.answer",
    "run": "core.rounds",
    "Tree": "core.tree",
}
__all__ = [
    "Algorithm",
    "Batch",
    "Client",
    "Data",
    "Engine",
    "Facts",
    "Federation",
    "FitResult",
    "Header",
    "Heard",
    "Layer",
    "Lost",
    "Message",
    "Output",
    "Progress",
    "Replies",
    "Round",
    "Scalar",
    "StackError",
    "Tree",
    "answer",
    "experiment",
    "fit",
    "run",
    "stack",
]
__getattr__, __dir__ = lazily(__name__, _WHERE)

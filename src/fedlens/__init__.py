"""FedLens: federated vision. Images stay with their owners; a message goes down, a reply comes
up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedlens.core.lazy import lazily

if TYPE_CHECKING:
    from fedlens.core.algorithm import Algorithm, Layer, StackError, stack
    from fedlens.core.client import Batch, Client, Data, Output
    from fedlens.core.federation import Federation
    from fedlens.core.message import Message
    from fedlens.core.replies import Lost, Replies
    from fedlens.core.rounds import Engine, Progress, Round, answer, run
    from fedlens.core.tree import Tree
    from fedlens.runs.job import experiment

__version__ = "0.1.0"

# Loaded on first use: `fedlens --help` must not wait for torch.
_WHERE = {
    "Algorithm": "core.algorithm",
    "Layer": "core.algorithm",
    "StackError": "core.algorithm",
    "stack": "core.algorithm",
    "Batch": "core.client",
    "Client": "core.client",
    "Data": "core.client",
    "Output": "core.client",
    "Federation": "core.federation",
    "experiment": "runs.job",
    "Message": "core.message",
    "Lost": "core.replies",
    "Replies": "core.replies",
    "Engine": "core.rounds",
    "Progress": "core.rounds",
    "Round": "core.rounds",
    "answer": "core.rounds",
    "run": "core.rounds",
    "Tree": "core.tree",
}
__all__ = [
    "Algorithm",
    "Batch",
    "Client",
    "Data",
    "Engine",
    "Federation",
    "Layer",
    "Lost",
    "Message",
    "Output",
    "Progress",
    "Replies",
    "Round",
    "StackError",
    "Tree",
    "answer",
    "experiment",
    "run",
    "stack",
]
__getattr__ = lazily(__name__, _WHERE)

"""FedLens: federated vision. Images stay with their owners; a message goes down, a reply comes up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedlens.lazy import lazily

if TYPE_CHECKING:
    from fedlens.algorithm import Algorithm, Layer, StackError, stack
    from fedlens.client import Batch, Client, Data, Output
    from fedlens.federation import Federation
    from fedlens.job import experiment
    from fedlens.message import Message
    from fedlens.replies import Lost, Replies
    from fedlens.rounds import Engine, Progress, Round, answer, run
    from fedlens.tree import Tree

__version__ = "0.1.0"

# Loaded on first use: `fedlens --help` must not wait for torch.
_WHERE = {
    "Algorithm": "algorithm", "Layer": "algorithm", "StackError": "algorithm", "stack": "algorithm", "Batch": "client", "Client": "client",
    "Data": "client", "Output": "client", "Federation": "federation", "experiment": "job", "Message": "message", "Lost": "replies",
    "Replies": "replies", "Engine": "rounds", "Progress": "rounds", "Round": "rounds", "answer": "rounds", "run": "rounds", "Tree": "tree",
}  # fmt: skip
__all__ = [
    "Algorithm", "Batch", "Client", "Data", "Engine", "Federation", "Layer", "Lost", "Message", "Output", "Progress", "Replies",
    "Round", "StackError", "Tree", "answer", "experiment", "run", "stack",
]  # fmt: skip
__getattr__ = lazily(__name__, _WHERE)

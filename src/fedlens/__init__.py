"""FedLens: federated vision. Images stay with their owners; a message goes down, a reply comes up."""

from fedlens.algorithm import Algorithm, Layer, StackError, stack
from fedlens.client import Batch, Client, Data, Output
from fedlens.federation import Federation
from fedlens.message import Message
from fedlens.replies import Lost, Replies
from fedlens.run import Engine, Progress, Round, answer, run
from fedlens.tree import Tree

__version__ = "0.1.0"
__all__ = [
    "Algorithm", "Batch", "Client", "Data", "Engine", "Federation", "Layer", "Lost", "Message", "Output", "Progress", "Replies",
    "Round", "StackError", "Tree", "answer", "run", "stack",
]  # fmt: skip

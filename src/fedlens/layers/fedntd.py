r"""FedNTD (Lee et al., 2022): local training must not forget what the global model knows about the
classes that are not true.

loss += beta tau^2 KL(q_g || q_l), both softmax at temperature tau over the logits without the true
class's (Eqs. 3 and 4). The paper's tables use beta = 1, tau = 1; its code's default is tau = 3. The
factor tau^2 is the code's; at tau = 1 it makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.client import Batch, Client, Output
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message
from fedlens.layers.moon import frozen


@dataclass
class FedNTD(TrainingLayer):
    """
    Args:
        beta: strength.
        tau: temperature.

    For classification only.
    """

    beta: NotNegative = 1.0
    tau: Positive = 1.0
    whole: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"beta": (0.3, 3.0, 10.0)}

    def client_step(self, message: Message, client: Client) -> Message:
        teacher = frozen(self.fedavg, message.trees["model"])

        def term(model: object, batch: Batch, output: Output) -> Tensor:
            if "y" not in batch or output.prediction.dim() != 2:
                raise ValueError(
                    "FedNTD needs class scores and labels: it works for classification only"
                )
            with torch.no_grad():
                known = self.fedavg.task.forward(teacher, batch).prediction
            return self.beta * not_true(output.prediction, known, batch["y"], self.tau)

        return self.inner.client_step(message, client.plus(term))


def not_true(local: Tensor, known: Tensor, y: Tensor, tau: float) -> Tensor:
    """tau^2 KL(known || local) over all classes but the true one, mean over the batch."""
    others = F.one_hot(y, local.shape[1]) == 0
    a, b = (t[others].view(len(y), -1) / tau for t in (local, known))
    return tau**2 * F.kl_div(
        a.log_softmax(1), b.log_softmax(1), reduction="batchmean", log_target=True
    )

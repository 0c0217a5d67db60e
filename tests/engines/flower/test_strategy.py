"""A stack as a Flower Strategy: held against Flower's own FedAvg and against numbers worked out by
hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedlens import StackError
from fedlens.layers import FedProx, LossAware, Median, Scaffold
from fedlens.trust import SecureSum

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedlens.engines.flower.strategy import StackStrategy


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flower makes messages inside its own processes only, unless it is told who it is."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield


class Grid:
    def get_node_ids(self) -> list[int]:
        return [11, 12, 13]


def reply(to: Message, weights: list[float], examples: int, loss: float, client: int) -> Message:
    to.metadata.__dict__["_message_id"] = f"m{client}"
    arrays = ArrayRecord({"w": torch.tensor(weights), "steps": torch.tensor(3 + client)})
    metrics = MetricRecord({"num-examples": examples, "train_loss": loss, "client": client})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=to)


def one_round(strategy: Any, backwards: bool = False) -> dict[str, torch.Tensor]:
    start = ArrayRecord({"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(0)})
    asked = list(strategy.configure_train(1, start, ConfigRecord(), Grid()))
    sent = [([2.0, 0.0], 10, 1.0), ([4.0, 1.0], 30, 4.0), ([0.1, 0.7], 60, 1.0)]
    replies = [reply(m, *s, client=k) for k, (m, s) in enumerate(zip(asked, sent, strict=True))]
    arrays, _ = strategy.aggregate_train(1, replies[::-1] if backwards else replies)
    return dict(arrays.to_torch_state_dict())


def test_without_layers_it_is_flowers_fedavg() -> None:
    """w = 0.1 [2, 0] + 0.3 [4, 1] + 0.6 [0.1, 0.7] = [1.46, 0.72]; steps 0.1 x 3 + 0.3 x 4 + 0.6 x
    5 = 4.5: 4 or 5.
    """
    ours, flowers = one_round(StackStrategy()), one_round(FedAvg())
    assert torch.allclose(ours["w"], torch.tensor([1.46, 0.72])) and torch.allclose(
        ours["w"], flowers["w"].float()
    )
    assert ours["steps"].dtype == torch.int64 and int(ours["steps"]) in (4, 5)


def test_order_of_arrival_changes_no_bit() -> None:
    forwards, back = one_round(StackStrategy()), one_round(StackStrategy(), backwards=True)
    assert all(torch.equal(forwards[n], back[n]) for n in forwards)


def test_losses_weigh() -> None:
    """Greedy inverse losses 1, 1/4, 1 over 2.25: w = ([2, 0] + [1, 0.25] + [0.1, 0.7]) / 2.25."""
    got = one_round(StackStrategy(LossAware(greedy=True)))
    assert torch.allclose(got["w"], torch.tensor([3.1, 0.95]) / 2.25)


def test_single_replies_reach_those_who_need_them() -> None:
    assert torch.allclose(one_round(StackStrategy(Median()))["w"], torch.tensor([2.0, 0.7]))


@pytest.mark.parametrize("layer", [FedProx(0.1), Scaffold(), SecureSum(masks=False), SecureSum()])
def test_layers_with_a_half_that_nobody_would_run_are_refused(layer: Any) -> None:
    with pytest.raises(StackError, match=type(layer).__name__):
        StackStrategy(layer)

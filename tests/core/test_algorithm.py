from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
from toy import Toy, toy_federation

from fedlens import Algorithm, Client, Layer, Message, Replies, StackError, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Stage
from fedlens.core.client import generator
from fedlens.layers import FedProx, Median


class Still(Algorithm):
    """Does not train."""

    def init(self) -> Message:
        return Message()

    def broadcast(self, state: Message) -> Message:
        return state

    def client_step(self, message: Message, client: Client) -> Message:
        return Message()

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state


@dataclass
class Secret(Layer):
    stage: ClassVar[Stage] = "wire"
    hides_replies: ClassVar[bool] = True


def test_a_training_layer_needs_something_that_trains() -> None:
    with pytest.raises(
        StackError, match="FedProx changes how clients train, but Still does not train"
    ):
        stack(Still(), FedProx())


def test_nothing_that_hides_single_replies_stands_over_something_that_needs_them() -> None:
    with pytest.raises(StackError, match="Secret hides single replies, but Median needs them"):
        stack(FedAvg(Toy()), Median(), Secret())
    assert stack(FedAvg(Toy()), Secret()).needs == "sums"


def test_a_learning_layer_does_not_stand_outside_a_wire_layer() -> None:
    with pytest.raises(StackError, match="put FedProx before it"):
        stack(FedAvg(Toy()), Secret(), FedProx())


def test_a_stack_begins_with_a_base_and_goes_on_with_layers() -> None:
    with pytest.raises(StackError, match="is a layer"):
        stack(FedProx())
    with pytest.raises(StackError, match="base of its own"):
        stack(FedAvg(Toy()), Still())  # type: ignore[arg-type]
    with pytest.raises(StackError, match="FedProx is in this stack twice"):
        stack(FedAvg(Toy()), FedProx(), Median(), FedProx())


def test_needs_and_parts_of_a_stack() -> None:
    algorithm = stack(FedAvg(Toy()), FedProx(), Median())
    assert algorithm.needs == "replies"
    assert [type(p).__name__ for p in algorithm.parts()] == ["FedAvg", "FedProx", "Median"]
    assert isinstance(algorithm.base, FedAvg)


def test_a_layer_can_be_used_in_two_stacks() -> None:
    prox = FedProx(0.5)
    a, b = stack(FedAvg(Toy()), prox), stack(FedAvg(Toy()), Median(), prox)
    assert a.needs == "sums" and b.needs == "replies" and not hasattr(prox, "inner")


def test_importing_fedlens_loads_no_engine_of_others() -> None:
    code = (
        "import sys, fedlens; print([m for m in ('flwr', 'ray', 'matplotlib', 'torchvision', 'av',"
        " 'deepinv') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


class Counting(Still):
    def evaluate(self, message: Message, data: object, memory: object) -> dict[str, float]:
        return {"accuracy": 0.5, "examples": 7.0}


def test_a_metric_is_not_called_like_the_size_of_what_it_was_measured_on() -> None:
    data = toy_federation(1).holdings[0]
    client = Client(0, data, generator(0), {}, held_out=data)
    assert Still().score(Message(), client).scalars == {"examples": float(len(data))}
    with pytest.raises(ValueError, match="a metric is called 'examples', which is how much data"):
        Counting().score(Message(), client)

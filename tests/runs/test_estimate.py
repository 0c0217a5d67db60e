"""A dry run does little and says how much more the whole is."""

from __future__ import annotations

import pytest
from toy import Toy

from fedlens import stack
from fedlens.algorithms import FedAvg
from fedlens.layers import FedProx


@pytest.mark.parametrize(
    ("keys", "inside", "times"),
    [
        ({"epochs": 10}, (1, None), 10),  # one of ten epochs
        ({"steps": 100}, (1, 4), 25),  # four of a hundred steps
        ({"steps": 3, "epochs": 7}, (1, 3), 1),  # where steps are given, epochs say nothing
    ],
)
def test_local_work_is_shortened_in_a_copy(
    keys: dict[str, int], inside: tuple[int, int | None], times: float
) -> None:
    algorithm = stack(FedAvg(Toy(), **keys), FedProx())  # type: ignore[arg-type]
    short, found, batch, by_data = algorithm.shortened(4)
    assert batch == 32 and by_data == ("steps" not in keys)
    assert isinstance(short, FedProx) and isinstance(short.base, FedAvg)
    assert (short.base.epochs, short.base.steps) == inside and found == times
    base = algorithm.base
    assert isinstance(base, FedAvg)
    assert (base.epochs, base.steps) == (keys.get("epochs", 1), keys.get("steps"))

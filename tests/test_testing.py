"""The public checks, as a user calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from toy import Toy

from fedlens import Heard, Message
from fedlens.core.replies import Arrival
from fedlens.data import Synthetic
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, LossAware
from fedlens.testing import (
    check_engine,
    check_layer,
    check_source,
    check_task,
    small_federation,
)


def test_good_parts_pass() -> None:
    check_layer(FedProx(mu=0.1))
    check_layer(LossAware(tau=0.0))
    check_task(Toy(), small_federation().holdings[0])
    check_source(Synthetic(images=60, test_images=10, size=8))
    check_engine(lambda a, f: Simulator(a, f, workers=2))


class Forgetful(Loopback):
    """Loses the last reply of every round without a word."""

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        *kept, last = super().exchange(message, ids, heard)
        assert isinstance(last, Message | Heard)
        yield from kept


class Deaf(Toy):
    """Its loss does not depend on the network."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch).detach().requires_grad_()


def test_bad_parts_are_found() -> None:
    with pytest.raises(AssertionError, match="the engine changes the result"):
        check_engine(Forgetful)
    with pytest.raises(AssertionError, match="the loss has no gradient"):
        check_task(Deaf(), small_federation().holdings[0])

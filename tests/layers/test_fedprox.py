from __future__ import annotations

import pytest
from by_hand import Rounds, fedavg, federation

from fedlens import stack
from fedlens.layers import FedProx


def test_two_steps_by_hand() -> None:
    """Target 1, lr 0.1, mu 1, two steps. w = 0: gradient -1 + 1 * 0 = -1, w = 0.1. Then (0.1 - 1) +
    0.1 = -0.8, w = 0.18 (0.19 without FedProx).
    The loss that is reported is the task's alone: (1/2 + 0.81/2) / 2 = 0.4525."""
    game = Rounds(stack(fedavg(lr=0.1, epochs=2), FedProx(1.0)), federation(1.0))
    game.play()
    assert game.w == pytest.approx([0.18])
    assert game.replies.values("loss") == pytest.approx([0.4525])


def test_the_anchor_is_the_received_model_of_each_round() -> None:
    """Round 2 starts at 0.18: gradient -0.82, w = 0.262; then -0.738 + 0.082 = -0.656, w =
    0.3276.
    """
    game = Rounds(stack(fedavg(lr=0.1, epochs=2), FedProx(1.0)), federation(1.0))
    game.play()
    game.play()
    assert game.w == pytest.approx([0.3276])

from __future__ import annotations

import itertools

import pytest
import torch
from by_hand import Rounds, fedavg, federation

from fedlens import StackError, stack
from fedlens.layers import FedCDA
from fedlens.layers.fedcda import choose_models


def game(**options: int) -> Rounds:
    """Targets 0 and 8, lr 0.5: a client goes half the way from the received model to its target."""
    return Rounds(stack(fedavg(lr=0.5), FedCDA(**options)), federation(0.0, 8.0))


def test_three_rounds_by_hand() -> None:
    """Round 1: 0 and 4, x = 2. Round 2: 1 and 5; kept {1, 0} and {5, 4}; the nearest pair is (1,
    4), x = 2.5.
    Round 3: 1.25 and 5.25; kept {1.25, 1, 0} and {5.25, 5, 4}; (1.25, 4), x = 2.625."""
    play = game()
    found = []
    for _ in range(3):
        play.play()
        found += play.w
    assert found == pytest.approx([2, 2.5, 2.625])
    assert play.state.scalars["cda:0"] == 0 and play.state.scalars["cda:1"] == 2


def test_only_the_last_k_are_kept() -> None:
    """keep = 2: in round 3 client 1 has {5.25, 5}: (1.25, 5), x = 3.125."""
    play = game(keep=2)
    for _ in range(3):
        play.play()
    assert play.w == pytest.approx([3.125])


def test_who_is_not_heard_keeps_its_choice() -> None:
    """After round 2 client 1 stands at 4. Round 3 asks client 0 only: from 2.5 it goes to 1.25: x =
    (1.25 + 4) / 2.
    """
    play = game()
    play.play()
    play.play()
    play.play(0)
    assert play.w == pytest.approx([2.625])


def test_warm_up_is_fedavg() -> None:
    """Round 2 is still plain: (1 + 5) / 2 = 3; round 3 chooses among {1.5, 1, 0} and {5.5, 5, 4}:
    (1.5, 4).
    """
    play = game(warmup=2)
    play.play()
    play.play()
    assert play.w == pytest.approx([3.0])
    play.play()
    assert play.w == pytest.approx([2.75])


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Against trying everything with the divergence written as it is defined, weights unequal and
    some clients fixed.
    """
    rng = torch.Generator().manual_seed(seed)
    options = [[torch.randn(6, generator=rng).double() for _ in range(3)] for _ in range(4)]
    still = torch.randn(6, generator=rng).double()
    p = [0.1, 0.3, 0.2, 0.15]

    def divergence(choice: tuple[int, ...]) -> float:
        models = [*(options[n][k] for n, k in enumerate(choice)), still]
        shares = [*p, 0.25]
        mean = sum(s * m for s, m in zip(shares, models))
        return float(sum(s * (m - mean).square().sum() for s, m in zip(shares, models)))

    best = min(itertools.product(range(3), repeat=4), key=divergence)
    assert choose_models(options, p, 0.25 * still, group=3, exact=4096) == list(best)
    by_groups = choose_models(options, p, 0.25 * still, group=2, exact=1)
    assert divergence(best) <= divergence(tuple(by_groups)) <= divergence((0, 0, 0, 0))


def test_refused() -> None:
    with pytest.raises(StackError, match="server_lr = 1"):
        stack(fedavg(server_lr=0.5), FedCDA())
    with pytest.raises(ValueError, match="keep is 0, but it must be of at least 1"):
        FedCDA(keep=0)

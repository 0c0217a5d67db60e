"""LossAware, MixedWeights and MovingMean: with learning rate 1 a client's update is its target, so
the new model shows the weights.
"""

from __future__ import annotations

import math

import pytest
from by_hand import Rounds, fedavg, federation, targets

from fedlens import stack
from fedlens.layers import LossAware, MixedWeights, MovingMean

LOSSES = (0.02, 0.03, 0.04, 0.05)


def axes(losses: tuple[float, ...]) -> list[list[float]]:
    """Client k's target is sqrt(2 L_k) along axis k: its loss at w = 0 is L_k, and w_k / sqrt(2
    L_k) is its weight in the mean.
    """
    return [
        [math.sqrt(2 * loss) * (k == j) for j in range(len(losses))]
        for k, loss in enumerate(losses)
    ]


def weights_of(layer: LossAware, rounds: int) -> tuple[list[float], float]:
    game = Rounds(stack(fedavg(4), layer), federation(*axes(LOSSES)), rounds)
    state = game.play()
    return [w / math.sqrt(2 * loss) for w, loss in zip(game.w, LOSSES)], state.scalars["mix"]


def test_loss_aware_with_the_public_decay() -> None:
    """Round 1 of 100: exponent 1 - 1/100 = 0.99. I = L^-0.99 = (48.09, 32.19, 24.21, 19.41), sum
    123.90, so l = (0.388, 0.260, 0.195, 0.157); H^2 = 1 - sum sqrt(l) / 2 = 1 - 0.98529 = 0.0147, H
    = 0.121; m = (0.121 - 0.05) / 0.95 = 0.075; w = (1 - m) / 4 + m l = (0.260, 0.251, 0.246,
    0.243)."""
    w, m = weights_of(LossAware(tau=0.05), 100)
    assert m == pytest.approx(0.075, abs=5e-4)
    assert w == pytest.approx([0.260, 0.251, 0.246, 0.243], abs=5e-4)
    assert sum(w) == pytest.approx(1)


def test_loss_aware_by_replies_gives_the_same_weights() -> None:
    """The numbers of the test above, from one mean with the final weights."""
    w, m = weights_of(LossAware(tau=0.05, by="replies"), 100)
    assert m == pytest.approx(0.075, abs=5e-4)
    assert w == pytest.approx([0.260, 0.251, 0.246, 0.243], abs=5e-4)
    assert stack(fedavg(4), LossAware(by="replies")).needs == "replies"


def test_loss_aware_ends_uniform_with_the_public_decay() -> None:
    """In the last round the exponent is 0 and everybody counts alike."""
    w, m = weights_of(LossAware(tau=0.05), 1)
    assert m == 0 and w == pytest.approx([0.25] * 4)


def test_loss_aware_as_the_paper_writes_it() -> None:
    """Exponent 1 in every round: I = (50, 33.33, 25, 20), sum 128.33, l = (0.3896, 0.2597, 0.1948,
    0.1558); sum sqrt(l) = 0.62418 + 0.50964 + 0.44137 + 0.39477 = 1.96996, H^2 = 0.01502, H =
    0.12256; m = 0.07638; w_1 = 0.92362 / 4 + 0.07638 * 0.3896 = 0.26066."""
    w, m = weights_of(LossAware(tau=0.05, decay="paper"), 1)
    assert m == pytest.approx(0.07638, abs=5e-5)
    assert w == pytest.approx([0.26066, 0.25074, 0.24578, 0.24281], abs=5e-5)


def test_greedy_is_inverse_loss() -> None:
    """m = 1: w = (50, 33.33, 25, 20) / 128.33."""
    w, m = weights_of(LossAware(greedy=True), 1)
    assert m == 1 and w == pytest.approx([0.38961, 0.25974, 0.19481, 0.15584], abs=1e-5)


def test_a_gate_above_the_distance_leaves_a_uniform_mean() -> None:
    """H = 0.121 < tau = 0.2."""
    assert weights_of(LossAware(tau=0.2), 100) == (pytest.approx([0.25] * 4), 0.0)


def test_mixed_weights_by_hand() -> None:
    """Losses ln 2 and ln 4: e^-L = 1/2 and 1/4, shares 2/3 and 1/3. Samples 1 and 3: shares 1/4 and
    3/4. alpha = 0.9: 0.6 + 0.025 = 0.625 and 0.375."""
    losses = (math.log(2), math.log(4))
    rows = axes(losses)
    game = Rounds(
        stack(fedavg(2), MixedWeights(0.9)), federation(targets(rows[0]), targets(*[rows[1]] * 3))
    )
    game.play()
    assert [w / math.sqrt(2 * loss) for w, loss in zip(game.w, losses)] == pytest.approx(
        [0.625, 0.375]
    )


@pytest.mark.parametrize(
    ("beta", "expected"), [(0, [1, 2, 3]), (1, [1, 1.5, 2]), (2, [1, 1.5, 5 / 3])]
)
def test_moving_mean_by_hand(beta: int, expected: list[float]) -> None:
    """A far target pulls by lr * (1e7 - w) = 1 a round with lr = 1e-7. beta = 1: round 2 gives 2,
    mean of 2 and 1 is 1.5; round 3 gives 2.5, mean with 1.5 is 2. beta = 2: round 3 gives 2.5, mean
    of 2.5, 1.5 and 1 is 5/3."""
    game = Rounds(stack(fedavg(lr=1e-7), MovingMean(beta)), federation(1e7))
    found = []
    for _ in range(3):
        game.play()
        found += game.w
    assert found == pytest.approx(expected)

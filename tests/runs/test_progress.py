"""What is drawn while a job goes."""

from __future__ import annotations

from typing import Any

from fedlens.runs.progress import Live
from fedlens.runs.text import spark


def a_round(loss: float | None, **metrics: float | None) -> dict[str, Any]:
    return {"loss": loss, "metrics": metrics}


def test_the_small_curve_shows_one_thing() -> None:
    """Evaluated every other round: the accuracies, not losses between them. A metric that is no
    number leaves no place for the next one.
    """
    bar = Live()
    assert bar.curve(a_round(9.0)) == spark([9.0])
    assert bar.curve(a_round(8.0, accuracy=0.1, other=70.0)) == spark([0.1])
    assert bar.curve(a_round(7.0)) == spark([0.1])
    assert bar.curve(a_round(6.0, accuracy=0.3, other=80.0)) == spark([0.1, 0.3])
    assert bar.curve(a_round(5.0, accuracy=None, other=90.0)) == spark([0.1, 0.3])


def test_without_evaluation_the_small_curve_is_the_loss() -> None:
    bar = Live()
    bar.curve(a_round(3.0))
    bar.curve(a_round(None))  # nobody was heard
    assert bar.curve(a_round(1.0)) == spark([3.0, 1.0])

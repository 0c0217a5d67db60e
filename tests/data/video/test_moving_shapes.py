from __future__ import annotations

import numpy as np
import pytest
import torch
from tables import from_table

from fedlens.data.video.moving_shapes import MovingShapes, moving_shape


def test_shapes_do_what_their_class_says() -> None:
    """The brightest-changing column moves right for class 0 and left for class 1: centres of what
    differs from the median frame.
    """

    def centre(action: int, axis: int) -> torch.Tensor:
        clip = moving_shape(action, 16, 40, torch.Generator().manual_seed(3)).float()
        moved = (clip - clip.median(0).values).abs().sum(1)
        along = moved.sum(2 - axis + (axis == 0) * 0)
        place = torch.arange(40.0)
        return (along * place).sum(1) / along.sum(1)

    assert float(centre(0, 1)[-1] - centre(0, 1)[0]) > 10
    assert float(centre(1, 1)[-1] - centre(1, 1)[0]) < -10


def test_moving_shapes_are_a_federation() -> None:
    found = MovingShapes(
        videos=24, tests=8, partition="classes", classes_per_client=2, length=12, side=24
    ).federation(4, 0)
    again = MovingShapes(
        videos=24, tests=8, partition="classes", classes_per_client=2, length=12, side=24
    ).federation(4, 0)
    assert [sum(n > 0 for n in row) for row in found.facts.labels] == [2, 2, 2, 2]
    assert np.array_equal(
        found.holdings[1].clips[0].read(0, 12), again.holdings[1].clips[0].read(0, 12)
    )
    with pytest.raises(ValueError, match=r"data\.actions must be .* at most 8, not 9"):
        from_table("data", "MovingShapes", actions=9)
    with pytest.raises(ValueError, match=r"data\.holdout must be .* below 1, not 1.0"):
        from_table("data", "MovingShapes", holdout=1.0)

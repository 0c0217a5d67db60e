"""VCOP and Speed: tables worked out by hand, on videos whose pixels are their frame numbers."""

from __future__ import annotations

import pytest
import torch

from fedlens.core.client import generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.data.source import DataError
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.video_set import VideoSet
from fedlens.tasks.ctp import CtP
from fedlens.tasks.speed import Speed, played
from fedlens.tasks.vcop import CLIP_ORDERS, VCOP


def numbered(length: int) -> ArrayFrames:
    return ArrayFrames(
        torch.arange(length, dtype=torch.uint8)[:, None, None, None]
        .expand(length, 3, 40, 40)
        .contiguous()
    )


def test_strides_by_hand() -> None:
    assert list(played(10, 2, 4)) == [10, 12, 14, 16]
    assert list(played(10, -2, 4)) == [16, 14, 12, 10]
    assert list(played(10, 0, 4)) == [10, 10, 10, 10]


def test_speed_shows_the_stride_it_asks_for() -> None:
    """8 frames at strides up to 4 take 29 frames; the pixels are the frame numbers."""
    task = Speed(frames=8, size=32, colour=False)
    assert task.least == 29
    seen = set()
    for seed in range(60):
        example = task.sample(numbered(29), 0, generator(seed), True)
        shown = (example["x"][0, :, 0, 0] * 255).round()
        stride = task.strides[int(example["y"])]
        assert shown.diff().unique().tolist() == [stride]
        seen.add(stride)
    assert seen == {-4, -2, -1, 0, 1, 2, 4}


def test_the_permutation_table() -> None:
    assert CLIP_ORDERS == ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def test_vcop_shows_the_order_it_asks_for() -> None:
    """Three clips of 4 frames with gaps of 2 take 16; in a video of 16 the clips begin at 0, 6 and
    12.
    """
    task = VCOP(frames=4, gap=2, size=32)
    assert task.least == 16
    for seed in range(30):
        example = task.sample(numbered(16), 0, generator(seed), True)
        first = (example["x"][:, 0, 0, 0, 0] * 255).round().tolist()
        assert first == [6.0 * j for j in CLIP_ORDERS[int(example["y"])]]
        assert bool(((example["x"][:, 0].diff(dim=1)[:, :, 0, 0] * 255).round() == 1).all())


def videos(*lengths: int) -> VideoSet:
    return VideoSet(
        [numbered(n) for n in lengths], [0] * len(lengths), [str(k) for k in range(len(lengths))]
    )


def test_short_videos_are_left_out_and_counted() -> None:
    """VCOP needs 16 frames here: of (15, 16, 40) and (20, 3) one each goes."""
    found = VCOP(frames=4, gap=2, size=32).admit(
        Federation([videos(15, 16, 40), videos(20, 3)], facts=Facts(classes=("a",)))
    )
    assert [len(h) for h in found.holdings] == [2, 1]
    assert (
        found.facts.details["excluded"] == 2
        and found.facts.details["excluded_by_client"] == [1, 1]
        and found.facts.details["least_frames"] == 16
    )
    assert list(found.facts.notes) == ["2 videos are shorter than 16 frames and were left out"]


def test_what_nobody_can_learn_from_is_refused() -> None:
    with pytest.raises(DataError, match="client 1 has no video of 16 frames or more"):
        VCOP(frames=4, gap=2, size=32).admit(Federation([videos(16), videos(15)]))
    with pytest.raises(DataError, match="no video has the 80 frames that VCOP needs"):
        VCOP(frames=16, gap=16, size=32).admit(Federation([videos(16)]))
    with pytest.raises(DataError, match="CtP learns from videos"):
        CtP(frames=8, size=32).admit(Federation([torch.zeros(3)]))

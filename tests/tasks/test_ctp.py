from __future__ import annotations

import math
from itertools import pairwise

import torch
from pytest import approx

from fedlens.core.client import Output, generator
from fedlens.data.video.frames import ArrayFrames
from fedlens.tasks.ctp import CtP, TrackHead, targets


def test_targets_of_a_known_path() -> None:
    """A box of 24 x 24 at (50, 40) moves by 12 and -4 and grows to 24 e^.04 x 24 e^.08. In pixels
    over .8: 15 and -5; in sides of the first box over .8: .625 and -.2083. Growth .04 and .08 over
    .04: 1 and 2.
    """
    w, h = 24 * math.exp(0.04), 24 * math.exp(0.08)
    boxes = torch.tensor([[38.0, 28, 62, 52], [62 - w / 2, 36 - h / 2, 62 + w / 2, 36 + h / 2]])
    assert targets(boxes)[0].tolist() == [0, 0, 0, 0]
    assert targets(boxes)[1].tolist() == approx([15, -5, 1, 2], abs=1e-4)
    assert targets(boxes, None)[1].tolist() == approx([0.625, -5 / 24, 1, 2], abs=1e-4)


def test_the_loss_of_the_public_head() -> None:
    """The three paths of `test_patches.py` at frames 0, 7 and 15 through `CtPHead.loss` with its
    published deviations and answers of zero: 19.4957 for the centre and 5.5626 for the size.
    """
    boxes = torch.tensor(
        [
            [[37.0, 41, 112, 103], [17, 19, 107, 93], [0, 0, 95, 78]],
            [[74, 20, 95, 51], [79, 16, 105, 56], [88, 15, 112, 59]],
            [[48, 71, 86, 90], [47, 82, 86, 98], [47, 94, 86, 109]],
        ]
    )
    y = targets(boxes)[None]
    zero = torch.zeros_like(y)
    centre = torch.cat([y[..., :2], zero[..., 2:]], -1)
    assert float(CtP().loss(Output(zero), {"y": centre})) == approx(19.4957, abs=1e-3)
    assert float(CtP().loss(Output(zero), {"y": y})) == approx(19.4957 + 5.5626, abs=1e-3)


def test_targets_do_not_depend_on_the_size_of_a_clip() -> None:
    """In a clip of 56 a pixel counts twice: speeds and patches are half as large there."""
    means = []
    for size in (56, 112):
        task = CtP(frames=8, size=size)
        frames = ArrayFrames(torch.randint(256, (20, 3, size, size), dtype=torch.uint8))
        made = [task.sample(frames, 0, generator(seed), True)["y"] for seed in range(60)]
        means.append(float(torch.stack(made)[..., :2].abs().mean()))
    assert means[0] == approx(means[1], rel=0.1)


def test_the_loss_is_a_sum_over_coordinates_and_a_mean_over_patches_and_frames() -> None:
    """Differences .5, 0, 2, 0 in all of 3 x 8: smooth L1 gives .125 + 0 + 1.5 + 0."""
    y = torch.zeros(2, 3, 8, 4)
    said = y + torch.tensor([0.5, 0, 2, 0])
    assert float(CtP().loss(Output(said), {"y": y})) == approx(1.625)


def test_a_fresh_head_says_that_nothing_moves() -> None:
    """Deviations of .001 in both linear layers: answers below .01 where targets go up to 50."""
    head = TrackHead((16, 2, 7, 7), 8, 56).requires_grad_(False)
    said = head(torch.rand(2, 16, 2, 7, 7), torch.tensor([[8.0, 8, 24, 30]]).expand(2, 1, 4))
    assert said.shape == (2, 1, 8, 4) and float(said.abs().max()) < 0.01
    assert float(head.hidden.weight.std()) == approx(0.001, rel=0.1)


def test_strides_are_capped_by_the_length_and_nothing_is_looped() -> None:
    """8 frames of a video of 20: at most stride 2 (7 x 2 + 1 = 15 frames). Frame k lies in
    [start + k s, start + (k + 1) s), the last one in the video.
    """
    task = CtP(frames=8, stride=5)
    last = set()
    for seed in range(200):
        numbers = task.numbers(20, generator(seed))
        assert all(0 <= a < 20 for a in numbers) and all(
            1 <= b - a <= 3 for a, b in pairwise(numbers)
        )
        last.add(numbers[-1])
    assert max(last) == 19 and min(last) == 7
    assert list(task.numbers(8, generator(0))) == list(range(8))
    assert task.least == 8


def test_an_example_is_the_same_for_the_same_generator() -> None:
    frames = ArrayFrames(torch.randint(256, (20, 3, 40, 50), dtype=torch.uint8))
    task = CtP(frames=8, size=32)
    a, b = (task.sample(frames, 0, generator(5), True) for _ in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert {k: tuple(v.shape) for k, v in a.items()} == {
        "x": (3, 8, 32, 32),
        "boxes": (3, 4),
        "y": (3, 8, 4),
    }


def test_a_clip_of_one_frame_is_no_error() -> None:
    frames = ArrayFrames(torch.randint(256, (3, 3, 40, 50), dtype=torch.uint8))
    made = CtP(frames=1, size=32).sample(frames, 0, generator(0), True)
    assert made["x"].shape == (3, 1, 32, 32) and not bool(made["y"].any())

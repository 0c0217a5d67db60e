from __future__ import annotations

import math
from itertools import pairwise

import torch
from pytest import approx

from fedlens.core.client import Output, generator
from fedlens.data.video.frames import ArrayFrames
from fedlens.tasks.ctp import CtP, between, corners, cover, draw_path, key_frames, paste, targets


def test_targets_of_a_known_path() -> None:
    """A box of 20 x 10 at (50, 40) goes to (58, 36) and grows to 20 e^.04 x 10 e^.08. Shift in
    sides: 8/20 = .4 and -4/10 = -.4; over .8: .5 and -.5. Growth .04 and .08 over .04: 1 and 2.
    Half-way between the key frames, the centre is half-way: .25 and -.25."""
    path = between(
        [0, 2], [[50.0, 40, 20, 10], [58.0, 36, 20 * math.exp(0.04), 10 * math.exp(0.08)]]
    )
    found = targets(path)
    assert found.shape == (3, 4)
    assert found[0].tolist() == [0, 0, 0, 0]
    assert found[1, :2].tolist() == approx([0.25, -0.25])
    assert found[2].tolist() == approx([0.5, -0.5, 1, 2], abs=1e-5)
    assert corners(path[0]).tolist() == [40, 35, 60, 45]


def test_the_loss_is_a_sum_over_coordinates_and_a_mean_over_patches_and_frames() -> None:
    """Differences .5, 0, 2, 0 in all of 3 x 8: smooth L1 gives .125 + 0 + 1.5 + 0."""
    y = torch.zeros(2, 3, 8, 4)
    said = y + torch.tensor([0.5, 0, 2, 0])
    assert float(CtP().loss(Output(said), {"y": y})) == approx(1.625)


def test_paths_stay_inside_and_within_their_speed() -> None:
    """At a size of 56 the centre moves by at most 1.5 pixels a frame; sides by e^.025 at most, plus
    what straight lines add to a curve.
    """
    for seed in range(200):
        path = draw_path(16, 56, 0.18, generator(seed))
        boxes = torch.stack([corners(p) for p in path])
        assert float(boxes.min()) >= -1e-4 and float(boxes.max()) <= 56 + 1e-4
        assert float(path[:, :2].diff(dim=0).abs().max()) <= 1.5 + 1e-4
        assert float(path[:, 2:].log().diff(dim=0).abs().max()) <= 0.03


def test_key_frames_are_none_one_or_two_besides_the_ends() -> None:
    """Probabilities .5, .3, .2 over 3000 draws: three standard deviations are below .03."""
    draws = torch.rand(3000, 3, generator=generator(1)).tolist()
    counts = (
        torch.bincount(
            torch.tensor([len(key_frames(16, iter(row))) - 2 for row in draws]), minlength=3
        )
        / 3000
    )
    assert counts.tolist() == approx([0.5, 0.3, 0.2], abs=0.03)


def test_shapes() -> None:
    """At (.9, .9) of the half sides only the rectangle covers, at (.6, .6) also the ellipse, at
    (.4, .4) all three.
    """
    u, v = torch.tensor([0.9, 0.6, 0.4, 1.1]), torch.tensor([0.9, 0.6, 0.4, 0.0])
    assert [cover(u, v, k, soft=False).tolist() for k in range(3)] == [
        [1, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 0],
    ]
    assert cover(torch.tensor([0.9]), torch.tensor([0.0]), 0, soft=True).tolist() == approx([0.5])


def test_a_patch_is_painted_inside_its_box_and_nowhere_else() -> None:
    clip = torch.full((3, 4, 32, 32), 0.25)
    clip[:, :, :8] = 1.0
    path = torch.tensor([[16.0, 16, 8, 6]]).repeat(4, 1)
    changed = torch.zeros(32, 32, dtype=torch.bool)
    for seed in range(40):  # some of these are cut from the white part
        changed |= (paste(clip, path[None], generator(seed)) != clip).any(0).any(0)
    rows, columns = changed.nonzero().unbind(1)
    assert (int(rows.min()), int(rows.max()), int(columns.min()), int(columns.max())) == (
        13,
        18,
        12,
        19,
    )


def test_the_first_frame_and_its_own_always_show_a_patch() -> None:
    """A patch cut from white covers grey in frame 0 whatever is drawn; other frames are left out in
    a fifth of the cases.
    """
    clip = torch.full((3, 6, 32, 32), 0.0)
    clip[:, :, :, :4] = 1.0
    path = torch.tensor([[16.0, 16, 31, 31]]).repeat(6, 1)
    shown = (
        torch.stack(
            [
                (paste(clip, path[None], generator(seed)) != clip).any(0).flatten(1).any(1)
                for seed in range(400)
            ]
        )
        .float()
        .mean(0)
    )
    assert float(shown[0]) == 1.0
    assert shown[1:].tolist() == approx([0.8 + 0.2 / 6] * 5, abs=0.06)


def test_strides_are_capped_by_the_length_and_nothing_is_looped() -> None:
    """8 frames of a video of 20: at most stride 2 (20 // 8). Frame k lies in [start + k s, start +
    (k + 1) s).
    """
    task = CtP(frames=8, stride=5)
    for seed in range(100):
        numbers = task.numbers(20, generator(seed))
        assert all(0 <= a < 20 for a in numbers) and all(
            1 <= b - a <= 3 for a, b in pairwise(numbers)
        )
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

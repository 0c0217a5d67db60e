"""Boxes, ways and masks against numbers from microsoft/CtP: its functions were run beside these
with the same draws (300 seeds of boxes and ways: no pixel of difference; 60 clips: pixels within
1e-6). What stands here are single cases of that.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pytest import approx

from fedlens.core.client import generator
from fedlens.tasks.patches import (
    EVEN,
    FASTER,
    SLOWER,
    between,
    cover,
    draw_boxes,
    first_boxes,
    key_frames,
    moving_boxes,
    overlay,
    paste,
    uniforms,
)
from fedlens.tasks.video_colour import jitter_colours, tinted


def test_first_boxes_are_those_of_the_public_code() -> None:
    """Two of the boxes that `RandomRegionSampler` draws at numpy's seed 5: its sides after jitter,
    its places as shares of the room that is left.
    """
    sides = np.array([[74.631372, 62.100292], [20.919862, 31.151760]])
    places = np.array([[0.990821, 0.819473], [0.808282, 0.242540]])
    boxes = first_boxes(sides, places, 112)
    assert boxes[0].tolist() == approx([37.025619, 40.891453, 111.656991, 102.991745], abs=1e-4)
    assert boxes[1].tolist() == approx([73.618408, 19.608965, 94.538269, 50.760725], abs=1e-4)


def test_boxes_move_as_those_of_the_public_code() -> None:
    """Centres evenly, sides slowing down, from frame 0 to 15; frames 0, 7 and 15 of what
    `rectangle_movement` makes of these numbers, rounded as `PatchMask` does.
    """
    first = np.array(
        [
            [37.025619, 40.891453, 111.656991, 102.991745],
            [73.618408, 19.608965, 94.538269, 50.760725],
            [48.337713, 70.548550, 85.910041, 90.252529],
        ]
    )
    shifts = np.array([[-26.626073, -34.281418], [34.011276, 2.130776], [-0.707760, 20.868399]])
    growth = np.array([[0.244916, 0.250120], [0.294308, 0.343510], [0.046003, -0.307088]])
    found = moving_boxes(first, 112, ([0, 15], [EVEN], [shifts]), ([0, 15], [SLOWER], [growth]))
    assert found[:, [0, 7, 15]].tolist() == [
        [[37, 41, 112, 103], [17, 19, 107, 93], [0, 0, 95, 78]],
        [[74, 20, 95, 51], [79, 16, 105, 56], [88, 15, 112, 59]],
        [[48, 71, 86, 90], [47, 82, 86, 98], [47, 94, 86, 109]],
    ]


def test_paces_are_those_of_the_public_code() -> None:
    """From 0 to 5 in ten frames: the table in the docstring of `extend_key_frame_to_all`; slowing
    down is the same backwards.
    """
    ends = np.array([0.0, 5.0])
    table = [0.0, 0.05, 0.2, 0.45, 0.8, 1.25, 1.8, 2.45, 3.2, 4.05, 5.0]
    assert between([0, 10], ends, [EVEN]).tolist() == approx([k / 2 for k in range(11)])
    assert between([0, 10], ends, [FASTER]).tolist() == approx(table)
    assert between([0, 10], ends, [SLOWER]).tolist() == approx([5 - v for v in table[::-1]])
    bent = between([0, 2, 4], np.array([0.0, 2.0, 6.0]), [EVEN, FASTER])
    assert bent.tolist() == approx([0, 1, 2, 3, 6])
    assert between([0], np.array([3.0]), []).tolist() == [3.0]


def test_key_frames_lie_where_the_public_code_puts_them() -> None:
    """16 frames. One in between: 8, moved by -2 ... 1 (a third of 8 is 2). Two: 5 and 10, moved by
    -1 or 0 (a third of 5.33 is 1).
    """
    one = {key_frames(16, iter([0.6, place]))[1] for place in (0.0, 0.3, 0.6, 0.99)}
    two = {tuple(key_frames(16, iter([0.9, a, b]))) for a in (0.0, 0.9) for b in (0.0, 0.9)}
    assert one == {6, 7, 8, 9}
    assert two == {(0, a, b, 15) for a in (4, 5) for b in (9, 10)}
    assert key_frames(16, iter([0.4])) == [0, 15]
    assert key_frames(1, iter([0.9, 0.5, 0.5])) == [0]


def test_key_frames_are_none_one_or_two_besides_the_ends() -> None:
    """Probabilities .5, .3, .2 over 3000 draws: three standard deviations are below .03."""
    draws = torch.rand(3000, 3, generator=generator(1)).tolist()
    inner = torch.tensor([len(key_frames(16, iter(row))) - 2 for row in draws])
    assert (torch.bincount(inner, minlength=3) / 3000).tolist() == approx([0.5, 0.3, 0.2], abs=0.03)


def test_drawn_boxes_stay_inside_and_within_their_speed() -> None:
    """At a size of 56 an even path moves its centre by at most 1.5 pixels a frame, one that speeds
    up or slows down by less than twice that; half a pixel more for rounding. Corners lie on whole
    pixels of 112, which are half ones here, and sides are at least one pixel.
    """
    turns = set()
    for seed in range(200):
        boxes = draw_boxes(3, 16, 56, 0.18, 3.0, 0.025, uniforms(generator(seed)))
        assert boxes.shape == (3, 16, 4)
        assert float(boxes.min()) >= 0 and float(boxes.max()) <= 56
        assert bool((2 * boxes == (2 * boxes).round()).all())
        assert float((boxes[..., 2:] - boxes[..., :2]).min()) > 0.999
        centre = (boxes[..., :2] + boxes[..., 2:]) / 2
        assert float(centre.diff(dim=1).abs().max()) <= 3 + 0.5
        turns.add(round(float(centre[0, -1, 0] - centre[0, 0, 0])))
    assert len(turns) > 20


@pytest.mark.parametrize("size", [8, 16])
def test_in_tiny_clips_boxes_keep_a_pixel(size: int) -> None:
    for seed in range(50):
        boxes = draw_boxes(3, 4, size, 0.18, 3.0, 2.0, uniforms(generator(seed)))
        assert float((boxes[..., 2:] - boxes[..., :2]).min()) > 0.999
        assert float(boxes.min()) >= 0 and float(boxes.max()) <= size


def test_masks_are_those_of_the_public_code() -> None:
    """A patch of 5 x 4 pixels through `pick_alphas`: ellipse and rhombus with hard and soft edges
    (turning point .4), and the soft rectangle.
    """
    ones, none = [1.0] * 5, [0.0] * 5
    assert cover(5, 4, 0, None).tolist() == [ones] * 4
    torch.testing.assert_close(cover(5, 4, 0, 0.4), torch.tensor([ones, ones, ones, none]))
    assert cover(5, 4, 1, None).tolist() == [ones, ones, ones, none]
    soft = [0.283, 1.0, 1.0, 1.0, 0.283]
    for row, expected in zip(cover(5, 4, 1, 0.4).tolist(), [soft, ones, soft, none], strict=True):
        assert row == approx(expected, abs=1e-4)
    tips = [0.0, 1.0, 1.0, 1.0, 0.0]
    assert cover(5, 4, 2, None).tolist() == [tips, ones, tips, none]
    sides = [0.0, 0.5, 1.0, 0.5, 0.0]
    for row, expected in zip(cover(5, 4, 2, 0.4).tolist(), [sides, ones, sides, none], strict=True):
        assert row == approx(expected, abs=1e-4)


def test_a_patch_is_resized_as_opencv_does() -> None:
    """[[0, .1], [.2, .3]] in a box of 4 x 3, by cv2.resize; with an opacity of .5 on grey .4 half
    of it. Outside of the box nothing changes.
    """
    out = torch.full((3, 2, 8, 8), 0.4)
    path = torch.tensor([[2.0, 1, 4, 3], [2.0, 4, 6, 7]])
    patch = torch.tensor([[0.0, 0.1], [0.2, 0.3]]).expand(3, 2, 2)
    overlay(out, path, patch, torch.ones(2, 2), torch.tensor([1.0, 0.5]))
    resized = torch.tensor(
        [[0.0, 0.025, 0.075, 0.1], [0.1, 0.125, 0.175, 0.2], [0.2, 0.225, 0.275, 0.3]]
    )
    torch.testing.assert_close(out[:, 0, 1:3, 2:4], patch)
    torch.testing.assert_close(out[:, 1, 4:7, 2:6], (0.2 + resized / 2).expand(3, 3, 4))
    assert int((out != 0.4).any(0)[0].sum()) == 4 and int((out != 0.4).any(0)[1].sum()) == 12


def test_a_patch_shows_its_own_box_and_nothing_else() -> None:
    """A box over the white corner paints white where it goes, one over grey paints nothing new."""
    clip = torch.full((3, 4, 32, 32), 0.25)
    clip[:, :, :8, :8] = 1.0
    corner, middle = torch.tensor([0.0, 0, 8, 8]), torch.tensor([12.0, 13, 20, 19])
    still = middle.repeat(4, 1)[None]
    assert all(
        torch.equal(paste(clip, still, uniforms(generator(seed))), clip) for seed in range(20)
    )
    walk = torch.stack([corner, corner, corner, middle])[None]
    changed = torch.zeros(4, 32, 32, dtype=torch.bool)
    for seed in range(40):
        changed |= (paste(clip, walk, uniforms(generator(seed))) != clip).any(0)
    rows, columns = changed[3].nonzero().unbind(1)
    span = (int(rows.min()), int(rows.max()), int(columns.min()), int(columns.max()))
    assert span == (13, 18, 12, 19)


def test_small_patches_lie_above_large_ones() -> None:
    """The large one shows black, the small one, drawn first, white; where both are, white wins."""
    clip = torch.zeros(3, 2, 32, 32)
    clip[:, :, :6, :6] = 1.0
    small = torch.tensor([[0.0, 0, 6, 6], [14.0, 14, 20, 20]])
    large = torch.tensor([[8.0, 8, 28, 28], [8.0, 8, 28, 28]])
    seen = 0
    for seed in range(60):
        out = paste(clip, torch.stack([small, large]), uniforms(generator(seed)))
        seen += float(out[0, 1, 16, 16]) >= 0.79
    # its own frame must be the first (1/2; else it shows black) and frame 1 show it (.8)
    assert seen == approx(60 * 0.5 * 0.8, abs=12)


def test_the_first_frame_and_its_own_always_show_a_patch() -> None:
    """White in the first box of every frame: a patch cut anywhere is white there."""
    clip = torch.zeros(3, 6, 32, 32)
    boxes = torch.tensor([[[k * 5.0, 4, k * 5 + 5, 12] for k in range(6)]])
    for k in range(6):
        clip[:, k, 4:12, k * 5 : k * 5 + 5] = torch.linspace(0.2, 1, 8)[None, :, None] - 0.02 * k
    shown = torch.zeros(6)
    for seed in range(400):
        out = paste(clip, boxes, uniforms(generator(seed)))
        shown += (out != clip).any(0).flatten(1).any(1)
    # frame 0 differs unless the patch was cut from it; so do the others in .8 of the other cases
    assert float(shown[0]) / 400 == approx(5 / 6, abs=0.06)
    assert (shown[1:] / 400).tolist() == approx([0.8 * 5 / 6] * 5, abs=0.08)


def test_tint_as_opencv_computes_it() -> None:
    """(200, 100, 50) has hue 10 of 180 and saturation 191 of 255. Hue 10 more and saturation times
    1.1 is (200, 145, 35) in OpenCV's 8 bits, which round hue and saturation on the way.
    """
    pixel = torch.tensor([200.0, 100, 50]).view(3, 1, 1, 1) / 255
    found = (tinted(pixel, 10 / 180, 1.1) * 255).flatten().tolist()
    assert found == approx([200, 145, 35], abs=1.5)


def test_colours_change_in_their_share_of_clips_and_over_time() -> None:
    clip = torch.rand(3, 8, 6, 6, generator=generator(3)) * 0.6 + 0.2
    same = moving = 0
    for seed in range(300):
        out = jitter_colours(clip, uniforms(generator(seed)), 0.25, 0.5, 30 / 255, 0.12, True)
        assert float(out.min()) >= 0 and float(out.max()) <= 1
        same += torch.equal(out, clip)
        change = (out - clip).mean((0, 2, 3))
        moving += float(change.std()) > 1e-4
    assert same / 300 == approx(0.75 * 0.5 * 0.5, abs=0.07)
    assert moving / 300 == approx(0.75, abs=0.08)  # brightness or contrast, both by chance
    still = [
        jitter_colours(clip, uniforms(generator(seed)), 0.0, 1.0, 0.1, 0.0, False) - clip
        for seed in range(5)
    ]
    assert all(float((d - d[0, 0, 0, 0]).abs().max()) < 1e-5 for d in still)

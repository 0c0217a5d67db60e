from __future__ import annotations

from pathlib import Path

import torch
from films import make_clips

from fedlens.data.video.clips import Clips
from fedlens.data.video.degrade import degrade
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.windows import cut_pair, turn_pair


def test_a_crop_is_cut_from_the_degraded_frame() -> None:
    """Wherever the crop lies, also at the border: the same as shrinking the whole frame first."""
    frames = ArrayFrames(
        torch.randint(
            0, 256, (3, 3, 70, 94), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
    )
    for scale in (2, 3, 4):
        whole = degrade(frames.array, scale)
        limit = [(n - n % scale - 8 * scale) // scale for n in (70, 94)]
        for top, left in [(0, 0), (3, 5), (limit[0], limit[1]), (0, limit[1])]:
            x, y = cut_pair(frames, 0, 3, (top * scale, left * scale, 8 * scale, 8 * scale), scale)
            torch.testing.assert_close(
                x, whole[..., top : top + 8, left : left + 8], atol=1e-6, rtol=0
            )
            expected = frames.array[
                ..., top * scale : (top + 8) * scale, left * scale : (left + 8) * scale
            ]
            assert torch.equal((y * 255).round().byte(), expected)


def test_turning_keeps_low_and_high_resolution_together() -> None:
    y = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = set()
    for how in range(8):
        a, b = turn_pair(degrade(y, 4), y, how)
        torch.testing.assert_close(degrade(b, 4), a, atol=1.5 / 255, rtol=0)
        seen.add(tuple(b.flatten().tolist()))
    assert len(seen) == 8


def test_augmentation_follows_the_generator(tmp_path: Path) -> None:
    windows = (
        Clips(str(make_clips(tmp_path, ["a"])), frames=5, crop=16, repeat=3)
        .federation(1, 0)
        .holdings[0]
    )
    assert len(windows) == 3
    draw = [
        windows.batch(torch.arange(3), torch.Generator().manual_seed(s))["y"] for s in (0, 0, 1)
    ]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    plain = windows.batch(torch.tensor([0, 1]))["y"]
    assert torch.equal(plain[0], plain[1])

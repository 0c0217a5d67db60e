from __future__ import annotations

import torch

from fedlens.data.video.moving_textures import MovingTextures


def test_moving_textures_move_and_differ_between_families() -> None:
    federation = MovingTextures(
        clips=3, groups=3, split="groups", height=64, width=64, held_out=0.34
    ).federation(3, 0)
    clips = [h.clips[h.pieces[0].clip].read(0, 7).float() for h in federation.holdings]
    for clip in clips:
        assert clip.diff(dim=0).abs().mean() > 0.5 and clip.std() > 15
    assert (clips[0] - clips[1]).abs().mean() > 10
    same = MovingTextures(
        clips=3, groups=3, split="groups", height=64, width=64, held_out=0.34
    ).federation(3, 0)
    assert torch.equal(
        same.holdings[1].clips[1].read(0, 7), federation.holdings[1].clips[1].read(0, 7)
    )
    assert all(len(held) == 1 for held in federation.held_out) and len(federation.test) == 2

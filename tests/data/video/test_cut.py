from __future__ import annotations

from pathlib import Path

import pytest
import torch
from films import make_clips

from fedlens.data.source import DataError
from fedlens.data.video.clips import Clips
from fedlens.data.video.degrade import degrade
from fedlens.data.video.moving_textures import MovingTextures
from fedlens.tasks.super_resolution import SuperResolution


def test_pooled_deals_every_piece_once(tmp_path: Path) -> None:
    root = make_clips(tmp_path, ["a", "b", "c"], size=(40, 48))
    source = Clips(str(root), split="pooled", regions=2, frames=5, crop=16)
    federation = source.federation(4, seed=1)
    pieces = [(p.clip, p.box) for h in federation.holdings for p in h.pieces]
    assert len(pieces) == len(set(pieces)) == 12 and federation.facts.details["windows"] == [
        3,
        3,
        3,
        3,
    ]
    assert not federation.facts.notes  # 40x48 is divisible by 4
    again, other = source.federation(4, seed=1), source.federation(4, seed=2)
    assert again.facts == federation.facts != other.facts
    with pytest.raises(DataError, match="12 pieces of video cannot be dealt to 13 clients"):
        source.federation(13, 0)


def test_cameras_of_different_resolution_see_as_much_of_the_scene() -> None:
    """Every second client films at half the resolution: its frames are the others' shrunk by two
    (`degrade`, whose agreement with MATLAB is tested elsewhere), its crop is the same middle of the
    scene with half the side, and its low resolution is made from that."""
    options = {
        "clips": 2,
        "groups": 2,
        "split": "groups",
        "frames": 2,
        "crop": 32,
        "height": 64,
        "width": 64,
        "scale": 4,
    }
    plain = MovingTextures(**options).federation(2, 0)  # type: ignore[arg-type]
    mixed = MovingTextures(**options, native=(1, 2)).federation(2, 0)  # type: ignore[arg-type]
    first = torch.arange(1)
    full, half = plain.holdings[1].batch(first), mixed.holdings[1].batch(first)
    assert torch.equal(mixed.holdings[0].batch(first)["y"], plain.holdings[0].batch(first)["y"])
    assert half["y"].shape == (1, 2, 3, 16, 16) and half["x"].shape == (1, 2, 3, 4, 4)
    film = plain.holdings[1].clips[plain.holdings[1].pieces[0].clip].read(0, 2)
    small = degrade(film, 2)
    assert torch.equal(half["y"][0], small[..., 8:24, 8:24])
    assert torch.equal(full["y"][0], film[..., 16:48, 16:48].float() / 255)
    torch.testing.assert_close(half["x"][0], degrade(small, 4)[..., 2:6, 2:6], atol=1e-6, rtol=0)
    assert mixed.facts.resolutions == ((8, 8), (4, 4)) and len(mixed.holdings[1]) == len(
        plain.holdings[1]
    )
    with pytest.raises(DataError, match=r"crops of 32 must be divisible by it and by the scale 4"):
        MovingTextures(**options, native=(3,))  # type: ignore[arg-type]


def test_every_camera_is_tested() -> None:
    """A test clip as the smaller camera films it is `degrade` of the clip by its factor; its
    figures bear its name."""
    options = {"clips": 2, "groups": 2, "test_clips": 1, "frames": 2, "length": 2, "crop": 32}
    alike = MovingTextures(**options).federation(2, 0)  # type: ignore[arg-type]
    mixed = MovingTextures(**options, native=(1, 2)).federation(2, 0)  # type: ignore[arg-type]
    assert alike.test is not None and mixed.test is not None
    assert not alike.test.also and list(mixed.test.also) == ["half_size"]
    small = mixed.test.also["half_size"].pair(0)[1]
    assert torch.equal(small, degrade(mixed.test.clips[0].read(0, 2), 2))
    found = SuperResolution(model="light", metrics=("psnr",)).references(None, mixed.test)
    assert list(found["bicubic"]) == ["psnr", "half_size_psnr"]

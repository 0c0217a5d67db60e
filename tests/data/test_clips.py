from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.clips import Clips
from fedlens.data.degrade import degrade
from fedlens.data.frames import ArrayFrames
from fedlens.data.moving_textures import MovingTextures
from fedlens.data.source import DataError
from fedlens.data.windows import cut_pair, turned


def make_clips(root: Path, names: list[str], frames: int = 5, size: tuple[int, int] = (34, 50)) -> Path:
    """Clip k is filled with noise around level 20 k."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(names):
        folder = root / name
        folder.mkdir(parents=True)
        for t in range(frames):
            Image.fromarray((20 * k + rng.integers(0, 20, (*size, 3))).astype(np.uint8)).save(folder / f"{t:08d}.png")
    return root


def test_a_crop_is_cut_from_the_degraded_frame() -> None:
    """Wherever the crop lies, also at the border: the same as shrinking the whole frame first."""
    frames = ArrayFrames(torch.randint(0, 256, (3, 3, 70, 94), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    for scale in (2, 3, 4):
        whole = degrade(frames.array, scale)
        limit = [(n - n % scale - 8 * scale) // scale for n in (70, 94)]
        for top, left in [(0, 0), (3, 5), (limit[0], limit[1]), (0, limit[1])]:
            x, y = cut_pair(frames, 0, 3, (top * scale, left * scale, 8 * scale, 8 * scale), scale)
            torch.testing.assert_close(x, whole[..., top : top + 8, left : left + 8], atol=1e-6, rtol=0)
            expected = frames.array[..., top * scale : (top + 8) * scale, left * scale : (left + 8) * scale]
            assert torch.equal((y * 255).round().byte(), expected)


def test_cameras_of_different_resolution_see_as_much_of_the_scene() -> None:
    """Every second client films at half the resolution: its frames are the others' shrunk by two (`degrade`, whose agreement with MATLAB is
    tested elsewhere), its crop is the same middle of the scene with half the side, and its low resolution is made from that."""
    options = {"clips": 2, "groups": 2, "split": "groups", "frames": 2, "crop": 32, "height": 64, "width": 64, "scale": 4}
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
    assert mixed.facts["resolutions"] == ["8x8", "4x4"] and len(mixed.holdings[1]) == len(plain.holdings[1])
    with pytest.raises(DataError, match=r"crops of 32 must be divisible by it and by the scale 4"):
        MovingTextures(**options, native=(3,))  # type: ignore[arg-type]


def test_turning_keeps_low_and_high_resolution_together() -> None:
    y = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = set()
    for how in range(8):
        a, b = turned(degrade(y, 4), y, how)
        torch.testing.assert_close(degrade(b, 4), a, atol=1.5 / 255, rtol=0)
        seen.add(tuple(b.flatten().tolist()))
    assert len(seen) == 8


def test_groups_by_clip_folder_and_label_file(tmp_path: Path) -> None:
    flat = make_clips(tmp_path / "flat", ["a", "b", "c"])
    base = {"frames": 3, "crop": 16, "scale": 4}
    federation = Clips(str(flat), split="groups", **base).federation(3, 0)
    assert federation.facts["clips"] == [["a"], ["b"], ["c"]] and federation.facts["windows"] == [3, 3, 3]
    assert federation.facts["notes"][0].startswith("the sides of 3 clips (a, ...) cannot be divided by the scale 4")  # 34x50
    batch = federation.holdings[2].batch(torch.arange(3))
    assert batch["x"].shape == (3, 3, 3, 4, 4) and batch["y"].shape == (3, 3, 3, 16, 16)
    assert float(batch["y"].min()) >= 40 / 255 and float(batch["y"].max()) < 60 / 255
    nested = make_clips(tmp_path / "nested", ["bowling/v1", "bowling/v2", "archery/v1"])
    assert Clips(str(nested), split="groups", **base).federation(2, 0).facts["groups"] == [["archery"], ["bowling"]]
    (tmp_path / "labels.json").write_text(json.dumps({"a": "x", "b": "y", "c": "x"}))
    labelled = Clips(str(flat), split="groups", labels=str(tmp_path / "labels.json"), **base).federation(2, 0)
    assert labelled.facts["clips"] == [["a", "c"], ["b"]]
    # By number: b is number 1 also where a is left out, and then tested on.
    (tmp_path / "numbers.json").write_text(json.dumps({"0": "x", "1": "y", "2": "z"}))
    numbered = Clips(str(flat), split="groups", labels=str(tmp_path / "numbers.json"), leave_out="a", **base).federation(2, 0)
    assert numbered.facts["groups"] == [["y"], ["z"]] and [numbered.test.name(i) for i in range(len(numbered.test))] == ["a"]
    with pytest.raises(DataError, match="3 groups of clips for 4 clients"):
        Clips(str(flat), split="groups", **base).federation(4, 0)


def test_pooled_deals_every_piece_once(tmp_path: Path) -> None:
    root = make_clips(tmp_path, ["a", "b", "c"], size=(40, 48))
    source = Clips(str(root), split="pooled", regions=2, frames=5, crop=16)
    federation = source.federation(4, seed=1)
    pieces = [(p.clip, p.box) for h in federation.holdings for p in h.pieces]
    assert len(pieces) == len(set(pieces)) == 12 and federation.facts["windows"] == [3, 3, 3, 3]
    assert "notes" not in federation.facts  # 40x48 is divisible by 4
    again, other = source.federation(4, seed=1), source.federation(4, seed=2)
    assert again.facts == federation.facts != other.facts
    with pytest.raises(DataError, match="12 pieces of video cannot be dealt to 13 clients"):
        source.federation(13, 0)


def test_reds4_is_held_out(tmp_path: Path) -> None:
    root = make_clips(tmp_path / "REDS", [f"{k:03d}" for k in (0, 1, 2, 11, 15, 20)])
    federation = Clips(str(root), frames=5, crop=16).federation(2, 0)
    assert sorted(n for names in federation.facts["clips"] for n in names) == ["001", "002"]
    assert [federation.test.name(i) for i in range(4)] == ["000", "011", "015", "020"]
    kept = Clips(str(root), frames=5, crop=16, leave_out="none").federation(2, 0)
    assert sum(map(len, kept.facts["clips"])) == 6 and kept.test is None


def test_augmentation_follows_the_generator(tmp_path: Path) -> None:
    windows = Clips(str(make_clips(tmp_path, ["a"])), frames=5, crop=16, repeat=3).federation(1, 0).holdings[0]
    assert len(windows) == 3
    draw = [windows.batch(torch.arange(3), torch.Generator().manual_seed(s))["y"] for s in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    plain = windows.batch(torch.tensor([0, 1]))["y"]
    assert torch.equal(plain[0], plain[1])


def test_bad_input(tmp_path: Path) -> None:
    root = make_clips(tmp_path / "clips", ["a"])
    for options, sentence in [
        ({"frames": 6, "crop": 16}, "clip a has 5 frames, fewer than the window of 6"),
        ({"frames": 5, "crop": 64}, "50x34|48x32 usable pixels, too few for crops of 64"),
        ({"frames": 5, "crop": 16, "leave_out": "zz"}, "names zz, which is not among the clips"),
    ]:
        with pytest.raises(DataError, match=sentence):
            Clips(str(root), **options).federation(1, 0)
    with pytest.raises(DataError, match="not divisible by the scale 4"):
        Clips(str(root), crop=18)
    with pytest.raises(DataError, match="there is nothing at"):
        Clips(str(tmp_path / "nowhere")).federation(1, 0)
    with pytest.raises(DataError, match="environment variable in it is not set"):
        Clips("$FEDLENS_NO_SUCH_VARIABLE/x").federation(1, 0)
    for text, sentence in [("[1]", r"is not an object \{clip name or number: group\}"), ("{", "is not JSON")]:
        (tmp_path / "labels.json").write_text(text)
        with pytest.raises(DataError, match=sentence):
            Clips(str(root), frames=5, crop=16, labels=str(tmp_path / "labels.json")).federation(1, 0)
    odd = make_clips(tmp_path / "odd", ["a"])
    Image.new("RGB", (48, 34)).save(odd / "a" / "00000004.png")
    with pytest.raises(DataError, match=r"odd/a has frames of different sizes: .* 48x34 pixels, but the clip began with 50x34"):
        Clips(str(odd), frames=5, crop=16).federation(1, 0)
    low = make_clips(tmp_path / "low", ["a"], size=(9, 12))
    with pytest.raises(DataError, match="low-resolution frames have 12x9 pixels, 12x8 were expected at x4"):
        Clips(str(root), test=str(root), test_low=str(low), frames=5, crop=16).federation(1, 0)


def test_moving_textures_move_and_differ_between_families() -> None:
    federation = MovingTextures(clips=3, groups=3, split="groups", height=64, width=64, held_out=0.34).federation(3, 0)
    clips = [h.clips[h.pieces[0].clip].read(0, 7).float() for h in federation.holdings]
    for clip in clips:
        assert clip.diff(dim=0).abs().mean() > 0.5 and clip.std() > 15
    assert (clips[0] - clips[1]).abs().mean() > 10
    same = MovingTextures(clips=3, groups=3, split="groups", height=64, width=64, held_out=0.34).federation(3, 0)
    assert torch.equal(same.holdings[1].clips[1].read(0, 7), federation.holdings[1].clips[1].read(0, 7))
    assert all(len(held) == 1 for held in federation.held_out) and len(federation.test) == 2

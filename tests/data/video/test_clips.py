from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from films import make_clips
from PIL import Image

from fedlens.data.source import DataError
from fedlens.data.video.clips import Clips


def test_groups_by_clip_folder_and_label_file(tmp_path: Path) -> None:
    flat = make_clips(tmp_path / "flat", ["a", "b", "c"])
    base = {"frames": 3, "crop": 16, "scale": 4}
    federation = Clips(str(flat), split="groups", **base).federation(3, 0)
    assert federation.facts.details["clips"] == [["a"], ["b"], ["c"]] and federation.facts.details[
        "windows"
    ] == [
        3,
        3,
        3,
    ]
    # 34x50
    assert federation.facts.notes[0].startswith(
        "the sides of 3 clips (a, ...) cannot be divided by the scale 4"
    )
    batch = federation.holdings[2].batch(torch.arange(3))
    assert batch["x"].shape == (3, 3, 3, 4, 4) and batch["y"].shape == (3, 3, 3, 16, 16)
    assert float(batch["y"].min()) >= 40 / 255 and float(batch["y"].max()) < 60 / 255
    nested = make_clips(tmp_path / "nested", ["bowling/v1", "bowling/v2", "archery/v1"])
    assert Clips(str(nested), split="groups", **base).federation(2, 0).facts.details["groups"] == [
        ["archery"],
        ["bowling"],
    ]
    (tmp_path / "labels.json").write_text(json.dumps({"a": "x", "b": "y", "c": "x"}))
    labelled = Clips(
        str(flat), split="groups", labels=str(tmp_path / "labels.json"), **base
    ).federation(2, 0)
    assert labelled.facts.details["clips"] == [["a", "c"], ["b"]]
    # By number: b is number 1 also where a is left out, and then tested on.
    (tmp_path / "numbers.json").write_text(json.dumps({"0": "x", "1": "y", "2": "z"}))
    numbered = Clips(
        str(flat), split="groups", labels=str(tmp_path / "numbers.json"), leave_out="a", **base
    ).federation(2, 0)
    assert numbered.facts.details["groups"] == [["y"], ["z"]] and [
        numbered.test.name(i) for i in range(len(numbered.test))
    ] == ["a"]
    with pytest.raises(DataError, match="3 groups of clips for 4 clients"):
        Clips(str(flat), split="groups", **base).federation(4, 0)


def test_reds4_is_held_out(tmp_path: Path) -> None:
    root = make_clips(tmp_path / "REDS", [f"{k:03d}" for k in (0, 1, 2, 11, 15, 20)])
    federation = Clips(str(root), frames=5, crop=16).federation(2, 0)
    assert sorted(n for names in federation.facts.details["clips"] for n in names) == ["001", "002"]
    assert [federation.test.name(i) for i in range(4)] == ["000", "011", "015", "020"]
    kept = Clips(str(root), frames=5, crop=16, leave_out="none").federation(2, 0)
    assert sum(map(len, kept.facts.details["clips"])) == 6 and kept.test is None


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
    with pytest.raises(DataError, match=r"no folder of clips at .*: set data\.folder"):
        Clips(str(tmp_path / "nowhere")).federation(1, 0)
    with pytest.raises(DataError, match="environment variable in it is not set"):
        Clips("$FEDLENS_NO_SUCH_VARIABLE/x").federation(1, 0)
    for text, sentence in [
        ("[1]", r"is not an object \{clip name or number: group\}"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "labels.json").write_text(text)
        with pytest.raises(DataError, match=sentence):
            Clips(str(root), frames=5, crop=16, labels=str(tmp_path / "labels.json")).federation(
                1, 0
            )
    odd = make_clips(tmp_path / "odd", ["a"])
    Image.new("RGB", (48, 34)).save(odd / "a" / "00000004.png")
    with pytest.raises(
        DataError,
        match=(
            r"odd/a has frames of different sizes: .* 48x34 pixels, but the clip began with 50x34"
        ),
    ):
        Clips(str(odd), frames=5, crop=16).federation(1, 0)
    low = make_clips(tmp_path / "low", ["a"], size=(9, 12))
    with pytest.raises(
        DataError, match="low-resolution frames have 12x9 pixels, 12x8 were expected at x4"
    ):
        Clips(str(root), test=str(root), test_low=str(low), frames=5, crop=16).federation(1, 0)

"""The paper's recipes on stand-ins that have the real directory structure of the data sets: what a
user who holds REDS, Vid4, Vimeo-90K or Kinetics would have on disk, with tiny pictures in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from films import shaded
from PIL import Image

from fedlens.config import recipe as config
from fedlens.core.federation import Federation

REDS4 = ("000", "011", "015", "020")


def clip(folder: Path, names: Sequence[str], size: tuple[int, int] = (32, 48)) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(str(folder)))
    for name in names:
        Image.fromarray(rng.integers(0, 255, (*size, 3)).astype(np.uint8)).save(folder / name)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REDS", "VID4", "KINETICS", "VIMEO"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("calendar", "city", "foliage", "walk"):
        clip(tmp_path / "VID4" / "GT" / name, [f"{k:08d}.png" for k in range(3)])
    return tmp_path


def federation(recipe: str, **keys: Any) -> Federation:
    small = {
        "data.frames": 2,
        "data.crop": 16,
        "federation.clients": 2,
        "federation.cohort": 2,
        **keys,
    }
    made = config.read(recipe, [f"{k}={v}" for k, v in small.items()])
    return made.build_source().federation(made.settings.clients, made.settings.seed)


def test_reds(here: Path) -> None:
    """train_sharp/NNN/NNNNNNNN.png; the four of REDS4 are tested on, beside Vid4, and never trained
    on."""
    for name in [*REDS4, "001", "002", "239"]:
        clip(here / "REDS" / "train_sharp" / name, [f"{k:08d}.png" for k in range(3)])
    found = federation("fedvsr-less")
    held = {c for share in found.facts.details["clips"] for c in share}
    assert held == {"001", "002", "239"}
    test = found.test
    assert [test.name(i) for i in range(len(test))] == ["calendar", "city", "foliage", "walk"]
    ((name, more),) = test.also.items()
    assert name == "reds4" and tuple(more.name(i) for i in range(4)) == REDS4
    assert test.batch(torch.tensor([0]))["x"].shape == (1, 3, 3, 8, 12)


def test_kinetics(here: Path) -> None:
    """Clips of PNGs that are numbered from 1, and a file of labels by the clip's number: a class a
    client."""
    for k in range(6):
        names = [f"{n:08d}.png" for n in range(1, 4)]
        clip(here / "KINETICS" / "clips" / f"{k:03d}", names)
    labels = {str(k): ("archery", "bowling")[k % 2] for k in range(6)}
    (here / "KINETICS" / "labels.json").write_text(json.dumps(labels))
    found = federation("fedvsr-more")
    assert found.facts.details["groups"] == [["archery"], ["bowling"]]
    assert found.facts.details["clips"] == [["000", "002", "004"], ["001", "003", "005"]]
    assert not found.test.also


def test_kinetics_as_video_files(here: Path) -> None:
    """As it is downloaded: a folder a class, video files in it."""
    pytest.importorskip("av")
    for group in ("archery", "bowling"):
        (here / "KINETICS" / "clips" / group).mkdir(parents=True)
        for k in range(2):
            shaded(here / "KINETICS" / "clips" / group / f"{group}_{k}.mp4", 6)
    found = federation("fedvsr-more", **{"data.labels": "none"})
    assert found.facts.details["groups"] == [["archery"], ["bowling"]]
    assert found.holdings[0].batch(torch.tensor([0]))["y"].shape == (1, 2, 3, 16, 16)


def test_vimeo(here: Path) -> None:
    """sequences/NNNNN/NNNN/im1.png to im7.png, and sep_trainlist.txt that names some of them."""
    for name in ("00001/0001", "00001/0002", "00096/0936"):
        clip(here / "VIMEO" / "sequences" / name, [f"im{k}.png" for k in range(1, 8)])
    (here / "VIMEO" / "sep_trainlist.txt").write_text("00001/0001\n00096/0936\n\n")
    keys = {
        "data.folder": "$VIMEO/sequences",
        "data.list_file": "$VIMEO/sep_trainlist.txt",
        "data.test_also": "none",
        "data.frames": 7,
    }
    found = federation("fedvsr-less", **keys)
    assert sorted(found.facts.details["clips"]) == [["0001"], ["0936"]]
    assert [len(x.pieces) for x in found.holdings] == [1, 1]


def test_nothing_is_left_out_of_other_clips(here: Path) -> None:
    clip(here / "REDS" / "train_sharp" / "001", ["0.png", "1.png"])
    with pytest.raises(ValueError, match=r"data\.test_also is left_out, but no clips are left out"):
        federation("fedvsr-less")

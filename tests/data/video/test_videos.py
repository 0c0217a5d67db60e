from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from films import shaded
from PIL import Image

from fedlens.data.source import DataError
from fedlens.data.video.files import FileFrames
from fedlens.data.video.videos import MOST_OPEN, Videos


def test_class_folders_with_broken_files(shelf: Path, tmp_path: Path) -> None:
    """A text file that is called a video, an empty one and a folder of frames of two sizes are
    skipped, counted and named; the rest is there."""
    root = tmp_path / "with bad ones"
    for path in (shelf / "videos").rglob("*.mp4"):
        target = root / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    (root / "run" / "broken.mp4").write_text("this is no video")
    (root / "run" / "empty.avi").touch()
    (root / "run" / "odd").mkdir()
    for k in range(16):
        Image.new("RGB", (48, 32 + k // 15)).save(root / "run" / "odd" / f"{k}.png")
    found = Videos(root=str(root), side=16, test_share=0.5).federation(2, 0)
    assert list(found.facts.classes) == ["jump", "run", "wave"]
    assert [s.split(":")[0] for s in found.facts.skipped] == ["broken.mp4", "empty.avi", "odd"]
    assert found.facts.skipped[2].endswith(
        "frames of different sizes: 15.png has 48x33 pixels, but the clip began with 48x32"
    )
    assert sum(len(h) for h in found.holdings) + len(found.test) == 12
    assert found.holdings[0].clips[0].size == (16, 24)
    assert found.holdings[0].clips[0].read(0, 2).shape == (2, 3, 16, 24)
    films = [
        {(y, s) for y, s in zip(part.labels, part.sources)}
        for part in (found.test.gallery, found.test.queries)
    ]
    assert not films[0] & films[1], "clips of one film are on both sides"


def test_nothing_to_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(
        DataError, match=r"holds no videos in class folders, and there is no labels.csv"
    ):
        Videos(root=str(tmp_path)).federation(2, 0)
    (tmp_path / "a" / "x.mp4").touch()
    with pytest.raises(DataError, match=r"no readable video in .* \(1 skipped, first: x.mp4"):
        Videos(root=str(tmp_path), test_share=0.0).federation(2, 0)
    with pytest.raises(DataError, match=r"layout ucf101 needs data.listing"):
        Videos(root=str(tmp_path), layout="ucf101").federation(2, 0)


def test_frames_are_what_the_decoder_gives_and_few_files_stay_open(shelf: Path) -> None:
    found = Videos(root=str(shelf / "videos"), side=None, test_share=0.0).federation(1, 0)
    clips = found.holdings[0].clips
    for clip in clips:
        direct = FileFrames(clip.frames.path)
        assert torch.equal(clip.read(3, 9), direct.read(3, 9))
        direct.close()
    assert len(clips[0].frames.opened.files) <= MOST_OPEN
    twin = pickle.loads(pickle.dumps(found))
    assert torch.equal(twin.holdings[0].clips[0].read(0, 2), clips[0].read(0, 2))


def test_cache_on_disk_knows_a_rewritten_file(tmp_path: Path) -> None:
    def level(shade: int) -> float:
        shaded(tmp_path / "videos" / "run" / "a.mp4", shade=shade)
        source = Videos(
            root=str(tmp_path / "videos"), test_share=0.0, cache=str(tmp_path / "cache")
        )
        return float(source.federation(1, 0).holdings[0].clips[0].read(0, 1).float().mean())

    assert [level(40), level(200)] == pytest.approx([40, 200], abs=3)

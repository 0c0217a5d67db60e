from __future__ import annotations

import json
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.frames import ArrayFrames
from fedlens.data.moving_shapes import MovingShapes, moving_shape
from fedlens.data.source import DataError
from fedlens.data.video import FileFrames, reduced
from fedlens.data.video_lists import source_of
from fedlens.data.video_writer import writer
from fedlens.data.videos import OPEN, Videos


def film(path: Path, frames: int = 20, shade: int = 100) -> Path:
    """A small video file whose frames get brighter."""
    pixels = (torch.arange(frames) + shade).clamp(max=255).byte()[:, None, None, None].expand(frames, 3, 32, 48).contiguous()
    with writer(path, ArrayFrames(pixels, rate=Fraction(10)), (32, 48)) as write:
        write(pixels)
    return path


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, four clips each, two films a class; and what is wrong in real collections."""
    root = tmp_path_factory.mktemp("shelf")
    for c, name in enumerate(("jump", "run", "wave")):
        for k in range(4):
            film(root / "videos" / name / f"v_{name}_g{k // 2:02d}_c{k % 2:02d}.mp4", 16 + k, 50 * c)
    return root


def test_class_folders_with_broken_files(shelf: Path, tmp_path: Path) -> None:
    """A text file that is called a video, an empty one and a folder of frames of two sizes are skipped, counted and named; the rest is
    there."""
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
    assert found.facts["classes"] == ["jump", "run", "wave"]
    assert [s.split(":")[0] for s in found.facts["skipped"]] == ["broken.mp4", "empty.avi", "odd"]
    assert found.facts["skipped"][2].endswith("frames of different sizes: 15.png has 48x33 pixels, but the clip began with 48x32")
    assert sum(len(h) for h in found.holdings) + len(found.test) == 12
    assert found.holdings[0].clips[0].size == (16, 24)
    assert found.holdings[0].clips[0].read(0, 2).shape == (2, 3, 16, 24)
    films = [{(y, s) for y, s in zip(part.labels, part.sources)} for part in (found.test.gallery, found.test.queries)]
    assert not films[0] & films[1], "clips of one film are on both sides"


def test_a_table_with_a_split_and_sources(shelf: Path, tmp_path: Path) -> None:
    rows = [(p, p.parent.name, "test" if "c01" in p.name else "train") for p in sorted((shelf / "videos").rglob("*.mp4"))]
    csv = tmp_path / "list.csv"
    csv.write_text("path,class,split,source\n" + "".join(f"{p},{c},{s},{p.stem[-7:-4]}\n" for p, c, s in rows))
    found = Videos(root=str(shelf), listing=str(csv), partition="sources").federation(2, 0)
    assert len(found.test.gallery) == len(found.test.queries) == 6
    assert [sorted(set(h.sources)) for h in found.holdings] in ([["g00"], ["g01"]], [["g01"], ["g00"]])
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([{"name": str(p.with_suffix("")), "label": 1 + k % 3} for k, (p, _, _) in enumerate(rows)]))
    by_name = Videos(root=str(shelf), listing=str(listed), test_share=0.0).federation(3, 0)
    assert by_name.facts["classes"] == ["1", "2", "3"] and not by_name.facts["skipped"] and by_name.test is None


def test_partitions(shelf: Path) -> None:
    found = Videos(root=str(shelf / "videos"), partition="classes", classes_per_client=1, test_share=0.0).federation(3, 0)
    assert sorted(sum(n > 0 for n in row) for row in found.facts["labels"]) == [1, 1, 1]
    even = Videos(root=str(shelf / "videos"), test_share=0.0, holdout=0.25).federation(3, 0)
    assert [len(h) for h in even.holdings] == [3, 3, 3] and [len(h) for h in even.held_out] == [1, 1, 1]
    with pytest.raises(DataError, match="6 groups cannot serve 7 clients"):
        Videos(root=str(shelf / "videos"), partition="sources", test_share=0.0).federation(7, 0)


def test_class_lists_that_do_not_match(shelf: Path, tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("jump\nrun\n")
    with pytest.raises(DataError, match="class 'wave' is in the data but not in the class list"):
        Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0)
    names.write_text("wave\nrun\njump\nswim\n")
    with pytest.raises(DataError, match="class 'swim' is in the class list but has no video"):
        Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0)
    names.write_text("wave\nrun\njump\n")
    assert Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0).facts["classes"] == ["wave", "run", "jump"]


def test_nothing_to_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"holds no videos in class folders, and there is no labels.csv"):
        Videos(root=str(tmp_path)).federation(2, 0)
    (tmp_path / "a" / "x.mp4").touch()
    with pytest.raises(DataError, match=r"no readable video in .* \(1 skipped, first: x.mp4"):
        Videos(root=str(tmp_path), test_share=0.0).federation(2, 0)
    with pytest.raises(DataError, match=r"layout ucf101 needs data.listing"):
        Videos(root=str(tmp_path), layout="ucf101").federation(2, 0)


def test_official_splits_of_ucf101_and_hmdb51(data_pack: Path, tmp_path: Path) -> None:
    """Real files in the official layouts; lists written here in their formats."""
    samples = data_pack / "video_samples"
    ucf, hmdb = tmp_path / "ucf", tmp_path / "hmdb"
    (ucf / "SoccerJuggling").mkdir(parents=True)
    for p in samples.glob("v_*.avi"):
        (ucf / "SoccerJuggling" / p.name).symlink_to(p)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "trainlist01.txt").write_text("SoccerJuggling/v_SoccerJuggling_g23_c01.avi 83\n")
    (lists / "testlist01.txt").write_text("SoccerJuggling/v_SoccerJuggling_g24_c01.avi\n")
    (lists / "classInd.txt").write_text("83 SoccerJuggling\n")
    found = Videos(root=str(ucf), listing=str(lists), layout="ucf101", side=64).federation(1, 0)
    assert found.test.gallery.sources == ["v_SoccerJuggling_g23"] and len(found.test) == 1
    (lists / "classInd.txt").write_text("1 ApplyEyeMakeup\n")
    with pytest.raises(DataError, match=r"SoccerJuggling is in the split but not in classInd.txt"):
        Videos(root=str(ucf), listing=str(lists), layout="ucf101").federation(1, 0)
    (hmdb / "wave").mkdir(parents=True)
    waves = sorted(p for p in samples.glob("*wave*.avi"))
    for p in waves:
        (hmdb / "wave" / p.name).symlink_to(p)
    (lists / "wave_test_split1.txt").write_text("".join(f"{p.name} {use} \n" for p, use in zip(waves, (1, 2, 0))))
    found = Videos(root=str(hmdb), listing=str(lists), layout="hmdb51", side=64).federation(1, 0)
    assert [len(found.holdings[0]), len(found.test)] == [1, 1]
    assert found.test.gallery.sources == ["RATRACE"]


def test_kinetics_list(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "jump rope").mkdir()
    (tmp_path / "jump rope" / "abc_000003_000013.mp4").symlink_to(next((shelf / "videos" / "jump").glob("*.mp4")))
    table = tmp_path / "train.csv"
    table.write_text("label,youtube_id,time_start,time_end,split\njump rope,abc,3,13,train\njump rope,gone,0,10,train\n")
    found = Videos(root=str(tmp_path), listing=str(table), layout="kinetics").federation(1, 0)
    assert len(found.holdings[0]) == 1 and found.facts["skipped"] == ["gone_000000_000010.mp4: there is no such file"]


def test_sources_by_name() -> None:
    assert source_of(Path("v_SoccerJuggling_g23_c01.avi")) == "v_SoccerJuggling_g23"
    assert source_of(Path("TrumanShow_wave_f_nm_np1_fr_med_26.avi")) == "TrumanShow"
    assert source_of(Path("holiday.mp4")) == "holiday"


def test_frames_are_what_the_decoder_gives_and_few_files_stay_open(shelf: Path) -> None:
    found = Videos(root=str(shelf / "videos"), side=None, test_share=0.0).federation(1, 0)
    clips = found.holdings[0].clips
    for clip in clips:
        direct = FileFrames(clip.frames.path)
        assert torch.equal(clip.read(3, 9), direct.read(3, 9))
        direct.close()
    assert len(clips[0].frames.opened.files) <= OPEN
    twin = pickle.loads(pickle.dumps(found))
    assert torch.equal(twin.holdings[0].clips[0].read(0, 2), clips[0].read(0, 2))


def test_cache_on_disk_knows_a_rewritten_file(tmp_path: Path) -> None:
    def level(shade: int) -> float:
        film(tmp_path / "videos" / "run" / "a.mp4", shade=shade)
        source = Videos(root=str(tmp_path / "videos"), test_share=0.0, cache=str(tmp_path / "cache"))
        return float(source.federation(1, 0).holdings[0].clips[0].read(0, 1).float().mean())

    assert [level(40), level(200)] == pytest.approx([40, 200], abs=3)


def test_sizes_after_shrinking() -> None:
    assert [reduced((240, 320), 120), reduced((320, 240), 120), reduced((100, 200), 120), reduced((240, 320), None)] == [
        (120, 160), (160, 120), (100, 200), (240, 320),
    ]  # fmt: skip


def test_shapes_do_what_their_class_says() -> None:
    """The brightest-changing column moves right for class 0 and left for class 1: centres of what differs from the median frame."""

    def centre(action: int, axis: int) -> torch.Tensor:
        clip = moving_shape(action, 16, 40, torch.Generator().manual_seed(3)).float()
        moved = (clip - clip.median(0).values).abs().sum(1)
        along = moved.sum(2 - axis + (axis == 0) * 0)
        place = torch.arange(40.0)
        return (along * place).sum(1) / along.sum(1)

    assert float(centre(0, 1)[-1] - centre(0, 1)[0]) > 10
    assert float(centre(1, 1)[-1] - centre(1, 1)[0]) < -10


def test_moving_shapes_are_a_federation() -> None:
    found = MovingShapes(videos=24, tests=8, partition="classes", classes_per_client=2, length=12, side=24).federation(4, 0)
    again = MovingShapes(videos=24, tests=8, partition="classes", classes_per_client=2, length=12, side=24).federation(4, 0)
    assert [sum(n > 0 for n in row) for row in found.facts["labels"]] == [2, 2, 2, 2]
    assert np.array_equal(found.holdings[1].clips[0].read(0, 12), again.holdings[1].clips[0].read(0, 12))
    with pytest.raises(DataError, match="2 to 8 are known"):
        MovingShapes(actions=9).federation(2, 0)

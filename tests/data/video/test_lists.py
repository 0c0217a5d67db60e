from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlens.data.source import DataError
from fedlens.data.video.lists import source_of
from fedlens.data.video.videos import Videos


def test_a_table_with_a_split_and_sources(shelf: Path, tmp_path: Path) -> None:
    rows = [
        (p, p.parent.name, "test" if "c01" in p.name else "train")
        for p in sorted((shelf / "videos").rglob("*.mp4"))
    ]
    csv = tmp_path / "list.csv"
    csv.write_text(
        "path,class,split,source\n" + "".join(f"{p},{c},{s},{p.stem[-7:-4]}\n" for p, c, s in rows)
    )
    found = Videos(root=str(shelf), listing=str(csv), partition="sources").federation(2, 0)
    assert len(found.test.gallery) == len(found.test.queries) == 6
    assert [sorted(set(h.sources)) for h in found.holdings] in (
        [["g00"], ["g01"]],
        [["g01"], ["g00"]],
    )
    listed = tmp_path / "list.json"
    listed.write_text(
        json.dumps(
            [
                {"name": str(p.with_suffix("")), "label": 1 + k % 3}
                for k, (p, _, _) in enumerate(rows)
            ]
        )
    )
    by_name = Videos(root=str(shelf), listing=str(listed), test_share=0.0).federation(3, 0)
    assert (
        list(by_name.facts.classes) == ["1", "2", "3"]
        and not list(by_name.facts.skipped)
        and by_name.test is None
    )


def test_class_lists_that_do_not_match(shelf: Path, tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("jump\nrun\n")
    with pytest.raises(DataError, match="class 'wave' is in the data but not in the class list"):
        Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0)
    names.write_text("wave\nrun\njump\nswim\n")
    with pytest.raises(DataError, match="class 'swim' is in the class list but has no video"):
        Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0)
    names.write_text("wave\nrun\njump\n")
    found = Videos(root=str(shelf / "videos"), classes=str(names)).federation(2, 0)
    assert found.facts.classes == ("wave", "run", "jump")


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
    (lists / "wave_test_split1.txt").write_text(
        "".join(f"{p.name} {use} \n" for p, use in zip(waves, (1, 2, 0)))
    )
    found = Videos(root=str(hmdb), listing=str(lists), layout="hmdb51", side=64).federation(1, 0)
    assert [len(found.holdings[0]), len(found.test)] == [1, 1]
    assert found.test.gallery.sources == ["RATRACE"]


def test_kinetics_list(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "jump rope").mkdir()
    (tmp_path / "jump rope" / "abc_000003_000013.mp4").symlink_to(
        next((shelf / "videos" / "jump").glob("*.mp4"))
    )
    table = tmp_path / "train.csv"
    table.write_text(
        "label,youtube_id,time_start,time_end,split\njump rope,abc,3,13,train\njump"
        " rope,gone,0,10,train\n"
    )
    found = Videos(root=str(tmp_path), listing=str(table), layout="kinetics").federation(1, 0)
    assert len(found.holdings[0]) == 1 and list(found.facts.skipped) == [
        "gone_000000_000010.mp4: there is no such file"
    ]


def test_sources_by_name() -> None:
    assert source_of(Path("v_SoccerJuggling_g23_c01.avi")) == "v_SoccerJuggling_g23"
    assert source_of(Path("TrumanShow_wave_f_nm_np1_fr_med_26.avi")) == "TrumanShow"
    assert source_of(Path("holiday.mp4")) == "holiday"

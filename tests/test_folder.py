"""Reading run folders: whole ones, and every way in which they can be broken."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run

from fedlens import folder as folders


def line(number: int, **more: object) -> str:
    return json.dumps({"round": number, "loss": 1.0 / (number + 1), **more}) + "\n"


def test_a_whole_run_has_no_problems(tmp_path: Path) -> None:
    run = folders.read(write_run(tmp_path / "run", rounds=6, clients=5, cohort=3))
    assert (run.status, list(run.problems), len(run.rounds), run.planned) == ("finished", [], 6, 6)
    assert run.title["algorithm"] == ["FedAvg", "LossAware"]
    seen = folders.view(run, str)
    assert seen["done"] == 6 and len(seen["curves"]["loss"]) == 6
    assert sum(len(rows) for rows in seen["clients"]["heard"]) == sum(r["heard"] for r in run.rounds)
    assert sum(x["times"] for x in seen["lost"]) == sum(r["asked"] - r["heard"] for r in run.rounds)


def test_a_corrupt_line_costs_that_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + '{"round": 1, "lo\x00ss"\n' + "[1, 2]\n" + line(2))
    run = folders.read(tmp_path)
    assert [r["round"] for r in run.rounds] == [0, 2]
    assert "2 unreadable lines skipped (line 2, 3)" in " ".join(run.problems)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + line(1)[:-9])
    run = folders.read(tmp_path)
    assert [r["round"] for r in run.rounds] == [0]
    assert any("incomplete" in text for text in run.problems)


def test_a_round_written_again_counts_as_written_last(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + line(1, seconds=1) + line(1, seconds=2))
    assert [r.get("seconds") for r in folders.read(tmp_path).rounds] == [None, 2]


def test_running_stopped_interrupted_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, planned=9, pictures=False, finished=False)
    assert folders.read(run).status == "running"
    for file in run.iterdir():
        os.utime(file, (time.time() - 5000,) * 2)
    died = folders.read(run)
    assert died.status == "stopped" and "3 rounds are recorded" in died.problems[0]
    (run / "summary.json").write_text(json.dumps({"rounds": 3, "interrupted": True}))
    assert folders.read(run).status == "stopped"
    (run / "summary.json").write_text(json.dumps({"rounds": 3, "interrupted": False}))
    assert folders.read(run).status == "finished"


def test_a_summary_older_than_the_last_round_is_out_of_date(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, pictures=False)
    os.utime(run / "summary.json", (time.time() - 60,) * 2)
    assert folders.read(run).status == "running"


def test_a_job_that_holds_the_folder_is_running_however_quiet_it_is(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    run = write_run(tmp_path / "run", rounds=3, pictures=False, finished=False)
    for file in run.iterdir():
        os.utime(file, (time.time() - 5000,) * 2)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folders._locked(run / ".lock"):
            pytest.skip("this system does not list its locks")
        assert folders.read(run).status == "running"
    assert folders.read(run).status == "stopped"


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "federation.json", "metrics.jsonl", "pictures/index.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{{{", b"[]", b"3", b'{"metrics": 3, "rounds": "x", "facts": [1], "labels": [3, [1]]}'])
def test_a_broken_file_is_a_sentence_at_most(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path / "run", rounds=2, clients=3, cohort=2)
    (run / name).write_bytes(content)
    json.dumps(folders.view(folders.read(run), str), allow_nan=False)
    assert folders.card(run, "run")["name"] == "run"


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    assert [folders.read(tmp_path / n).status for n in ("empty", "notes")] == ["empty", "not a run"]
    with pytest.raises(ValueError, match="is not a folder"):
        folders.read(tmp_path / "absent")


def test_numbers_no_browser_reads_become_null() -> None:
    assert folders.clean({"a": [math.nan, -math.inf, 1 / 3], "b": {1: np.float64(2)}}) == {"a": [None, None, 0.33333], "b": {"1": 2.0}}


def test_an_index_cannot_name_files_outside(tmp_path: Path) -> None:
    """Neither by a path nor by a link, nor anything that is no image."""
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    pictures = run / "pictures"
    pictures.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (pictures / "link.png").symlink_to(tmp_path / "secret.png")
    (pictures / "script.svg").write_text("<svg/>")
    files = ["../../secret.png", str(tmp_path / "secret.png"), "link.png", "script.svg", "../config.toml"]
    (pictures / "index.json").write_text(json.dumps([{"caption": "c", "kind": "image", "files": files}]))
    read = folders.read(run)
    assert read.pictures == [] and "5 of 5 files" in read.problems[0]


def test_who_holds_what_in_either_form(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    told = {"clients": 2, "examples": [3, 5], "facts": {"labels": [[1, 2], [5, 0]], "classes": ["cat", "dog"], "names": ["A", "B"]}}
    (run / "federation.json").write_text(json.dumps(told))
    seen = folders.view(folders.read(run), str)["federation"]
    assert seen == {"sizes": [3, 5], "labels": [[1, 2], [5, 0]], "names": ["A", "B"], "classes": ["cat", "dog"], "remarks": []}
    (run / "federation.json").write_text(json.dumps({"labels": [[1, 2], [5, 0]]}))
    assert folders.view(folders.read(run), str)["federation"]["sizes"] == [3, 5]


def test_what_was_left_out_is_said() -> None:
    """Seven files skipped, of which five are named; then the notes. Nothing to say: no lines."""
    facts = {"skipped": [f"{k}.mp4: broken" for k in range(7)], "notes": ["3 videos are shorter than 28 frames and were left out"]}
    said = "7 files could not be read and were left out: 0.mp4: broken; 1.mp4: broken and 5 more"
    assert folders.remarks(facts, most=2) == [said, facts["notes"][0]]
    assert folders.remarks({"skipped": []}) == [] and folders.remarks({"notes": ["a", "b", "c"]}, 2) == ["a", "b", "and 1 more such notes"]


def test_a_card_of_a_long_run_agrees_with_all_of_it(tmp_path: Path) -> None:
    """The list reads only some lines of a large file; round, metrics and last loss must be those of the whole."""
    run = write_run(tmp_path / "run", rounds=120, clients=40, cohort=40, pictures=False, finished=False)
    assert (run / "metrics.jsonl").stat().st_size > 1 << 18
    whole, card = folders.read(run), folders.card(run, "run")
    assert card["done"] == 120 and card["metrics"] == folders.clean(folders.final_metrics(whole))
    assert card["loss"][0] == folders.clean(whole.rounds[0]["loss"]) and card["loss"][-1] == folders.clean(whole.rounds[-1]["loss"])


def test_long_runs_are_thinned_but_keep_their_end() -> None:
    rounds = [{"round": k, "loss": float(k), "metrics": {"accuracy": k / 1e4}} for k in range(9001)]
    curves = folders._curves(rounds)
    assert len(curves["loss"]) <= folders.POINTS + 1 and curves["loss"][-1] == 9000
    assert curves["metrics"]["accuracy"][-1] == [9000, 0.9] and len(curves["metrics"]["accuracy"]) <= folders.POINTS


def test_runs_are_found_below_and_links_out_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "a", rounds=1, pictures=False)
    write_run(root / "sweep" / "b", rounds=1, pictures=False)
    (root / "empty").mkdir()
    outside = write_run(tmp_path / "outside", rounds=1, pictures=False)
    (root / "link").symlink_to(outside)
    assert sorted(folders.find_runs(root)) == ["a", "empty", "sweep/b"]
    assert list(folders.find_runs(root / "a")) == ["."]


def test_which_metrics_are_better_when_higher() -> None:
    better = {n: folders.higher_is_better(n) for n in ("accuracy", "psnr", "client_loss_worst", "lpips", "FID", "glossiness", "test_mse")}
    assert better == {
        "accuracy": True,
        "psnr": True,
        "client_loss_worst": False,
        "lpips": False,
        "FID": False,
        "glossiness": True,
        "test_mse": False,
    }

"""Reading run folders: whole ones, and every way in which they can be broken."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from run_folders import write_run

from fedlens.report import reading as folders


def line(number: int, **more: object) -> str:
    return json.dumps({"round": number, "loss": 1.0 / (number + 1), **more}) + "\n"


def test_a_whole_run_has_no_problems(tmp_path: Path) -> None:
    run = folders.read_run(write_run(tmp_path / "run", rounds=6, clients=5, cohort=3))
    assert (run.status, list(run.problems), len(run.rounds), run.planned) == ("finished", [], 6, 6)
    assert run.title["algorithm"] == ["FedAvg", "LossAware"]


def test_a_corrupt_line_costs_that_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        line(0) + '{"round": 1, "lo\x00ss"\n' + "[1, 2]\n" + line(2)
    )
    run = folders.read_run(tmp_path)
    assert [r["round"] for r in run.rounds] == [0, 2]
    assert "2 unreadable lines skipped (line 2, 3)" in " ".join(run.problems)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + line(1)[:-9])
    run = folders.read_run(tmp_path)
    assert [r["round"] for r in run.rounds] == [0]
    assert any("incomplete" in text for text in run.problems)


@pytest.mark.parametrize(
    "text", ['{"round": Infinity}', '{"round": NaN}', '{"round": "x"}', "[1]", "3", "null"]
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_names_no_round_is_never_an_exception(text: str, end: str) -> None:
    problems: list[str] = []
    assert [r["round"] for r in folders.parse_rounds(line(0) + text + end, problems)] == [0]
    assert len(problems) == 1


def test_a_round_written_again_counts_as_written_last(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + line(1, seconds=1) + line(1, seconds=2))
    assert [r.get("seconds") for r in folders.read_run(tmp_path).rounds] == [None, 2]


def test_running_stopped_interrupted_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, planned=9, pictures=False, finished=False)
    assert folders.read_run(run).status == "running"
    for file in run.iterdir():
        os.utime(file, (time.time() - 5000,) * 2)
    died = folders.read_run(run)
    assert died.status == "stopped" and "3 rounds are recorded" in died.problems[0]
    (run / "summary.json").write_text(json.dumps({"rounds": 3, "interrupted": True}))
    assert folders.read_run(run).status == "stopped"
    (run / "summary.json").write_text(json.dumps({"rounds": 3, "interrupted": False}))
    assert folders.read_run(run).status == "finished"


def test_a_summary_older_than_the_last_round_is_out_of_date(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, pictures=False)
    os.utime(run / "summary.json", (time.time() - 60,) * 2)
    assert folders.read_run(run).status == "running"


def test_a_job_that_holds_the_folder_is_running_however_quiet_it_is(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    run = write_run(tmp_path / "run", rounds=3, pictures=False, finished=False)
    for file in run.iterdir():
        os.utime(file, (time.time() - 5000,) * 2)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folders._locked(run / ".lock"):
            pytest.skip("this system does not list its locks")
        assert folders.read_run(run).status == "running"
    assert folders.read_run(run).status == "stopped"


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    assert [folders.read_run(tmp_path / n).status for n in ("empty", "notes")] == [
        "empty",
        "not a run",
    ]
    with pytest.raises(ValueError, match="is not a folder"):
        folders.read_run(tmp_path / "absent")


def test_an_index_cannot_name_files_outside(tmp_path: Path) -> None:
    """Neither by a path nor by a link, nor anything that is no image."""
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    pictures = run / "pictures"
    pictures.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (pictures / "link.png").symlink_to(tmp_path / "secret.png")
    (pictures / "script.svg").write_text("<svg/>")
    files = [
        "../../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "script.svg",
        "../config.toml",
    ]
    (pictures / "index.json").write_text(
        json.dumps([{"caption": "c", "kind": "image", "files": files}])
    )
    read = folders.read_run(run)
    assert read.pictures == [] and "5 of 5 files" in read.problems[0]


def test_runs_are_found_below_and_links_out_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "a", rounds=1, pictures=False)
    write_run(root / "sweep" / "b", rounds=1, pictures=False)
    (root / "empty").mkdir()
    outside = write_run(tmp_path / "outside", rounds=1, pictures=False)
    (root / "link").symlink_to(outside)
    assert sorted(folders.find_runs(root)) == ["a", "empty", "sweep/b"]
    assert list(folders.find_runs(root / "a")) == ["."]


HUGE, DEEP = "1" + "0" * 400, "[" * 100_000


@pytest.mark.parametrize(
    "text", [f'{{"round": {HUGE}}}', DEEP, f'{{"round": 1, "metrics": {"[" * 400}{"]" * 400}}}']
)
def test_a_line_too_large_or_too_deep_costs_that_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + text + "\n" + line(2))
    run = folders.read_run(tmp_path)
    assert [r["round"] for r in run.rounds] == [0, 2] and "1 unreadable line skipped" in " ".join(
        run.problems
    )
    assert folders.rounds_done(folders.read_overview(tmp_path).rounds) == 3


@pytest.mark.parametrize(
    "file, text, reason",
    [
        (
            "summary.json",
            f'{{"metrics": {{"accuracy": {HUGE}}}}}',
            "summary.json is not valid JSON (a number in it is too large).",
        ),
        ("summary.json", DEEP, "summary.json is not valid JSON (it is nested too deeply)."),
        ("federation.json", DEEP, "federation.json is not valid JSON (it is nested too deeply)."),
        ("config.toml", f"x = {DEEP}", "config.toml is not valid TOML (it is nested too deeply)."),
        (
            "config.toml",
            f"x.{'x.' * 300}x = 1",
            "config.toml is not valid TOML (it is nested too deeply).",
        ),
        (
            "config.toml",
            f"x = 0x1{'0' * 5000}",
            "config.toml is not valid TOML (a number in it is too large).",
        ),
    ],
    ids=[
        "huge summary",
        "deep summary",
        "deep federation",
        "deep config",
        "deep tables",
        "huge config",
    ],
)
def test_a_file_too_large_or_too_deep_is_a_sentence(
    tmp_path: Path, file: str, text: str, reason: str
) -> None:
    run = write_run(tmp_path / "run", rounds=2, pictures=False)
    (run / file).write_text(text)
    read = folders.read_run(run)
    assert reason in read.problems and len(read.rounds) == 2
    folders.final_metrics(folders.read_overview(run))


@pytest.mark.parametrize(
    "name",
    ["a\0.png", "x" * 300 + ".png", "\udcff.png", "loop.png"],
    ids=["NUL", "long", "not UTF-8", "loop"],
)
def test_a_picture_that_cannot_be_named_is_left_out(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", rounds=1)
    (run / "pictures" / "loop.png").symlink_to("loop.png")
    (run / "pictures" / "index.json").write_text(
        json.dumps([{"caption": "c", "files": [name, "00-00.png"]}])
    )
    read = folders.read_run(run)
    assert [len(p["paths"]) for p in read.pictures] == [
        1
    ] and "1 of 2 files are missing or not allowed" in read.problems[-1]


def test_names_that_are_not_utf8_can_be_shown_and_told_apart() -> None:
    names = folders.distinct_names(
        [Path(os.fsdecode(b"bad\xff")), Path(os.fsdecode(b"bad\xfe")), Path("größe")]
    )
    assert len(set(names)) == 3 and names[2] == "größe" and all(name.encode() for name in names)

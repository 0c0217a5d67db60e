"""What a page shows about a run: all of it, a line of it, and numbers that every browser reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run

from fedlens.core.facts import remarks
from fedlens.report import page_data as views
from fedlens.report import reading as folders


def test_every_round_and_every_client_is_shown(tmp_path: Path) -> None:
    run = folders.read_run(write_run(tmp_path / "run", rounds=6, clients=5, cohort=3))
    seen = views.run_view(run, str)
    assert seen["done"] == 6 and len(seen["curves"]["loss"]) == 6
    assert sum(len(rows) for rows in seen["clients"]["heard"]) == sum(
        r["heard"] for r in run.rounds
    )
    assert sum(x["times"] for x in seen["lost"]) == sum(r["asked"] - r["heard"] for r in run.rounds)


def test_what_a_layer_wants_recorded_is_a_column(tmp_path: Path) -> None:
    """FBL's `made` beside weight, loss and examples; a client without it has a gap."""
    run = write_run(tmp_path / "run", rounds=1, clients=2, cohort=2)
    (line,) = folders.read_run(run).rounds
    clients = {"0": {"weight": 0.5, "loss": 1.0, "examples": 9.0, "made": 3.0}, "1": {"loss": 2.0}}
    (run / "metrics.jsonl").write_text(json.dumps({**line, "clients": clients}) + "\n")
    seen = views.run_view(folders.read_run(run), str)["clients"]
    assert seen["columns"] == ["weight", "loss", "examples", "made"]
    assert seen["heard"] == [[[0, 0.5, 1.0, 9.0, 3.0], [1, None, 2.0, None, None]]]


@pytest.mark.parametrize(
    "name",
    ["config.toml", "summary.json", "federation.json", "metrics.jsonl", "pictures/index.json"],
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{{{",
        b"[]",
        b"3",
        b'{"metrics": 3, "rounds": "x", "facts": [1], "labels": [3, [1]]}',
    ],
)
def test_a_broken_file_is_a_sentence_at_most(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path / "run", rounds=2, clients=3, cohort=2)
    (run / name).write_bytes(content)
    json.dumps(views.run_view(folders.read_run(run), str), allow_nan=False)
    assert views.run_card(run, "run")["name"] == "run"


def test_numbers_no_browser_reads_become_null() -> None:
    assert views.json_safe({"a": [math.nan, -math.inf, 1 / 3], "b": {1: np.float64(2)}}) == {
        "a": [None, None, 0.33333],
        "b": {"1": 2.0},
    }


def test_who_holds_what_in_either_form(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    told = {
        "clients": 2,
        "examples": [3, 5],
        "facts": {"labels": [[1, 2], [5, 0]], "classes": ["cat", "dog"], "names": ["A", "B"]},
    }
    (run / "federation.json").write_text(json.dumps(told))
    seen = views.run_view(folders.read_run(run), str)["federation"]
    assert seen == {
        "sizes": [3, 5],
        "labels": [[1, 2], [5, 0]],
        "names": ["A", "B"],
        "classes": ["cat", "dog"],
        "remarks": [],
    }
    (run / "federation.json").write_text(json.dumps({"labels": [[1, 2], [5, 0]]}))
    assert views.run_view(folders.read_run(run), str)["federation"]["sizes"] == [3, 5]


def test_what_was_left_out_is_said() -> None:
    """Seven files skipped, of which five are named; then the notes. Nothing to say: no lines."""
    skipped = [f"{k}.mp4: broken" for k in range(7)]
    notes = ["3 videos are shorter than 28 frames and were left out"]
    said = "7 files could not be read and were left out: 0.mp4: broken; 1.mp4: broken and 5 more"
    assert remarks(skipped, notes, most=2) == [said, notes[0]]
    assert remarks([], []) == []
    assert remarks([], ["a", "b", "c"], 2) == ["a", "b", "and 1 more such notes"]


def test_a_card_of_a_long_run_agrees_with_all_of_it(tmp_path: Path) -> None:
    """The list reads only some lines of a large file; round, metrics and last loss must be those of
    the whole.
    """
    run = write_run(
        tmp_path / "run", rounds=120, clients=40, cohort=40, pictures=False, finished=False
    )
    assert (run / "metrics.jsonl").stat().st_size > 1 << 18
    whole, card = folders.read_run(run), views.run_card(run, "run")
    assert card["done"] == 120 and card["metrics"] == views.json_safe(folders.final_metrics(whole))
    assert card["loss"][0] == views.json_safe(whole.rounds[0]["loss"]) and card["loss"][
        -1
    ] == views.json_safe(whole.rounds[-1]["loss"])


def test_long_runs_are_thinned_but_keep_their_end() -> None:
    rounds = [{"round": k, "loss": float(k), "metrics": {"accuracy": k / 1e4}} for k in range(9001)]
    curves = views._curves(rounds)
    assert len(curves["loss"]) <= views.POINTS + 1 and curves["loss"][-1] == 9000
    assert (
        curves["metrics"]["accuracy"][-1] == [9000, 0.9]
        and len(curves["metrics"]["accuracy"]) <= views.POINTS
    )

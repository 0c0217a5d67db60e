"""The table of a comparison, with numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

from toy_job import write_recipe

from fedlens.runs.compare import make_cells
from fedlens.runs.table import (
    cell_text,
    comparison_table,
    mean_and_spread,
    spent_until,
    table_columns,
)


def test_what_was_spent_until_the_target() -> None:
    """The target .5 is seen in the third round: 3 x (10 + 5) bytes, two epochs of 4 + 6 examples
    three times.
    """
    rounds = [
        {
            "round": r,
            "bytes_down": 10,
            "bytes_up": 5,
            "seconds": 2.0,
            "clients": {"0": {"examples": 4}, "3": {"examples": 6}},
            "metrics": m,
        }
        for r, m in enumerate([{"r": 0.3}, {}, {"r": 0.5}, {"r": 0.6}])
    ]
    assert spent_until(rounds, "r", 0.5, epochs=2) == {
        "rounds": 3,
        "bytes": 45,
        "examples": 60,
        "seconds": 6,
    }
    assert spent_until(rounds, "r", 0.9) is None


def test_a_loss_reaches_its_target_from_above() -> None:
    """3, then 1: below 2 in the second round."""
    rounds = [
        {
            "round": r,
            "bytes_down": 1,
            "bytes_up": 1,
            "seconds": 1.0,
            "clients": {},
            "metrics": {"loss": value},
        }
        for r, value in enumerate([3.0, 1.0])
    ]
    spent = spent_until(rounds, "loss", 2.0)
    assert spent and (spent["rounds"], spent["bytes"]) == (2, 4)


def test_seeds_that_never_got_there_are_counted() -> None:
    """Rounds 4 and 6 of three seeds: the mean of those that did, 5 ± 1.4, and how many they are."""
    row = {
        "metrics": {},
        "rounds_to_target": mean_and_spread([4.0, None, 6.0]),
        "bytes_to_target": mean_and_spread([None, None, 2e6]),
    }
    assert (
        cell_text(row, "rounds_to_target") == "5.0 ± 1.4 (2 of 3)"
        and cell_text(row, "bytes_to_target") == "2.0 (1 of 3)"
    )
    assert (
        cell_text({"metrics": {}, "rounds_to_target": mean_and_spread([None])}, "rounds_to_target")
        == "–"
    )


def test_who_does_worst_stands_beside_the_mean() -> None:
    names = [
        "accuracy",
        "loss",
        "accuracy_balanced",
        "accuracy_worst_class",
        "client_accuracy",
        "client_accuracy_worst",
    ]
    table = {
        "algorithms": {"a": {"metrics": {n: {"mean": 0.5, "spread": None} for n in names}}},
        "seeds": [0],
        "recipe": "r",
    }
    assert [k for k, _, _ in table_columns(table)][:5] == [
        "accuracy",
        "loss",
        "accuracy_worst_class",
        "client_accuracy",
        "client_accuracy_worst",
    ]


def test_training_loss_and_test_loss_are_told_apart(tmp_path: Path) -> None:
    """The test metric of the same name, 9, must not stand where the clients' loss, 2, belongs:
    neither in the table nor in the curves.
    """
    write_recipe(tmp_path)
    cell = make_cells(tmp_path / "toy.toml", ["fedavg"], [0], (), tmp_path / "out")[0]
    cell.folder.mkdir(parents=True)
    given = {
        "algorithm": "FedAvg",
        "metrics": {"accuracy": 0.5, "loss": 9.0},
        "loss": 2.0,
        "seconds": 1,
        "bytes_up": 1,
        "asked": 1,
        "heard": 1,
    }
    (cell.folder / "summary.json").write_text(json.dumps(given))
    (cell.folder / "metrics.jsonl").write_text(
        json.dumps({"round": 0, "loss": 2.0, "metrics": given["metrics"]}) + "\n"
    )
    table = comparison_table([cell])
    row = table["algorithms"]["fedavg"]
    shown = {head: cell_text(row, key) for key, head, _ in table_columns(table)}
    assert shown["loss"] == "9.0000" and shown["training loss"] == "2.0000"
    assert row["curves"]["training_loss"]["mean"] == [2.0] and row["curves"]["loss"]["mean"] == [
        9.0
    ]

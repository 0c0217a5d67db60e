from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedlens.config.recipe import ConfigError
from fedlens.runs import compare, job
from fedlens.runs.compare import Cell, cells, columns, markdown, reached, spread, summarise, text_of
from fedlens.runs.tune import parameters, tune
from tests.toy_job import write_recipe


def known(best: dict[str, float], seen: list[dict[str, float]]):  # type: ignore[no-untyped-def]
    """Instead of training, an accuracy that is highest at `best`: minus the squared distances of
    the logarithms.
    """

    def finish(cell: Cell) -> None:
        found = {
            f"{p.name}.{k}": float(v)
            for p in cell.config.algorithm
            for k, v in p.resolved().items()
            if k in ("lr", "mu")
        }
        seen.append(found)
        score = -sum(math.log(found[k] / v) ** 2 for k, v in best.items())
        cell.folder.mkdir(parents=True)
        (cell.folder / "summary.json").write_text(json.dumps({"metrics": {"accuracy": score}}))

    return finish


def test_the_rate_first_then_the_methods_own_parameter(tmp_path: Path) -> None:
    """The recipe's rate is 0.1. Of 0.1, 0.0333 and 0.3 the last is nearest to 0.25. FedProx's mu is
    0.01; of 0.001, 0.1 and 1 at that rate 0.1 is nearest to 0.2. Six runs, and no more."""
    seen: list[dict[str, float]] = []
    chosen = tune(
        write_recipe(tmp_path),
        "fedprox",
        (),
        tmp_path / "out",
        known({"FedAvg.lr": 0.25, "FedProx.mu": 0.2}, seen),
    )
    assert chosen == pytest.approx({"FedAvg.lr": 0.3, "FedProx.mu": 0.1})
    assert [s["FedAvg.lr"] for s in seen] == pytest.approx([0.1, 0.1 / 3, 0.3, 0.3, 0.3, 0.3])
    assert [s["FedProx.mu"] for s in seen] == pytest.approx([0.01, 0.01, 0.01, 0.001, 0.1, 1.0])


def test_the_recipes_own_value_is_named_too_where_it_wins(tmp_path: Path) -> None:
    chosen = tune(
        write_recipe(tmp_path),
        "fedprox",
        (),
        tmp_path / "out",
        known({"FedAvg.lr": 0.1, "FedProx.mu": 0.01}, []),
    )
    assert chosen == pytest.approx({"FedAvg.lr": 0.1, "FedProx.mu": 0.01})


def test_without_an_own_parameter_the_rates_get_finer(tmp_path: Path) -> None:
    """Best at 0.5: after 0.3 come 0.3 sqrt 3 = 0.52, 0.3 / sqrt 3 = 0.17 and, beyond the edge, 0.9.
    The same six runs as any other method."""
    seen: list[dict[str, float]] = []
    chosen = tune(
        write_recipe(tmp_path), "fedavg", (), tmp_path / "out", known({"FedAvg.lr": 0.5}, seen)
    )
    assert [s["FedAvg.lr"] for s in seen] == pytest.approx(
        [0.1, 0.1 / 3, 0.3, 0.3 * 3**0.5, 0.3 / 3**0.5, 0.9]
    )
    assert chosen == pytest.approx({"FedAvg.lr": 0.3 * 3**0.5})


def test_what_can_be_tuned(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    one = cells(recipe, ["FedAvg+FedProx+Median"], [0], (), tmp_path)[0].config
    assert parameters(one) == (("FedAvg.lr", 0.1), ("FedProx.mu", (0.01, 0.001, 0.1, 1.0)))
    with pytest.raises(ConfigError, match="at least 3 trials"):
        tune(recipe, "fedavg", (), tmp_path, lambda cell: None, 2)


def test_a_real_search_and_the_table_that_tells_of_it(tmp_path: Path) -> None:
    """Three trials and one seed that counts, on the toy: the cell that counts ran with what was
    chosen, and the table says it.
    """
    recipe, out = write_recipe(tmp_path), tmp_path / "out"

    def finish(cell: Cell) -> None:
        compare.finish([cell], watch=lambda c: job.Watch())

    given = {"rounds": 2}
    chosen = tune(recipe, "fedavg", given, out, finish, 3)
    trials = [
        json.loads((out / "tune" / f"trial-{k}" / "fedavg" / "seed-0" / "summary.json").read_text())
        for k in range(3)
    ]
    scores = [t["metrics"]["accuracy"] for t in trials]
    assert chosen["FedAvg.lr"] == pytest.approx([0.1, 0.1 / 3, 0.3][scores.index(max(scores))])
    table = compare.compare(
        cells(recipe, ["fedavg"], [1], given, out, {"fedavg": chosen}),
        out,
        watch=lambda c: job.Watch(),
        target=0.01,
    )
    assert (
        f"fedavg, tuned on a seed that does not count: FedAvg.lr={chosen['FedAvg.lr']:.4g}"
        in markdown(table)
    )
    row = table["algorithms"]["fedavg"]
    model = 4 * (8 * 16 + 16 + 4 * 16 + 16 * 3 + 3) + 8  # the toy's floats and BatchNorm's counter
    assert row["rounds_to_target"]["mean"] == 1 and row["bytes_to_target"]["mean"] == 6 * 2 * model
    assert "rounds to 0.01" in [head for _, head, _ in columns(table)]


def test_reached_by_hand() -> None:
    records = [
        {"round": k, "bytes_down": 10, "bytes_up": 5, "metrics": m}
        for k, m in enumerate([{"a": 0.1}, {}, {"a": 0.6}, {"a": 0.9}])
    ]
    assert reached(records, "a", 0.5) == (3, 45) and reached(records, "a", 0.95) == (None, None)
    falling = [
        {"round": k, "bytes_down": 1, "bytes_up": 1, "metrics": {"loss": v}}
        for k, v in enumerate([3.0, 1.0])
    ]
    assert reached(falling, "loss", 2.0) == (2, 4)


def test_seeds_that_never_got_there_are_counted() -> None:
    """Rounds 4 and 6 of three seeds: the mean of those that did, 5 ± 1.4, and how many they are."""
    row = {
        "metrics": {},
        "rounds_to_target": spread([4.0, None, 6.0]),
        "bytes_to_target": spread([None, None, 2e6]),
    }
    assert (
        text_of(row, "rounds_to_target") == "5.0 ± 1.4 (2 of 3)"
        and text_of(row, "bytes_to_target") == "2.0 (1 of 3)"
    )
    assert text_of({"metrics": {}, "rounds_to_target": spread([None])}, "rounds_to_target") == "–"


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
    assert [k for k, _, _ in columns(table)][:4] == [
        "accuracy",
        "loss",
        "accuracy_worst_class",
        "client_accuracy_worst",
    ]


def test_training_loss_and_test_loss_are_told_apart(tmp_path: Path) -> None:
    """The test metric of the same name, 9, must not stand where the clients' loss, 2, belongs:
    neither in the table nor in the curves.
    """
    write_recipe(tmp_path)
    cell = cells(tmp_path / "toy.toml", ["fedavg"], [0], (), tmp_path / "out")[0]
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
    table = summarise([cell])
    row = table["algorithms"]["fedavg"]
    shown = {head: text_of(row, key) for key, head, _ in columns(table)}
    assert shown["loss"] == "9.0000" and shown["training loss"] == "2.0000"
    assert row["curves"]["training_loss"]["mean"] == [2.0] and row["curves"]["loss"]["mean"] == [
        9.0
    ]

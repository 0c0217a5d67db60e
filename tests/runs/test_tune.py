from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedlens.config.recipe import ConfigError
from fedlens.runs.compare import Cell, make_cells, run_cells, run_comparison
from fedlens.runs.listener import Listener
from fedlens.runs.table import table_columns, table_markdown
from fedlens.runs.tune import tune, tuned_parameters
from tests.toy_job import write_recipe


def known(best: dict[str, float], seen: list[dict[str, float]]):  # type: ignore[no-untyped-def]
    """Instead of training, an accuracy that is highest at `best`: minus the squared distances of
    the logarithms.
    """

    def run_cell(cell: Cell) -> None:
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

    return run_cell


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
    one = make_cells(recipe, ["FedAvg+FedProx+Median"], [0], (), tmp_path)[0].config
    assert tuned_parameters(one) == (("FedAvg.lr", 0.1), ("FedProx.mu", (0.01, 0.001, 0.1, 1.0)))
    with pytest.raises(ConfigError, match="at least 3 trials"):
        tune(recipe, "fedavg", (), tmp_path, lambda cell: None, 2)


def test_a_real_search_and_the_table_that_tells_of_it(tmp_path: Path) -> None:
    """Three trials and one seed that counts, on the toy: the cell that counts ran with what was
    chosen, and the table says it.
    """
    recipe, out = write_recipe(tmp_path), tmp_path / "out"

    def run_cell(cell: Cell) -> None:
        run_cells([cell], listener=lambda c: Listener())

    given = {"rounds": 2}
    chosen = tune(recipe, "fedavg", given, out, run_cell, 3)
    trials = [
        json.loads((out / "tune" / f"trial-{k}" / "fedavg" / "seed-0" / "summary.json").read_text())
        for k in range(3)
    ]
    scores = [t["metrics"]["accuracy"] for t in trials]
    assert chosen["FedAvg.lr"] == pytest.approx([0.1, 0.1 / 3, 0.3][scores.index(max(scores))])
    table = run_comparison(
        make_cells(recipe, ["fedavg"], [1], given, out, {"fedavg": chosen}),
        out,
        listener=lambda c: Listener(),
        target=0.01,
    )
    assert (
        f"fedavg, tuned on a seed that does not count: FedAvg.lr={chosen['FedAvg.lr']:.4g}"
        in table_markdown(table)
    )
    row = table["algorithms"]["fedavg"]
    model = 4 * (8 * 16 + 16 + 4 * 16 + 16 * 3 + 3) + 8  # the toy's floats and BatchNorm's counter
    assert row["rounds_to_target"]["mean"] == 1 and row["bytes_to_target"]["mean"] == 6 * 2 * model
    assert "rounds to 0.01" in [head for _, head, _ in table_columns(table)]

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from fedlens.cli import main as cli
from fedlens.config.recipe import ConfigError
from fedlens.runs.compare import Cell
from fedlens.runs.sweep import Choices, Range, best_first, read_space, sweep, write_sweep
from tests.toy_job import write_recipe


def test_what_varies_and_what_stays() -> None:
    space, fixed = read_space(
        ["lr=0.01,0.1", "mu=log(1e-4,1)", "batch=int:1:8", "rounds=5", "mean=[0.5, 0.5]"]
    )
    assert space == {
        "lr": Choices(("0.01", "0.1")),
        "mu": Range("log", 1e-4, 1.0),
        "batch": Range("int", 1.0, 8.0),
    }
    assert fixed == ["rounds=5", "mean=[0.5, 0.5]"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rounds=5", "nothing varies"),
        ("mu=log(0,1)", "begins above 0"),
        ("mu=uniform(2,1)", "from the smaller to the larger"),
        ("mu=log(a,b)", "from a number to a number"),
        ("mu", "is not an override"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_space([text])


class Known:
    """Instead of training, an accuracy that is highest at lr = 0.03."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, cell: Cell) -> None:
        if (cell.folder / "summary.json").exists():
            return
        rate = float(cell.config.algorithm[0].resolved()["lr"])
        self.seen.append(rate)
        cell.folder.mkdir(parents=True)
        score = -(math.log(rate / 0.03) ** 2)
        (cell.folder / "summary.json").write_text(json.dumps({"metrics": {"accuracy": score}}))


def test_a_sweep_finds_the_top_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The first trial is the recipe's own rate, 0.1. Stopped after 6 and started again, a sweep has
    the same 14 trials as one that was never stopped. The best is nearer to the top than half the
    way from the recipe's own, which is off by a factor of 3.3."""
    pytest.importorskip("optuna")
    recipe = write_recipe(tmp_path)
    whole, parts = Known(), Known()
    space = ["lr=log(1e-4,1)"]
    done = sweep(recipe, space, tmp_path / "whole", whole, trials=14)
    sweep(recipe, space, tmp_path / "parts", parts, trials=6)
    again = sweep(recipe, space, tmp_path / "parts", parts, trials=14)
    assert whole.seen[0] == 0.1 and parts.seen == whole.seen and len(whole.seen) == 14
    assert [t.value for t in again] == [t.value for t in done]
    best = best_first(done)[0]
    assert abs(math.log(best.chosen["lr"] / 0.03)) < abs(math.log(0.1 / 0.03)) / 2


def test_lists_are_tried_in_all_combinations(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    run = Known()
    done = sweep(recipe, ["lr=0.01,0.1,0.03", "momentum=0,0.9"], tmp_path / "s", run, trials=50)
    assert len({tuple(t.chosen.items()) for t in done}) == len(done) == 6
    write_sweep(done, tmp_path / "s")
    rows = json.loads((tmp_path / "s" / "table.json").read_text())
    assert rows[0]["lr"] == "0.03" and (tmp_path / "s" / "sweep.png").stat().st_size > 1000
    assert (
        (tmp_path / "s" / "table.md").read_text().startswith("| trial | lr | momentum | accuracy")
    )


def test_lists_need_no_optuna_and_no_run_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("optuna", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    recipe = write_recipe(tmp_path)
    done = sweep(recipe, ["lr=0.01,0.1"], tmp_path / "s", Known())
    assert [p.name for p in write_sweep(done, tmp_path / "s")] == ["table.md", "table.json"]
    with pytest.raises(ConfigError, match=r"fedlens\[sweep\]"):
        sweep(recipe, ["lr=log(0.01,0.1)"], tmp_path / "t", Known())


def test_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    few = ["images=60", "test_images=12", "clients=2", "cohort=2", "rounds=1", "workers=0"]
    words = ["sweep", "demo", "lr=0.01,0.1", *few, "--out", str(tmp_path / "s")]
    assert cli.invoke(words) == 0
    out = capsys.readouterr().out
    assert "trial-000" in out and "trial-001" in out and "looks better than it is" in out
    assert (tmp_path / "s" / "trial-001" / "report.html").is_file()
    assert cli.invoke(["sweep", "demo", "nothing=1,2", "--out", str(tmp_path / "t")]) == 2

"""The tables of the experiments' README files are those that their programs write from the stored
cells, and the files of cells survive what happens to them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CELLS = {
    "baselines": ("recipe", "method", "seed"),
    "fbl": ("split", "row", "seed"),
    "feddeblur": ("name",),
    "fedvsr": ("setup", "split", "row", "seed"),
    "fedvssl": ("setup", "row", "seed"),
    "leakage": ("method", "data", "attack", "seed"),
    "privacy": ("level", "row", "rate", "seed"),
    "raf": ("data", "row", "seed"),
    "trust": ("method", "how", "seed"),
}
SHARED_BY = {"trust": "method"}
EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as it is when somebody runs it: its own folder first on the path."""
    file = EXPERIMENTS / path
    monkeypatch.setattr(sys, "path", [str(file.parent), str(EXPERIMENTS), *sys.path])
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look up their own module
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path",
    [
        "feddeblur/tables.py",
        "raf/tables.py",
        "baselines/run.py",
        "fbl/run.py",
        "fedvsr/run.py",
        "fedvssl/run.py",
        "leakage/run.py",
        "privacy/run.py",
        "trust/run.py",
    ],
)
def test_no_result_in_the_readme_is_typed_by_hand(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = load(path, monkeypatch).BLOCKS
    text = ((EXPERIMENTS / path).parent / "README.md").read_text()
    assert load("blocks.py", monkeypatch).render(text, blocks) == text
    assert all(f"<!-- {name} -->" in text for name in blocks)


def test_no_figure_in_the_docs_on_privacy_is_typed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load("leakage/run.py", monkeypatch).DOCS
    text = (EXPERIMENTS.parent / "docs" / "privacy.md").read_text()
    assert load("blocks.py", monkeypatch).render(text, blocks) == text
    assert all(f"<!-- {name} -->" in text for name in blocks)


def test_a_block_is_written_anew_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks between prose; the old content of both goes, the prose does not."""
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y.1 -->\n<!-- /y.1 -->\nc"
    wanted = "a\n<!-- x -->\n1\n<!-- /x -->\nb\n<!-- y.1 -->\n2\n<!-- /y.1 -->\nc"
    assert (
        load("blocks.py", monkeypatch).render(text, {"x": lambda: "1", "y.1": lambda: "2"})
        == wanted
    )


@pytest.mark.parametrize("paper", CELLS)
def test_stored_cells_are_sorted_and_repeat_nothing(
    paper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--table` would write: each cell once, shared settings said first."""
    path, by = EXPERIMENTS / paper / "cells.jsonl", SHARED_BY.get(paper, "")
    cells = load("cells.py", monkeypatch).Cells(path, *CELLS[paper], shared_by=by)
    assert path.read_bytes() == cells.tidied()


def test_a_cell_reads_back_as_it_was_with_shared_settings_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three cells share lr; one has another batch, one none at all; 1 and 1.0 are kept apart."""
    cells = load("cells.py", monkeypatch).Cells(tmp_path / "cells.jsonl", "row", "seed")
    made = [
        {"row": "b", "seed": 0, "psnr": 3.5, "settings": {"lr": 0.1, "batch": 1}},
        {"row": "a", "seed": 1, "psnr": 2.5, "settings": {"lr": 0.1, "batch": 1.0}},
        {"row": "a", "seed": 0, "psnr": 1.5, "settings": {"lr": 0.1, "batch": 1}},
        {"row": "c", "seed": 0, "psnr": 4.5, "settings": {"lr": 0.1}},
    ]
    for cell in made:
        cells.append(cell)
    cells.tidy()
    assert [json.loads(line) for line in cells.path.read_text().splitlines()] == [
        {"shared": {"settings": {"lr": 0.1, "batch": 1}}},
        {"row": "a", "seed": 0, "psnr": 1.5},
        {"row": "a", "seed": 1, "psnr": 2.5, "settings": {"batch": 1.0}},
        {"row": "b", "seed": 0, "psnr": 3.5},
        {"row": "c", "seed": 0, "psnr": 4.5, "settings": {"batch": None}},
    ]
    assert cells.read() == [made[2], made[1], made[0], made[3]]
    assert (
        cells.read(row="a", seed=1) == [made[1]] and cells.find({"row": "c", "seed": 0}) == made[3]
    )
    assert cells.find({"row": "c", "seed": 1}) is None
    again = {"row": "b", "seed": 0, "psnr": 9.5, "settings": {"lr": 0.1, "batch": 1}}
    cells.append(again)
    assert cells.read(row="b") == [again]


def test_methods_with_little_in_common_share_settings_each_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written first with one line for all, as the file was before; a new method has none yet."""
    module, path = load("cells.py", monkeypatch), tmp_path / "cells.jsonl"
    made = [
        {"row": "a", "seed": 0, "settings": {"lr": 0.1, "batch": 1}},
        {"row": "a", "seed": 1, "settings": {"lr": 0.1, "batch": 1}},
        {"row": "b", "seed": 0, "settings": {"rho": 2.0}},
        {"row": "b", "seed": 1, "settings": {"rho": 3.0}},
    ]
    before = module.Cells(path, "row", "seed")
    for cell in made:
        before.append(cell)
    before.tidy()
    cells = module.Cells(path, "row", "seed", shared_by="row")
    assert cells.read() == made
    cells.tidy()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"shared": {"settings": {"batch": 1, "lr": 0.1}}, "row": "a"},
        {"shared": {"settings": {"rho": 2.0}}, "row": "b"},
        {"row": "a", "seed": 0},
        {"row": "a", "seed": 1},
        {"row": "b", "seed": 0},
        {"row": "b", "seed": 1, "settings": {"rho": 3.0}},
    ]
    new = {"row": "c", "seed": 0, "settings": {"lr": 0.1}}
    cells.append(new)
    assert cells.read() == [*made, new]


def test_a_killed_run_leaves_half_a_line_that_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = load("cells.py", monkeypatch).Cells(tmp_path / "cells.jsonl", "row")
    first, second, third = ({"row": name, "psnr": 1.0} for name in "abc")
    cells.append(first)
    cells.append(second)
    cells.path.write_bytes(cells.path.read_bytes()[:-5])
    assert cells.read() == [first]
    cells.append(third)
    assert cells.read() == [first, third]


def test_finished_cells_are_skipped_and_the_budget_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("cells.py", monkeypatch)
    cells = module.Cells(tmp_path / "cells.jsonl", "row")
    cells.append({"row": "a", "psnr": 1.0})
    asked: list[str] = []

    def job(name: str) -> tuple[dict[str, str], Callable[[], dict[str, Any]]]:
        def make() -> dict[str, Any]:
            asked.append(name)
            return {"row": name, "psnr": 2.0}

        return {"row": name}, make

    module.compute(cells, map(job, "ab"), 1.0, str)
    assert asked == ["b"] and [c["row"] for c in cells.read()] == ["a", "b"]
    module.compute(cells, map(job, "abc"), -1.0, str)
    assert asked == ["b"]

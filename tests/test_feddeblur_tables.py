"""The tables of experiments/feddeblur/README.md are those that `run.py --table` writes from the stored results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "feddeblur"


def test_no_result_in_the_readme_is_typed_by_hand() -> None:
    spec = importlib.util.spec_from_file_location("feddeblur_tables", FOLDER / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (FOLDER / "README.md").read_text()
    assert tables.render(text) == text
    assert all(f"<!-- {name} -->" in text for name in tables.BLOCKS)
    assert tables.grid_of(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"

"""Notebooks of the site: kept without output, run from the first cell to the last, shown as pages.

`make docs` runs them too, and fails where a cell does.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def hook() -> Any:
    """docs/notebooks.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_is_kept_without_output(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    programs = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(programs) > 3
    assert not any(cell.outputs or cell.execution_count for cell in programs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_runs_and_shows_pictures(path: Path) -> None:
    began = time.monotonic()
    module = hook()
    page = module.as_page(module.run_notebook(path), path.stem)
    print(f"\n{path.name}: {len(page.pictures)} pictures, {time.monotonic() - began:.1f} s")
    assert len(page.pictures) >= 2
    assert "```text" in page.text


def test_a_page_has_text_programs_and_what_they_showed() -> None:
    v4: Any = nbformat.v4
    shown = [
        v4.new_output("stream", name="stdout", text="one\n"),
        v4.new_output("stream", name="stderr", text="a warning\n"),
        v4.new_output("stream", name="stdout", text="two\n"),
        v4.new_output("display_data", data={"image/png": "cGl4ZWxz", "text/plain": "<Figure>"}),
    ]
    cells = [v4.new_markdown_cell("# Title"), v4.new_code_cell("print(1)", outputs=shown)]
    page = hook().as_page(v4.new_notebook(cells=cells), "name")
    assert page.pictures == {"name-1.png": b"pixels"}
    assert page.text.split("\n\n")[2:] == [
        "```python\nprint(1)\n```",
        "```text\none\ntwo\n```",
        "![Output of the cell above](name-1.png)\n",
    ]

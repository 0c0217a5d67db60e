"""The tables of the experiments' README files are those that their programs write from the stored
results.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    ],
)
def test_no_result_in_the_readme_is_typed_by_hand(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = load(path, monkeypatch).BLOCKS
    text = ((EXPERIMENTS / path).parent / "README.md").read_text()
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

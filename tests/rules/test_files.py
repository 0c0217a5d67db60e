"""One atomic write: only `core/files.py` renames files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedlens

PACKAGE = Path(fedlens.__file__).parent
# The simulator's scratch folder is no file that is written: it takes its name when its lock is
# held, so that nobody sweeps it away in between.
ALLOWED = {("core", "atomic_path"), ("core", "atomic_files"), ("engines", "make_scratch")}


def renames(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The function and the line of every os.replace, os.rename, shutil.move, Path.replace and
    Path.rename. `str.replace` takes two arguments and `dataclasses.replace` is called by name."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            name = getattr(function, "name", "")
            for call in own_calls(function):
                if is_rename(call):
                    yield name, call.lineno


def own_calls(function: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from own_calls(child)


def is_rename(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in ("rename", "renames", "move")
    if not isinstance(function, ast.Attribute):
        return False
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if module in ("os", "shutil"):
        return function.attr in ("replace", "rename", "renames", "move")
    return function.attr in ("replace", "rename") and len(call.args) == 1 and not call.keywords


def test_only_one_module_renames_files() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        for function, line in renames(ast.parse(path.read_text())):
            if (place.parts[0], function) not in ALLOWED:
                found[f"{place}:{line}"] = function
    assert not found, f"use fedlens.core.files instead: {found}"


def test_the_rule_sees_what_it_is_for() -> None:
    written = """
import os, shutil
from dataclasses import replace
def f(a, b):
    os.replace(a, b)
    a.rename(b)
    def g():
        a.with_suffix(".x").replace(b)
    shutil.move(a, b)
    "text".replace("a", "b")
    replace(a, b=1)
"""
    assert sorted(renames(ast.parse(written))) == [("f", 5), ("f", 6), ("f", 9), ("g", 8)]

"""Rooms import in one direction, and heavy libraries stay in theirs. Read from the source, so that
imports inside functions count too, as do `import_module` and attributes of the package itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "fedlens"
# A room imports only rooms before it.
ORDER = (
    "core", "data", "models", "metrics", "tasks", "generators", "algorithms", "layers", "deblur",
    "config", "trust", "engines", "report", "runs", "audit", "sites", "cli",
)  # fmt: skip
TEXTS = {"recipes", "templates"}  # folders without code
TOP = {"__init__.py", "testing.py", "py.typed"}
# Files that import what a name says at run time: exports on first use, a user's own module, the
# parts that a recipe names (SecureSum's room is after config), what `fedlens list` shows.
BY_NAME = {"core/lazy.py", "core/imports.py", "config/parts.py", "cli/list.py"}
RELATIVE, UNKNOWN = "a relative import", "a module named at run time"
# Where a library may be imported at all, as folders or files of the package.
HOMES = {
    "flwr": ("engines/flower",),
    "ray": ("engines/ray.py",),
    "cryptography": ("sites", "trust"),
    "typer": ("cli",),
    "click": (),  # typer may carry another one
    "fastapi": ("report/board",),
    "uvicorn": ("report/board", "cli/board.py"),
}


@cache
def top_names() -> dict[str, str]:
    """Where the names that `fedlens` itself offers live: {"fit": "runs.fit"}."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE":
            where: dict[str, str] = ast.literal_eval(node.value)
            return where
    raise AssertionError("fedlens/__init__.py has no _WHERE")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, at any depth and in any form."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, RELATIVE
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, lives_at(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Call) and is_import_call(node):
            yield node.lineno, literal_module(node)
    yield from attributes_of_package(tree)


def lives_at(name: str) -> str:
    """`fedlens.fit` is `fedlens.runs.fit.fit`."""
    package, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if package == "fedlens" and first in top_names():
        return f"fedlens.{top_names()[first]}.{rest}"
    return name


def is_import_call(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def literal_module(call: ast.Call) -> str:
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")]
    if not given or not isinstance(given[0], ast.Constant):
        return UNKNOWN
    name = str(given[0].value)
    return RELATIVE if name.startswith(".") else name


def attributes_of_package(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`fedlens.fit` and `fedlens.runs.job` behind an `import fedlens`, under any name."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours |= {a.asname for a in node.names if a.name == "fedlens" and a.asname}
            ours |= {"fedlens" for a in node.names if a.name.startswith("fedlens") and not a.asname}
    for node in ast.walk(tree) if ours else ():
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in ours and rest.replace(".", "").isidentifier():
                yield node.lineno, lives_at(f"fedlens.{rest}")


def upward(room: str, source: str) -> list[str]:
    """Imports of a file in `room` that point at a room after it, or that cannot be told."""
    found = []
    for line, module in imported(source):
        package, *rest = module.split(".")
        ours = package == "fedlens" and bool(rest)
        if module in (RELATIVE, UNKNOWN) or (ours and not is_before(rest[0], room)):
            found.append(f"line {line}: {module}")
    return list(dict.fromkeys(found))


def is_before(name: str, room: str) -> bool:
    """Is it a room that this one may import? `fedlens.__version__` is nobody's; `testing` is after
    every room."""
    if name in ORDER:
        return ORDER.index(name) <= ORDER.index(room)
    return name.startswith("__")


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    found = {}
    for path in sorted((PACKAGE / room).rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        wrong = upward(room, path.read_text())
        if place in BY_NAME:
            wrong = [w for w in wrong if not w.endswith(UNKNOWN)]
        if wrong:
            found[place] = wrong
    assert not found


def test_the_rule_sees_lazy_imports() -> None:
    source = "def f():\n    from fedlens.runs import job\n    import fedlens.core.tree\n"
    assert upward("layers", source) == ["line 2: fedlens.runs.job"]
    assert upward("cli", source) == []


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from fedlens import fit", "line 1: fedlens.runs.fit.fit"),
        ("from fedlens import runs", "line 1: fedlens.runs"),
        ("import fedlens\nfedlens.fit()", "line 2: fedlens.runs.fit.fit"),
        ("import fedlens as f\nf.experiment", "line 2: fedlens.runs.job.experiment"),
        ("import fedlens.core.tree\nfedlens.runs.job", "line 2: fedlens.runs.job"),
        ("import importlib\nimportlib.import_module('fedlens.runs.job')", "fedlens.runs.job"),
        ("from importlib import import_module\nimport_module(name='fedlens.runs')", "fedlens.runs"),
        ("__import__('fedlens.runs')", "line 1: fedlens.runs"),
        ("from fedlens.testing import check_layer", "line 1: fedlens.testing.check_layer"),
        ("from fedlens import testing", "line 1: fedlens.testing"),
        ("import fedlens.testing", "line 1: fedlens.testing"),
        ("from fedlens import *", "line 1: fedlens.*"),
        ("from . import job", RELATIVE),
        ("from ..runs import job", RELATIVE),
        ("def f():\n    from .runs.job import run", RELATIVE),
        ("import importlib\nimportlib.import_module('.job', 'fedlens.runs')", RELATIVE),
        ("import importlib\nimportlib.import_module(f'fedlens.{room}')", UNKNOWN),
        ("import importlib\nimportlib.import_module(name)", UNKNOWN),
    ],
)
def test_the_rule_sees_imports_in_any_form(source: str, seen: str) -> None:
    found = upward("layers", source)
    assert any(line.endswith(seen) for line in found), found


@pytest.mark.parametrize(
    "source",
    [
        "from fedlens import Message, stack, __version__",
        "import fedlens\nfedlens.__version__, fedlens.Tree",
        "import fedlens.core.tree\nfedlens.core.tree.add",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_the_rule_lets_pass_what_points_back(source: str) -> None:
    assert upward("layers", source) == []


def test_nothing_else_lies_at_the_top() -> None:
    files = {p.name for p in PACKAGE.iterdir() if p.is_file()}
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert files == TOP
    assert folders == {*ORDER, *TEXTS}
    assert not [path for name in TEXTS for path in (PACKAGE / name).rglob("*.py")]
    assert all((PACKAGE / room / "__init__.py").is_file() for room in ORDER)


def test_heavy_libraries_stay_in_their_rooms() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, module in imported(path.read_text()):
            homes = HOMES.get(module.split(".")[0])
            if homes is not None and not place.startswith(homes):
                found.append(f"{place}:{line} imports {module}")
    assert not found


def public_names(source: str) -> list[str]:
    """What a module defines for others: functions, classes, constants and types by another name."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [n for target in targets for n in ast.walk(target)]
            found += [n.id for n in stored if isinstance(n, ast.Name)]
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def test_one_name_has_one_meaning() -> None:
    """A public name is defined in one module of the package only; a constant of one module's own
    begins with an underscore where another has one of that name."""
    # Flower and Typer look for `app` under this name, config for the parts that a room offers
    shared = {"app", "PART_KINDS"}
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in public_names(path.read_text()):
            places.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    twice = {n: p for n, p in places.items() if len(p) > 1 and n not in shared}
    assert not twice


def test_the_rule_sees_every_kind_of_definition() -> None:
    planted = """
import os
from typing import Any
A = B = 1
C, (D, *E) = 2, (3, 4)
F: int = 5
_private = 6
def g(): inner = 7
async def h(): ...
class I: J = 8
Log = [x for x in "K"]
"""
    assert public_names(planted) == ["A", "B", "C", "D", "E", "F", "g", "h", "I", "Log"]

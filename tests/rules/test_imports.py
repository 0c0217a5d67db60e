"""Rooms import in one direction, and heavy libraries stay in theirs. Read from the source, so that
imports inside functions count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "fedlens"
# A room imports only rooms before it.
ORDER = (
    "core", "data", "models", "metrics", "tasks", "generators", "algorithms", "layers", "deblur",
    "config", "trust", "engines", "report", "runs", "audit", "sites", "cli",
)  # fmt: skip
TOP = {"__init__.py", "testing.py", "py.typed"}
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


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def upward(room: str, source: str) -> list[str]:
    """Imports of a file in `room` that point at a room after it."""
    found = []
    for line, module in imported(source):
        parts = module.split(".")
        if parts[0] != "fedlens" or len(parts) < 2 or parts[1] not in ORDER:
            continue
        if ORDER.index(parts[1]) > ORDER.index(room):
            found.append(f"line {line}: {module}")
    return found


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    found = {}
    for path in sorted((PACKAGE / room).rglob("*.py")):
        if wrong := upward(room, path.read_text()):
            found[str(path.relative_to(PACKAGE))] = wrong
    assert not found


def test_the_rule_sees_lazy_imports() -> None:
    source = "def f():\n    from fedlens.runs import job\n    import fedlens.core.tree\n"
    assert upward("layers", source) == ["line 2: fedlens.runs.job"]
    assert upward("cli", source) == []


def test_nothing_else_lies_at_the_top() -> None:
    files = {p.name for p in PACKAGE.iterdir() if p.is_file()}
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert files == TOP
    assert rooms == set(ORDER)


def test_heavy_libraries_stay_in_their_rooms() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, module in imported(path.read_text()):
            homes = HOMES.get(module.split(".")[0])
            if homes is not None and not place.startswith(homes):
                found.append(f"{place}:{line} imports {module}")
    assert not found


def test_one_name_has_one_meaning() -> None:
    """A public function or class is defined in one module of the package only. Methods of an
    interface that several modules fill in are exempt, by name."""
    shared = {"app"}  # Flower and Typer look for it under this name
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {n: p for n, p in places.items() if len(p) > 1 and n not in shared}
    assert not twice

"""The reference has everything that packages export, argument by argument.

Read from the pages and the source alone, nothing is imported. What is listed on a page of
docs/reference, `::: MODULE` with its `members`, is public: its docstring has an `Args:` section
with every argument of the constructor or function, and with none that there is not. Arguments that
a class inherits are documented by the class that has them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fedlens"
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
LISTED = re.compile(r"^::: fedlens\.([\w.]+)\n    options: \{members: \[(.*)\]\}$", re.MULTILINE)
ROOMS = ("layers", "algorithms", "data", "tasks", "models", "metrics", "deblur", "generators")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Part = ast.ClassDef | Function


def listed() -> dict[str, list[str]]:
    """Modules below `fedlens` and their public names, as the pages have them; those of `fedlens`
    itself too, whose page lists no members."""
    found = {module: names.split(", ") for page in PAGES for module, names in entries(page)}
    for module, names in exported(PACKAGE / "__init__.py").items():
        found[module] = sorted({*found.get(module, []), *names})
    return found


def entries(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = LISTED.findall(page.read_text())
    return found


def exported(package: Path) -> dict[str, list[str]]:
    """Names that a package exports, by their module within it."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE":
            for name, module in ast.literal_eval(node.value).items():
                found.setdefault(module, []).append(name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedlens.layers."):
            names = [alias.name for alias in node.names]
            found[(node.module or "").removeprefix("fedlens.layers.")] = names
    return found


@cache
def parts_of(module: str) -> dict[str, Part]:
    """Classes and functions at the top of a module."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, Part)}


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of the package, by its name."""
    modules = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    parts = [parts_of(".".join(path.with_suffix("").parts)) for path in modules]
    return {n: p for found in parts for n, p in found.items() if isinstance(p, ast.ClassDef)}


def arguments(part: Part) -> list[str]:
    """Of a function, or of the constructor that a class itself has; private ones left out."""
    if isinstance(part, Function):
        a = part.args
        extra = [x for x in (a.vararg, a.kwarg) if x]
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *extra)]
    elif is_record(part):
        names = [ast.unparse(x.target) for x in part.body if is_argument(x)]
    else:
        names = [n for x in part.body if is_constructor(x) for n in arguments(x)]
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


def is_record(part: ast.ClassDef) -> bool:
    words = [ast.unparse(x) for x in (*part.decorator_list, *part.bases)]
    return any(word.startswith("dataclass") or word == "NamedTuple" for word in words)


def is_argument(node: ast.stmt) -> bool:
    """A field that the constructor takes."""
    if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
        return False
    return node.value is None or "init=False" not in ast.unparse(node.value)


def is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, Function) and node.name == "__init__"


def inherited(part: Part) -> Iterator[str]:
    for base in getattr(part, "bases", ()):
        parent = classes().get(ast.unparse(base).partition("[")[0])
        if parent is not None:
            yield from arguments(parent)
            yield from inherited(parent)


def documented(part: Part) -> list[str]:
    section = re.search(
        r"^Args:\n((?:    .*\n?|\n)+)", ast.get_docstring(part) or "", flags=re.MULTILINE
    )
    return re.findall(r"^    (\w+):", section[1], flags=re.MULTILINE) if section else []


def faults(part: Part) -> list[str]:
    own, said = arguments(part), documented(part)
    missing = [f"{part.name}: {name} is not documented" for name in own if name not in said]
    known = {*own, *inherited(part)}
    return missing + [f"{part.name}: has no {name}" for name in said if name not in known]


def test_everything_exported_is_in_the_reference() -> None:
    pages = listed()
    missing = [
        f"fedlens.{room}.{module}: {name}"
        for room in ROOMS
        for module, names in exported(PACKAGE / room / "__init__.py").items()
        for name in names
        if name != "Listed" and name not in pages.get(f"{room}.{module}", [])
    ]
    assert missing == []


def test_every_entry_says_what_is_public() -> None:
    """A module without `members` would show whatever is in it."""
    for page in PAGES:
        entries_in_all = re.findall(r"^::: fedlens\.", page.read_text(), flags=re.MULTILINE)
        assert len(entries_in_all) == len(entries(page)), page


def test_every_argument_in_the_reference_is_documented() -> None:
    found: list[str] = []
    counted = 0
    for module, names in listed().items():
        parts = parts_of(module)
        for name in names:
            if name in parts:  # not a type such as `Tree`
                found += [f"{module}.{fault}" for fault in faults(parts[name])]
                counted += len(arguments(parts[name]))
    print(f"\n{counted} arguments are documented")
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def f(a, *b, c=1, **d):\n  '''F.\n\n  Args:\n      a: A.\n      c: C.\n  '''",
            ["b", "d"],
        ),
        ("@dataclass\nclass A:\n  x: int\n  _y: int = 0\n  z: ClassVar[int] = 1", ["x"]),
        ("class A:\n  def __init__(self, x): ...\n  def f(self, y): ...", ["x"]),
    ],
)
def test_the_rule_sees_what_is_missing(source: str, expected: list[str]) -> None:
    (part,) = ast.parse(source).body
    assert isinstance(part, Part)
    assert faults(part) == [f"{part.name}: {name} is not documented" for name in expected]


def test_the_rule_sees_what_is_too_much() -> None:
    (part,) = ast.parse("def f():\n  '''F.\n\n  Args:\n      a: gone.\n  '''").body
    assert isinstance(part, Part)
    assert faults(part) == ["f: has no a"]

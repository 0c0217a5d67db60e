"""One atomic write: only `core/files.py` renames files. Data is looked for only where the user
named it, or below FEDLENS_DATA: only `core/files.py` asks the environment or the home folder.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = "src/fedlens/core/files.py"
# Files and functions that may rename. The simulator's scratch folder is no file that is written: it
# takes its name when its lock is held, so that nobody sweeps it away in between. The benchmark of
# the board moves a whole run folder, to see it come.
RENAMES = {
    (FILES, "atomic_path"),
    (FILES, "atomic_files"),
    ("src/fedlens/engines/simulator.py", "make_scratch"),
    ("benchmarks/report.py", "measure_board"),
}
# Files that may ask the environment, and the variables: none of them is a place where data lies.
# Ray's own settings, of Python's path for its actors; what a child process is started with (its
# PATH, the home of Flower's own programs); how much is said, and in which form.
VARIABLES = {
    FILES: {"FEDLENS_DATA", "FEDLENS_HOME"},
    "src/fedlens/engines/ray.py": {
        "PYTHONPATH",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_worker_niceness",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    },
    "src/fedlens/runs/engines.py": {"RAY_ADDRESS"},
    "src/fedlens/cli/run.py": {"RAY_ADDRESS"},
    "src/fedlens/cli/main.py": {"FEDLENS_DEBUG"},
    "src/fedlens/engines/flower/site.py": {"FEDLENS_DEBUG"},
    "src/fedlens/engines/flower/engine.py": {"FEDLENS_DEBUG"},
    "src/fedlens/sites/logs.py": {"VARIABLE"},
    "src/fedlens/sites/programs.py": {
        "the whole environment",
        "PATH",
        "FLWR_HOME",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL",
    },
}
# Files that fill in the `~` of a path that a user wrote.
TILDES = {
    FILES,
    "src/fedlens/data/paths.py",
    "src/fedlens/data/images/cifar.py",  # where torchvision puts what it fetches
    "src/fedlens/generators/generator.py",  # a cache
    "src/fedlens/tasks/apply/search.py",  # a gallery
}
RENAMING = {
    "os.replace",
    "os.rename",
    "os.renames",
    "shutil.move",
    "pathlib.Path.replace",
    "pathlib.Path.rename",
}

Find = Callable[[ast.AST], Iterable[tuple[str, int]]]


def imported_as(tree: ast.AST) -> dict[str, str]:
    """What names stand for: {"o": "os", "put": "os.replace"}, imports inside functions too."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
            found |= {(n := a.name.split(".")[0]): n for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """ "os.path.expanduser" for `o.path.expanduser`; nothing where it is no imported name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := full_name(node.value, names)):
        return f"{before}.{node.attr}"
    return ""


def inside_functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name of the innermost function that it stands in."""
    for child in ast.iter_child_nodes(tree):
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield name, child
        yield from inside_functions(child, child.name if function else name)


def renames(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The function and the line of every os.replace, os.rename, shutil.move, Path.replace and
    Path.rename, also as a function that is passed on (`map(os.replace, ...)`)."""
    names = imported_as(tree)
    for function, node in inside_functions(tree):
        named = isinstance(node, ast.Name | ast.Attribute) and full_name(node, names) in RENAMING
        if named or (isinstance(node, ast.Call) and is_method_rename(node, names)):
            yield function, node.lineno  # type: ignore[attr-defined]


def is_method_rename(call: ast.Call, names: dict[str, str]) -> bool:
    """A path's. `str.replace` takes two arguments, a function of a module is no method."""
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr not in ("replace", "rename"):
        return False
    if full_name(method, names):
        return False
    return len(call.args) + len(call.keywords) == 1 and (
        bool(call.args) or call.keywords[0].arg in ("target", None)
    )


def asks_environment(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The variable and the line of everything that is read from or written to the environment."""
    names = imported_as(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        name = full_name(node, names)
        if name in ("os.getenv", "os.putenv", "os.getenvb"):
            yield first_argument(parents[node]), node.lineno  # type: ignore[attr-defined]
        elif name in ("os.environ", "os.environb") and isinstance(node, ast.Name | ast.Attribute):
            yield variable_of(parents[node], parents), node.lineno


def variable_of(around: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    if isinstance(around, ast.Subscript):
        return spelt(around.slice)
    if isinstance(around, ast.Attribute):
        return first_argument(parents[around])
    return "the whole environment"


def first_argument(call: ast.AST) -> str:
    if isinstance(call, ast.Call) and call.args:
        return spelt(call.args[0])
    return "the whole environment"


def spelt(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def asks_home(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Path.home, and whatever fills in `~` or variables, by whichever name it goes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("expanduser", "expandvars"):
            yield "~", node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "home":
            if full_name(node.value, imported_as(tree)) == "pathlib.Path":
                yield "home", node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in ("os.path", "posixpath"):
            taken = {alias.name for alias in node.names} & {"expanduser", "expandvars"}
            yield from (("~", node.lineno) for _ in taken)


def found_in(folders: Iterable[str], find: Find) -> Iterator[tuple[str, str, int]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for what, line in find(ast.parse(path.read_text())):
                yield path.relative_to(ROOT).as_posix(), what, line


def test_only_one_module_renames_files() -> None:
    found = list(found_in(("src/fedlens", "experiments", "benchmarks", "examples"), renames))
    wrong = [f"{file}:{line}" for file, name, line in found if (file, name) not in RENAMES]
    assert not wrong, "use fedlens.core.files instead"
    assert {(file, name) for file, name, _ in found} == RENAMES


def test_only_one_module_looks_for_data_outside() -> None:
    found = list(found_in(("src/fedlens",), asks_environment))
    wrong = [f"{file}:{line} {n}" for file, n, line in found if n not in VARIABLES.get(file, ())]
    assert not wrong, "take the place from fedlens.core.files, or from what the user named"
    asked = {file: {n for f, n, _ in found if f == file} for file in VARIABLES}
    assert asked == VARIABLES


def test_only_one_module_asks_for_the_home_folder() -> None:
    found = list(found_in(("src/fedlens",), asks_home))
    wrong = [(file, line) for file, what, line in found if what == "home" and file != FILES]
    wrong += [(file, line) for file, what, line in found if what == "~" and file not in TILDES]
    assert not wrong, "take the place from fedlens.core.files, or from what the user named"
    assert {file for file, _, _ in found} == TILDES


def test_the_rule_sees_renames() -> None:
    written = """
import os, shutil
import os as o
from os import replace as put, rename
from dataclasses import replace
import dataclasses
from pathlib import Path
def f(a, b):
    os.replace(a, b)
    a.rename(b)
    def g():
        a.with_suffix(".x").replace(b)
    shutil.move(a, b)
    "text".replace("a", "b")
    replace(a, b=1)
    dataclasses.replace(a)
    o.rename(a, b)
    put(a, b)
    rename(a, b)
    a.replace(target=b)
    a.rename(**b)
    Path.replace(a, b)
    a.replace(tzinfo=b)
    list(map(os.renames, a, b))
"""
    lines = [9, 10, 13, 17, 18, 19, 20, 21, 22, 24]
    assert sorted(renames(ast.parse(written))) == [*(("f", line) for line in lines), ("g", 12)]


def test_the_rule_sees_only_what_renames_by_that_name() -> None:
    assert list(renames(ast.parse("from os import replace\nreplace(1, 2)"))) == [("", 2)]
    assert not list(renames(ast.parse("from copy import replace\nreplace(1, b=2)")))


@pytest.mark.parametrize(
    ("written", "variable"),
    [
        ("import os\nos.environ['DATA']", "DATA"),
        ("import os as o\no.environ.get('DATA', '')", "DATA"),
        ("from os import environ as e\ne.setdefault('DATA', '')", "DATA"),
        ("import os\nNAME = 'x'\nos.environ[NAME]", "NAME"),
        ("import os\nos.getenv('DATA')", "DATA"),
        ("from os import getenv\ngetenv('DATA')", "DATA"),
        ("import os\nprint(os.environ)", "the whole environment"),
        ("import os\n{**os.environ}", "the whole environment"),
    ],
)
def test_the_rule_sees_the_environment(written: str, variable: str) -> None:
    assert [name for name, _ in asks_environment(ast.parse(written))] == [variable]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("from pathlib import Path\nPath.home()", ["home"]),
        ("from pathlib import Path as P\ndef f():\n    P.home() / 'data'", ["home"]),
        ("import pathlib\npathlib.Path.home()", ["home"]),
        ("p.expanduser()", ["~"]),
        ("import os\nos.path.expanduser('~/data')", ["~"]),
        ("from os.path import expanduser", ["~"]),
        ("self.home()", []),
    ],
)
def test_the_rule_sees_the_home_folder(written: str, found: list[str]) -> None:
    assert [what for what, _ in asks_home(ast.parse(written))] == found

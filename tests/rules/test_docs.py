"""Paths, modules and names that the docs and docstrings mention exist.

Read from the text and the source alone, nothing is imported. A word is looked at if it is

- a file ending in .py or .md (`core/tree.py`, `consensus.py`) or a path into one of `FOLDERS`: in
  the code of a document, in its links, or anywhere in a docstring;
- a dotted name in code that begins with `fedlens`, a room, a module or a class of ours, such as
  `fedlens.core.tree`, `runs.folder.check_rounds`, `Replies.average`;
- a single name in code, such as `measured_state`, in a row of a table that names files of ours: it
  must occur in one of them.

A fenced block that begins with `# NAME` is that file, and `fedlens new KIND NAME` in one writes
NAME.py and its test, so the document may name them. Variables of a
fenced program may be called like a module, so there only `fedlens.` counts.

It does not see: other single names without a dot, comments, other kinds of files (recipes, run
folders), keys of recipes (`data.alpha`), names behind the attribute of a class, and whether a
method named with a variable (`client.plus`) belongs to the class that is meant or to another in
that module.
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
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
HISTORY = {ROOT / "docs" / "LOG.md"}  # what it names was there when it was written
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]

FILE = re.compile(r"(?<![\w./*<>~-])[\w-][\w./-]*\.(?:py|md)\b(?!\w)")
FOLDERS = ("docs", "tests", "benchmarks", "experiments", "examples", "src/fedlens", "engines")
FOLDER = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*")
DOTTED = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/-])")
# tables of a recipe, and a library that one of our modules is named after
NOT_OURS = {"data", "task", "federation", "algorithm", "generator", "ray"}
DATA = (".json", ".jsonl", ".csv", ".png", ".toml", ".mp4", ".html")  # files, not names
WRITTEN = {"table.md"}  # by `fedlens compare`, beside what it compared


def code(markdown: str) -> tuple[str, str]:
    """The code of a document, a piece a line: between backticks, and in fenced blocks."""
    parts = re.split(r"^```.*$", markdown, flags=re.MULTILINE)
    inline = [span for part in parts[::2] for span in re.findall(r"`([^`]+)`", part)]
    return "\n".join(inline), "\n".join(parts[1::2])


def links(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)#:]+)\)", markdown)


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def files(text: str) -> set[str]:
    return {*FILE.findall(text), *(found.rstrip(".") for found in FOLDER.findall(text))}


def dotted(text: str) -> set[str]:
    return {n for n in DOTTED.findall(text) if not n.endswith((".py", ".md", *DATA))}


def file_exists(name: str, beside: Path) -> bool:
    return name in WRITTEN or any((f / name).exists() for f in (ROOT, PACKAGE, beside))


@cache
def modules() -> dict[str, list[Path]]:
    """Files by every dotted name that can mean them: `fedlens.core.tree`, `core.tree`, `tree`."""
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE.parent).with_suffix("")
        parts = place.parent.parts if place.name == "__init__" else place.parts
        for k in range(len(parts)):
            found.setdefault(".".join(parts[k:]), []).append(path)
    return found


@cache
def classes() -> dict[str, ast.ClassDef]:
    bodies = [ast.parse(path.read_text()).body for path in PACKAGE.rglob("*.py")]
    return {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}


def assigned(body: list[ast.stmt]) -> set[str]:
    """Names that these statements define or import, inside `if` and `try` too."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            found |= assigned(node.body)
        else:
            stored = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            found |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return found


def has_attribute(node: ast.ClassDef, name: str) -> bool:
    """Its own, one of `self`, or a base's; a base that is not ours may have anything."""
    if name in assigned(node.body):
        return True
    attributes = [inside for inside in ast.walk(node) if isinstance(inside, ast.Attribute)]
    if any(a.attr == name and isinstance(a.ctx, ast.Store) for a in attributes):
        return True
    bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
    names = [b.id if isinstance(b, ast.Name) else "" for b in bases]
    known = [n for n in names if n not in ("ABC", "Protocol", "Generic", "NamedTuple")]
    return any(n not in classes() or has_attribute(classes()[n], name) for n in known)


def module_has(path: Path, names: list[str]) -> bool:
    """Is the first of these names defined in a module, or an attribute of one of its classes? If it
    is a class, does that have the second?"""
    if not names:
        return True
    body = ast.parse(path.read_text()).body
    own = [node for node in body if isinstance(node, ast.ClassDef)]
    for node in own:
        if node.name == names[0]:
            return len(names) == 1 or has_attribute(node, names[1])
    return names[0] in assigned(body) or any(has_attribute(node, names[0]) for node in own)


def is_ours(name: str) -> bool:
    first = name.split(".")[0]
    return first not in NOT_OURS and (first in modules() or first in classes())


def name_exists(name: str) -> bool:
    parts = name.split(".")
    if parts[0] in classes() and parts[0] not in modules():
        return has_attribute(classes()[parts[0]], parts[1])
    for k in range(len(parts), 0, -1):
        found = modules().get(".".join(parts[:k]), [])
        if any(module_has(path, parts[k:]) for path in found):
            return True
    return False


def wrong_names(text: str) -> list[str]:
    return sorted(name for name in dotted(text) if is_ours(name) and not name_exists(name))


def wrong_files(text: str, beside: Path) -> list[str]:
    return sorted(name for name in files(text) if not file_exists(name, beside))


def single_names(row: str) -> set[str]:
    """Names in a row's code: a whole span, also as a call (`broadcast()`, `FedProx(mu=0.01)`)."""
    spans = re.findall(r"`([^`]+)`", row)
    called = [re.fullmatch(r"([A-Za-z_]\w+)(?:\(.*\))?", span) for span in spans]
    return {match[1] for match in called if match}


def wrong_in_rows(markdown: str, beside: Path) -> list[str]:
    """Names in rows of a table that occur in none of the files the row names."""
    found: set[str] = set()
    for row in re.findall(r"^\|.*\|$", markdown, flags=re.MULTILINE):
        named = {n for span in re.findall(r"`([^`]+)`", row) for n in FILE.findall(span)}
        paths = [f / n for n in named for f in (ROOT, PACKAGE, beside) if n.endswith(".py")]
        sources = [path.read_text() for path in paths if path.is_file()]
        words = {word for source in sources for word in re.findall(r"\w+", source)}
        found |= single_names(row) - words if sources else set()
    return sorted(found)


def wrong_in_document(markdown: str, beside: Path) -> list[str]:
    inline, fenced = code(markdown)
    found = {*wrong_files(inline, beside), *wrong_files(fenced, beside), *wrong_names(inline)}
    found -= set(re.findall(r"^```\w+\n# ([\w.]+)$", markdown, flags=re.MULTILINE))
    made = re.findall(r"^fedlens new \w+ (\w+)$", markdown, flags=re.MULTILINE)
    found -= {f"{start}{name}.py" for name in made for start in ("", "test_")}
    found |= {name for name in wrong_names(fenced) if name.startswith("fedlens.")}
    found |= set(wrong_in_rows(markdown, beside))
    return sorted(found | {link for link in links(markdown) if not file_exists(link, beside)})


def wrong_in_source(source: str, beside: Path) -> list[str]:
    found: set[str] = set()
    for text in docstrings(source):
        found |= set(wrong_files(text, beside))
        found |= {name for span in re.findall(r"`([^`]+)`", text) for name in wrong_names(span)}
    return sorted(found)


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if p not in HISTORY], ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_a_document_names_exists(path: Path) -> None:
    assert wrong_in_document(path.read_text(), path.parent) == []


def test_what_docstrings_name_exists() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in SOURCES
        if (wrong := wrong_in_source(path.read_text(), path.parent))
    }
    assert found == {}


def test_the_rule_sees_wrong_names_in_a_document() -> None:
    planted = """
The core is `tree.py`, not `core/tree.py`; see [sites](sites.md) and [nothing](nowhere.md).
`runs.folder.check_rounds` took the place of `runs.may_go_on`, `core.tree.nothing` is not there,
`Replies.average` is and `Replies.nonsense` is not, `client.plus` is and `client.minus` is not.
Neither torch.lerp nor `torch.lerp` nor `data.alpha=0.1` are ours.

```
python benchmarks/nothing.py > tests/toy.py
from fedlens.core.trees import add
```
"""
    assert wrong_in_document(planted, ROOT / "docs") == [
        "Replies.nonsense",
        "benchmarks/nothing.py",
        "client.minus",
        "core.tree.nothing",
        "fedlens.core.trees",
        "nowhere.md",
        "runs.may_go_on",
        "tree.py",
    ]


def test_the_rule_sees_wrong_names_in_a_row() -> None:
    planted = """
| what | where |
|---|---|
| `Replies`, `Nothing`, `gather(...)` | `core/replies.py` |
| `watch`: change | `deblur/feddeblur.py` |
| `watch` | nobody's file |
| `Message`, `anything` | `README.md` |
| `mean_of_last` of `deblur/consensus.py` and `Prior` of `deblur/priors.py` | both |
"""
    assert wrong_in_document(planted, ROOT / "docs") == ["Nothing", "watch"]


def test_the_changelog_and_the_examples_are_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert {"CHANGELOG.md", "SECURITY.md", "examples/flower_app/README.md"} <= names


def test_the_rule_sees_wrong_names_in_a_docstring() -> None:
    planted = '''
"""See `prior.py`, priors.py and `engines/site.py`."""
def f():
    """As `consensus.nobody` says, and `consensus.since_last` too."""
    return "missing.py"
'''
    assert wrong_in_source(planted, PACKAGE / "deblur") == [
        "consensus.nobody",
        "engines/site.py",
        "prior.py",
    ]

"""Every `fedlens` command that a document shows is one: its command and options exist, its recipe
is there, and the recipe has the keys that are set.

That holds for commands that are run by `test_snippets.py` anyway, for those that need data, hours
or sites and are run by nobody here, and for those in a sentence. A word in capitals (RECIPE, DIR)
stands for the reader's own; a recipe that is the reader's own file is not looked at.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedlens.cli.main import command_group
from fedlens.config.convert import ConfigError
from fedlens.config.files import shipped_recipes
from fedlens.config.recipe import read
from fedlens.data.source import DataError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
]
HISTORY = ROOT / "docs" / "LOG.md"  # its commands were there when they were written
LINE = re.compile(r"^ *fedlens +(.+)$", re.MULTILINE)  # in a fenced or indented block
INLINE = re.compile(r"`fedlens +([^`\n]+)`")
WITH_RECIPE = ("run", "compare", "partition", "privacy")
OVERRIDE = re.compile(r"[\w.]+=.*")


def commands(markdown: str) -> list[list[str]]:
    """Their words, without `fedlens`; what follows a command of the shell or a comment is gone."""
    found = [*LINE.findall(markdown), *INLINE.findall(markdown)]
    parts = [re.split(r" && | \|\| | \| |; | &$|\) ?&?$", text)[0] for text in found]
    return [shlex.split(part, comments=True) for part in parts]


@cache
def group() -> Any:
    return command_group()


def fault(words: list[str]) -> str | None:
    """What is wrong with a command; None if nothing is."""
    command = group()
    rest = list(words)
    while rest and hasattr(command, "commands"):
        if rest[0].startswith("-") or rest[0] == "...":
            break
        name = rest.pop(0)
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    known = {text for p in command.params for text in (*p.opts, *p.secondary_opts)}
    known |= {"-h", "--help", "--install-completion", "--show-completion"}
    for word in rest:
        option = word.partition("=")[0]
        if option.startswith("-") and option not in known:
            return f"{' '.join(words[:2])!r} has no option {option!r}"
    if words[0] in WITH_RECIPE and len(words) > 1 and words[1] in shipped_recipes():
        return recipe_fault(words[1], rest[1:])
    return None


def recipe_fault(recipe: str, words: list[str]) -> str | None:
    algorithm = words[words.index("--algorithm") + 1] if "--algorithm" in words else None
    if algorithm and (":" in algorithm or algorithm.isupper()):
        return None  # the reader's own
    overrides = [w for w in words if OVERRIDE.fullmatch(w) and not w.startswith("-")]
    with contextlib.suppress(DataError):  # data that the reader would have
        try:
            read(recipe, overrides, algorithm)
        except ConfigError as e:
            return str(e)
    return None


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_are_commands(page: Path) -> None:
    if page == HISTORY:
        pytest.skip("history")
    found = commands(page.read_text())
    assert [f"{' '.join(words)}: {why}" for words in found if (why := fault(words))] == []


def test_how_many_commands_were_looked_at() -> None:
    counted = [len(commands(page.read_text())) for page in DOCUMENTS if page != HISTORY]
    print(f"\n{sum(counted)} commands on {len([n for n in counted if n])} pages")
    assert sum(counted) > 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("    fedlens fly demo", "no command 'fly'"),
        ("`fedlens run demo --sideways`", "no option '--sideways'"),
        ("    fedlens run demo task.nonsense=1  # comment", "nonsense"),
        ("    (cd here && fedlens run demo lr=-1) &", None),
        ("    fedlens run demo lr=-1", "lr"),
        ("`fedlens run RECIPE --algorithm NAME`", None),
    ],
)
def test_the_rule_sees_a_wrong_command(text: str, why: str | None) -> None:
    found = [fault(words) for words in commands(text)]
    assert found == [] or (found == [None] if why is None else why in str(found[0]))

"""What several commands share: their arguments, the recipe these stand for, and a spinner while it
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from fedlens.config.recipe import Config


def complete_recipe(incomplete: str) -> list[str]:
    """For the shell: shipped recipes, and TOML files and run folders that lie here."""
    from fedlens.config.files import shipped_recipes

    folder = Path(incomplete.rpartition("/")[0] or ("/" if incomplete[:1] == "/" else "."))
    found = list(shipped_recipes()) if "/" not in incomplete else []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix == ".toml" or (path / "config.toml").is_file():
            found.append(str(path))
        elif path.is_dir() and not path.name.startswith("."):
            found.append(f"{path}/")
    return [name for name in found if name.startswith(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    from fedlens.algorithms.named import NAMED

    return [name for name in NAMED if name.startswith(incomplete.lower())]


def one_of(words: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell: those of a few words that begin so."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete.lower())]

    return complete


RecipeArgument = Annotated[
    str,
    typer.Argument(
        help="A shipped recipe, a TOML file, or a run folder.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides: rounds=6, FedProx.mu=0.01, data.alpha=0.1",
        show_default=False,
    ),
]


def allow_modules(modules: list[str] | None) -> list[str] | None:
    from fedlens.core.imports import allow

    allow(modules or [])
    return modules


ModuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--module",
        callback=allow_modules,
        help="A module, or its file, that a run folder may have imported; may be repeated.",
        show_default=False,
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="simulator, ray or flower.",
        autocompletion=one_of(("simulator", "ray", "flower")),
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", "-w", help="Processes. [dim]default: cores[/]", show_default=False),
]


def examples(*lines: str) -> str:
    """An epilog of commands, one a line."""
    return "[bold]Examples[/]\n\n" + "\n\n".join(f"  {line}" for line in lines)


def all_overrides(overrides: Sequence[str] | None, workers: int | None) -> list[str]:
    """With --workers as one of them."""
    given = list(overrides or [])
    return given if workers is None else [*given, f"federation.workers={workers}"]


def read_config(
    recipe: str,
    overrides: Sequence[str] | None,
    algorithm: str | None = None,
    workers: int | None = None,
) -> Config:
    from fedlens.config import recipe as recipes

    return recipes.read(recipe, all_overrides(overrides, workers), algorithm)


class UsageError(ValueError):
    """A command line that cannot be meant; one message for the user. Not click's: typer may carry a
    click of its own, and knows nothing of errors that were raised with another."""


class Stopped(Exception):
    """Ctrl-C before there was anything to save. Click would answer it with an exit code and no
    word.
    """


@contextmanager
def loading() -> Iterator[Status]:
    """A spinner on a terminal while torch and the data are loaded; nothing in a pipe."""
    from rich.console import Console
    from rich.status import Status

    try:
        with Status(
            "[dim]loading[/]", console=Console(stderr=True), spinner_style="cyan"
        ) as status:
            yield status
    except KeyboardInterrupt:
        raise Stopped from None

"""What several commands share: their arguments, the recipe these stand for, and a spinner while it
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from fedlens.config.recipe import Config

RecipeArgument = Annotated[
    str, typer.Argument(help="A shipped recipe, a TOML file, or a run folder.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides: rounds=6, FedProx.mu=0.01, data.alpha=0.1",
        show_default=False,
    ),
]
EngineOption = Annotated[str, typer.Option("--engine", help="simulator, ray or flower.")]
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

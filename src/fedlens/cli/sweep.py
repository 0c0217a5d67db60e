"""`fedlens sweep`: one recipe with many settings, Optuna choosing them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from fedlens.cli.options import (
    EngineOption,
    ModuleOption,
    RecipeArgument,
    WorkersOption,
    all_overrides,
    examples,
)
from fedlens.runs.text import ACCENT, console, rounded

if TYPE_CHECKING:
    from fedlens.runs.compare import Cell

app = typer.Typer()
_SHOWN = 10  # lines of the table on a terminal


@app.command(
    "sweep",
    epilog=examples(
        "fedlens sweep demo lr=0.01,0.03,0.1 momentum=0,0.9",
        "fedlens sweep demo --algorithm fedprox 'lr=log(0.001,0.3)' 'mu=log(1e-4,1)' --trials 20",
        "fedlens sweep my.toml lr=log:0.001:0.3 batch=16,32,64 rounds=5 --out runs/rates",
    ),
)
def sweep_recipe(
    recipe: RecipeArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUES...",
            help="lr=0.01,0.1 tries these, mu=log(1e-4,1), uniform(0,1) or int(1,8) a range.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Runs.", min=1)] = 20,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", "-a", help="Instead of the recipe's own.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder. [dim]default: runs/RECIPE-sweep[/]", show_default=False
        ),
    ] = None,
    engine: EngineOption = "simulator",
    workers: WorkersOption = None,
    module: ModuleOption = None,
) -> None:
    """Look for good settings: many runs, one table, one plot.

    Where only lists vary, all combinations are tried; otherwise Optuna chooses. Run it again to go
    on where it stopped, or with more trials. The best of many on one seed looks better than it is:
    compare it with others on other seeds.
    """
    from fedlens.runs import compare as comparison
    from fedlens.runs import sweep as sweeping
    from fedlens.runs.job import Interrupted
    from fedlens.runs.progress import CellBar

    folder = out or Path("runs") / f"{Path(recipe).stem}-sweep"
    shown: set[str] = set()

    def run_cell(cell: Cell) -> None:
        words = " ".join(f"{k}={_brief(v)}" for k, v in cell.chosen.items())
        comparison.run_cells(
            [cell], engine=engine, listener=lambda c: CellBar(f"{c.algorithm}  {words}", shown)
        )

    given = all_overrides(settings, workers)
    try:
        done = sweeping.sweep(recipe, given, folder, run_cell, trials=trials, algorithm=algorithm)
    except Interrupted as e:
        e.again = shlex.join(["fedlens", *sys.argv[1:]])
        raise
    written = sweeping.write_sweep(done, folder)
    ranked = sweeping.best_first(done)
    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for name in ("trial", *ranked[0].chosen, ranked[0].metric):
        grid.add_column(name, style=ACCENT if name == "trial" else None)
    for t in ranked[:_SHOWN]:
        value = "–" if t.value is None else rounded(t.value)
        grid.add_row(t.folder.name, *(_brief(v) for v in t.chosen.values()), value)
    console().print(grid)
    if len(ranked) > _SHOWN:
        typer.echo(f"and {len(ranked) - _SHOWN} more")
    best = " ".join(shlex.quote(f"{k}={_brief(v)}") for k, v in ranked[0].chosen.items())
    own = f"--algorithms {algorithm}" if algorithm else "--algorithms ..."
    typer.echo(f"The best of {len(ranked)} on one seed looks better than it is. On others:")
    typer.echo(f"  fedlens compare {recipe} {own} --seeds 1,2,3,4,5,6 {best}")
    typer.echo(", ".join(map(str, written)))


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

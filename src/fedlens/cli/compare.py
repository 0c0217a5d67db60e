"""`fedlens compare`: several algorithms and seeds on one recipe, with a search for each one's own
parameters if wanted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedlens.cli.options import (
    EngineOption,
    ModuleOption,
    OverridesArgument,
    RecipeArgument,
    UsageError,
    WorkersOption,
    all_overrides,
    examples,
    loading,
)
from fedlens.runs.text import ACCENT, console

if TYPE_CHECKING:
    from fedlens.runs.compare import Cell

app = typer.Typer()


@app.command(
    "compare",
    epilog=examples(
        "fedlens compare demo --algorithms fedavg,fedprox,fednova --seeds 0,1,2",
        "fedlens compare cifar10 --algorithms fedavg,fedprox,fednova --tune --seeds 1,2,3"
        " --target 0.5",
        "fedlens compare classification --algorithms fedavg,FedAvg+FedProx+Median data.alpha=0.1"
        " mu=0.1 --out runs/skew",
        "fedlens compare fedvssl --algorithms fedavg,fedvssl-0.9-1 --seeds 0,1,2 --dry-run",
    ),
)
def compare_algorithms(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    algorithms: Annotated[
        str,
        typer.Option(
            "--algorithms",
            "-a",
            help=(
                "Names from `list algorithms` or `list layers`, or parts joined by +; commas"
                " between."
            ),
            show_default=False,
        ),
    ] = "",
    seeds: Annotated[
        str, typer.Option("--seeds", "-s", help="Whole numbers, commas between.")
    ] = "0",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder. [dim]default: runs/RECIPE-compare[/]", show_default=False
        ),
    ] = None,
    engine: EngineOption = "simulator",
    workers: WorkersOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished cells again.")] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First search each one's learning rate and own parameter on seed 0."
        ),
    ] = False,
    trials: Annotated[
        int, typer.Option("--trials", help="Runs every algorithm may spend on that.")
    ] = 6,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            help="Also count rounds and bytes until the first metric is there.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Say what would be done, and what it would take."),
    ] = False,
    module: ModuleOption = None,
) -> None:
    """Several algorithms, several seeds: one table (mean and spread) and one plot.

    Run it again to go on where it stopped, or with more algorithms or seeds: cells that are
    finished are kept.
    """
    names = unique_algorithms([n.strip() for n in algorithms.split(",") if n.strip()])
    if not names:
        raise UsageError("which ones? add --algorithms fedavg,fedprox")
    numbers = parse_seeds(seeds)
    if tune and 0 in numbers:
        raise UsageError(
            "--tune spends seed 0 on the search: let others count, such as --seeds 1,2,3"
        )
    given = all_overrides(overrides, workers)
    folder = out or Path("runs") / f"{Path(recipe).stem}-compare"
    with loading():
        from fedlens.runs.compare import make_cells
        from fedlens.runs.job import Interrupted

        # Refuses what cannot work before any search.
        cells = make_cells(recipe, names, numbers, given, folder)
        if dry_run:
            grid, closing = plan_comparison(cells, fresh, trials if tune else 0)
    if dry_run:
        console().print(grid)
        console().print(closing)
        return
    try:
        chosen = search_parameters(recipe, names, given, folder, engine, trials) if tune else None
        todo = make_cells(recipe, names, numbers, given, folder, chosen)
        run_and_print(todo, folder, engine, fresh, target)
    except Interrupted as e:
        e.again = shlex.join(["fedlens", *[a for a in sys.argv[1:] if a != "--fresh"]])
        raise


def plan_comparison(todo: Sequence[Cell], fresh: bool, trials: int) -> tuple[Table, str]:
    """What a comparison would take: a line for every algorithm, estimated from a little of its
    first run; and the sum.
    """
    from fedlens.runs.compare import is_finished
    from fedlens.runs.estimate import estimate
    from fedlens.runs.setup import make_setup, try_one_example
    from fedlens.runs.text import duration, size

    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    grid.add_column("algorithm", style=ACCENT)
    for head in ("runs", "finished before", "time of one", "traffic of one"):
        grid.add_column(head, justify="right")
    seconds = 0.0
    for name in dict.fromkeys(cell.algorithm for cell in todo):
        mine = [cell for cell in todo if cell.algorithm == name]
        done = 0 if fresh else sum(is_finished(cell) for cell in mine)
        setup = make_setup(mine[0].config)
        try_one_example(setup)
        expected = estimate(setup)
        seconds += expected.seconds * (len(mine) - done + trials)
        traffic = size(expected.bytes_down + expected.bytes_up)
        each = f"about {duration(expected.seconds)}"
        grid.add_row(name, str(len(mine)), str(done or "-"), each, traffic)
    search = f", {trials} runs of search for each included" if trials else ""
    return grid, f"[dim]about {duration(seconds)} in all{search}. Nothing was run or written.[/]"


def parse_seeds(text: str) -> list[int]:
    try:
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise UsageError(f"--seeds takes whole numbers such as 0,1,2, not {text!r}") from None


def unique_algorithms(names: Sequence[str]) -> list[str]:
    """Each algorithm once: names mean the same in any case. Not those of classes (module:Class),
    which would still share a folder.
    """
    first: dict[str, str] = {}
    for name in names:
        if first.setdefault(name.lower(), name) != name and ":" in name:
            raise UsageError(
                f"{first[name.lower()]} and {name} would share one folder: give one of the classes"
                " another name"
            )
    return list(first.values())


def search_parameters(
    recipe: str, names: Sequence[str], given: Sequence[str], folder: Path, engine: str, trials: int
) -> dict[str, dict[str, float]]:
    """What every algorithm's own search found, as overrides."""
    from fedlens.runs import compare as comparison
    from fedlens.runs import tune as tuning
    from fedlens.runs.progress import CellBar

    width = max(map(len, names))
    shown: set[str] = set()
    found = {}
    for name in names:

        def finish(cell: Cell, name: str = name) -> None:
            title = f"{name:<{width}}  {cell.folder.parts[-3]}"
            comparison.run_cells([cell], engine=engine, listener=lambda _: CellBar(title, shown))

        found[name] = tuning.tune(recipe, name, given, folder, finish, trials)
    return found


def run_and_print(
    todo: Sequence[Cell], folder: Path, engine: str, fresh: bool, target: float | None
) -> None:
    """Run what is not finished, then print the table."""
    from fedlens.runs import compare as comparison
    from fedlens.runs.progress import CellBar

    width = max(len(cell.algorithm) for cell in todo)
    shown: set[str] = set()
    skipped = 0 if fresh else sum(comparison.is_finished(cell) for cell in todo)
    console().print(
        f"[bold {ACCENT}]{escape(todo[0].config.name)}[/]: {len(todo)} runs"
        + (f", {skipped} of them finished before" if skipped else "")
    )
    table = comparison.run_comparison(
        todo,
        folder,
        engine=engine,
        fresh=fresh,
        target=target,
        listener=lambda cell: CellBar(f"{cell.algorithm:<{width}}  seed {cell.seed}", shown),
    )
    print_comparison(table, folder)


def print_comparison(table: Mapping[str, Any], folder: Path) -> None:
    from fedlens.runs import table as tables
    from fedlens.runs.significance import in_sentences

    out = console()
    columns = tables.table_columns(table)
    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    grid.add_column("algorithm", style=ACCENT)
    for _, head, _ in columns:
        grid.add_column(head, justify="right")
    for name, row in table["algorithms"].items():
        values = []
        for key, _, larger in columns:
            value = tables.cell_text(row, key)
            is_best = name in tables.best_algorithms(table, key, larger)
            values.append(f"[bold]{value}[/]" if is_best else value)
        grid.add_row(name, *values)
    out.print(grid)
    seeds = len(table["seeds"])
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: no spread"
    out.print(f"[dim]{spread}[/]")
    for line in (*in_sentences(table.get("test")), *tables.tuned_values(table)):
        out.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    files = ("report.html", "table.md", "table.json", "compare.png")
    out.print(", ".join(str(folder / name) for name in files), soft_wrap=True)

"""`fedlens run`: a recipe becomes a run folder; with --dry-run, only what it would take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedlens.cli.options import (
    EngineOption,
    ModuleOption,
    OverridesArgument,
    RecipeArgument,
    UsageError,
    WorkersOption,
    complete_algorithm,
    examples,
    loading,
    read_config,
)
from fedlens.core import heap
from fedlens.core.extras import require
from fedlens.runs.text import console, duration, short, size

if TYPE_CHECKING:
    from fedlens.config.parts import Part
    from fedlens.config.recipe import Config
    from fedlens.runs.estimate import Estimate
    from fedlens.runs.setup import Setup

app = typer.Typer()


@app.command(
    "run",
    epilog=examples(
        "fedlens run demo",
        "fedlens run classification --algorithm fedprox FedProx.mu=0.1 rounds=30",
        "fedlens run my.toml --out runs/first --workers 4",
        "fedlens run runs/first --resume",
        "fedlens run cifar10 --dry-run",
        "fedlens run deblur --secure",
        "fedlens run demo --record-messages",
    ),
)
def run_recipe(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            "-a",
            help=(
                "Instead of the recipe's own: a name from `list algorithms` or `list layers`, or"
                " parts joined by +."
            ),
            show_default=False,
            autocompletion=complete_algorithm,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Run folder. [dim]default: runs/RECIPE[/]", show_default=False
        ),
    ] = None,
    engine: EngineOption = "simulator",
    workers: WorkersOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over in a folder that already holds a run.")
    ] = False,
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger", help="Write down what leaves each client; `fedlens ledger RUN` shows it."
        ),
    ] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Add replies up under masks: the server sees sums only (SecureSum)."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Say what would be done, and what it would take."),
    ] = False,
    record_messages: Annotated[
        bool,
        typer.Option(
            "--record-messages",
            help="Keep every message as the server saw it, in RUN/messages, for `fedlens audit`.",
        ),
    ] = False,
    superlink: Annotated[
        str,
        typer.Option(
            "--superlink",
            help="With --engine flower: the folder of `fedlens serve`.",
        ),
    ] = "superlink",
    unbound: Annotated[
        bool,
        typer.Option(
            "--unbound",
            help=(
                "With --engine flower: --superlink is host:port or a connection of your Flower"
                " config, and sites are believed which client they are."
            ),
        ),
    ] = False,
    ca: Annotated[
        Path, typer.Option("--ca", help="With --unbound: the federation's CA certificate.")
    ] = Path("keys/ca.crt"),
    wait: Annotated[
        float, typer.Option("--wait", help="With --engine flower: seconds to wait for sites.")
    ] = 600.0,
    least: Annotated[
        int, typer.Option("--least", help="With --engine flower: sites a round needs.")
    ] = 1,
    forgive: Annotated[
        bool,
        typer.Option(
            "--forgive", help="With --engine flower: let sites that lost their memory begin anew."
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="With --engine ray: a running cluster. [dim]default: one is started here[/]",
            show_default=False,
        ),
    ] = None,
    module: ModuleOption = None,
) -> None:
    """Run a recipe and leave a run folder with curves, model and report.

    RECIPE is the name of a shipped recipe, a TOML file of yours, or a run folder. KEY=VALUE sets
    one of its keys: rounds=6, data.alpha=0.1, FedProx.mu=0.01; where a key occurs once, its own
    name will do.
    """
    if resume and fresh:
        raise UsageError("--resume goes on, --fresh starts over: choose one")
    with loading() as spinner:
        from fedlens.runs import progress
        from fedlens.runs.job import run_job

        overrides = [*(overrides or []), "federation.ledger=true"] if ledger else overrides
        overrides = [*(overrides or []), "federation.secure=true"] if secure else overrides
        config = read_config(recipe, overrides, algorithm, workers)
        if dry_run:
            print_dry_run(config, engine, spinner)
            return
        folder = out or folder_of(recipe, config, resume, fresh)
        if engine == "flower":
            require("flwr")
            if record_messages:
                raise UsageError("--record-messages is for simulations: not with flower")
            from fedlens.sites.submit import submit

            spinner.stop()
            code = submit(
                config,
                folder,
                superlink,
                ca=ca,
                unbound=unbound,
                resume=resume,
                fresh=fresh,
                wait=wait,
                least=least,
                forgive=forgive,
                log=lambda text: typer.echo(text, err=True),
            )
            raise typer.Exit(code)
        if ray_address:
            os.environ["RAY_ADDRESS"] = ray_address
        if config.settings.workers == 0:  # this process is the worker
            heap.keep()
        listener = progress.live(spinner)
        run_job(
            config,
            folder,
            engine=engine,
            resume=resume,
            fresh=fresh,
            listener=listener,
            record=record_messages,
        )


def folder_of(recipe: str, config: Config, resume: bool, fresh: bool) -> Path:
    from fedlens.runs.folder import default_folder

    if Path(recipe).is_dir():  # a run folder stands for itself
        return Path(recipe)
    return default_folder(config.name, resume, fresh)


# -- a dry run -------------------------------------------------------------------------------------


def print_dry_run(config: Config, engine: str, spinner: Any) -> None:
    """What would be done, with estimates from a little of it."""
    from fedlens.config.convert import suggestion
    from fedlens.runs.engines import ENGINES
    from fedlens.runs.estimate import estimate
    from fedlens.runs.setup import make_setup, try_one_example

    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}{suggestion(engine, ENGINES)}")
    setup = make_setup(config)
    try_one_example(setup)
    rows = plan_rows(setup, engine, estimate(setup))
    spinner.stop()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for key, value in rows.items():
        grid.add_row(key, escape(value))
    out = console()
    out.print(grid)
    for line in setup.federation.facts.remarks():
        out.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
    out.print("[dim]Nothing was run or written.[/]")


def plan_rows(setup: Setup, engine: str, expected: Estimate) -> dict[str, str]:
    config, settings = setup.config, setup.settings
    workers = f"{expected.workers} worker{'s' if expected.workers > 1 else ''}"
    per_client = short(expected.client_seconds)
    return {
        "recipe": f"{config.name}  {config.about}".strip(),
        "task": constructor_call(config.task),
        "data": constructor_call(config.data),
        "clients": f"{len(setup.federation)}{describe_sizes(setup)}",
        "algorithm": "\n".join(constructor_call(part) for part in config.algorithm),
        "rounds": f"{settings.rounds}, {settings.cohort or 'all'} clients in each",
        "engine": f"{engine}, {workers}, {setup.device}",
        "model": f"{expected.parameters:,} numbers" if expected.parameters else "none",
        "time": f"about {duration(expected.seconds)} ({per_client} a client){expected.left_out}",
        "memory": f"about {size(expected.memory)}",
        "traffic": f"{size(expected.bytes_down)} down, {size(expected.bytes_up)} up",
    }


def describe_sizes(setup: Setup) -> str:
    sizes = [len(h) for h in setup.federation.holdings if hasattr(h, "__len__")]
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    each = f"{low} to {high}" if low < high else str(high)
    return f", {each} examples each, {sum(sizes)} in all"


def constructor_call(part: Part) -> str:
    """As Python would write it."""
    from fedlens.config.parts import Part

    arguments = []
    for key, value in part.given.items():
        text = value.name if isinstance(value, Part) else repr(value)
        arguments.append(f"{key}={text}")
    return f"{part.name}({', '.join(arguments)})"

"""The command line. Nothing heavy is imported before a command needs it: `fedlens --help` answers
at once.

What a user can get wrong costs one sentence on stderr and exit code 2; Ctrl-C saves and exits with
130. Set FEDLENS_DEBUG=1 to see where an error came from.
"""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import click
import typer
from typer.core import TyperArgument
from typer.utils import get_params_from_function

if TYPE_CHECKING:
    from rich.status import Status

    from fedlens.config.recipe import Config

USER, STOPPED = 2, 130

app = typer.Typer(
    name="fedlens",
    help=(
        "Federated vision: train a model or restore a scene together, and no image leaves its"
        " owner."
    ),
    epilog=(
        "[bold]Start here[/]\n\n  fedlens run demo                                  a federated job"
        " in half a minute, no data needed\n\n  fedlens list recipes                             "
        " what else there is to run\n\n  fedlens compare demo --algorithms fedavg,fedprox  two"
        " methods side by side"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Recipe = Annotated[
    str, typer.Argument(help="A shipped recipe, a TOML file, or a run folder.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides: rounds=6, FedProx.mu=0.01, data.alpha=0.1",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Run folder. [dim]default: runs/RECIPE[/]", show_default=False
    ),
]
EngineName = Annotated[str, typer.Option("--engine", help="simulator, ray or flower.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", "-w", help="Processes. [dim]default: cores[/]", show_default=False),
]


def examples(*lines: str) -> str:
    """An epilog of commands, one a line."""
    return "[bold]Examples[/]\n\n" + "\n\n".join(f"  {line}" for line in lines)


@app.command(
    epilog=examples(
        "fedlens run demo",
        "fedlens run classification --algorithm fedprox FedProx.mu=0.1 rounds=30",
        "fedlens run my.toml --out runs/first --workers 4",
        "fedlens run runs/first --resume",
        "fedlens run cifar10 --dry-run",
    )
)
def run(
    recipe: Recipe,
    overrides: Overrides = None,
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
        ),
    ] = None,
    out: Out = None,
    engine: EngineName = "simulator",
    workers: Workers = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over in a folder that already holds a run.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Say what would be done, and what it would take."),
    ] = False,
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            help="With --engine flower: host:port, or a connection of your Flower config.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Path, typer.Option("--ca", help="With --engine flower: the federation's CA certificate.")
    ] = Path("keys/ca.crt"),
    patience: Annotated[
        float, typer.Option("--patience", help="With --engine flower: seconds to wait for sites.")
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
) -> None:
    """Run a recipe and leave a run folder with curves, model and report.

    RECIPE is the name of a shipped recipe, a TOML file of yours, or a run folder. KEY=VALUE sets
    one of its keys: rounds=6, data.alpha=0.1, FedProx.mu=0.01; where a key occurs once, its own
    name will do.
    """
    if resume and fresh:
        raise click.UsageError("--resume goes on, --fresh starts over: choose one")
    with waiting() as spinner:
        from fedlens.cli import progress as live
        from fedlens.cli import show
        from fedlens.runs.job import run_job

        config = load(recipe, overrides, algorithm, workers)
        if dry_run:
            show.dry_run(config, engine, spinner)
            return
        folder = out or default_folder(recipe, config, resume, fresh)
        if engine == "flower":
            from fedlens.sites import study as sites

            if not superlink:
                raise click.UsageError(
                    "--engine flower needs --superlink host:port (`fedlens serve` starts one)"
                )
            spinner.stop()
            raise typer.Exit(
                sites.submit(
                    config,
                    folder,
                    superlink,
                    ca=ca,
                    resume=resume,
                    fresh=fresh,
                    patience=patience,
                    least=least,
                    forgive=forgive,
                    say=lambda text: click.echo(text, err=True),
                )
            )
        if ray_address:
            os.environ["RAY_ADDRESS"] = ray_address
        run_job(
            config, folder, engine=engine, resume=resume, fresh=fresh, listener=live.live(spinner)
        )


@app.command(
    epilog=examples(
        "fedlens compare demo --algorithms fedavg,fedprox,fednova --seeds 0,1,2",
        "fedlens compare cifar10 --algorithms fedavg,fedprox,fednova --tune --seeds 1,2,3"
        " --target 0.5",
        "fedlens compare classification --algorithms fedavg,FedAvg+FedProx+Median data.alpha=0.1"
        " mu=0.1 --out runs/skew",
    )
)
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
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
    engine: EngineName = "simulator",
    workers: Workers = None,
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
) -> None:
    """Several algorithms, several seeds: one table (mean and spread) and one plot.

    Run it again to go on where it stopped, or with more algorithms or seeds: cells that are
    finished are kept.
    """
    names = distinct([n.strip() for n in algorithms.split(",") if n.strip()])
    if not names:
        raise click.UsageError("which ones? add --algorithms fedavg,fedprox")
    try:
        numbers = sorted({int(s) for s in seeds.split(",")})
    except ValueError:
        raise click.UsageError(
            f"--seeds takes whole numbers such as 0,1,2, not {seeds!r}"
        ) from None
    given = [
        *(overrides or []),
        *([f"federation.workers={workers}"] if workers is not None else []),
    ]
    folder = out or Path("runs") / f"{Path(recipe).stem}-compare"
    if tune and 0 in numbers:
        raise click.UsageError(
            "--tune spends seed 0 on the search: let others count, such as --seeds 1,2,3"
        )
    with waiting():
        from fedlens.cli import show
        from fedlens.runs.compare import make_cells
        from fedlens.runs.job import Interrupted

        make_cells(
            recipe, names, numbers, given, folder
        )  # refuses what cannot work before any search
    try:
        chosen = show.tune(recipe, names, given, folder, engine, trials) if tune else None
        show.compare(
            make_cells(recipe, names, numbers, given, folder, chosen), folder, engine, fresh, target
        )
    except Interrupted as e:
        e.again = shlex.join(["fedlens", *[a for a in sys.argv[1:] if a != "--fresh"]])
        raise


def distinct(names: Sequence[str]) -> list[str]:
    """Each algorithm once: names mean the same in any case. Not those of classes (module:Class),
    which would still share a folder.
    """
    first: dict[str, str] = {}
    for name in names:
        if first.setdefault(name.lower(), name) != name and ":" in name:
            raise click.UsageError(
                f"{first[name.lower()]} and {name} would share one folder: give one of the classes"
                " another name"
            )
    return list(first.values())


@app.command(
    "list", epilog=examples("fedlens list", "fedlens list layers", "fedlens list layers LossAware")
)
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help=(
                "recipes, algorithms, layers, tasks, models, datasets, metrics, generators or"
                " engines."
            ),
            show_default=False,
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(
            help="One of them: all that is said about it, and its keys.", show_default=False
        ),
    ] = "",
) -> None:
    """What there is: recipes, algorithms, layers, tasks, models, datasets, metrics."""
    from fedlens.cli.catalogue import catalogue

    catalogue(kind, name)


@app.command(
    epilog=examples(
        "fedlens partition classification",
        "fedlens partition classification data.alpha=0.1 clients=20 --out split.png",
    )
)
def partition(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Picture. [dim]default: RECIPE-partition.png[/]", show_default=False
        ),
    ] = None,
) -> None:
    """Who holds what, as a table and a picture."""
    from fedlens.cli import show

    config = load(recipe, overrides)
    show.partition(config, out or Path(f"{config.name}-partition.png"))


@app.command(
    epilog=examples("fedlens report runs/demo", "fedlens report runs/demo --figures pdf,png")
)
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="A run folder, or a folder of runs to compare.", show_default=False),
    ],
    figures: Annotated[
        str,
        typer.Option(
            help="Also figures and tables for papers, of these kinds: pdf, png, svg, eps.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Write the report of a run (again), or of several side by side."""
    from fedlens.cli import show

    if not folder.is_dir():
        raise click.UsageError(f"there is no run folder {folder}")
    show.report(folder, [kind for kind in figures.split(",") if kind.strip()])


@app.command(
    epilog=examples(
        "fedlens apply runs/vsr small.mp4 large.mp4", "fedlens apply runs/demo photos/ labels.csv"
    )
)
def apply(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A file or folder of yours.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Where the result goes.", show_default=False)
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the task.", show_default=False),
    ] = None,
) -> None:
    """Use what was trained: upscale a video, find keypoints, classify, retrieve."""
    from fedlens.cli import show

    if not (folder / "config.toml").is_file():
        raise click.UsageError(f"{folder} is not a run folder: it has no config.toml")
    if not source.exists():
        raise click.UsageError(f"there is no {source}")
    if target.resolve() == source.resolve():
        raise click.UsageError(f"the result would take the place of {source}: give it another name")
    show.apply(folder, source, target, options or [])


class Stopped(Exception):
    """Ctrl-C before there was anything to save. Click would answer it with an exit code and no
    word.
    """


@contextmanager
def waiting() -> Iterator[Status]:
    """A sign of life on a terminal while torch and the data are loaded; nothing in a pipe."""
    from rich.console import Console
    from rich.status import Status

    try:
        with Status(
            "[dim]loading[/]", console=Console(stderr=True), spinner_style="cyan"
        ) as status:
            yield status
    except KeyboardInterrupt:
        raise Stopped from None


# -- how a command line becomes a config -----------------------------------------------------------


def load(
    recipe: str,
    overrides: Sequence[str] | None,
    algorithm: str | None = None,
    workers: int | None = None,
) -> Config:
    from fedlens.config import recipe as config

    given = list(overrides or [])
    if workers is not None:
        given.append(f"federation.workers={workers}")
    return config.read(recipe, given, algorithm)


def default_folder(recipe: str, config: Config, resume: bool, fresh: bool) -> Path:
    from fedlens.runs.folder import free_folder, newest_folder

    if Path(recipe).is_dir():  # a run folder stands for itself
        return Path(recipe)
    if resume:
        return newest_folder(config.name)
    return Path("runs") / config.name if fresh else free_folder(config.name)


# -- how it ends -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> NoReturn:
    ours, others = "fedlens: {}\n", warnings.formatwarning
    warnings.formatwarning = lambda text, kind, *a, **k: (
        ours.format(text) if kind is UserWarning else others(text, kind, *a, **k)
    )
    sys.exit(invoke(argv))


def invoke(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    try:
        code = whole()(
            args=list(argv) if argv is not None else None,
            standalone_mode=False,
            prog_name="fedlens",
        )
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.format_message())
        return 0
    except click.ClickException as e:
        return complain(e.format_message(), e)
    except (click.Abort, KeyboardInterrupt, Stopped):
        return complain("stopped before the first round; there was nothing to save.", code=STOPPED)
    except BrokenPipeError:  # `fedlens list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        return complain(about_file(e), e)
    except ValueError as e:
        return complain(str(e), e)
    except Exception as e:
        from fedlens.runs.job import Interrupted

        if not isinstance(e, Interrupted):
            raise
        return complain(f"{e}; what was done is saved. Go on with: {e.again}", code=STOPPED)


def complain(sentence: str, error: BaseException | None = None, code: int = USER) -> int:
    """One sentence on stderr."""
    if error is not None and os.environ.get("FEDLENS_DEBUG"):
        raise error
    text = " ".join(sentence.split())
    click.echo(
        f"fedlens: {text}" + ("" if code == STOPPED or text.endswith((".", "?", "!")) else "."),
        err=True,
    )
    return code


def about_file(e: OSError) -> str:
    name = f" ({e.filename})" if e.filename else ""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{name}; what was written before is whole: make room and add --resume"
        )
    return f"{e.strerror or e}{name}" if e.errno else str(e)


def whole() -> click.Group:
    """All commands. Their arguments get the help back that click takes away: from 8.5 on it has one
    of its own for arguments, and writes None over what typer has put there before."""
    register_others()
    group = typer.main.get_group(app)
    for command in group.commands.values():
        told = (
            get_params_from_function(inspect.unwrap(command.callback)) if command.callback else {}
        )
        for argument in (p for p in command.params if isinstance(p, TyperArgument)):
            argument.help = told[str(argument.name)].default.help
    return group


def register_others() -> None:
    """Commands that live in files of their own: real sites, the board, analyses of runs."""
    for module in ("fedlens.cli.sites", "fedlens.cli.board", "fedlens.cli.analyse"):
        if importlib.util.find_spec(module) and module not in _registered:
            _registered.add(module)
            importlib.import_module(module).register(app)


_registered: set[str] = set()


if __name__ == "__main__":
    main()

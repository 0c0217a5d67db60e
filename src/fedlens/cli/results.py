"""`fedlens report`, `apply` and `analyse`: what to do with a run that has ended."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from fedlens.cli.options import ModuleOption, OverridesArgument, UsageError, examples
from fedlens.core import heap
from fedlens.runs.text import ACCENT, console, rounded

if TYPE_CHECKING:
    from fedlens.core.task import Task

ClientOption = Annotated[
    int | None,
    typer.Option(
        "--client",
        help="With the model of this client, where clients have their own.",
        show_default=False,
    ),
]
ANALYSES = ("landscape", "surface", "perturbation", "target")

app = typer.Typer()


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
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}")
    from fedlens.report.figures import write_figures
    from fedlens.report.html import write_report
    from fedlens.report.reading import printable

    console().print(f"Report: {printable(str(write_report(folder)))}", soft_wrap=True)
    if kinds := [kind for kind in figures.split(",") if kind.strip()]:
        written = write_figures(folder, kinds)
        console().print(
            f"Figures and tables: {written[0].parent} ({len(written)} files)", soft_wrap=True
        )


@app.command(
    epilog=examples(
        "fedlens apply runs/vsr small.mp4 large.mp4",
        "fedlens apply rlfn_ntire_x4.pth small.mp4 large.mp4 --task SuperResolution --preview 3s",
        "fedlens apply runs/demo photos/ labels.csv",
        "fedlens apply runs/fedper photos/ labels.csv --client 3",
    )
)
def apply(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run folder, or with --task a file of weights.",
            show_default=False,
        ),
    ],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A file or folder of yours.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Where the result goes.", show_default=False)
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Options of the task; with --task also its keys.",
            show_default=False,
        ),
    ] = None,
    client: ClientOption = None,
    preview: Annotated[
        str | None,
        typer.Option(
            "--preview",
            help="Of a film only so much, from its middle, such as 3s, and a picture of the gain.",
            show_default=False,
        ),
    ] = None,
    task_name: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="What a file of weights is for: of `fedlens list tasks`, module:Class, a recipe.",
            show_default=False,
        ),
    ] = None,
    module: ModuleOption = None,
) -> None:
    """Use what was trained: upscale a video, find keypoints, classify, retrieve. Nothing has to be
    trained here: a checkpoint from elsewhere will do, with --task and the keys of its network.
    """
    if folder.is_file():
        task, options = task_of_weights(folder, task_name, options or [])
    elif task_name is not None:
        raise UsageError(
            f"--task is for a file of weights, and {folder} is "
            + ("a folder" if folder.exists() else "not there")
        )
    else:
        require_run_folder(folder)
        from fedlens.config import recipe as recipes

        task = recipes.read(folder).build_task()
    if not source.exists():
        raise UsageError(f"there is no {source}")
    if target.resolve() == source.resolve():
        raise UsageError(f"the result would take the place of {source}: give it another name")
    heap.keep()
    chosen = task_options(task, options or []) | ({"preview": preview} if preview else {})
    with model_of(folder, client) as whose:
        said = task.apply(whose, source, target, **chosen)
    console().print(said, markup=False, soft_wrap=True)


def task_of_weights(file: Path, name: str | None, options: Sequence[str]) -> tuple[Task, list[str]]:
    """The task for a file of weights, built with those of the options that are its keys (`task.`
    in front says so), and what the weights show; the other options are `apply`'s.
    """
    from fedlens.config.convert import ConfigError
    from fedlens.config.files import find_recipe, load_tables
    from fedlens.config.overrides import parse_overrides
    from fedlens.config.parts import make_part, parameters
    from fedlens.core.weights import read_weights

    if name is None:
        raise UsageError(
            f"{file} is a file of weights: say what it is for, with --task (`fedlens list tasks`)"
        )
    try:
        part = make_part("task", {"name": name}, "task")
    except ConfigError as e:
        try:
            recipe = find_recipe(name)
        except ConfigError:
            raise e from None
        part = make_part("task", load_tables(recipe).get("task", {}), "task")
    known, rest = parameters(part.cls), []
    for text in options:
        ((key, value),) = parse_overrides([text])
        if key.removeprefix("task.") in known:
            part = part.with_value(key.removeprefix("task."), value)
        else:
            rest.append(text)
    weights = read_weights(file)
    try:
        shown = part.cls.arguments_from_weights(weights, part.given)  # type: ignore[attr-defined]
    except ValueError as e:
        raise UsageError(f"{file}: {e}") from None
    for key, value in shown.items():
        part = part if key in part.given else part.with_value(key, value)
    task: Task = part.checked().build()
    return task, rest


@contextmanager
def model_of(folder: Path, client: int | None) -> Iterator[Path]:
    """The run folder, or the one of a client's own model. Where only a client's will do, an error
    says so.
    """
    from fedlens.core.weights import Misfit
    from fedlens.runs.personal import own_models, run_of_client

    if client is not None:
        with run_of_client(folder, client) as whose:
            yield whose
        return
    try:
        yield folder
    except Misfit as e:
        if who := own_models(folder):
            raise ValueError(
                f"in {folder} a part of the model stays with the clients: say whose to use, with"
                f" --client and one of {who}"
            ) from e
        raise


@app.command(
    "evaluate",
    epilog=examples(
        "fedlens evaluate runs/ditto",
        "fedlens evaluate runs/demo data.root=other/photos",
    ),
)
def print_evaluation(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    overrides: OverridesArgument = None,
    module: ModuleOption = None,
) -> None:
    """Evaluate what a run learned once more: the common model on the test set, and every client's
    own on what that client held out. KEY=VALUE puts other data in the place of the run's.
    """
    require_run_folder(folder)
    from fedlens.engines.worker import threads
    from fedlens.runs.personal import evaluate_run

    heap.keep()
    with threads(1):
        config, common, clients = evaluate_run(folder, overrides or [])
    if not common and not clients:
        raise UsageError(
            f"{config.data.name} has neither test data nor anything that clients held out"
        )
    names = list(dict.fromkeys([*common, *(k for row in clients.values() for k in row)]))
    names = [n for n in names if "_class_" not in n]
    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    grid.add_column("whose model, on what", style=ACCENT)
    for name in names:
        grid.add_column(name, justify="right")
    rows: dict[str, Mapping[str, Any]] = {"common, test set": common} if common else {}
    rows |= {f"client {i}, held out": row for i, row in clients.items()}
    for label, row in rows.items():
        values = (row.get(n) for n in names)
        grid.add_row(
            label,
            *(str(v) if isinstance(v, int) else "–" if v is None else rounded(v) for v in values),
        )
    console().print(grid)


def require_run_folder(folder: Path) -> None:
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} is not a run folder: it has no config.toml")


def task_options(task: Task, options: Sequence[str]) -> dict[str, Any]:
    """The KEY=VALUE arguments of `apply`, checked against what the task's `apply` takes."""
    from fedlens.config.convert import suggestion
    from fedlens.config.overrides import parse_overrides

    known = dict(inspect.signature(task.apply).parameters)
    for own in ("folder", "source", "target"):
        known.pop(own, None)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    chosen = {}
    for key, value in parse_overrides(options):
        if key not in known and not open_ended:
            raise UsageError(f"{type(task).__name__} has no option {key!r}{suggestion(key, known)}")
        chosen[key] = next(value.candidates())
    return chosen


@app.command(
    epilog=examples(
        "fedlens analyse landscape runs/central runs/fedvssl",
        "fedlens analyse surface runs/fedvssl --points 15",
        "fedlens analyse perturbation runs/central runs/fedvssl --draws 3",
        "fedlens analyse target runs/fedavg runs/fedvssl --value 0.2",
    )
)
def analyse(
    what: Annotated[
        str,
        typer.Argument(help=f"{', '.join(ANALYSES[:-1])} or {ANALYSES[-1]}.", show_default=False),
    ],
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Finished run folders.", show_default=False),
    ],
    points: Annotated[int, typer.Option(help="Points along a direction.", min=2)] = 21,
    span: Annotated[float, typer.Option(help="How far to go, in lengths of the filters.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Perturbations of each strength.", min=1)] = 1,
    value: Annotated[float | None, typer.Option(help="The target.", show_default=False)] = None,
    metric: Annotated[
        str | None, typer.Option(help="Instead of the first one.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of directions and perturbations.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A folder for plot and numbers; the runs stay as they are.",
            show_default=False,
        ),
    ] = None,
    module: ModuleOption = None,
) -> None:
    """Loss landscape (1-D and 2-D), a metric under perturbed weights, or rounds, bytes and compute
    to a target.

    The plot goes into the report of every run named, the numbers into RUN/analysis/WHAT.json; with
    --out both go into that folder, WHAT.json and WHAT-00.png.
    """
    if what not in ANALYSES:
        raise UsageError(f"there is no analysis {what!r}: {', '.join(ANALYSES)} are known")
    for run in runs:
        require_run_folder(run)
    from fedlens.core.files import write_atomically
    from fedlens.core.picture import add_picture
    from fedlens.engines.worker import threads
    from fedlens.report.html import write_report
    from fedlens.report.reading import distinct_names
    from fedlens.runs import analysis
    from fedlens.runs.landscape import FinishedRun

    names = distinct_names([run.resolve() for run in runs])
    with threads(1):
        if what == "target":
            if value is None:
                raise UsageError("which target? add --value 0.2")
            picture, numbers = analysis.target_picture(runs, names, value, metric)
        else:
            finished = [FinishedRun.read(run) for run in runs]
            if what == "perturbation":
                picture, numbers = analysis.perturbation_picture(
                    finished, names, draws, metric, seed
                )
            elif what == "landscape":
                picture, numbers = analysis.landscape_picture(finished, names, points, span, seed)
            else:
                picture, numbers = analysis.surface_picture(finished, names, points, span, seed)
    for run in () if out else runs:
        (run / "analysis").mkdir(exist_ok=True)
        write_atomically(run / "analysis" / f"{what}.json", json.dumps(numbers, indent=1))
        add_picture(picture, run / "pictures", what)
        write_report(run)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{what}.json", json.dumps(numbers, indent=1))
        add_picture(picture, out, what)
    for name, fact in picture.facts.items():
        typer.echo(f"{name}: {fact}")
    where = f"in {out}" if out else f"in the report of {', '.join(str(r) for r in runs)}"
    typer.echo(f"{picture.caption}: {where}")

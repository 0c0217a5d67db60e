"""`fedlens analyse`: plots about finished runs, added to their reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
import typer

KINDS = ("landscape", "surface", "perturbation", "target")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    from fedlens.cli.main import examples

    app.command(
        epilog=examples(
            "fedlens analyse landscape runs/central runs/fedvssl",
            "fedlens analyse surface runs/fedvssl --points 15",
            "fedlens analyse perturbation runs/central runs/fedvssl --draws 3",
            "fedlens analyse target runs/fedavg runs/fedvssl --value 0.2",
        )
    )(analyse)


def analyse(
    what: Annotated[
        str, typer.Argument(help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.", show_default=False)
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
) -> None:
    """Loss landscape (1-D and 2-D), a metric under perturbed weights, or rounds, bytes and compute
    to a target.

    The plot goes into the report of every run named, the numbers into RUN/analysis/WHAT.json.
    """
    if what not in KINDS:
        raise click.UsageError(f"there is no analysis {what!r}: {', '.join(KINDS)} are known")
    for run in runs:
        if not (run / "config.toml").is_file():
            raise click.UsageError(f"{run} is not a run folder: it has no config.toml")
    from fedlens.core.files import write_atomically
    from fedlens.core.picture import add_picture
    from fedlens.engines.worker import threads
    from fedlens.report import analysis
    from fedlens.report.html import write_report
    from fedlens.report.landscape import FinishedRun
    from fedlens.runs.reading import distinct_names

    names = distinct_names([r.resolve() for r in runs])
    with threads(1):
        if what == "target":
            if value is None:
                raise click.UsageError("which target? add --value 0.2")
            picture, numbers = analysis.target_picture(runs, names, value, metric)
        else:
            finished = [FinishedRun.read(r) for r in runs]
            if what == "perturbation":
                picture, numbers = analysis.perturbation_picture(
                    finished, names, draws, metric, seed
                )
            else:
                draw = {
                    "landscape": analysis.landscape_picture,
                    "surface": analysis.surface_picture,
                }[what]
                picture, numbers = draw(finished, names, points, span, seed)
    for run in runs:
        (run / "analysis").mkdir(exist_ok=True)
        write_atomically(run / "analysis" / f"{what}.json", json.dumps(numbers, indent=1))
        add_picture(picture, run / "pictures", what)
        write_report(run)
    for name, fact in picture.facts.items():
        click.echo(f"{name}: {fact}")
    click.echo(f"{picture.caption}: in the report of {', '.join(str(r) for r in runs)}")

"""`fedlens audit`: what a curious server could have seen in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import ModuleOption, UsageError, examples, loading
from fedlens.cli.results import require_run_folder
from fedlens.runs.text import console

app = typer.Typer()


@app.command(
    "audit",
    epilog=examples(
        "fedlens audit runs/deblur",
        "fedlens audit runs/demo --client 3 --attack gradient --budget 5",
        "fedlens run demo --record-messages && fedlens audit runs/demo",
    ),
)
def audit_run(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    client: Annotated[
        list[int] | None,
        typer.Option("--client", help="Whose messages; may be repeated.", show_default=False),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="Only these, with commas between; `fedlens list attacks` names them.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option("--budget", help="Minutes for the search of one attack, all its rows."),
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds to replay where messages were not recorded.")
    ] = 12,
    protections: Annotated[
        bool,
        typer.Option("--protections/--plain", help="Also attack the same run under protections."),
    ] = True,
    module: ModuleOption = None,
) -> None:
    """Attack the messages of a run as a curious server could, and show what comes out.

    Messages are those that `run --record-messages` kept, or a replay of the clients' steps with the
    real stack. The page is RUN/audit.html, its numbers are in RUN/audit.json.
    """
    require_run_folder(folder)
    if not budget > 0:
        raise UsageError("--budget is a number of minutes above 0")
    if rounds < 1:
        raise UsageError("--rounds must be at least 1")
    with loading() as spinner:
        from fedlens.audit.audit import FAILED, audit, write_audit

        spinner.stop()
        report = audit(
            folder,
            clients=client or (),
            attacks=[name for word in attack or () for name in word.split(",")],
            minutes=budget,
            rounds=rounds,
            protections=protections,
            log=lambda text: console().print(text, markup=False, soft_wrap=True),
        )
        page = write_audit(report, folder)
    for name, why in report.refused:
        console().print(f"[dim]{name}: does not apply, {why}[/]", soft_wrap=True)
    console().print(f"\n{report.headline}", markup=False, soft_wrap=True)
    console().print(f"[dim]{FAILED}[/]", soft_wrap=True)
    console().print(f"Audit: {page}", markup=False, soft_wrap=True)

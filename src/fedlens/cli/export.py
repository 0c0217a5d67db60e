"""`fedlens export`: a trained network as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import ModuleOption, UsageError, examples, one_of
from fedlens.cli.results import ClientOption, model_of, require_run_folder

app = typer.Typer()


@app.command(
    "export",
    epilog=examples(
        "fedlens export runs/demo --to onnx",
        "fedlens export runs/demo --to torch-export --out classifier.pt2",
        "fedlens export runs/fedper --to onnx --client 3 --out mine.onnx",
    ),
)
def export_network(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="onnx or torch-export.", autocompletion=one_of(("onnx", "torch-export"))
        ),
    ] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="[dim]default: RUN/export/model.onnx[/]", show_default=False
        ),
    ] = None,
    client: ClientOption = None,
    module: ModuleOption = None,
) -> None:
    """Write a run's network as ONNX or for torch.export, and check it: what was written is read
    back and gives the network's own outputs on the run's data, at two sizes.
    """
    require_run_folder(folder)
    from fedlens.engines.worker import threads
    from fedlens.runs.export import SUFFIX, export_run

    kind = next((known for known in SUFFIX if known == to), None)
    if kind is None:
        raise UsageError(f"--to is onnx or torch-export, not {to!r}")
    if client is not None and out is None:
        raise UsageError("a client's own network needs a place of its own: add --out FILE")
    target = out or folder / "export" / f"model{SUFFIX[kind]}"
    with threads(1), model_of(folder, client) as whose:
        done = export_run(whose, kind, target)
    shape = " x ".join("any" if n is None else str(n) for n in done.input)
    typer.echo(f"{done.network} in {done.file}: takes {shape}")
    for size, gap in done.differences.items():
        typer.echo(f"  differs by at most {gap:.1e} at {size}")
    if done.note:
        typer.echo(f"  height and width are fixed, because: {done.note}")

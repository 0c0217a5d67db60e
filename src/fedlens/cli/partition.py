"""`fedlens partition`: who holds what, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedlens.cli.options import (
    ModuleOption,
    OverridesArgument,
    RecipeArgument,
    UsageError,
    examples,
    read_config,
)
from fedlens.runs.text import ACCENT, bars, console

if TYPE_CHECKING:
    from fedlens.core.federation import Federation

app = typer.Typer()


@app.command(
    epilog=examples(
        "fedlens partition classification",
        "fedlens partition classification data.alpha=0.1 clients=20 --out split.png",
    )
)
def partition(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Picture. [dim]default: RECIPE-partition.png[/]", show_default=False
        ),
    ] = None,
    module: ModuleOption = None,
) -> None:
    """Who holds what, as a table and a picture."""
    config = read_config(recipe, overrides)
    picture = picture_file(out or Path(f"{config.name}-partition.png"))
    settings = config.settings
    federation = config.build_source().federation(settings.clients, settings.seed)
    sizes = [len(h) if hasattr(h, "__len__") else 1 for h in federation.holdings]
    print_partition(federation, sizes)
    draw_partition(federation, sizes, picture, config.name)
    console().print(f"Picture: {picture}", soft_wrap=True)


def picture_file(path: Path, option: str = "--out") -> Path:
    """The file that matplotlib will write: a folder gets one of its own, a name without a suffix
    becomes a PNG. A suffix it does not know is refused before any data is read."""
    from matplotlib.backend_bases import FigureCanvasBase

    if path.is_dir():
        return path / "partition.png"
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise UsageError(
            f"{option} {path}: a picture cannot be a {path.suffix} file;"
            f" {', '.join(known)} are known"
        )
    return path


def print_partition(federation: Federation, sizes: Sequence[int]) -> None:

    labels = federation.facts.labels or None
    look = federation.facts.look
    held_out = bool(federation.held_out)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("client", justify="right", style=ACCENT)
    table.add_column("examples", justify="right")
    if held_out:
        table.add_column("held out", justify="right")
    if labels is not None:
        table.add_column("classes", justify="right")
        table.add_column("largest", justify="right")
        table.add_column("labels", no_wrap=True)
    if look:
        table.add_column("look", no_wrap=True)
    for client, size in enumerate(sizes):
        row = [str(client), str(size)]
        if held_out:
            own = federation.held_out_of(client)
            row.append(str(len(own)) if own is not None else "0")
        if labels is not None:
            counts = list(labels[client])
            present = sum(count > 0 for count in counts)
            largest = 100 * max(counts) / max(1, sum(counts))
            row += [str(present), f"{largest:.0f} %", bars(counts)]
        if look:
            row.append(look[client])
        table.add_row(*row)
    out = console()
    out.print(table)
    test = federation.test
    tested = f", {len(test)} to test on" if test is not None and hasattr(test, "__len__") else ""
    each = f"{min(sizes)} to {max(sizes)} each"
    out.print(f"{len(sizes)} clients hold {sum(sizes)} examples ({each}){tested}")
    for line in federation.facts.remarks():
        out.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)


def draw_partition(federation: Federation, sizes: Sequence[int], picture: Path, title: str) -> None:
    """A bar a client, in the colours of its classes; below, where clients differ in how their
    images look, an image of each.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels, look = federation.facts.labels, federation.facts.look
    counts = [list(row) for row in labels] if labels else [[n] for n in sizes]
    width = max(5.0, min(14.0, 1.5 + 0.28 * len(counts)))
    figure = plt.figure(figsize=(width, 4.9 if look else 3.8), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.8, 1.1)) if look else (figure, None)
    axes = upper.subplots()
    draw_bars(axes, counts, legend_names(federation, len(counts[0])))
    axes.set(xlabel="client", ylabel="examples", title=f"{title}: who holds what")
    if labels and len(counts[0]) <= 20:
        upper.legend(loc="outside right upper", frameon=False, fontsize="small")
    if lower is not None and look:
        draw_looks(lower, federation, look)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def legend_names(federation: Federation, classes: int) -> list[str]:
    names = federation.facts.classes
    if len(names) == classes:
        return list(names)
    return [str(k) for k in range(classes)]


def draw_bars(axes: Any, counts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    from matplotlib import pyplot as plt

    classes = len(names)
    palette = "tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"
    colours = plt.get_cmap(palette, max(classes, 2))
    clients = range(len(counts))
    bottom = [0] * len(counts)
    for k, name in enumerate(names):
        heights = [row[k] for row in counts]
        axes.bar(clients, heights, bottom=bottom, color=colours(k), width=0.85, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def draw_looks(figure: Any, federation: Federation, look: Sequence[str], most: int = 8) -> None:
    """The first image of some clients, from the first client to the last."""
    import torch

    shown = sorted({round(k * (len(look) - 1) / (most - 1)) for k in range(most)})
    for axes, client in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        image = federation.holdings[client].batch(torch.tensor([0]))["x"][0].permute(1, 2, 0)
        axes.imshow(image.expand(-1, -1, 3) if image.shape[2] == 1 else image, vmin=0, vmax=1)
        axes.set_title(f"{client}: {look[client]}", fontsize="x-small")
        axes.axis("off")

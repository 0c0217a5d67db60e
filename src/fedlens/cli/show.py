"""What the command line prints before, beside and after jobs: what a run would take, who holds
what, comparisons, reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedlens.cli.progress import Cells
from fedlens.cli.text import ACCENT, bars, console, duration, short, size
from fedlens.config import recipe as recipes
from fedlens.config.convert import nearest
from fedlens.config.overrides import split
from fedlens.config.parts import Part
from fedlens.config.recipe import Config, ConfigError
from fedlens.report.page_data import remarks
from fedlens.runs.engines import ENGINES
from fedlens.runs.setup import make_setup, try_one_example

if TYPE_CHECKING:
    from fedlens.core.federation import Federation
    from fedlens.runs.compare import Cell


# -- before a job ----------------------------------------------------------------------------------


def dry_run(config: Config, engine: str, spinner: Any = None) -> None:
    """What would be done, with estimates from a little of it."""
    if engine not in ENGINES:
        raise ConfigError(f"there is no engine {engine!r}{nearest(engine, ENGINES)}")
    from fedlens.runs.estimate import estimate

    setup, out = make_setup(config), console()
    try_one_example(setup)
    s = setup.settings
    sizes = [len(h) for h in setup.federation.holdings if hasattr(h, "__len__")]
    found = estimate(setup)
    if spinner:
        spinner.stop()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    each = (
        f"{min(sizes)} to {max(sizes)}"
        if sizes and min(sizes) < max(sizes)
        else f"{max(sizes, default=0)}"
    )
    spread = f", {each} examples each, {sum(sizes)} in all" if sizes else ""
    rows = {
        "recipe": f"{config.name}  {config.about}".strip(),
        "task": call(config.task),
        "data": call(config.data),
        "clients": f"{len(setup.federation)}{spread}",
        "algorithm": "\n".join(call(p) for p in config.algorithm),
        "rounds": f"{s.rounds}, {s.cohort or 'all'} clients in each",
        "engine": (
            f"{engine}, {found.workers} worker{'s' if found.workers > 1 else ''}, {setup.device}"
        ),
        "model": f"{found.parameters:,} numbers" if found.parameters else "none",
        "time": (
            f"about {duration(found.seconds)} ({short(found.client_seconds)} a"
            f" client){found.left_out}"
        ),
        "memory": f"about {size(found.memory)}",
        "traffic": f"{size(found.bytes_down)} down, {size(found.bytes_up)} up",
    }
    for key, value in rows.items():
        grid.add_row(key, escape(value))
    out.print(grid)
    out.print("[dim]Nothing was run or written.[/]")


def call(part: Part) -> str:
    given = ", ".join(
        f"{k}={v.name if isinstance(v, Part) else v!r}" for k, v in part.given.items()
    )
    return f"{part.name}({given})"


# -- who holds what --------------------------------------------------------------------------------


def partition(config: Config, picture: Path) -> None:
    picture = picture_file(picture)
    settings = config.settings
    federation = config.build_source().federation(settings.clients, settings.seed)
    labels: Sequence[Sequence[int]] | None = federation.facts.get("labels")
    sizes = [len(h) if hasattr(h, "__len__") else 1 for h in federation.holdings]
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("client", justify="right", style=ACCENT)
    table.add_column("examples", justify="right")
    held_out = bool(federation.held_out)
    if held_out:
        table.add_column("held out", justify="right")
    if labels is not None:
        table.add_column("classes", justify="right")
        table.add_column("largest", justify="right")
        table.add_column("labels", no_wrap=True)
    look: Sequence[str] = federation.facts.get("look", ())
    if look:
        table.add_column("look", no_wrap=True)
    for i, n in enumerate(sizes):
        row = [str(i), str(n)]
        if held_out:
            mine = federation.held_out_of(i)
            row.append(str(len(mine)) if mine is not None else "0")
        if labels is not None:
            counts = list(labels[i])
            row += [
                str(sum(c > 0 for c in counts)),
                f"{100 * max(counts) / max(1, sum(counts)):.0f} %",
                bars(counts),
            ]
        row += [look[i]] if look else []
        table.add_row(*row)
    out = console()
    out.print(table)
    test = (
        f", {len(federation.test)} to test on"
        if federation.test is not None and hasattr(federation.test, "__len__")
        else ""
    )
    out.print(
        f"{len(sizes)} clients hold {sum(sizes)} examples ({min(sizes)} to {max(sizes)} each){test}"
    )
    for line in remarks(federation.facts):
        out.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
    draw_partition(federation, sizes, picture, config.name)
    out.print(f"Picture: {picture}", soft_wrap=True)


def picture_file(path: Path) -> Path:
    """The file that matplotlib will write: a folder gets one of its own, a name without a suffix
    becomes a PNG. A suffix it does not know is refused before any data is read."""
    from matplotlib.backend_bases import FigureCanvasBase

    if path.is_dir():
        return path / "partition.png"
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(
            f"--out {path}: a picture cannot be a {path.suffix} file; {', '.join(known)} are known"
        )
    return path


def draw_partition(federation: Federation, sizes: Sequence[int], picture: Path, title: str) -> None:
    """A bar a client, in the colours of its classes; below, where clients differ in how their
    images look, an image of each.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels, names, look = (federation.facts.get(key) for key in ("labels", "classes", "look"))
    counts = [list(row) for row in labels] if labels is not None else [[n] for n in sizes]
    classes = len(counts[0])
    words = (
        [str(n) for n in names]
        if isinstance(names, Sequence) and len(names) == classes
        else [str(k) for k in range(classes)]
    )
    figure = plt.figure(
        figsize=(max(5.0, min(14.0, 1.5 + 0.28 * len(counts))), 4.9 if look else 3.8),
        layout="constrained",
    )
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.8, 1.1)) if look else (figure, None)
    axes = upper.subplots()
    colours = plt.get_cmap(
        "tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo", max(classes, 2)
    )
    bottom = [0] * len(counts)
    for k in range(classes):
        heights = [row[k] for row in counts]
        axes.bar(
            range(len(counts)), heights, bottom=bottom, color=colours(k), width=0.85, label=words[k]
        )
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(xlabel="client", ylabel="examples", title=f"{title}: who holds what")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if labels is not None and classes <= 20:
        upper.legend(loc="outside right upper", frameon=False, fontsize="small")
    if lower is not None and look:
        draw_looks(lower, federation, look)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def draw_looks(figure: Any, federation: Federation, look: Sequence[str], most: int = 8) -> None:
    """The first image of some clients, from the first client to the last."""
    import torch

    shown = sorted({round(k * (len(look) - 1) / (most - 1)) for k in range(most)})
    for axes, client in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        image = federation.holdings[client].batch(torch.tensor([0]))["x"][0].permute(1, 2, 0)
        axes.imshow(image.expand(-1, -1, 3) if image.shape[2] == 1 else image, vmin=0, vmax=1)
        axes.set_title(f"{client}: {look[client]}", fontsize="x-small")
        axes.axis("off")


# -- several jobs ----------------------------------------------------------------------------------


def tune(
    recipe: str, names: Sequence[str], given: Sequence[str], folder: Path, engine: str, trials: int
) -> dict[str, dict[str, float]]:
    """What every algorithm's own search found, as overrides."""
    from fedlens.runs import compare as comparison
    from fedlens.runs import tune as tuning

    width, found, told = max(map(len, names)), {}, set[str]()
    for name in names:

        def finish(cell: Cell, name: str = name) -> None:
            comparison.run_cells(
                [cell],
                engine=engine,
                listener=lambda c: Cells(f"{name:<{width}}  {c.folder.parts[-3]}", told),
            )

        found[name] = tuning.tune(recipe, name, given, folder, finish, trials)
    return found


def compare(
    todo: Sequence[Cell], folder: Path, engine: str, fresh: bool, target: float | None = None
) -> None:
    from fedlens.runs import compare as comparison
    from fedlens.runs import table as tables

    out, width, told = console(), max(len(c.algorithm) for c in todo), set[str]()
    skipped = 0 if fresh else sum(comparison.is_finished(c) for c in todo)
    out.print(
        f"[bold {ACCENT}]{escape(todo[0].config.name)}[/]: {len(todo)} runs"
        + (f", {skipped} of them finished before" if skipped else "")
    )
    table = comparison.run_comparison(
        todo,
        folder,
        engine=engine,
        fresh=fresh,
        target=target,
        listener=lambda c: Cells(f"{c.algorithm:<{width}}  seed {c.seed}", told),
    )
    shown = tables.table_columns(table)
    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    grid.add_column("algorithm", style=ACCENT)
    for _, head, _ in shown:
        grid.add_column(head, justify="right")
    for name, row in table["algorithms"].items():
        cells = [tables.cell_text(row, k) for k, _, _ in shown]
        marked = [
            f"[bold]{c}[/]" if name in tables.best_algorithms(table, k, larger) else c
            for c, (k, _, larger) in zip(cells, shown, strict=True)
        ]
        grid.add_row(name, *marked)
    out.print(grid)
    seeds = table["seeds"]
    several = f"mean ± standard deviation over {len(seeds)} seeds"
    out.print(f"[dim]{several if len(seeds) > 1 else 'one seed: no spread'}[/]")
    for line in tables.tuned_values(table):
        out.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    out.print(
        f"{folder / 'report.html'}, {folder / 'table.md'}, {folder / 'table.json'},"
        f" {folder / 'compare.png'}",
        soft_wrap=True,
    )


# -- after a job -----------------------------------------------------------------------------------


def report(folder: Path, figures: Sequence[str] = ()) -> None:
    from fedlens.report.figures import write_figures
    from fedlens.report.html import write_report
    from fedlens.runs.reading import printable

    console().print(f"Report: {printable(str(write_report(folder)))}", soft_wrap=True)
    if figures:
        written = write_figures(folder, figures)
        console().print(
            f"Figures and tables: {written[0].parent} ({len(written)} files)", soft_wrap=True
        )


def apply(folder: Path, source: Path, target: Path, options: Sequence[str]) -> None:
    config = recipes.read(folder)
    task = config.build_task()
    known = {
        n: p
        for n, p in inspect.signature(task.apply).parameters.items()
        if n not in ("folder", "source", "target")
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    chosen: dict[str, Any] = {}
    for key, value in split(options):
        if key not in known and not open_ended:
            raise ConfigError(f"{type(task).__name__} has no option {key!r}{nearest(key, known)}")
        chosen[key] = next(value.guesses())
    console().print(task.apply(folder, source, target, **chosen), markup=False, soft_wrap=True)

"""What the command line prints: a live bar and tables on a terminal, plain lines in a pipe."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from fedlens import config as recipes
from fedlens.config import Config, ConfigError
from fedlens.folder import remarks
from fedlens.job import ENGINES, Setup, Watch, prepare, rehearse
from fedlens.overrides import split
from fedlens.parts import Part, names, parameters
from fedlens.values import nearest

if TYPE_CHECKING:
    from fedlens.compare import Cell
    from fedlens.federation import Federation

ACCENT = "cyan"
BLOCKS = " ▁▂▃▄▅▆▇█"


def console() -> Console:
    """Made when it is needed, so that it looks at the terminal of the moment; a pipe gets lines that are not cut."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=200, no_color=True)


# -- a job, live ---------------------------------------------------------------------------------------------------------------------


def live(spinner: Any = None) -> Watch:
    return Live(spinner) if console().is_terminal else Plain()


class Plain(Watch):
    """One line a round."""

    def __init__(self) -> None:
        self.console = console()

    def begin(self, setup: Setup, folder: Path, done: int) -> None:
        self.rounds, self.folder = setup.settings.rounds, folder
        for line in [*headline(setup, folder, done), *remarks(setup.federation.facts)]:
            self.print(line)

    def round(self, record: Mapping[str, Any]) -> None:
        self.print(f"round {record['round'] + 1}/{self.rounds}  {'  '.join(facts(record))}  {record['seconds']:.2f} s")
        for line in losses(record):
            self.print(line)

    def log(self, text: str) -> None:
        pass  # whoever got lost is in the round's own lines

    def end(self, summary: Mapping[str, Any]) -> None:
        for line in [*ending(summary), whereabouts(self.folder)]:
            self.print(line)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class Live(Watch):
    """A bar that shows round, loss, metric, clients heard and time left, with what went wrong above it."""

    def __init__(self, spinner: Any = None) -> None:
        self.console, self.spinner = console(), spinner
        self.bar = Progress(
            SpinnerColumn(style=ACCENT),
            TextColumn("[bold]{task.completed:.0f}[/][dim]/{task.total:.0f}[/]"),
            BarColumn(bar_width=28, complete_style=ACCENT, finished_style=ACCENT),
            TextColumn("{task.fields[facts]}"),
            TextColumn("[dim]{task.fields[left]}[/]"),
            console=self.console,
            transient=True,
        )
        self.values: list[float] = []

    def begin(self, setup: Setup, folder: Path, done: int) -> None:
        self.close()
        first, *rest = headline(setup, folder, done)
        self.console.print(f"[bold {ACCENT}]{escape(first)}[/]", soft_wrap=True)
        for line in rest:
            self.console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
        for line in remarks(setup.federation.facts):
            self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
        self.first, self.rounds, self.began, self.folder = done, setup.settings.rounds, time.monotonic(), folder
        self.task = self.bar.add_task("", total=self.rounds, completed=done, facts="[dim]starting[/]", left="")
        self.bar.start()

    def round(self, record: Mapping[str, Any]) -> None:
        done = record["round"] + 1
        spent = time.monotonic() - self.began
        left = spent / (done - self.first) * (self.rounds - done)
        value = next((v for v in record["metrics"].values() if v is not None), record["loss"])
        if value is not None:
            self.values.append(value)
        text = "  ".join(escape(f) for f in facts(record)) + f"  [{ACCENT}]{spark(self.values)}[/]"
        self.bar.update(self.task, completed=done, facts=text, left=f"{duration(left)} left" if done < self.rounds else "")
        for line in losses(record):
            self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    def log(self, text: str) -> None:
        if not text.startswith("client "):  # those are in the round's own lines
            self.console.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        first, *rest = [*ending(summary), whereabouts(self.folder)]
        self.console.print(f"[bold green]✓[/] [bold]{escape(first)}[/]", soft_wrap=True)
        for line in rest:
            self.console.print(f"  [dim]{escape(line)}[/]", soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()
        if self.spinner:
            self.spinner.stop()


class Cells(Live):
    """A bar a cell, and a line when it is done. `told`: what was said about the data before, because cells share it."""

    def __init__(self, title: str, told: set[str]) -> None:
        super().__init__()
        self.title, self.told = title, told

    def begin(self, setup: Setup, folder: Path, done: int) -> None:
        for line in remarks(setup.federation.facts):
            if line not in self.told:
                self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
        self.told.update(remarks(setup.federation.facts))
        self.first, self.rounds, self.began, self.folder = done, setup.settings.rounds, time.monotonic(), folder
        self.task = self.bar.add_task("", total=self.rounds, completed=done, facts=f"[dim]{escape(self.title)} starts[/]", left="")
        if self.console.is_terminal:
            self.bar.start()

    def round(self, record: Mapping[str, Any]) -> None:
        super().round(record)
        self.bar.update(self.task, facts=f"[bold]{escape(self.title)}[/]  {self.bar.tasks[0].fields['facts']}")

    def end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self.console.print(
            f"[green]✓[/] {escape(self.title)}  {escape(ending(summary)[0])}  [dim]{duration(summary['seconds'])}[/]", soft_wrap=True
        )


def tune(recipe: str, names: Sequence[str], given: Sequence[str], folder: Path, engine: str, trials: int) -> dict[str, dict[str, float]]:
    """What every algorithm's own search found, as overrides."""
    from fedlens import compare as comparison
    from fedlens import tune as tuning

    width, found, told = max(map(len, names)), {}, set[str]()
    for name in names:

        def finish(cell: Cell, name: str = name) -> None:
            comparison.finish([cell], engine=engine, watch=lambda c: Cells(f"{name:<{width}}  {c.folder.parts[-3]}", told))

        found[name] = tuning.tune(recipe, name, given, folder, finish, trials)
    return found


def compare(todo: Sequence[Cell], folder: Path, engine: str, fresh: bool, target: float | None = None) -> None:
    from fedlens import compare as comparison

    out, width, told = console(), max(len(c.algorithm) for c in todo), set[str]()
    skipped = 0 if fresh else sum(comparison.is_finished(c) for c in todo)
    out.print(
        f"[bold {ACCENT}]{escape(todo[0].config.name)}[/]: {len(todo)} runs" + (f", {skipped} of them finished before" if skipped else "")
    )
    table = comparison.compare(
        todo, folder, engine=engine, fresh=fresh, target=target, watch=lambda c: Cells(f"{c.algorithm:<{width}}  seed {c.seed}", told)
    )
    shown = comparison.columns(table)
    grid = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    grid.add_column("algorithm", style=ACCENT)
    for _, head, _ in shown:
        grid.add_column(head, justify="right")
    for name, row in table["algorithms"].items():
        cells = [comparison.text_of(row, k) for k, _, _ in shown]
        marked = [
            f"[bold]{c}[/]" if name in comparison.best(table, k, larger) else c for c, (k, _, larger) in zip(cells, shown, strict=True)
        ]
        grid.add_row(name, *marked)
    out.print(grid)
    seeds = table["seeds"]
    out.print(f"[dim]{f'mean ± standard deviation over {len(seeds)} seeds' if len(seeds) > 1 else 'one seed: no spread'}[/]")
    for line in comparison.choices(table):
        out.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    out.print(f"{folder / 'report.html'}, {folder / 'table.md'}, {folder / 'table.json'}, {folder / 'compare.png'}", soft_wrap=True)


def headline(setup: Setup, folder: Path, done: int) -> list[str]:
    s, config = setup.settings, setup.config
    cohort = f"{s.cohort} of {len(setup.federation)} clients a round" if s.cohort else f"{len(setup.federation)} clients"
    again = f", going on after round {done}" if done else ""
    return [
        f"{config.name}: {setup.stack}",
        f"{config.task.name} on {config.data.name}, {cohort}, {s.rounds} rounds, seed {s.seed}{again} → {folder}",
    ]


def facts(record: Mapping[str, Any]) -> list[str]:
    """Training loss, the headline metric, who was heard."""
    out = [f"loss {record['loss']:.4f}"] if record["loss"] is not None else []
    out += [f"{name} {number(value)}" for name, value in list(record["metrics"].items())[:1] if value is not None]
    return [*out, f"heard {record['heard']}/{record['asked']}"]


def losses(record: Mapping[str, Any]) -> list[str]:
    """Who got lost and why, a reason a line."""
    why: dict[str, list[str]] = {}
    for x in record["lost"]:
        why.setdefault(("refused: " if x["refused"] else "") + x["reason"], []).append(str(x["client"]))
    lines = [f"round {record['round'] + 1}: client{'s' if len(ids) > 1 else ''} {few(ids)} {reason}" for reason, ids in why.items()]
    return lines if record["heard"] else [*lines, f"round {record['round'] + 1}: nobody was heard, so it is skipped"]


def whereabouts(folder: Path) -> str:
    return str(folder / "report.html") if (folder / "report.html").exists() else str(folder)


def ending(summary: Mapping[str, Any]) -> list[str]:
    metrics = [f"{k} {number(v)}" for k, v in summary["metrics"].items() if v is not None and k != "loss"][:3]
    loss = [f"training loss {summary['loss']:.4f}"] if summary["loss"] is not None else []
    lost = f", {gone} of {summary['asked']} replies lost" if (gone := summary["asked"] - summary["heard"]) else ""
    traffic = f"{size(summary['bytes_down'])} down, {size(summary['bytes_up'])} up"
    return [
        "  ".join([*metrics, *loss]) or "done",
        f"{summary['rounds']} rounds in {duration(summary['seconds'])}, {traffic}, peak memory {size(summary['peak_memory'])}{lost}",
    ]


# -- before a job ----------------------------------------------------------------------------------------------------------------------


def dry_run(config: Config, engine: str, spinner: Any = None) -> None:
    """What would be done, with estimates from a little of it."""
    if engine not in ENGINES:
        raise ConfigError(f"there is no engine {engine!r}{nearest(engine, ENGINES)}")
    from fedlens.estimate import estimate

    setup, out = prepare(config), console()
    rehearse(setup)
    s = setup.settings
    sizes = [len(h) for h in setup.federation.holdings if hasattr(h, "__len__")]
    found = estimate(setup)
    if spinner:
        spinner.stop()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    each = f"{min(sizes)} to {max(sizes)}" if sizes and min(sizes) < max(sizes) else f"{max(sizes, default=0)}"
    spread = f", {each} examples each, {sum(sizes)} in all" if sizes else ""
    rows = {
        "recipe": f"{config.name}  {config.about}".strip(),
        "task": call(config.task),
        "data": call(config.data),
        "clients": f"{len(setup.federation)}{spread}",
        "algorithm": "\n".join(call(p) for p in config.algorithm),
        "rounds": f"{s.rounds}, {s.cohort or 'all'} clients in each",
        "engine": f"{engine}, {found.workers} worker{'s' if found.workers > 1 else ''}, {setup.device}",
        "model": f"{found.parameters:,} numbers" if found.parameters else "none",
        "time": f"about {duration(found.seconds)} ({short(found.client_seconds)} a client){found.left_out}",
        "memory": f"about {size(found.memory)}",
        "traffic": f"{size(found.bytes_down)} down, {size(found.bytes_up)} up",
    }
    for key, value in rows.items():
        grid.add_row(key, escape(value))
    out.print(grid)
    out.print("[dim]Nothing was run or written.[/]")


def call(part: Part) -> str:
    given = ", ".join(f"{k}={v.name if isinstance(v, Part) else v!r}" for k, v in part.given.items())
    return f"{part.name}({given})"


# -- what there is ---------------------------------------------------------------------------------------------------------------------

KINDS = {
    "recipes": "to run as they are", "algorithms": "paper names, for --algorithm", "layers": "the parts of a stack, with their keys",
    "tasks": "what is learned or restored", "models": "networks", "datasets": "where data comes from", "metrics": "how well it was done",
    "generators": "what makes images of a class, for Balance", "engines": "what carries the messages",
}  # fmt: skip


def catalogue(kind: str) -> None:
    if not kind:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, about in KINDS.items():
            table.add_row(f"[{ACCENT}]fedlens list {name}[/]", about, f"[dim]{escape(few(sorted(rows_of(name)), 6))}[/]")
        console().print(table)
        return
    match = next((k for k in KINDS if k.rstrip("s") == kind.lower().rstrip("s")), None)
    if match is None:
        raise ConfigError(f"there is no list of {kind!r}{nearest(kind, KINDS)}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=f"bold {ACCENT}", no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in rows_of(match).items():
        table.add_row(escape(name), escape(about))
    console().print(table)


def rows_of(kind: str) -> dict[str, str]:
    """Names and a line about each."""
    if kind == "recipes":
        return {name: about_recipe(path) for name, path in recipes.shipped_recipes().items()}
    if kind == "algorithms":
        from fedlens.algorithms.recipes import NAMED

        known = {n.lower() for n in names("algorithm")}
        whole = {n: r for n, r in NAMED.items() if all(t["name"].lower() in known for t in r.tables())}
        return {n: f"{r.about}  ({' + '.join(t['name'] for t in r.tables())})" for n, r in whole.items()}
    if kind == "engines":
        return {"simulator": "processes on this machine (the default)", "ray": "a Ray cluster", "flower": "real clients through Flower"}
    package = {"datasets": "data"}.get(kind, kind)
    about = {n: about_export(package, n) for n in exported(package)}
    return {n: "\n".join([text, *measured(n)]) for n, text in about.items()} if kind == "models" else about


def exported(package: str) -> list[str]:
    found = list(importlib.import_module(f"fedlens.{package}").__all__)
    if package == "generators":
        found.remove("ImageGenerator")  # the interface of the others
    if package != "data":
        return found
    from fedlens.data.source import Source

    classes = {n: getattr(importlib.import_module("fedlens.data"), n) for n in found}
    return [n for n, c in classes.items() if isinstance(c, type) and issubclass(c, Source)]


def about_export(package: str, name: str) -> str:
    """The first sentence about it, and its keys."""
    try:
        thing = getattr(importlib.import_module(f"fedlens.{package}"), name)
    except ImportError as e:
        return f"needs a package that is not installed: {e}"
    own = inspect.getdoc(thing) if not isinstance(thing, type) or thing.__doc__ not in (None, "") else ""
    module = inspect.getdoc(inspect.getmodule(thing)) or ""
    named = name.lower() in module.lower() if package == "layers" else package == "models" and module.lower().startswith(name.lower())
    text = first_sentence(module if named else own or module)
    if not isinstance(thing, type) or package in ("models", "metrics"):
        return text
    keys = [f"{p.name}={p.default}" if p.default is not inspect.Parameter.empty else p.name for p in parameters(thing).values()]
    return f"{text}\n[{', '.join(keys)}]" if keys else text


@cache
def measurements() -> dict[str, Any]:
    """What `benchmarks/vsr_networks.py --keep` found, by lower-case name."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "models" / "measured.json").read_text())
    return found


def measured(name: str) -> list[str]:
    """Size of a network, and what a clip takes on a CPU, as far as that was measured."""
    known = measurements().get(name.lower())
    if not known:
        return []
    parts = [f"{known['parameters']:,} parameters"]
    for key, word in (("train", "a training step"), ("forward", "a forward pass"), ("enlarge", "enlarging")):
        if key not in known:
            continue
        row = known[key]
        _, frames, _, height, width = row["clip"]
        seconds = row.get("seconds") or sum(v for k, v in row.items() if k.endswith("_seconds"))
        where = f"{row['threads']} threads, at {row['commit']}"
        parts.append(f"{word} on {frames} frames of {width}x{height}: {row['peak_gb']:.1f} GB, {duration(seconds)} ({where})")
    return [f"[{'; '.join(parts)}]"]


def first_sentence(text: str) -> str:
    head = " ".join(text.strip().split("\n\n")[0].split())
    stop = re.search(r"(?<!\bEq)(?<!\bEqs)(?<!\bal)(?<!\bFig)(?<!\bSec)\. (?=[A-Z])", head)
    return head[: stop.start() + 1] if stop else head


def about_recipe(path: Path) -> str:
    """`about`, or the comment the file begins with."""
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("about"):
            return line.partition("=")[2].strip().strip('"')
    first = text.splitlines()[0] if text else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


# -- who holds what --------------------------------------------------------------------------------------------------------------------


def partition(config: Config, picture: Path) -> None:
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
            row += [str(sum(c > 0 for c in counts)), f"{100 * max(counts) / max(1, sum(counts)):.0f} %", bars(counts)]
        row += [look[i]] if look else []
        table.add_row(*row)
    out = console()
    out.print(table)
    test = f", {len(federation.test)} to test on" if federation.test is not None and hasattr(federation.test, "__len__") else ""
    out.print(f"{len(sizes)} clients hold {sum(sizes)} examples ({min(sizes)} to {max(sizes)} each){test}")
    for line in remarks(federation.facts):
        out.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
    draw_partition(federation, sizes, picture, config.name)
    out.print(f"Picture: {picture}", soft_wrap=True)


def draw_partition(federation: Federation, sizes: Sequence[int], picture: Path, title: str) -> None:
    """A bar a client, in the colours of its classes; below, where clients differ in how their images look, an image of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels, names, look = (federation.facts.get(key) for key in ("labels", "classes", "look"))
    counts = [list(row) for row in labels] if labels is not None else [[n] for n in sizes]
    classes = len(counts[0])
    words = [str(n) for n in names] if isinstance(names, Sequence) and len(names) == classes else [str(k) for k in range(classes)]
    figure = plt.figure(figsize=(max(5.0, min(14.0, 1.5 + 0.28 * len(counts))), 4.9 if look else 3.8), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.8, 1.1)) if look else (figure, None)
    axes = upper.subplots()
    colours = plt.get_cmap("tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo", max(classes, 2))
    bottom = [0] * len(counts)
    for k in range(classes):
        heights = [row[k] for row in counts]
        axes.bar(range(len(counts)), heights, bottom=bottom, color=colours(k), width=0.85, label=words[k])
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


# -- after a job ---------------------------------------------------------------------------------------------------------------------


def report(folder: Path, figures: Sequence[str] = ()) -> None:
    from fedlens import report as page

    console().print(f"Report: {page.write(folder)}", soft_wrap=True)
    if figures:
        written = page.figures(folder, figures)
        console().print(f"Figures and tables: {written[0].parent} ({len(written)} files)", soft_wrap=True)


def apply(folder: Path, source: Path, target: Path, options: Sequence[str]) -> None:
    config = recipes.read(folder)
    task = config.build_task()
    known = {n: p for n, p in inspect.signature(task.apply).parameters.items() if n not in ("folder", "source", "target")}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    chosen: dict[str, Any] = {}
    for key, value in split(options):
        if key not in known and not open_ended:
            raise ConfigError(f"{type(task).__name__} has no option {key!r}{nearest(key, known)}")
        chosen[key] = next(value.guesses())
    console().print(task.apply(folder, source, target, **chosen), markup=False, soft_wrap=True)


# -- words and numbers -----------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def few(words: Sequence[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def bars(counts: Sequence[int]) -> str:
    """A bar of text for every count; nothing at all stays blank, and the smallest something is seen."""
    top = max(counts, default=0) or 1
    return "".join(BLOCKS[0 if c == 0 else max(1, round(8 * c / top))] for c in counts)


def spark(values: Sequence[float], width: int = 16) -> str:
    """The last values as a line of text, from their lowest to their highest."""
    recent = list(values)[-width:]
    low, high = min(recent, default=0.0), max(recent, default=0.0)
    return "".join(BLOCKS[1 + round(7 * (v - low) / (high - low))] if high > low else BLOCKS[1] for v in recent)

"""A job as it goes: a live bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from fedlens.report.page_data import UNEVALUATED, privacy_lines, reference_lines
from fedlens.runs.listener import Listener
from fedlens.runs.setup import Setup
from fedlens.runs.text import ACCENT, console, count, duration, few, rounded, size, spark


def live(spinner: Any = None) -> Listener:
    return Live(spinner) if console().is_terminal else Plain()


class Plain(Listener):
    """One line a round."""

    def __init__(self) -> None:
        self.console = console()

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        self.rounds, self.folder = setup.settings.rounds, folder
        for line in [*opening_lines(setup, folder, done), *setup.federation.facts.remarks()]:
            self.print(line)

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.print(
            f"round {record['round'] + 1}/{self.rounds}  {'  '.join(facts(record))} "
            f" {record['seconds']:.2f} s"
        )
        for line in losses(record):
            self.print(line)

    def log(self, text: str) -> None:
        if not in_round(text):
            self.print(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        for line in [*closing_lines(summary), report_or_folder(self.folder)]:
            self.print(line)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class Live(Listener):
    """A bar that shows round, loss, metric, clients heard and time left, with what went wrong above
    it.
    """

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
            # a bar that never started would end with an empty line
            disable=not self.console.is_terminal,
        )
        self.losses: list[float] = []
        self.scores: list[float] = []

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        self.close()
        first, *rest = opening_lines(setup, folder, done)
        self.console.print(f"[bold {ACCENT}]{escape(first)}[/]", soft_wrap=True)
        for line in rest:
            self.console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
        for line in setup.federation.facts.remarks():
            self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
        self.first, self.rounds, self.began, self.folder = (
            done,
            setup.settings.rounds,
            time.monotonic(),
            folder,
        )
        self.task = self.bar.add_task(
            "", total=self.rounds, completed=done, facts="[dim]starting[/]", left=""
        )
        self.bar.start()

    def on_round(self, record: Mapping[str, Any]) -> None:
        done = record["round"] + 1
        spent = time.monotonic() - self.began
        left = spent / (done - self.first) * (self.rounds - done)
        text = "  ".join(escape(f) for f in facts(record)) + f"  [{ACCENT}]{self.curve(record)}[/]"
        self.bar.update(
            self.task,
            completed=done,
            facts=text,
            left=f"{duration(left)} left" if done < self.rounds else "",
        )
        for line in losses(record):
            self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    def curve(self, record: Mapping[str, Any]) -> str:
        """The headline metric so far, where it was evaluated; the training loss as long as it never
        was. Never one behind the other.
        """
        for values, found in (
            (self.losses, [record["loss"]]),
            (self.scores, list(record["metrics"].values())[:1]),
        ):
            values += [v for v in found if v is not None]
        return spark(self.scores or self.losses)

    def log(self, text: str) -> None:
        if not in_round(text):
            self.console.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        first, *rest = [*closing_lines(summary), report_or_folder(self.folder)]
        self.console.print(f"[bold green]✓[/] [bold]{escape(first)}[/]", soft_wrap=True)
        for line in rest:
            self.console.print(f"  [dim]{escape(line)}[/]", soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()
        if self.spinner:
            self.spinner.stop()


class CellBar(Live):
    """A bar for one cell of a comparison, and a line when it is done. `shown`: remarks on the data
    that were printed before, because cells share it.
    """

    def __init__(self, title: str, shown: set[str]) -> None:
        super().__init__()
        self.title, self.shown = title, shown

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        for line in setup.federation.facts.remarks():
            if line not in self.shown:
                self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
        self.shown.update(setup.federation.facts.remarks())
        self.first, self.rounds, self.began, self.folder = (
            done,
            setup.settings.rounds,
            time.monotonic(),
            folder,
        )
        self.task = self.bar.add_task(
            "",
            total=self.rounds,
            completed=done,
            facts=f"[dim]{escape(self.title)} starts[/]",
            left="",
        )
        self.bar.start()

    def on_round(self, record: Mapping[str, Any]) -> None:
        super().on_round(record)
        self.bar.update(
            self.task, facts=f"[bold]{escape(self.title)}[/]  {self.bar.tasks[0].fields['facts']}"
        )

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self.console.print(
            f"[green]✓[/] {escape(self.title)}  {escape(closing_lines(summary)[0])} "
            f" [dim]{duration(summary['seconds'])}[/]",
            soft_wrap=True,
        )


def opening_lines(setup: Setup, folder: Path, done: int) -> list[str]:
    settings, config = setup.settings, setup.config
    cohort = (
        f"{settings.cohort} of {len(setup.federation)} clients a round"
        if settings.cohort
        else count(len(setup.federation), "client")
    )
    again = f", going on after round {done}" if done else ""
    return [
        f"{config.name}: {setup.stack}",
        (
            f"{config.task.name} on {config.data.name}, {cohort},"
            f" {count(settings.rounds, 'round')}, seed {settings.seed}{again} → {folder}"
        ),
    ]


def facts(record: Mapping[str, Any]) -> list[str]:
    """Training loss, the headline metric, who was heard."""
    out = [f"loss {record['loss']:.4f}"] if record["loss"] is not None else []
    for name, value in list(record["metrics"].items())[:1]:
        if value is not None:
            out.append(f"{name} {rounded(value)}{beside(record, name)}")
    return [*out, f"heard {record['heard']}/{record['asked']}"]


def beside(record: Mapping[str, Any], metric: str) -> str:
    """What is reached without having learned anything, in brackets."""
    known = record.get("references", {}).items()
    found = [f"{who} {rounded(values[metric])}" for who, values in known if metric in values]
    return f" ({', '.join(found)})" if found else ""


def losses(record: Mapping[str, Any]) -> list[str]:
    """Who got lost and why, a reason a line."""
    clients: dict[str, list[str]] = {}
    for prefix, missing in (("", record["lost"]), (UNEVALUATED, record["unevaluated"])):
        for lost in missing:
            reason = prefix + ("refused: " if lost["refused"] else "") + lost["reason"]
            clients.setdefault(reason, []).append(str(lost["client"]))
    number = record["round"] + 1
    lines = []
    for reason, ids in clients.items():
        lines.append(f"round {number}: client{'s' if len(ids) > 1 else ''} {few(ids)} {reason}")
    if not record["heard"]:
        lines.append(f"round {number}: nobody was heard, so it is skipped")
    return lines


def in_round(text: str) -> bool:
    """What an engine says about one client comes again, with all that had the same reason, in the
    round's own lines.
    """
    return text.startswith("client ")


def report_or_folder(folder: Path) -> str:
    return str(folder / "report.html") if (folder / "report.html").exists() else str(folder)


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    metrics = {k: v for k, v in summary["metrics"].items() if v is not None and k != "loss"}
    first = next(iter(metrics), "")
    own = [n for n in (f"client_{first}",) if n in metrics]  # of clients with their own models
    names = list(dict.fromkeys([*list(metrics)[:1], *own, *metrics]))[:3]
    results = [f"{name} {rounded(metrics[name])}" for name in names]
    if summary["loss"] is not None:
        results.append(f"{summary.get('loss_name', 'training loss')} {summary['loss']:.4f}")
    costs = [
        f"{count(summary['rounds'], 'round')} in {duration(summary['seconds'])}",
        f"{size(summary['bytes_down'])} down",
        f"{size(summary['bytes_up'])} up",
        f"peak memory {size(summary['peak_memory'])}",
    ]
    if lost := summary["asked"] - summary["heard"]:
        costs.append(f"{lost} of {summary['asked']} replies lost")
    if skipped := summary.get("skipped"):
        costs.append(f"{count(skipped, 'round')} skipped")
    if missing := summary["unevaluated"]:
        costs.append(f"{count(missing, 'evaluation')} by clients lost")
    about = [*reference_lines(summary), *privacy_lines(summary)]
    return ["  ".join(results) or "done", *about, ", ".join(costs)]

"""A job as it goes, in a notebook: a table of the last rounds that is drawn anew after each."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.runs.listener import Listener
from fedlens.runs.progress import closing_lines, facts, losses, opening_lines, report_or_folder
from fedlens.runs.setup import Setup

_SHOWN = 8  # rounds


def in_notebook() -> bool:
    """Is this a kernel that can show HTML? A terminal's IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookProgress(Listener):
    """show: takes HTML and puts it in the place of what it showed before."""

    def __init__(self, show: Any = None) -> None:
        self.show = show or _display()
        self.head: list[str] = []
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.done = self.rounds = 0

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        self.head, self.rounds, self.done = opening_lines(setup, folder, done), 0, done
        self.rounds, self.folder = setup.settings.rounds, folder
        self.warnings += setup.federation.facts.remarks()
        self._draw()

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.done = record["round"] + 1
        self.lines.append(f"{self.done}  {'  '.join(facts(record))}  {record['seconds']:.2f} s")
        self.warnings += losses(record)
        self._draw()

    def log(self, text: str) -> None:
        if not text.startswith("client "):
            self.warnings.append(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.head += [*closing_lines(summary), report_or_folder(self.folder)]
        self._draw()

    def _draw(self) -> None:
        bar = f"<progress max='{self.rounds}' value='{self.done}'></progress>"
        text = [*self.head, *self.warnings[-_SHOWN:], *self.lines[-_SHOWN:]]
        shown = "<br>".join(html.escape(line) for line in text)
        self.show(f"<div>{bar} {self.done}/{self.rounds}<br><code>{shown}</code></div>")


def _display() -> Any:
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))

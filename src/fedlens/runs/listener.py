"""What a job reports while it runs, and to whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.runs.setup import Setup


class Listener:
    """Is called as a job goes; this one does nothing. The command line has one that draws a bar."""

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        """Before the first round. done: rounds of an earlier job that this one resumes."""

    def on_round(self, record: Mapping[str, Any]) -> bool | None:
        """After each round, with its line of metrics.jsonl. True: that was the last one."""
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """After the last round, when the folder is complete."""

    def log(self, text: str) -> None:
        """Something worth knowing happened."""

    def close(self) -> None:
        """Always called last, also after an error."""

"""Run folders: what is in one, where the next one goes, who may write to it.

The run folder is the contract between all tools:

    config.toml          everything resolved; `fedlens run FOLDER --resume` needs nothing else
    federation.json      who holds what
    metrics.jsonl        one object a round, numbered from 0
    summary.json         metrics, seconds, peak memory, bytes, versions, seed; written last
    model.safetensors    or whatever the task saves
    pictures/            what the task has to show
    checkpoint/          see checkpoint.py
    ledger/              with federation.ledger: what left each client, see trust/ledger.py
    tensorboard/         the same curves as metrics.jsonl
    report.html
    messages/            what the server saw, with --record-messages
    audit.html           what could be read out of it; audit.json its numbers
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlens.config.recipe import Config, ConfigError
from fedlens.core.algorithm import Algorithm
from fedlens.core.files import atomic_files, write_atomically
from fedlens.report.reading import parse_rounds

RUN_FILES = (
    "config.toml",
    "federation.json",
    "metrics.jsonl",
    "privacy.jsonl",
    "summary.json",
    "model.safetensors",
    "restored.png",
    "report.html",
    "pictures",
    "checkpoint",
    "tensorboard",
    "memory",
    "analysis",
    "messages",
    "audit.html",
    "audit.json",
    "flower.json",
    "ledger",
    "heads.json",
    ".part",
)
# What may change when a run goes on: none of these alters what a round computes (the number of
# rounds: unless `check_rounds` objects).
CHANGEABLE = tuple(
    f"federation.{k}"
    for k in (
        "rounds",
        "workers",
        "timeout",
        "checkpoint_every",
        "evaluate_every",
        "personal",
        "ledger",
    )
)


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoint", "summary.json"))


def free_folder(name: str, root: Path = Path("runs")) -> Path:
    """runs/NAME, or runs/NAME-2 and so on where that is taken."""
    folder, k = root / name, 1
    while holds_run(folder):
        k += 1
        folder = root / f"{name}-{k}"
    return folder


def newest_folder(name: str, root: Path = Path("runs")) -> Path:
    """The last one that `free_folder` gave out."""
    folder, k = root / name, 1
    while holds_run(root / f"{name}-{k + 1}"):
        k += 1
        folder = root / f"{name}-{k}"
    return folder


def default_folder(name: str, resume: bool = False, fresh: bool = False) -> Path:
    """Where a run goes that was given no folder: a free one, or the last one to go on there; to
    start over, the first.
    """
    if resume:
        return newest_folder(name)
    return Path("runs") / name if fresh else free_folder(name)


def clear_folder(folder: Path) -> None:
    """Remove what a run writes, and nothing else that may lie there."""
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_settings(config: Config, folder: Path) -> int:
    """Refuse to go on with other settings. How many rounds were planned before."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"there is no run in {folder} to resume")
    try:
        before = tomllib.loads((folder / "config.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{folder / 'config.toml'} is damaged: {e}") from e
    if change := config.difference(before, CHANGEABLE):
        raise ConfigError(
            f"{folder} was run with other settings ({change}): resume it as it was, or start over"
            " with --fresh"
        )
    return int(before.get("federation", {}).get("rounds", config.settings.rounds))


def check_rounds(algorithm: Algorithm, folder: Path, done: int, planned: int, rounds: int) -> None:
    """Refuse another number of rounds where the rounds so far would have been others, or are more
    already.
    """
    if rounds < done:
        raise ConfigError(
            f"{folder} has {done} rounds behind it, more than rounds={rounds}: there is nothing to"
            " go on with"
        )
    paced = next(
        (f"{type(p).__name__}'s {why}" for p in algorithm.parts() if (why := p.paced_by)), None
    )
    if paced and done and rounds != planned:
        raise ConfigError(
            f"{folder} was planned for {planned} rounds and {paced} depends on that: resume it as"
            " it was, or use --fresh"
        )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole: the last one may have been cut off."""
    return parse_rounds(path.read_text(errors="replace") if path.exists() else "", [])


def trim_records(path: Path, done: int) -> list[dict[str, Any]]:
    """Rounds behind the checkpoint will be run again: their lines go."""
    records = [r for r in read_records(path) if r["round"] < done]
    write_atomically(path, "".join(json.dumps(r) + "\n" for r in records))
    return records


def save_result(folder: Path, save: Callable[[Path], None]) -> None:
    """Let a task write its files beside, then move each into place whole."""
    with atomic_files(folder) as part:
        save(part)
        if (folder / "config.toml").exists():
            for path in filter(Path.is_file, part.iterdir()):
                # safetensors lets nobody else read what it writes
                shutil.copymode(folder / "config.toml", path)


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
        return found
    except (OSError, ValueError):
        return {}

"""Several algorithms on one recipe, several seeds each.

Every cell is a run folder of its own, DIR/ALGORITHM/seed-N. Finished cells are kept and skipped on
a rerun, unfinished ones go on from their checkpoint, so a comparison can be stopped and extended at
will.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.overrides import UnknownKey, parse_overrides
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.federation import Federation
from fedlens.core.files import write_atomically
from fedlens.report.html import write_comparison
from fedlens.runs.folder import CHANGEABLE, clear_folder, holds_run, read_summary
from fedlens.runs.job import run_job
from fedlens.runs.listener import Listener
from fedlens.runs.setup import load_federation, make_setup
from fedlens.runs.table import comparison_table, draw_comparison, table_markdown


@dataclass(frozen=True)
class Cell:
    algorithm: str
    seed: int
    config: Config
    folder: Path
    chosen: Mapping[str, Any] = field(default_factory=dict)  # by tuning


def make_cells(
    recipe: str | Path,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str] | Mapping[str, Any],
    folder: Path,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Cell]:
    """All of them, checked: seed by seed, so that a comparison stopped half-way compares something.
    An override has to fit one algorithm at least and leaves alone the others."""
    pairs = parse_overrides(overrides)
    if given := [value for key, value in pairs if key in ("seed", "federation.seed")]:
        raise ConfigError(
            f"compare takes its seeds together: --seeds {given[0]} instead of seed={given[0]}"
        )
    # they decide which other keys there are
    classes = {key: value for key, value in pairs if key.lower() in ("task.name", "data.name")}
    unused: dict[str, UnknownKey] = {}
    fitting: dict[str, dict[str, Any]] = {}
    for name in algorithms:
        fitting[name] = {}
        for key, value in pairs:
            try:
                recipes.read(recipe, {**classes, key: value}, name)
            except UnknownKey as e:
                unused.setdefault(key, e)
            except ConfigError:  # wrong on its own, maybe right with the others
                fitting[name][key] = value
            else:
                fitting[name][key] = value
    for key, error in unused.items():
        if not any(key in given for given in fitting.values()):
            raise error
    out = []
    for seed in seeds:
        for name in algorithms:
            tuned = (chosen or {}).get(name, {})
            config = recipes.read(recipe, {**fitting[name], **tuned, "federation.seed": seed}, name)
            # a stack that cannot work is refused before the first cell starts
            config.build_algorithm(config.build_task())
            out.append(Cell(name, seed, config, folder / name.lower() / f"seed-{seed}", tuned))
    return out


def is_finished(cell: Cell) -> bool:
    """Refuses a folder made with other settings: its numbers do not belong in this table."""
    if not holds_run(cell.folder) or not (cell.folder / "config.toml").is_file():
        return False
    before = tomllib.loads((cell.folder / "config.toml").read_text())
    free = [k for k in CHANGEABLE if k != "federation.rounds"]
    if change := cell.config.difference(before, free):
        raise ConfigError(
            f"{cell.folder} was run with other settings ({change}): give another --out, or start"
            " over with --fresh"
        )
    summary = read_summary(cell.folder)
    return bool(summary) and not summary.get("interrupted")


def run_comparison(
    todo: Sequence[Cell],
    folder: Path,
    *,
    engine: str = "simulator",
    fresh: bool = False,
    listener: Callable[[Cell], Listener],
    target: float | None = None,
) -> dict[str, Any]:
    """Run what is not finished, then write table.json, table.md, compare.png and report.html; the
    table.
    """
    run_cells(todo, engine=engine, fresh=fresh, listener=listener)
    table = comparison_table(todo, target)
    write_atomically(folder / "table.json", json.dumps(table, indent=1))
    write_atomically(folder / "table.md", table_markdown(table))
    draw_comparison(table, folder / "compare.png")
    write_comparison([cell.folder for cell in todo], folder)
    return table


def run_cells(
    todo: Sequence[Cell],
    *,
    engine: str = "simulator",
    fresh: bool = False,
    listener: Callable[[Cell], Listener],
) -> None:
    """Run what is not finished."""
    if fresh:
        for cell in todo:
            clear_folder(cell.folder)
    finished = {id(cell): is_finished(cell) for cell in todo}
    shared: tuple[str, Federation] | None = None
    for cell in todo:
        if finished[id(cell)]:
            continue
        key = json.dumps(
            [cell.config.tables()["data"], cell.config.settings.clients, cell.seed], default=str
        )
        if shared is None or shared[0] != key:
            shared = key, load_federation(cell.config)
        resume = holds_run(cell.folder) and (cell.folder / "config.toml").is_file()
        setup = make_setup(cell.config, shared[1])
        run_job(
            cell.config,
            cell.folder,
            engine=engine,
            resume=resume,
            listener=listener(cell),
            setup=setup,
        )

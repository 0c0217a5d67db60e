"""A sweep: many runs of one recipe, all combinations of lists, or Optuna choosing what to try next
from what came out before.

A trial is an ordinary run folder, DIR/trial-NNN. The sampler has a fixed seed and hears the trials
in order, so a sweep that is started again asks for the same ones: those that are finished are read,
the others run, and more trials go on where fewer had ended.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.overrides import find_place, parse_overrides
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.extras import is_installed
from fedlens.core.files import write_atomically
from fedlens.runs.compare import Cell
from fedlens.runs.folder import read_summary
from fedlens.runs.tune import headline_value

RANGE = re.compile(r"(log|uniform|int)[(:]([^,:)]+)[,:]([^,:)]+)\)?")


@dataclass(frozen=True)
class Choices:
    """One of these, as they were written."""

    values: tuple[str, ...]

    def suggest(self, trial: Any, key: str) -> str:
        return str(trial.suggest_categorical(key, list(self.values)))


@dataclass(frozen=True)
class Range:
    """A number between two, on a logarithmic scale if `kind` is "log", whole if it is "int"."""

    kind: str
    low: float
    high: float

    def suggest(self, trial: Any, key: str) -> float:
        if self.kind == "int":
            return int(trial.suggest_int(key, int(self.low), int(self.high)))
        return float(trial.suggest_float(key, self.low, self.high, log=self.kind == "log"))


Space = Mapping[str, Choices | Range]


@dataclass(frozen=True)
class Tried:
    number: int
    chosen: Mapping[str, Any]
    metric: str
    value: float | None
    folder: Path


def read_space(arguments: Sequence[str]) -> tuple[dict[str, Choices | Range], list[str]]:
    """What varies, and the overrides that stay: `lr=0.01,0.1` and `mu=log(1e-4,1)` (or
    `mu=log:1e-4:1`, which no shell stumbles over) vary, `rounds=5` stays.
    """
    space: dict[str, Choices | Range] = {}
    fixed = []
    for text in arguments:
        parse_overrides([text])
        key, _, value = (part.strip() for part in text.partition("="))
        if RANGE.fullmatch(value):
            space[key] = _range(key, value)
        elif "," in value and not value.startswith(("[", "{", '"', "'")):
            space[key] = Choices(tuple(v.strip() for v in value.split(",")))
        else:
            fixed.append(text)
    if not space:
        raise ConfigError(
            "nothing varies: write lr=0.01,0.1 for a choice, or 'mu=log(1e-4,1)', 'uniform(0,1)' or"
            " 'int(1,8)' for a range"
        )
    return space, fixed


def _range(key: str, text: str) -> Range:
    found = RANGE.fullmatch(text)
    assert found is not None
    kind = found.group(1)
    try:
        low, high = float(found.group(2)), float(found.group(3))
    except ValueError:
        raise ConfigError(f"{key}={text}: a range goes from a number to a number") from None
    if not low < high or (kind == "log" and low <= 0):
        above = " and begins above 0" if kind == "log" else ""
        raise ConfigError(f"{key}={text}: a range goes from the smaller to the larger{above}")
    return Range(kind, low, high)


def sweep(
    recipe: str | Path,
    arguments: Sequence[str],
    folder: Path,
    run_cell: Callable[[Cell], None],
    *,
    trials: int = 20,
    algorithm: str | None = None,
) -> list[Tried]:
    """Run or read `trials` trials. The first is the recipe as it is, where its own values lie in
    the space: what the others are worth is told by it.
    """
    space, fixed = read_space(arguments)
    base = recipes.read(recipe, fixed, algorithm)
    grid = _combinations(space)
    chooser: _Grid | _Optuna = _Grid(grid) if grid else _Optuna(space, _own_values(base, space))
    done: list[Tried] = []
    while len(done) < (min(trials, len(grid)) if grid else trials):
        chosen = chooser.ask()
        pairs = [*fixed, *(f"{key}={value}" for key, value in chosen.items())]
        config = recipes.read(recipe, pairs, algorithm)
        place = folder / f"trial-{len(done):03d}"
        run_cell(Cell(f"trial-{len(done):03d}", config.settings.seed, config, place, chosen))
        chooser.tell(headline_value(place))
        metric, value = next(iter(read_summary(place)["metrics"].items()))
        done.append(Tried(len(done), chosen, metric, value, place))
    return done


class _Grid:
    """All combinations, one after the other."""

    def __init__(self, combinations: Sequence[dict[str, Any]]) -> None:
        self.left = iter(combinations)

    def ask(self) -> dict[str, Any]:
        return next(self.left)

    def tell(self, value: float | None) -> None:
        """What came of one says nothing about the next."""


class _Optuna:
    """first: what is tried before Optuna chooses."""

    def __init__(self, space: Space, first: Sequence[dict[str, Any]]) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError('a sweep over ranges needs: pip install "fedlens[sweep]"') from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.failed = space, optuna.trial.TrialState.FAIL
        sampler = optuna.samplers.TPESampler(seed=0)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        for chosen in first:
            self.study.enqueue_trial(chosen)

    def ask(self) -> dict[str, Any]:
        self.asked = self.study.ask()
        return {key: options.suggest(self.asked, key) for key, options in self.space.items()}

    def tell(self, value: float | None) -> None:
        if value is None:
            self.study.tell(self.asked, state=self.failed)
        else:
            self.study.tell(self.asked, value)


def _combinations(space: Space) -> list[dict[str, Any]]:
    """All of them, where only choices vary."""
    lists = [o.values for o in space.values() if isinstance(o, Choices)]
    if len(lists) < len(space):
        return []
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def _own_values(config: Config, space: Space) -> list[dict[str, Any]]:
    """The recipe's own values, if all of them lie in the space."""
    own: dict[str, Any] = {}
    for key, options in space.items():
        place = find_place(config.parts, key)
        value = config.parts[place.part].resolved().get(place.path[-1])
        if isinstance(options, Choices):
            same = [v for v in options.values if str(value) == v or _number(v) == value]
            if not same:
                return []
            own[key] = same[0]
        elif isinstance(value, int | float) and options.low <= value <= options.high:
            own[key] = int(value) if options.kind == "int" else float(value)
        else:
            return []
    return [own]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def best_first(done: Sequence[Tried]) -> list[Tried]:
    from fedlens.core.direction import smaller_is_better

    def rank(trial: Tried) -> float:
        if trial.value is None:
            return float("inf")
        return trial.value if smaller_is_better(trial.metric) else -trial.value

    return sorted(done, key=rank)


def write_sweep(done: Sequence[Tried], folder: Path) -> list[Path]:
    """table.md, table.json and, where matplotlib is installed, sweep.png."""
    rows = [
        {"trial": t.folder.name, **t.chosen, t.metric: t.value} for t in best_first(done)
    ]  # fmt: skip
    write_atomically(folder / "table.json", json.dumps(rows, indent=1))
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_short(row[n]) for n in names) + " |" for row in rows]
    write_atomically(folder / "table.md", "\n".join(lines) + "\n")
    written = [folder / "table.md", folder / "table.json"]
    if not is_installed("matplotlib"):
        return written
    draw_sweep(done, folder / "sweep.png")
    return [*written, folder / "sweep.png"]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def draw_sweep(done: Sequence[Tried], path: Path) -> None:
    """The metric over each of the parameters; the best trial is marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [t for t in done if t.value is not None]
    keys = list(done[0].chosen)
    figure = Figure(figsize=(4 * len(keys), 3.2), dpi=140, layout="constrained")
    best = best_first(done)[0]
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        xs = [t.chosen[key] for t in known]
        numbers = all(isinstance(x, int | float) for x in xs)
        axes.scatter(xs, [t.value for t in known], s=18, alpha=0.7)
        if best.value is not None:
            axes.scatter([best.chosen[key]], [best.value], s=60, marker="*", color="C3")
        if numbers and xs and min(xs) > 0 and max(xs) / min(xs) >= 30:
            axes.set_xscale("log")
        axes.set(xlabel=key, ylabel=best.metric)
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))

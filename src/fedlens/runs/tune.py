"""Equal chances: before the seeds that count, every method may spend the same small number of runs
on one seed that does not.

First the learning rate: the recipe's, a third of it, three times as much. Then, at the best of
them, the method's one own parameter (`Layer.tuned` lists what to try); a method that has none
spends the same number of runs on finer learning rates. The judge is the headline metric at the end.
Trials are ordinary cells in DIR/tune, kept and skipped on a rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.config.overrides import parse_overrides
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.algorithm import Layer
from fedlens.core.direction import smaller_is_better
from fedlens.runs.compare import Cell, make_cells
from fedlens.runs.folder import read_summary

SEED = 0
TRIALS = 6


@dataclass(frozen=True)
class Trial:
    chosen: Mapping[str, float]
    value: float | None  # of the headline metric, larger is better


def tune(
    recipe: str | Path,
    name: str,
    overrides: Sequence[str] | Mapping[str, Any],
    folder: Path,
    run_cell: Callable[[Cell], None],
    trials: int = TRIALS,
) -> dict[str, float]:
    """The best of `trials` settings of one algorithm, as overrides. `run_cell` runs a cell that is
    not finished.
    """
    if trials < 3:
        raise ConfigError(f"tuning takes at least 3 trials, not {trials}")
    given = dict(parse_overrides(overrides))
    base, own = tuned_parameters(make_cells(recipe, [name], [SEED], given, folder)[0].config)
    done: list[Trial] = []

    def attempt(chosen: Mapping[str, float]) -> None:
        if len(done) < trials:
            cell = make_cells(
                recipe, [name], [SEED], {**given, **chosen}, folder / "tune" / f"trial-{len(done)}"
            )[0]
            run_cell(cell)
            done.append(Trial(dict(chosen), headline_value(cell.folder)))

    key, rate = base
    for factor in (1.0, 1 / 3, 3.0):
        attempt({key: rate * factor})
    best = best_trial(done).chosen
    for value in own[1][1:] if own else ():
        attempt({**best, own[0]: value})  # type: ignore[index]
    at = best[key]
    outward = at / rate if at != rate else 3**0.25  # an edge of the first three: look beyond it
    for factor in (
        3**0.5,
        3**-0.5,
        outward,
        1 / outward,
        *(3 ** (k / 8) for k in range(1, trials)),
    ):
        attempt({**best_trial(done).chosen, key: at * factor})
    return {**({own[0]: own[1][0]} if own else {}), **best_trial(done).chosen}


def tuned_parameters(
    config: Config,
) -> tuple[tuple[str, float], tuple[str, tuple[float, ...]] | None]:
    """The base's learning rate, and the outermost layer's own parameter with the recipe's value and
    those to try besides it.
    """
    first = config.algorithm[0]
    rate = first.resolved().get("lr")
    if not isinstance(rate, (int, float)):
        raise ConfigError(f"{first.name} has no learning rate to tune")
    for part in reversed(config.algorithm):
        options: Mapping[str, tuple[float, ...]] = (
            part.cls.tuned if issubclass(part.cls, Layer) else {}
        )
        for name, values in options.items():
            now = part.resolved()[name]
            return (f"{first.name}.lr", float(rate)), (
                f"{part.name}.{name}",
                (now, *(v for v in values if v != now)),
            )
    return (f"{first.name}.lr", float(rate)), None


def headline_value(folder: Path) -> float | None:
    """The first metric at the end of a run; one that is better when smaller is turned round."""
    found = next(iter(read_summary(folder).get("metrics", {}).items()), None)
    if found is None:
        raise ConfigError("tuning needs a metric to go by: set federation.evaluate_every")
    name, value = found
    return None if value is None else -float(value) if smaller_is_better(name) else float(value)


def best_trial(done: Sequence[Trial]) -> Trial:
    """The best; among equals the earliest, which is nearest to the recipe."""
    return max(done, key=lambda t: float("-inf") if t.value is None else t.value)

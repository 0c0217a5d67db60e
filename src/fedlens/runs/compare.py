"""Several algorithms on one recipe, several seeds each: one table, one plot.

Every cell is a run folder of its own, DIR/ALGORITHM/seed-N. Finished cells are kept and skipped on
a rerun, unfinished ones go on from their checkpoint, so a comparison can be stopped and extended at
will. The spread is the sample standard deviation over seeds.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.overrides import UnknownKey, parse_overrides
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.federation import Federation
from fedlens.report import html as report
from fedlens.runs import job
from fedlens.runs.checkpoint import write
from fedlens.runs.folder import FREE, clear, holds_run, read_records


@dataclass(frozen=True)
class Cell:
    algorithm: str
    seed: int
    config: Config
    folder: Path
    chosen: Mapping[str, Any] = field(default_factory=dict)  # by tuning


def cells(
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
    free = [k for k in FREE if k != "federation.rounds"]
    if change := cell.config.difference(before, free):
        raise ConfigError(
            f"{cell.folder} was run with other settings ({change}): give another --out, or start"
            " over with --fresh"
        )
    summary = read_summary(cell.folder)
    return bool(summary) and not summary.get("interrupted")


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
        return found
    except (OSError, ValueError):
        return {}


def compare(
    todo: Sequence[Cell],
    folder: Path,
    *,
    engine: str = "simulator",
    fresh: bool = False,
    watch: Callable[[Cell], job.Watch],
    target: float | None = None,
) -> dict[str, Any]:
    """Run what is not finished, then write table.json, table.md, compare.png and report.html; the
    table.
    """
    finish(todo, engine=engine, fresh=fresh, watch=watch)
    table = summarise(todo, target)
    write(folder / "table.json", json.dumps(table, indent=1).encode())
    write(folder / "table.md", markdown(table).encode())
    draw(table, folder / "compare.png")
    report.write_comparison([cell.folder for cell in todo], folder)
    return table


def finish(
    todo: Sequence[Cell],
    *,
    engine: str = "simulator",
    fresh: bool = False,
    watch: Callable[[Cell], job.Watch],
) -> None:
    """Run what is not finished."""
    if fresh:
        for cell in todo:
            clear(cell.folder)
    finished = {id(cell): is_finished(cell) for cell in todo}
    shared: tuple[str, Federation] | None = None
    for cell in todo:
        if finished[id(cell)]:
            continue
        key = json.dumps(
            [cell.config.tables()["data"], cell.config.settings.clients, cell.seed], default=str
        )
        if shared is None or shared[0] != key:
            shared = key, job.load_federation(cell.config)
        resume = holds_run(cell.folder) and (cell.folder / "config.toml").is_file()
        setup = job.prepare(cell.config, shared[1])
        job.start(
            cell.config, cell.folder, engine=engine, resume=resume, watch=watch(cell), setup=setup
        )


def summarise(done: Sequence[Cell], target: float | None = None) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(c.algorithm for c in done):
        mine = [c for c in done if c.algorithm == name]
        summaries = [read_summary(c.folder) for c in mine]
        numbers = {k for s in summaries for k in s["metrics"]}
        order = [k for k in summaries[0]["metrics"] if k in numbers]
        rows[name] = {
            "stack": summaries[0]["algorithm"],
            "metrics": {k: spread([s["metrics"].get(k) for s in summaries]) for k in order},
            # a metric called "loss" is of the test data
            "training_loss": spread([s["loss"] for s in summaries]),
            "seconds": spread([s["seconds"] for s in summaries]),
            "bytes_up": spread([s["bytes_up"] for s in summaries]),
            "lost": sum(s["asked"] - s["heard"] for s in summaries),
            "curves": curves(records := [read_records(c.folder / "metrics.jsonl") for c in mine]),
            "chosen": dict(mine[0].chosen),
        }
        if target is not None and order:
            hits = [reached(r, order[0], target) for r in records]
            rows[name] |= {
                "rounds_to_target": spread([h[0] for h in hits]),
                "bytes_to_target": spread([h[1] for h in hits]),
            }
    return {
        "recipe": done[0].config.name,
        "seeds": sorted({c.seed for c in done}),
        "algorithms": rows,
        "target": target,
    }


def reached(
    records: Sequence[Mapping[str, Any]], metric: str, target: float
) -> tuple[float | None, float | None]:
    """The round that first showed the target, and all bytes that had moved by then; neither where
    it never did.
    """
    moved = 0.0
    for r in records:
        moved += r["bytes_down"] + r["bytes_up"]
        value = r["metrics"].get(metric)
        if value is not None and (value <= target if metric.endswith("loss") else value >= target):
            return float(r["round"] + 1), moved
    return None, None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [float(v) for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
        "values": [v if v is None else float(v) for v in values],
    }


def curves(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Mean and spread over seeds of the training loss and of every metric, at the rounds where all
    seeds have it.
    """
    found: dict[str, list[dict[int, float]]] = {}
    for k, records in enumerate(runs):
        for r in records:
            for name, value in {"training_loss": r["loss"], **r["metrics"]}.items():
                if value is not None:
                    found.setdefault(name, [{} for _ in runs])[k][r["round"] + 1] = value
    out = {}
    for name, per_run in found.items():
        at = sorted(set.intersection(*(set(p) for p in per_run)))
        points = [spread([p[t] for p in per_run]) for t in at]
        out[name] = {
            "rounds": at,
            "mean": [p["mean"] for p in points],
            "spread": [p["spread"] for p in points],
        }
    return out


def columns(table: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """(key, heading, whether larger is better) of what a table shows: the first metrics, the loss,
    time and traffic.
    """
    known = list(dict.fromkeys(k for row in table["algorithms"].values() for k in row["metrics"]))
    # Beside the mean, who does worst: the class and the client.
    worst = {f"{known[0]}_worst_class", f"client_{known[0]}_worst"} if known else set()
    metrics = known[:2] + [k for k in known[2:] if k in worst]
    metrics += [k for k in known[2:3] if len(metrics) < 3]
    reach = [
        ("rounds_to_target", f"rounds to {table.get('target') or 0:g}", False),
        ("bytes_to_target", "MB to it", False),
    ]
    fixed = [
        ("training_loss", "training loss", False),
        ("seconds", "seconds", False),
        ("bytes_up", "MB up", False),
    ]
    return (
        [(k, k, not k.endswith("loss")) for k in metrics]
        + (reach if table.get("target") is not None else [])
        + fixed
    )


def value_of(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row["metrics"].get(key) or row.get(key) or spread([])
    return found


def text_of(row: Mapping[str, Any], key: str) -> str:
    found = value_of(row, key)
    if found["mean"] is None:
        return "–"
    mean, around, known = (
        found["mean"],
        found["spread"],
        sum(v is not None for v in found["values"]),
    )
    some = (
        f" ({known} of {len(found['values'])})"
        if key.endswith("_to_target") and known < len(found["values"])
        else ""
    )
    if key in ("bytes_up", "bytes_to_target"):
        return f"{mean / 1e6:.1f}{some}"
    digits = 1 if key in ("seconds", "rounds_to_target") else 4 if abs(mean) < 10 else 2
    return f"{mean:.{digits}f}" + (f" ± {around:.{digits}f}" if around is not None else "") + some


def best(table: Mapping[str, Any], key: str, larger: bool) -> set[str]:
    known = {
        name: m
        for name, row in table["algorithms"].items()
        if (m := value_of(row, key)["mean"]) is not None
    }
    if len(known) < 2 or key in (
        "seconds",
        "bytes_up",
        "bytes_to_target",
        "rounds_to_target",
    ):  # time and traffic are for information, not a contest
        return set()
    top = (max if larger else min)(known.values())
    return {name for name, m in known.items() if m == top}


def markdown(table: Mapping[str, Any]) -> str:
    shown = columns(table)
    seeds = table["seeds"]
    lines = [
        f"{table['recipe']}, "
        + (
            f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
            if len(seeds) > 1
            else f"seed {seeds[0]}"
        ),
        "",
        "| algorithm | " + " | ".join(head for _, head, _ in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for name, row in table["algorithms"].items():
        marked = [
            f"**{text_of(row, k)}**" if name in best(table, k, larger) else text_of(row, k)
            for k, _, larger in shown
        ]
        lines.append(f"| {name} | " + " | ".join(marked) + " |")
    return "\n".join([*lines, *(["", *notes] if (notes := choices(table)) else [])]) + "\n"


def choices(table: Mapping[str, Any]) -> list[str]:
    """What tuning chose, a line for each algorithm."""
    named = {name: row["chosen"] for name, row in table["algorithms"].items() if row.get("chosen")}
    return [
        f"{name}, tuned on a seed that does not count: "
        + ", ".join(f"{k}={v:.4g}" for k, v in c.items())
        for name, c in named.items()
    ]


def draw(table: Mapping[str, Any], path: Path) -> None:
    """The headline metric over the rounds, and the training loss: a line for the mean, a band for
    the spread.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = table["algorithms"]
    headline = next(
        (k for k, _, _ in columns(table) if any(k in row["metrics"] for row in rows.values())), None
    )
    shown = [
        k
        for k in (headline, "training_loss")
        if k and any(k in row["curves"] for row in rows.values())
    ]
    figure, axes = plt.subplots(
        1,
        max(1, len(shown)),
        figsize=(5.2 * max(1, len(shown)), 3.6),
        layout="constrained",
        squeeze=False,
    )
    for ax, key in zip(axes[0], shown, strict=False):
        for k, (name, row) in enumerate(rows.items()):
            c = row["curves"].get(key)
            if not c or not c["rounds"]:
                continue
            ax.plot(
                c["rounds"],
                c["mean"],
                color=f"C{k % 10}",
                label=name,
                marker="o" if len(c["rounds"]) < 15 else None,
                markersize=3,
            )
            if all(s is not None for s in c["spread"]):
                low, high = (
                    [m + sign * s for m, s in zip(c["mean"], c["spread"], strict=True)]
                    for sign in (-1, 1)
                )
                ax.fill_between(c["rounds"], low, high, color=f"C{k % 10}", alpha=0.15, linewidth=0)
        ax.set(xlabel="round", title=key.replace("_", " "))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)

"""The table of a comparison: what each algorithm reached, as numbers, as text and as a plot. The
spread is the sample standard deviation over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.core.direction import smaller_is_better
from fedlens.core.extras import is_installed
from fedlens.runs.folder import read_records, read_summary
from fedlens.runs.significance import compare_to_best, in_sentences

if TYPE_CHECKING:
    from fedlens.runs.compare import Cell


# for information, not a contest
COSTS = ("seconds", "bytes_up", "bytes_to_target", "rounds_to_target")


def comparison_table(done: Sequence[Cell], target: float | None = None) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(c.algorithm for c in done):
        mine = [c for c in done if c.algorithm == name]
        summaries = [read_summary(c.folder) for c in mine]
        records = [read_records(c.folder / "metrics.jsonl") for c in mine]
        order = list(summaries[0]["metrics"])
        rows[name] = {
            "stack": summaries[0]["algorithm"],
            "metrics": {
                k: mean_and_spread([s["metrics"].get(k) for s in summaries]) for k in order
            },
            # a metric called "loss" is of the test data
            "training_loss": mean_and_spread([s["loss"] for s in summaries]),
            "seconds": mean_and_spread([s["seconds"] for s in summaries]),
            "bytes_up": mean_and_spread([s["bytes_up"] for s in summaries]),
            "lost": sum(s["asked"] - s["heard"] for s in summaries),
            "curves": mean_curves(records),
            "chosen": dict(mine[0].chosen),
        }
        if target is not None and order:
            spent = [spent_until(r, order[0], target) or {} for r in records]
            rows[name] |= {
                "rounds_to_target": mean_and_spread([s.get("rounds") for s in spent]),
                "bytes_to_target": mean_and_spread([s.get("bytes") for s in spent]),
            }
    return {
        "recipe": done[0].config.name,
        "seeds": sorted({c.seed for c in done}),
        "algorithms": rows,
        "loss_name": loss_name(done),
        "target": target,
        "test": headline_test(rows),
    }


def headline_test(rows: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which of them is ahead in the first metric that all of them have, and which tie."""
    metrics = [list(row["metrics"]) for row in rows.values()]
    metric = next((k for k in metrics[0] if all(k in other for other in metrics)), None)
    if metric is None:
        return None
    return compare_to_best(
        {name: row["metrics"][metric]["values"] for name, row in rows.items()}, metric
    )


def loss_name(done: Sequence[Cell]) -> str:
    """What the clients' loss is called: one word for all, or just that."""
    names = {read_summary(c.folder).get("loss_name", "training loss") for c in done}
    return names.pop() if len(names) == 1 else "loss"


def spent_until(
    records: Sequence[Mapping[str, Any]], metric: str, target: float, epochs: float = 1.0
) -> dict[str, float] | None:
    """What had been spent when the metric first reached the target: rounds, bytes (down and up),
    examples trained on, seconds. None if it never did."""
    spent = {"rounds": 0.0, "bytes": 0.0, "examples": 0.0, "seconds": 0.0}
    for r in records:
        spent["rounds"] = r["round"] + 1.0
        spent["bytes"] += r["bytes_down"] + r["bytes_up"]
        spent["examples"] += epochs * sum(c.get("examples", 0.0) for c in r["clients"].values())
        spent["seconds"] += r["seconds"]
        value = r["metrics"].get(metric)
        if value is not None and (
            value <= target if smaller_is_better(metric) else value >= target
        ):
            return spent
    return None


def mean_and_spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [float(v) for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
        "values": [v if v is None else float(v) for v in values],
    }


def mean_curves(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
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
        points = [mean_and_spread([p[t] for p in per_run]) for t in at]
        out[name] = {
            "rounds": at,
            "mean": [p["mean"] for p in points],
            "spread": [p["spread"] for p in points],
        }
    return out


def table_columns(table: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """(key, heading, whether larger is better) of what a table shows: the first metrics, the loss,
    time and traffic.
    """
    known = list(dict.fromkeys(k for row in table["algorithms"].values() for k in row["metrics"]))
    # Beside the mean: clients with their own models, and who does worst, the class and the client.
    head = known[0].removeprefix("client_") if known else ""
    beside = {f"{head}_worst_class", f"client_{head}", f"client_{head}_worst"}
    metrics = known[:2] + [k for k in known[2:] if k in beside]
    metrics += [k for k in known[2:3] if len(metrics) < 3]
    reach = [
        ("rounds_to_target", f"rounds to {table.get('target') or 0:g}", False),
        ("bytes_to_target", "MB to it", False),
    ]
    fixed = [
        ("training_loss", table.get("loss_name", "training loss"), False),
        ("seconds", "seconds", False),
        ("bytes_up", "MB up", False),
    ]
    return (
        [(k, k, not smaller_is_better(k)) for k in metrics]
        + (reach if table.get("target") is not None else [])
        + fixed
    )


def cell_value(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row["metrics"].get(key) or row.get(key) or mean_and_spread([])
    return found


def cell_text(row: Mapping[str, Any], key: str) -> str:
    found = cell_value(row, key)
    if found["mean"] is None:
        return "–"
    mean, around = found["mean"], found["spread"]
    known, seeds = sum(v is not None for v in found["values"]), len(found["values"])
    some = f" ({known} of {seeds})" if key.endswith("_to_target") and known < seeds else ""
    if key in ("bytes_up", "bytes_to_target"):
        return f"{mean / 1e6:.1f}{some}"
    digits = 1 if key in ("seconds", "rounds_to_target") else 4 if abs(mean) < 10 else 2
    return f"{mean:.{digits}f}" + (f" ± {around:.{digits}f}" if around is not None else "") + some


def best_algorithms(table: Mapping[str, Any], key: str, larger: bool) -> set[str]:
    known = {
        name: m
        for name, row in table["algorithms"].items()
        if (m := cell_value(row, key)["mean"]) is not None
    }
    if len(known) < 2 or key in COSTS:
        return set()
    if (test := table.get("test")) and test["metric"] == key:
        ties = (n for n, row in test["rivals"].items() if row["verdict"] == "tie")
        return {test["best"], *ties}
    top = (max if larger else min)(known.values())
    return {name for name, m in known.items() if m == top}


def table_markdown(table: Mapping[str, Any]) -> str:
    shown = table_columns(table)
    seeds = ", ".join(map(str, table["seeds"]))
    several = len(table["seeds"]) > 1
    lines = [
        f"{table['recipe']}, "
        + (f"mean ± standard deviation over seeds {seeds}" if several else f"seed {seeds}"),
        "",
        "| algorithm | " + " | ".join(head for _, head, _ in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for name, row in table["algorithms"].items():
        texts = []
        for key, _, larger in shown:
            bold = "**" if name in best_algorithms(table, key, larger) else ""
            texts.append(bold + cell_text(row, key) + bold)
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    for notes in (in_sentences(table.get("test")), tuned_values(table)):
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def tuned_values(table: Mapping[str, Any]) -> list[str]:
    """What tuning chose, a line for each algorithm."""
    named = {name: row["chosen"] for name, row in table["algorithms"].items() if row.get("chosen")}
    return [
        f"{name}, tuned on a seed that does not count: "
        + ", ".join(f"{k}={v:.4g}" for k, v in c.items())
        for name, c in named.items()
    ]


def draw_comparison(table: Mapping[str, Any], path: Path) -> None:
    """The headline metric over the rounds, and the training loss: a line for the mean, a band for
    the spread. Without matplotlib there is none; the report has the same curves.
    """
    if not is_installed("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = table["algorithms"]
    measured = {k for row in rows.values() for k in row["metrics"]}
    headline = [k for k, _, _ in table_columns(table) if k in measured][:1]
    drawable = {k for row in rows.values() for k in row["curves"]}
    shown = [k for k in (*headline, "training_loss") if k in drawable]
    width = max(1, len(shown))
    figure, axes = plt.subplots(
        1, width, figsize=(5.2 * width, 3.6), layout="constrained", squeeze=False
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
        title = table.get("loss_name") if key == "training_loss" else None
        ax.set(xlabel="round", title=title or key.replace("_", " "))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)

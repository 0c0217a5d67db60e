"""Figures and tables for papers, from run folders alone: vector or bitmap, a column wide, in
colours that everybody can tell apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.core.direction import smaller_is_better
from fedlens.report.page_data import json_safe, run_view
from fedlens.report.reading import (
    RunFolder,
    as_table,
    distinct_names,
    final_metrics,
    read_run,
    runs_in,
)

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#444444")
DASHES = ("-", "--", "-.", ":")
_FORMATS = ("pdf", "png", "svg", "eps")
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
}
_WIDTH = 3.4  # inches: one column of a two-column paper


def write_figures(
    folder: Path | str | Sequence[Path | str],
    kinds: Sequence[str] = ("pdf", "png"),
    out: Path | str | None = None,
) -> list[Path]:
    """Publication-ready figures and tables of one run or several, in `folder/figures` unless `out`
    says otherwise.
    """
    many = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    target = Path(out) if out else many[0] / "figures"
    return draw_figures([read_run(one) for path in many for one in runs_in(path)], kinds, target)


def draw_figures(runs: Sequence[RunFolder], kinds: Sequence[str], out: Path) -> list[Path]:
    """Everything that these runs have something to show for. Returns the files written."""
    kinds = [kind.strip().lower().lstrip(".") for kind in kinds if kind.strip()]
    if wrong := [kind for kind in kinds if kind not in _FORMATS]:
        raise ValueError(
            f"There is no figure kind {wrong[0]!r}: choose from {', '.join(_FORMATS)}."
        )
    if not any(run.rounds for run in runs):
        raise ValueError(
            f"{runs[0].path} has no rounds to draw." if runs else "There are no runs to draw."
        )
    out.mkdir(parents=True, exist_ok=True)
    views = [run_view(run, str) for run in runs]
    labels = run_labels(runs)
    written = [
        path
        for name, paint in _plots(views, labels, seed_groups(runs))
        for path in _save(name, paint, kinds, out)
    ]
    for k, entry in enumerate(p for v in views for p in v["pictures"] if p["kind"] == "compare"):
        written += _row_of_images(entry, f"picture-{k:02d}", kinds, out)
    rows = result_rows(runs, labels)
    for name, text in (("results.md", markdown_table(rows)), ("results.tex", latex_table(rows))):
        (out / name).write_text(text)
        written.append(out / name)
    return written


def run_labels(runs: Sequence[RunFolder]) -> list[str]:
    """What tells the runs apart: their stacks, or else their folders."""
    stacks = [" + ".join(run.title["algorithm"]) for run in runs]
    if len(runs) > 1 and len(set(stacks)) == len(stacks) and all(stacks):
        return stacks
    return distinct_names([run.path.resolve() for run in runs])


def seed_groups(runs: Sequence[RunFolder]) -> list[list[int]]:
    """Finished runs that differ only in their seed belong together."""
    found: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        rest = {
            **run.config,
            "federation": {**as_table(run.config.get("federation")), "seed": None},
        }
        key = repr(rest) if run.config and run.status == "finished" else str(k)
        found.setdefault(key, []).append(k)
    return list(found.values())


def result_rows(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[list[str]]:
    """A header and a row for each method: runs that differ only in their seed become mean ±
    standard deviation.
    """
    finals = [final_metrics(run) for run in runs]
    columns = list(
        dict.fromkeys(name for final in finals for name in final if not name.endswith("_spread"))
    )
    rows = [["method", "runs", *columns]]
    means: list[list[float | None]] = []
    for members in seed_groups(runs):
        stack = " + ".join(runs[members[0]].title["algorithm"])
        values = [[finals[k][name] for k in members if name in finals[k]] for name in columns]
        means.append([statistics.fmean(v) if v else None for v in values])
        method = stack if len(members) > 1 and stack else labels[members[0]]
        rows.append([method, str(len(members)), *map(_spread, values)])
    for c, name in enumerate(columns):
        known = [x for m in means if (x := m[c]) is not None]
        if len(known) < 2:
            continue
        best = max(known) if higher_is_better(name) else min(known)
        for row, m in zip(rows[1:], means):
            if m[c] == best:
                row[c + 2] = f"**{row[c + 2]}**"
    return rows


def higher_is_better(name: str) -> bool:
    return not smaller_is_better(name)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex_table(rows: Sequence[Sequence[str]]) -> str:
    """For `\\usepackage{booktabs}`."""

    def cell(text: str) -> str:
        bold, text = text.startswith("**"), text.strip("*")
        for plain, escaped in (
            ("_", "\\_"),
            ("%", "\\%"),
            ("&", "\\&"),
            ("#", "\\#"),
            ("±", "$\\pm$"),
            ("–", "--"),
        ):
            text = text.replace(plain, escaped)
        return f"\\textbf{{{text}}}" if bold else text

    head, *body = [" & ".join(map(cell, row)) + " \\\\" for row in rows]
    return "\n".join(
        [
            f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
            "\\toprule",
            head,
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = statistics.fmean(values)
    places = 4 if abs(mean) < 10 else 2
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{mean:.{places}f}{spread}" if math.isfinite(mean) else "–"


def _plots(
    views: Sequence[dict[str, Any]], labels: Sequence[str], together: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Name and painter of every figure."""

    def curves(lines: Sequence[Any], title: str) -> Callable[[Any], None]:
        stacks = [" + ".join(views[members[0]]["title"]["algorithm"]) for members in together]
        shown = [
            stack if len(members) > 1 and stack else labels[members[0]]
            for members, stack in zip(together, stacks)
        ]
        return lambda axes: _curves(
            axes, [_merged([lines[k] for k in members]) for members in together], shown, title
        )

    yield (
        "training_loss",
        curves([(v["curves"]["round"], v["curves"]["loss"]) for v in views], "training loss"),
    )
    for name in dict.fromkeys(
        n for v in views for n in v["curves"]["metrics"] if not n.endswith("_spread")
    ):
        points = [tuple(zip(*v["curves"]["metrics"].get(name, []))) or ((), ()) for v in views]
        yield name, curves(points, "test loss" if name == "loss" else name.replace("_", " "))
    yield "bytes", curves([_traffic(v) for v in views], "traffic so far (MB)")
    for v, label in zip(views, labels):
        end = f"-{label}" if len(views) > 1 else ""
        if v["federation"]["labels"]:
            yield f"holdings{end}", partial(_holdings, federation=v["federation"])
        if any(row[1] is not None for rows in v["clients"]["heard"] for row in rows):
            yield f"weights{end}", partial(_weights, clients=v["clients"])


def _merged(lines: Sequence[Any]) -> tuple[list[float], list[float], list[float]]:
    """Rounds that all seeds have, the mean there and the standard deviation."""
    known = [{x: y for x, y in zip(*line) if y is not None} for line in lines]
    common = sorted(set.intersection(*(set(one) for one in known)))
    values = [[one[x] for one in known] for x in common]
    return (
        common,
        [statistics.fmean(v) for v in values],
        [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values],
    )


def _save(
    name: str, paint: Callable[[Any], None], kinds: Sequence[str], out: Path
) -> Iterator[Path]:
    with _figure() as (figure, axes):
        paint(axes)
        yield from _write(figure, name, kinds, out)


def _write(figure: Any, name: str, kinds: Sequence[str], out: Path) -> Iterator[Path]:
    for kind in kinds:
        path = out / f"{_file(name)}.{kind}"
        figure.savefig(path)
        yield path


@contextmanager
def _figure(columns: int = 1, height: float = _WIDTH * 0.66) -> Iterator[tuple[Any, Any]]:
    """Own figure, own style: whatever the caller does with matplotlib stays as it is, and no
    display is needed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH if columns == 1 else 2.1 * columns, height))
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(1, columns)


def _curves(axes: Any, lines: Sequence[Any], labels: Sequence[str], title: str) -> None:
    for k, ((x, y, spread), label) in enumerate(zip(lines, labels)):
        look = {
            "color": COLOURS[k % len(COLOURS)],
            "linestyle": DASHES[k // len(COLOURS) % 4],
            "markersize": 2.5,
        }
        axes.plot(x, y, label=label, marker="o" if len(x) <= 12 else None, **look)
        if any(spread):
            axes.fill_between(
                x,
                [a - b for a, b in zip(y, spread)],
                [a + b for a, b in zip(y, spread)],
                color=look["color"],
                alpha=0.15,
                linewidth=0,
            )
    axes.set(xlabel="round", ylabel=title)
    _whole(axes.xaxis)
    if len(lines) > 1:
        axes.legend()


def _whole(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _traffic(v: dict[str, Any]) -> tuple[list[int], list[float]]:
    total, so_far = 0.0, []
    for down, up in zip(v["curves"]["bytes_down"], v["curves"]["bytes_up"]):
        total += ((down or 0) + (up or 0)) * v["curves"]["step"] / 1e6
        so_far.append(total)
    return v["curves"]["round"], so_far


def _holdings(axes: Any, federation: dict[str, Any]) -> None:
    counts, classes = federation["labels"], federation["classes"]
    top = max(max(row) for row in counts) or 1
    cells = [(c, k, 60 * n / top) for c, row in enumerate(counts) for k, n in enumerate(row) if n]
    axes.scatter(
        [x for x, _, _ in cells],
        [y for _, y, _ in cells],
        s=[s for _, _, s in cells],
        color=COLOURS[0],
        linewidths=0,
    )
    axes.set(xlabel="client", ylabel="class")
    _whole(axes.xaxis)
    if len(classes) == len(counts[0]) <= 25:
        axes.set_yticks(range(len(classes)), [str(c) for c in classes])
    axes.invert_yaxis()


def _weights(axes: Any, clients: dict[str, Any]) -> None:
    import numpy as np

    place = {id: k for k, id in enumerate(clients["ids"])}
    grid = np.full((len(place), len(clients["rounds"])), np.nan)
    for c, rows in enumerate(clients["heard"]):
        total = sum(row[1] or 0 for row in rows) or 1
        for id, weight, *_ in rows:
            grid[place[id], c] = np.nan if weight is None else 100 * weight / total
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    lost = [(c, place[id]) for c, who in enumerate(clients["lost"]) for id in who]
    axes.scatter(
        [x for x, _ in lost],
        [y for _, y in lost],
        marker="x",
        s=4,
        color=COLOURS[1],
        linewidths=0.6,
    )
    axes.set(
        xlabel="round" if clients["step"] == 1 else f"every {clients['step']}th round",
        ylabel="client",
    )
    every = max(1, math.ceil(len(place) / 10))
    axes.set_yticks(range(0, len(place), every), [str(id) for id in clients["ids"][::every]])
    _whole(axes.xaxis)
    axes.figure.colorbar(image, ax=axes, label="share of the mean (%)", shrink=0.9)


def _row_of_images(
    entry: dict[str, Any], name: str, kinds: Sequence[str], out: Path
) -> Iterator[Path]:
    """A comparison as papers show it: the images side by side, and under the colour bar what the
    result still gets wrong.
    """
    import numpy as np
    from PIL import Image

    images = [
        np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
        for path in entry["images"]
    ]
    labels = [*entry["labels"], *[""] * len(images)][: len(images)]
    result = images[-2] if len(images) > 2 else images[0]
    same = len(images) > 1 and result.shape == images[-1].shape
    with _figure(len(images) + same, 2.1 * images[0].shape[0] / images[0].shape[1]) as (
        figure,
        axes,
    ):
        for spot, pixels, label in zip(axes, images, labels):
            spot.imshow(pixels)
            spot.set_title(label)
        if same:
            error = np.abs(result - images[-1]).mean(2)
            shown = axes[-1].imshow(
                error, cmap="inferno", vmin=0, vmax=max(4 / 255, float(np.quantile(error, 0.995)))
            )
            axes[-1].set_title("residual")
            figure.colorbar(shown, ax=axes[-1], shrink=0.8)
        for spot in axes:
            spot.set_axis_off()
        yield from _write(figure, name, kinds, out)


def _file(name: str) -> str:
    return (
        "".join(c if c.isalnum() or c in "-_" else "-" for c in str(json_safe(name))).strip("-")
        or "figure"
    )

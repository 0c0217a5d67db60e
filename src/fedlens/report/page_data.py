"""What a page shows about a run, as plain JSON: `run_view` is all of it, `run_card` a line in the
board's list. `page/view.js` draws it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlens.core.direction import smaller_is_better
from fedlens.core.facts import remarks
from fedlens.report.reading import (
    RunFolder,
    as_list,
    as_number,
    as_table,
    final_metrics,
    image_digest,
    last_change,
    printable,
    read_overview,
    rounds_done,
)
from fedlens.trust.departures import Departures, find_ledgers, read_departures

CELLS = 200_000  # client-rounds a page can hold; longer runs show every k-th round
LEDGERS = 500  # clients whose ledgers a page adds up
POINTS = 2_000  # rounds a curve can hold
DRAWN = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]{1,400000}")
UNEVALUATED = "left out of the evaluation: "


def reference_lines(summary: Mapping[str, Any]) -> list[str]:
    """What was reached without learning, a line each; then, in words, what the run's headline
    metric is not better than.
    """
    metrics = as_table(summary.get("metrics"))
    lines, beaten = [], []
    chief = next(iter(metrics), "")
    own = as_number(metrics.get(chief))
    for name, found in as_table(summary.get("references")).items():
        known = {k: v for k, v in as_table(found).items() if as_number(v) is not None}
        lines.append(f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in list(known.items())[:3]))
        other = as_number(as_table(found).get(chief))
        if own is None or other is None:
            continue
        if not (own < other if smaller_is_better(chief) else own > other):
            beaten.append(f"{name} ({other:.3g})")
    if beaten:
        lines.append(f"{chief} {own:.3g} is not better than {' and '.join(beaten)}")
    return lines


def privacy_lines(
    summary: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """What a run cost in differential privacy, in full, and why it ended early if it did. rounds:
    the last of them says it while a run is under way."""
    told = as_table(summary.get("privacy")).get("sentence")
    if told is None and rounds:
        told = rounds[-1].get("privacy")
    lines = [f"Differential privacy: {printable(told)}"] if isinstance(told, str) else []
    stopped = summary.get("stopped")
    return [*lines, printable(stopped)] if isinstance(stopped, str) and stopped else lines


def run_view(run: RunFolder, source: Callable[[Path], str]) -> dict[str, Any]:
    """What the page draws, as plain JSON. `source` turns an image file into what `<img src>` gets:
    a data URI or an address.
    """
    seen: dict[str, Any] = {
        "name": printable(run.path.resolve().name),
        "status": run.status,
        "problems": list(run.problems),
        "title": run.title,
        "done": rounds_done(run.rounds),
        "final": final_metrics(run),
        "curves": _curves(run.rounds),
        "clients": _clients(run.rounds),
        "lost": _reasons(run.rounds),
        "left": _left(run.path),
        "federation": _holdings(run.federation),
        "pictures": _pictures(run.pictures, source),
        "config": run.config_text,
        "settings": flat_settings(run.config),
        "summary": run.summary,
        "references": [*reference_lines(run.summary), *privacy_lines(run.summary, run.rounds)],
        "audit": _audit(run.path / "audit.json"),
    }
    cleaned: dict[str, Any] = json_safe(seen)
    return cleaned


def _audit(path: Path) -> dict[str, Any]:
    """What `fedlens audit` left, as far as it is what it should be: a damaged file costs its
    section only.
    """
    try:
        found = as_table(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
    rows = [
        {
            **{k: printable(str(row.get(k, ""))) for k in ("attack", "protection", "measure")},
            **{k: as_number(row.get(k)) for k in ("score", "baseline")},
        }
        for row in map(as_table, as_list(found.get("rows")))
    ]
    texts = {k: printable(str(found.get(k, ""))) for k in ("headline", "caution")}
    picture = as_table(found.get("picture"))
    images = [x for x in map(str, as_list(picture.get("images"))) if DRAWN.fullmatch(x)]
    shown = {"label": printable(str(picture.get("label", ""))), "images": images[:3]}
    return {**texts, "rows": rows, "picture": shown} if rows else {}


def run_card(path: Path, name: str) -> dict[str, Any]:
    """A line in the board's list."""
    run = read_overview(path)
    if run.status in ("empty", "not a run"):
        return _bare(path, name, run.status)
    return json_safe(  # type: ignore[no-any-return]
        {
            "name": name,
            "status": run.status,
            "title": run.title,
            "settings": flat_settings(run.config),
            "metrics": final_metrics(run),
            "loss": [r.get("loss") for r in run.rounds],
            "done": rounds_done(run.rounds),
            "seconds": run.summary.get("seconds"),
            "changed": last_change(path),
        }
    )


def broken_card(path: Path, name: str, reason: str) -> dict[str, Any]:
    """The line of a folder that cannot be shown, with the reason."""
    return {**_bare(path, name, "broken"), "problem": reason}


def _bare(path: Path, name: str, status: str) -> dict[str, Any]:
    return {
        "name": name,
        "status": status,
        "title": {},
        "metrics": {},
        "loss": [],
        "done": 0,
        "changed": last_change(path),
    }


def _curves(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns over rounds. Metrics have points only where they were evaluated."""
    step = max(1, math.ceil(len(rounds) / POINTS))
    thin = [r for k, r in enumerate(rounds) if k % step == 0 or k == len(rounds) - 1]
    columns = ("round", "seconds", "loss", "bytes_down", "bytes_up", "asked", "heard", "refused")
    curves: dict[str, Any] = {name: [as_number(r.get(name)) for r in thin] for name in columns}
    curves["lost"] = [len(as_list(r.get("lost"))) for r in thin]
    return curves | {
        "metrics": _by_name(rounds, "metrics"),
        "state": _by_name(rounds, "state"),
        "step": step,
    }


def _by_name(rounds: Sequence[Mapping[str, Any]], column: str) -> dict[str, list[list[float]]]:
    """[round, value] pairs of every number in a column, thinned like the curves but never without
    the last.
    """
    found: dict[str, list[list[float]]] = {}
    for r in rounds:
        for name, value in as_table(r.get(column)).items():
            if as_number(value) is not None:
                found.setdefault(name, []).append([int(r["round"]), value])
    return {k: v[-1 :: -max(1, math.ceil(len(v) / POINTS))][::-1] for k, v in found.items()}


def _clients(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who took part, sparse: for each round shown, the client and the values of `columns` of those
    heard, and the ids of those lost. columns: weight, loss, examples, and whatever else the layers
    of the run wanted recorded.
    """
    cells = sum(len(as_table(r.get("clients"))) + len(as_list(r.get("lost"))) for r in rounds)
    step = max(1, math.ceil(cells / CELLS))
    shown = rounds[::step]
    clients = [as_table(r.get("clients")) for r in shown]
    recorded = (str(name) for table in clients for row in table.values() for name in as_table(row))
    columns = list(dict.fromkeys(["weight", "loss", "examples", *recorded]))
    heard = []
    for table in clients:
        rows = [(_id(id), as_table(row)) for id, row in table.items()]
        heard.append([[id, *(as_number(row.get(name)) for name in columns)] for id, row in rows])
    lost = [[_id(as_table(x).get("client")) for x in as_list(r.get("lost"))] for r in shown]
    ids = {row[0] for rows in heard for row in rows} | {i for row in lost for i in row}
    return {
        "ids": sorted(ids, key=_order),
        "rounds": [r["round"] for r in shown],
        "columns": columns,
        "heard": heard,
        "lost": lost,
        "step": step,
    }


def _reasons(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Why replies were lost, in training or in evaluation: each reason once, how often, and which
    clients.
    """
    who: dict[str, Counter[Any]] = {}
    for r in rounds:
        for column, before in (("lost", ""), ("unevaluated", UNEVALUATED)):
            for entry in map(as_table, as_list(r.get(column))):
                who.setdefault(before + _reason(entry.get("reason")), Counter())[
                    _id(entry.get("client"))
                ] += 1
    often = sorted(who.items(), key=lambda item: -item[1].total())[:20]
    return [
        {"reason": k, "times": v.total(), "clients": sorted(v, key=_order)[:50]} for k, v in often
    ]


def _left(run: Path) -> dict[str, Any]:
    """What left each client, by its ledger; nothing where none was kept."""
    ledgers = find_ledgers(run / "ledger") if (run / "ledger").is_dir() else {}
    shown = list(ledgers.items())[:LEDGERS]
    found = {name: _departures(path, path.stat().st_size) for name, path in shown}
    trees, numbers = dict[str, list[int]](), dict[str, int]()
    for left in found.values():
        for name, item in left.trees.items():
            before = trees.get(name, [0, 0, 0])
            trees[name] = [before[0] + item.times, before[1] + item.bytes, item.arrays]
        for name, item in [*left.scalars.items(), *left.said.items()]:
            numbers[name] = numbers.get(name, 0) + item.times
    return {
        "clients": [
            [_id(name), x.whole.times, x.whole.bytes, x.whole.began, x.whole.ended]
            for name, x in found.items()
        ],
        "trees": [[name, *row] for name, row in trees.items()],
        "numbers": [[name, times] for name, times in numbers.items()],
        "protection": sorted({name for left in found.values() for name in left.protection}),
        "readable": sum(left.readable for left in found.values()),
        "hidden": len(ledgers) - len(found),
    }


@lru_cache(maxsize=4 * LEDGERS)
def _departures(path: Path, size: int) -> Departures:
    """A ledger only grows: read again when it has."""
    return read_departures(path)


def _reason(value: Any) -> str:
    words = str(value or "no reason given").strip().split("\n")[-1]
    return words if len(words) <= 160 else words[:159] + "…"


def _id(value: Any) -> int | str:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _order(id: int | str) -> tuple[bool, int | str]:
    return (isinstance(id, str), id)


def _holdings(federation: Mapping[str, Any]) -> dict[str, Any]:
    """Who holds what: sizes, counts of labels, names. What a source tells about its split stands
    under `facts`.
    """
    described = {**as_table(federation.get("facts")), **federation}
    sizes = [as_number(s) or 0 for s in as_list(described.get("sizes", described.get("examples")))]
    labels = [
        [c if isinstance(c, int | float) else 0 for c in as_list(row)]
        for row in as_list(described.get("labels"))
    ]
    if len({len(row) for row in labels}) > 1 or not all(labels):
        labels = []
    unusable = [[str(x) for x in as_list(described.get(key))] for key in ("skipped", "notes")]
    names, classes = (as_list(described.get(key)) for key in ("names", "classes"))
    held = {
        "sizes": sizes if any(sizes) else [sum(row) for row in labels],
        "labels": labels,
        "names": names,
        "classes": classes,
    }
    return held | {"remarks": remarks(unusable[0], unusable[1])}


def _pictures(
    pictures: Sequence[Mapping[str, Any]], source: Callable[[Path], str]
) -> list[dict[str, Any]]:
    """Results first, then what explains them."""
    return [
        {
            "caption": str(p.get("caption", "")),
            "kind": p.get("kind", "image"),
            "images": [source(path) for path in p["paths"]],
            "ids": [image_digest(path) for path in p["paths"]],
            "labels": [str(x) for x in as_list(p.get("labels"))],
            "facts": as_table(p.get("facts")),
            "ranges": as_list(p.get("ranges")),
        }
        for p in sorted(pictures, key=lambda p: p.get("kind") not in ("compare", "strip"))
    ]


def flat_settings(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted settings of a config, the way they are written as overrides; an algorithm's part is
    named by its `name`.
    """
    flat: dict[str, str] = {}
    for key, item in value.items():
        where = f"{prefix}{key}"
        if isinstance(item, dict):
            flat |= flat_settings(item, f"{where}.")
        elif isinstance(item, list) and item and all(isinstance(x, dict) for x in item):
            flat[where] = " + ".join(str(x.get("name", "?")) for x in item)
            for part in item:
                rest = {k: v for k, v in part.items() if k != "name"}
                flat |= flat_settings(rest, f"{where}.{part.get('name', '?')}.")
        else:
            flat[where] = json.dumps(item, default=str)
    return flat


def json_safe(value: Any) -> Any:
    """JSON that every browser reads: no NaN, no infinity, five digits. Whatever else is in there
    becomes text.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return (
            (float(f"{value:.5g}") if abs(value) < 1e5 else round(value, 1))
            if math.isfinite(value)
            else None
        )
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    return str(value)

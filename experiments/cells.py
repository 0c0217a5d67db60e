"""Cells: what was measured for one row of a table with one seed, a JSON line each in cells.jsonl.

The first line of a file is `{"shared": {...}}`: the settings and versions that most cells have. A
cell names those that are other, with null for what it does not have. Where a table puts methods
together that have little in common, each has such a line of its own, `{"shared": {...}, "method":
...}`. A cell that is there is not computed again; where it stands twice, the later line counts.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedlens.core.files import write_atomically

Cell = dict[str, Any]
SHARED = ("settings", "versions")


class Cells:
    """A file of cells. identity: the keys that tell one cell from another. shared_by: the one whose
    values have settings in common, if not all cells do."""

    def __init__(self, path: Path, *identity: str, shared_by: str = "") -> None:
        self.path, self.identity, self.shared_by = path, identity, shared_by

    def read(self, **wanted: Any) -> list[Cell]:
        """In the order of their identities; those that have these values, None for no such key."""
        cells = self._all().values()
        return [c for c in cells if all(c.get(key) == value for key, value in wanted.items())]

    def find(self, cell: Cell) -> Cell | None:
        """The finished cell with the identity of this one."""
        return self._all().get(self._key(cell))

    def append(self, cell: Cell) -> None:
        """A whole line at the end, also where a killed run left half a line there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
            shared, _ = self._parse(text)
            file.write(_line(_without(cell, self._usual(cell, shared))))
            file.flush()

    def tidy(self) -> None:
        """The file written anew: sorted, each cell once, what most share on the first lines.
        Not while another process appends to it.
        """
        write_atomically(self.path, self.tidied())

    def tidied(self) -> bytes:
        groups: dict[str, list[Cell]] = {}
        for cell in self._all().values():
            groups.setdefault(self._group(cell), []).append(cell)
        head, lines = [], []
        for group, cells in groups.items():
            shared = _most_common(cells)
            named = {self.shared_by: json.loads(group)} if self.shared_by else {}
            head += [{"shared": shared, **named}] if shared else []
            lines += [_without(cell, shared) for cell in cells]
        return b"".join(map(_line, [*head, *lines]))

    def _all(self) -> dict[str, Cell]:
        if not self.path.exists():
            return {}
        shared, lines = self._parse(self.path.read_bytes())
        cells = [_with(line, self._usual(line, shared)) for line in lines]
        found = {self._key(cell): cell for cell in cells}
        return {key: found[key] for key in sorted(found)}

    def _key(self, cell: Cell) -> str:
        return json.dumps([cell.get(name) for name in self.identity])

    def _group(self, cell: Cell) -> str:
        return json.dumps(cell.get(self.shared_by))

    def _usual(self, cell: Cell, shared: Mapping[str, Cell]) -> Cell:
        """What its group shares; what all do, where that has no line of its own."""
        return shared.get(self._group(cell), shared.get(self._group({}), {}))

    def _parse(self, text: bytes) -> tuple[dict[str, Cell], list[Cell]]:
        """What each group shares, and the lines of cells; half a last line is none."""
        whole = text[: text.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        shared = {self._group(line): line["shared"] for line in lines if "shared" in line}
        return shared, [line for line in lines if "shared" not in line]


def compute(
    cells: Cells,
    jobs: Iterable[tuple[Cell, Callable[[], Cell]]],
    minutes: float,
    described: Callable[[Cell], str],
) -> None:
    """The jobs, each with the identity of its cell, in the order given, until the next one might
    end after the budget: as long as the longest so far. `described` is what is printed of a cell.
    """
    began, longest = time.perf_counter(), 0.0
    for cell, make in jobs:
        if cells.find(cell):
            continue
        name = ", ".join(map(str, cell.values()))
        if time.perf_counter() - began + longest > 60 * minutes:
            print(f"budget spent before {name}")
            return
        start = time.perf_counter()
        done = make()
        longest = max(longest, time.perf_counter() - start)
        cells.append(done)
        print(f"{name}: {described(done)}", flush=True)


def flat_settings(tables: Mapping[str, Any]) -> Cell:
    """A resolved config as `data.alpha`, `algorithm.FedAvg.lr`, ..., without what a cell says
    elsewhere: the seed, and what the recipe is about.
    """
    out = {"stack": " + ".join(part["name"] for part in tables["algorithm"])}
    algorithm = {part["name"]: part for part in tables["algorithm"]}
    _flatten({**tables, "algorithm": algorithm}, "", out)
    return {key: value for key, value in out.items() if key not in ("about", "federation.seed")}


def versions() -> Cell:
    import torch

    return {"torch": str(torch.__version__)}


def _flatten(tables: Mapping[str, Any], prefix: str, out: Cell) -> None:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            _flatten(value, f"{prefix}{key}.", out)
        else:
            out[f"{prefix}{key}"] = value


def _line(cell: Cell) -> bytes:
    return json.dumps(cell, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _with(line: Cell, shared: Cell) -> Cell:
    cell = dict(line)
    for name in SHARED:
        if name in line or name in shared:
            both = shared.get(name, {}) | line.get(name, {})
            cell[name] = {key: value for key, value in both.items() if value is not None}
    return cell


def _without(cell: Cell, shared: Cell) -> Cell:
    line = {name: value for name, value in cell.items() if name not in SHARED}
    for name in SHARED:
        own, usual = cell.get(name, {}), shared.get(name, {})
        other = {k: own.get(k) for k in sorted(own | usual) if not _same(own.get(k), usual.get(k))}
        if other:
            line[name] = other
    return line


def _same(a: Any, b: Any) -> bool:
    """To the type: 1 is not 1.0 and not true."""
    return json.dumps(a) == json.dumps(b)


def _most_common(cells: list[Cell]) -> Cell:
    shared: Cell = {}
    for name in SHARED:
        for key in sorted({key for cell in cells for key in cell.get(name, {})}):
            counted = Counter(json.dumps(cell.get(name, {}).get(key)) for cell in cells)
            value = json.loads(counted.most_common(1)[0][0])
            if value is not None:
                shared.setdefault(name, {})[key] = value
    return shared

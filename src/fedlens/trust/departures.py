"""What left, for people: ledgers read and added up. Whether they are true is `trust.verify`'s
question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.trust.ledger import LEDGER_FILE


@dataclass
class Item:
    """One tree, number or remark by its name. bytes: of a tree, all times together. arrays: in one
    tree. first, last: rounds. began, ended: times.
    """

    times: int = 0
    bytes: int = 0
    arrays: int = 0
    first: int | None = None
    last: int | None = None
    began: str = ""
    ended: str = ""

    def seen(
        self, line: Mapping[str, Any], bytes: int = 0, arrays: int = 0, times: int = 1
    ) -> None:
        self.times += times
        self.bytes += bytes
        self.arrays = max(self.arrays, arrays)
        when, round = str(line["time"]), line["round"]
        self.began = min(self.began or when, when)
        self.ended = max(self.ended, when)
        if round is not None:
            self.first = round if self.first is None else min(self.first, round)
            self.last = round if self.last is None else max(self.last, round)


@dataclass
class Departures:
    """Everything a ledger tells: how often what left, in which rounds, between which times."""

    whole: Item = field(default_factory=Item)
    kinds: dict[str, Item] = field(default_factory=dict)
    trees: dict[str, Item] = field(default_factory=dict)
    scalars: dict[str, Item] = field(default_factory=dict)
    said: dict[str, Item] = field(default_factory=dict)
    overhead: Item = field(default_factory=Item)  # of requests: all that is not payload
    jobs: dict[str, str] = field(default_factory=dict)  # job -> hash of its recipe
    # bytes, by the hash of the recipe and the round: what a server calls a job limits nothing
    rounds: dict[tuple[str, int | None], int] = field(default_factory=dict)
    readable: int = 0  # replies that left without a layer that hides single ones
    protection: set[str] = field(default_factory=set)
    countersigned: int = 0  # the last line that the server has countersigned
    clients: set[int] = field(default_factory=set)
    # what replies cost in differential privacy, as JSON, and how often
    charges: dict[str, int] = field(default_factory=dict)
    odd: int = 0  # lines that are not a ledger's; `trust.verify` says more

    def add(self, line: Mapping[str, Any]) -> None:
        kind = str(line["kind"])
        if kind == "key":
            return
        size, round = int(line["bytes"]), line["round"]
        self.clients.add(int(line["client"]))
        self.whole.seen(line, size)
        self.kinds.setdefault(kind, Item()).seen(line, size)
        if line["job"]:
            self.jobs[str(line["job"])] = str(line["recipe"])
        of = str(line["recipe"]), round
        self.rounds[of] = self.rounds.get(of, 0) + size
        for name, tree in line["trees"].items():
            item = self.trees.setdefault(str(name), Item())
            item.seen(line, int(tree["bytes"]), len(tree["arrays"]))
        for part, items in (("scalars", self.scalars), ("texts", self.said), ("said", self.said)):
            for name in line[part]:
                items.setdefault(str(name), Item()).seen(line)
        if sent := line.get("overhead"):
            size = int(sent["headers"]) + int(sent["bodies"])
            self.overhead.seen(line, size, times=int(sent["requests"]))
        self.protection.update(map(str, line["protection"]))
        self.readable += bool(line["trees"]) and not line["protection"]
        if line.get("privacy"):
            charge = json.dumps(line["privacy"], sort_keys=True)
            self.charges[charge] = self.charges.get(charge, 0) + 1
        if line.get("receipt"):
            self.countersigned = max(self.countersigned, int(line["receipt"]["line"]))

    def bytes_of(self, recipe: str, round: int | None = None) -> int:
        """That left in all jobs of a recipe, or in one round of it."""
        if round is not None:
            return self.rounds.get((recipe, round), 0)
        return sum(size for (whose, _), size in self.rounds.items() if whose == recipe)


def find_ledgers(folder: Path) -> dict[str, Path]:
    """The ledgers in a site's folder, in a run folder, or this one file, by the client's name."""
    if folder.is_file():
        return {folder.stem: folder}
    if (folder / LEDGER_FILE).is_file():
        return {folder.name: folder / LEDGER_FILE}
    below = folder / "ledger" if (folder / "ledger").is_dir() else folder
    found = {path.stem: path for path in below.glob("*.jsonl") if path.stem.isdigit()}
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def read_departures(path: Path, into: Departures | None = None) -> Departures:
    """What a ledger tells, added to `into`; an unfinished last line is left out."""
    seen = into if into is not None else Departures()
    _read_lines(path, seen, 0)
    return seen


class Followed:
    """A ledger that grows while it is read. Each line counts once it is whole: what a kill left of
    one is removed by the next writer, whose line begins in its place."""

    def __init__(self, path: Path) -> None:
        self.path, self.so_far, self._end = path, Departures(), 0

    def catch_up(self) -> Departures:
        if self.path.exists():
            # a shorter one is another ledger: what left before it has left all the same
            start = self._end if self.path.stat().st_size >= self._end else 0
            self._end = _read_lines(self.path, self.so_far, start)
        return self.so_far


def _read_lines(path: Path, into: Departures, start: int) -> int:
    """From byte `start` on; returns where the last whole line ends."""
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            start += len(raw)
            try:
                into.add(json.loads(raw))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                into.odd += 1
    return start

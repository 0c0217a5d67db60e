"""Recipes: a TOML file and key=value overrides become checked constructor calls, before any work
starts.

`[task]`, `[data]` and each `[[algorithm]]` table name a class (`parts.py`), `[federation]` is
`Settings`, `key=value` changes any argument (`overrides.py`). An argument `seed` that nobody gave
follows the federation's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.config.convert import ConfigError as ConfigError
from fedlens.config.convert import nearest, section, toml
from fedlens.config.files import find_recipe, load_tables
from fedlens.config.inherit import carry_over, rename
from fedlens.config.overrides import override, split
from fedlens.config.parts import Part, find_class, make_part, names

if TYPE_CHECKING:
    from fedlens.core.algorithm import Algorithm
    from fedlens.core.task import Task
    from fedlens.data.source import Source


@dataclass(frozen=True)
class Settings:
    """clients: how many hold data. cohort: how many are asked in a round (default: all). seed: of
    everything. workers: processes (default: cores), 0 for none. threads: of torch in each.
    evaluate_every, checkpoint_every: rounds, 0 for never. personal: evaluate on the clients'
    held-out parts too. timeout: seconds a client may take. late: rounds a reply may be late."""

    clients: int = 10
    cohort: int | None = None
    rounds: int = 10
    seed: int = 0
    workers: int | None = None
    threads: int = 1
    evaluate_every: int = 1
    personal: bool = False
    timeout: float | None = None
    checkpoint_every: int = 1
    late: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"federation.{name} is {getattr(self, name)}: at least 1 is needed"
                )
        for name in ("seed", "workers", "evaluate_every", "checkpoint_every", "late"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(
                    f"federation.{name} is {getattr(self, name)}: it cannot be negative"
                )
        if self.cohort is not None and self.cohort < 1:
            raise ConfigError(
                f"federation.cohort is {self.cohort}: at least one client has to be asked"
            )
        if self.cohort is not None and self.cohort > self.clients:
            raise ConfigError(
                f"federation.cohort is {self.cohort}, but there are only {self.clients} clients"
                " (federation.clients)"
            )
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(
                f"federation.timeout is {self.timeout:g}: it has to be more than 0 seconds"
            )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    name: str
    about: str
    task: Part
    data: Part
    federation: Part
    algorithm: tuple[Part, ...]

    @property
    def settings(self) -> Settings:
        settings: Settings = self.federation.build()
        return settings

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.federation, self.task, self.data, *self.algorithm)

    def build_task(self) -> Task:
        task: Task = self.task.build(seed=self.settings.seed)
        return task

    def build_source(self) -> Source:
        source: Source = self.data.build(seed=self.settings.seed)
        return source

    def build_algorithm(self, task: Task) -> Algorithm:
        from fedlens.core.algorithm import stack

        base, *layers = (part.build(task=task, seed=self.settings.seed) for part in self.algorithm)
        return stack(base, *layers)

    def tables(self) -> dict[str, Any]:
        """Everything resolved, as plain values: what config.toml says."""
        out: dict[str, Any] = {"about": self.about} if self.about else {}
        out |= {"task": self.task.table(), "data": self.data.table()}
        out["federation"] = {k: v for k, v in self.federation.table().items() if k != "name"}
        out["algorithm"] = [part.table() for part in self.algorithm]
        return out

    def to_toml(self) -> str:
        tables = self.tables()
        pieces = [f"about = {toml(tables['about'])}\n"] if "about" in tables else []
        for key in ("task", "data", "federation"):
            pieces.append(section(f"[{key}]", tables[key]))
        pieces += [section("[[algorithm]]", part) for part in tables["algorithm"]]
        return "\n".join(pieces)

    def difference(self, other: Mapping[str, Any], free: Iterable[str] = ()) -> str | None:
        """The first setting in which the tables of another run differ, as a clause; settings named
        in `free` may. A key that came after that run has its default there."""
        with contextlib.suppress(ConfigError):
            other = from_tables(other).tables()
        mine, theirs = dict(_flat(self.tables())), dict(_flat(other))
        for key in dict.fromkeys([*mine, *theirs]):
            if key != "about" and key not in free and mine.get(key) != theirs.get(key):
                return (
                    f"{key} was {theirs.get(key, 'not set')}, now it is {mine.get(key, 'not set')}"
                )
        return None


# -- reading ---------------------------------------------------------------------------------------


def read(
    recipe: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithm: str | None = None,
) -> Config:
    """A shipped recipe by name, a TOML file, or a run folder (its config.toml); then another
    algorithm, then the overrides.
    """
    path = find_recipe(recipe)
    tables = load_tables(path)
    name = path.parent.name if path.name == "config.toml" else path.stem
    return from_tables(tables, name, overrides, algorithm)


def from_tables(
    tables: Mapping[str, Any],
    name: str = "recipe",
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithm: str | None = None,
) -> Config:
    known = ("about", "task", "data", "federation", "algorithm")
    for key in tables:
        if key not in known:
            raise ConfigError(f"recipe {name} has an unknown table {key!r}{nearest(key, known)}")
    for key in ("task", "data"):
        if not isinstance(tables.get(key), Mapping):
            raise ConfigError(f"recipe {name} has no [{key}] table")
    pairs = split(overrides)
    task, data = (_swap(k, tables[k], pairs) for k in ("task", "data"))
    own = tables.get("algorithm", [])
    if (
        not isinstance(own, list)
        or not all(isinstance(t, Mapping) for t in own)
        or not (own or algorithm)
    ):
        raise ConfigError(f"recipe {name} needs at least one [[algorithm]] table")
    stacked = carry_over(algorithm_tables(algorithm), own) if algorithm else own
    if not isinstance(tables.get("federation", {}), Mapping):
        raise ConfigError(f"recipe {name}: [federation] must be a table")
    config = Config(
        name,
        str(tables.get("about", "")),
        make_part("task", task, "task"),
        make_part("data", data, "data"),
        Part("federation", Settings, dict(tables.get("federation", {}))),
        tuple(make_part("algorithm", t, f"algorithm.{t.get('name', '?')}") for t in stacked),
    )
    federation, task_part, data_part, *layers = (p.checked() for p in override(config.parts, pairs))
    config = replace(
        config, federation=federation, task=task_part, data=data_part, algorithm=tuple(layers)
    )
    if (
        "clients" not in config.federation.given
        and (usual := config.data.build().default_clients()) is not None
    ):
        config = replace(config, federation=config.federation.with_value("clients", usual))
    config.settings  # noqa: B018  refuses impossible numbers now
    return config


# -- stacks ----------------------------------------------------------------------------------------


def algorithm_tables(name: str) -> list[dict[str, Any]]:
    """A paper's name, a layer's name (then on FedAvg), or parts joined by "+":
    `FedAvg+FedProx+Median`.
    """
    from fedlens.algorithms.named import NAMED
    from fedlens.core.algorithm import Layer

    if name.lower() in NAMED:
        return NAMED[name.lower()].tables()
    pieces = [p.strip() for p in name.split("+")]
    exported = {n.lower(): n for n in names("algorithm")}
    for piece in pieces:
        if piece.lower() not in exported and ":" not in piece:
            raise ConfigError(
                f"there is no algorithm {piece!r}{nearest(piece, [*NAMED, *exported.values()])}"
            )
    first = find_class("algorithm", pieces[0], "algorithm")
    pieces = ["FedAvg", *pieces] if issubclass(first, Layer) else pieces
    return [{"name": exported.get(p.lower(), p)} for p in pieces]


def _swap(key: str, table: Mapping[str, Any], pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """`data.name=Cifar10` names another class; keys that it knows carry over."""
    for pair in [p for p in pairs if p[0].lower() == f"{key}.name"]:
        pairs.remove(pair)
        table = rename(key, str(pair[1]).strip("\"'"), table)
    return table


def _flat(tables: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    items = tables.items() if isinstance(tables, Mapping) else enumerate(tables)
    if isinstance(tables, list):
        yield prefix.rstrip("."), " + ".join(str(t.get("name", "?")) for t in tables)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(tables, list) and isinstance(value, Mapping):
            name = (
                f"{prefix}{value.get('name', key)}"
                if sum(v.get("name") == value.get("name") for v in tables) == 1
                else name
            )
        if isinstance(value, Mapping) or (
            isinstance(value, list) and any(isinstance(v, Mapping) for v in value)
        ):
            yield from _flat(value, f"{name}.")
        else:
            yield name, toml(value)

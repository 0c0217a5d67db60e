"""Recipes: a TOML file and key=value overrides become checked constructor calls, before any work
starts.

`[task]`, `[data]` and each `[[algorithm]]` table name a class (`parts.py`), `[federation]` is
`Settings`, `key=value` changes any argument (`overrides.py`). An argument `seed` that nobody gave
follows the federation's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.config.convert import ConfigError as ConfigError
from fedlens.config.convert import suggestion, toml_section, toml_value
from fedlens.config.files import RUN_CONFIG, find_recipe, load_tables
from fedlens.config.inherit import carry_over, renamed_part
from fedlens.config.overrides import apply_overrides, parse_overrides
from fedlens.config.parts import (
    DEFAULT_BASE,
    SECURING_LAYER,
    Part,
    exported_names,
    find_class,
    make_part,
)
from fedlens.core.imports import allow, importing_no_others, named_modules
from fedlens.core.limits import MOST_WEIGHT, Count, Natural, Positive, Processes, Threads

if TYPE_CHECKING:
    from fedlens.core.algorithm import Algorithm, Layer
    from fedlens.core.task import Task
    from fedlens.data.source import Source


@dataclass(frozen=True)
class Settings:
    """clients: how many hold data. cohort: how many are asked in a round (default: all). rounds:
    0 evaluates and saves the start. seed: of everything. workers: processes (default: cores), 0 for
    none. threads: of torch in each. evaluate_every, checkpoint_every: rounds, 0 for never.
    personal: evaluate on the clients' held-out parts too. timeout: seconds a client may take. late:
    rounds a reply may be late.
    ledger: in a simulation, write down what leaves each client, as real sites do.
    max_weight: the largest weight that a reply may claim; the most examples that any client can
    have is a good one. patience: so many rounds in a row without a single reply end the run.
    secure: replies are added up under masks (SecureSum stands last in the stack); where nothing is
    said, not in simulations, and over real sites from three of them on."""

    clients: Count = 10
    cohort: Count | None = None
    rounds: Natural = 10
    seed: Natural = 0
    workers: Processes | None = None
    threads: Threads = 1
    evaluate_every: Natural = 1
    personal: bool = False
    timeout: Positive | None = None
    checkpoint_every: Natural = 1
    late: Natural = 0
    ledger: bool = False
    max_weight: Positive = MOST_WEIGHT
    patience: Count = 1
    secure: bool | None = None

    def __post_init__(self) -> None:
        if self.cohort is not None and self.cohort > self.clients:
            raise ConfigError(
                f"federation.cohort is {self.cohort}, but there are only {self.clients} clients"
                " (federation.clients)"
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
    folders: tuple[str, ...] = ()  # where own modules were looked for besides the usual places

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

    def digest(self) -> str:
        """Of what server and clients have to agree on: everything but [data], what the recipe says
        about itself, and what is only written down."""
        tables = {k: v for k, v in self.tables().items() if k not in ("data", "about")}
        tables["federation"] = {k: v for k, v in tables["federation"].items() if k != "ledger"}
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    def to_toml(self, with_folders: bool = False) -> str:
        """with_folders: for this machine, where own modules will be looked for again."""
        tables = self.tables()
        pieces = [f"about = {toml_value(tables['about'])}\n"] if "about" in tables else []
        if with_folders and self.folders and named_modules(tables):
            pieces.insert(0, f"folders = {toml_value(self.folders)}\n")
        for key in ("task", "data", "federation"):
            pieces.append(toml_section(f"[{key}]", tables[key]))
        pieces += [toml_section("[[algorithm]]", part) for part in tables["algorithm"]]
        return "\n".join(pieces)

    def difference(self, other: Mapping[str, Any], free: Iterable[str] = ()) -> str | None:
        """The first setting in which the tables of another run differ, as a clause; settings named
        in `free` may, and what is left to the data to say. A key that came after that run has its
        default there. Modules that only the other run names are not imported."""
        other = {k: v for k, v in other.items() if k != "folders"}
        shared = getattr(self.task.cls, "shared", ())
        free = {*free, *(f"task.{k}" for k in shared if k not in self.task.given)}
        with contextlib.suppress(ConfigError), importing_no_others():
            other = from_tables(other).tables()
        mine, theirs = dict(_flatten(self.tables())), dict(_flatten(other))
        for key in differing_keys(self.tables(), other):
            if key != "about" and key not in free:
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
    name = path.parent.name if path.name == RUN_CONFIG else path.stem
    tables = load_tables(path)
    return from_tables(tables, name, overrides, algorithm)


def from_tables(
    tables: Mapping[str, Any],
    name: str = "recipe",
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithm: str | None = None,
) -> Config:
    known = ("about", "task", "data", "federation", "algorithm", "folders")
    for key in tables:
        if key not in known:
            raise ConfigError(f"recipe {name} has an unknown table {key!r}{suggestion(key, known)}")
    for key in ("task", "data"):
        if not isinstance(tables.get(key), Mapping):
            raise ConfigError(f"recipe {name} has no [{key}] table")
    pairs = parse_overrides(overrides)
    allow(named_modules([(algorithm or "").split("+"), [value for _, value in pairs]]))
    task, data = (_swap(k, tables[k], pairs) for k in ("task", "data"))
    own = tables.get("algorithm", [])
    if (
        not isinstance(own, list)
        or not all(isinstance(t, Mapping | Part) for t in own)
        or not (own or algorithm)
    ):
        raise ConfigError(f"recipe {name} needs at least one [[algorithm]] table")
    stacked = carry_over(algorithm_tables(algorithm), own) if algorithm else own
    stacked = _secured(stacked, _wish(tables, pairs))
    if not isinstance(tables.get("federation", {}), Mapping):
        raise ConfigError(f"recipe {name}: [federation] must be a table")
    config = Config(
        name,
        str(tables.get("about", "")),
        make_part("task", task, "task"),
        make_part("data", data, "data"),
        Part("federation", Settings, dict(tables.get("federation", {}))),
        tuple(make_part("algorithm", t, _place_of(t)) for t in stacked),
        tuple(tables.get("folders", ())),
    )
    federation, task_part, data_part, *layers = (
        p.checked() for p in apply_overrides(config.parts, pairs)
    )
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


def _wish(tables: Mapping[str, Any], pairs: Sequence[tuple[str, Any]]) -> Any:
    """What is said about `secure`, last by an override."""
    federation = tables.get("federation", {})
    said = federation.get("secure") if isinstance(federation, Mapping) else None
    for key, value in pairs:
        if key.lower() in ("secure", "federation.secure"):
            said = {"true": True, "false": False}.get(str(value).lower(), value)
    return said


def _secured(stacked: list[Any], wish: Any) -> list[Any]:
    """The stack with or without the layer that adds replies up under masks."""
    last = {"name": SECURING_LAYER}
    names = [t.name if isinstance(t, Part) else str(t.get("name", "")) for t in stacked]
    has = [name.lower() == last["name"].lower() for name in names]
    if wish is True and not any(has):
        return [*stacked, last]
    if wish is False:
        return [t for t, secure in zip(stacked, has, strict=True) if not secure]
    return stacked


def securing_layer() -> Layer:
    """That layer, with its own defaults."""
    layer: Layer = make_part("algorithm", {"name": SECURING_LAYER}, SECURING_LAYER).build()
    return layer


def _place_of(table: Mapping[str, Any] | Part) -> str:
    return table.where if isinstance(table, Part) else f"algorithm.{table.get('name', '?')}"


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
    exported = {n.lower(): n for n in exported_names("algorithm")}
    for piece in pieces:
        if piece.lower() not in exported and ":" not in piece:
            raise ConfigError(
                f"there is no algorithm {piece!r}{suggestion(piece, [*NAMED, *exported.values()])}"
            )
    first = find_class("algorithm", pieces[0], "algorithm")
    pieces = [DEFAULT_BASE, *pieces] if issubclass(first, Layer) else pieces
    return [{"name": exported.get(p.lower(), p)} for p in pieces]


def _swap(key: str, table: Mapping[str, Any], pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """`data.name=Cifar10` names another class; keys that it knows carry over."""
    for pair in [p for p in pairs if p[0].lower() == f"{key}.name"]:
        pairs.remove(pair)
        table = renamed_part(key, str(pair[1]).strip("\"'"), table)
    return table


def differing_keys(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Dotted keys at which the tables of two recipes are not equal."""
    left, right = dict(_flatten(mine)), dict(_flatten(theirs))
    return [k for k in dict.fromkeys([*left, *right]) if left.get(k) != right.get(k)]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as TOML. A list of tables, which is a stack, is one value by
    its names, and then each of its tables by itself."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
            names = [str(t.get("name", "?")) for t in value]
            yield f"{prefix}{key}", " + ".join(names)
            for index, (name, inner) in enumerate(zip(names, value, strict=True)):
                unique = names.count(name) == 1
                yield from _flatten(inner, f"{prefix}{key}.{name if unique else index}.")
        else:
            yield f"{prefix}{key}", toml_value(value)

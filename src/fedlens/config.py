"""Recipes: a TOML file and key=value overrides become checked constructor calls, before any work starts.

`[task]`, `[data]` and each `[[algorithm]]` table name a class; every other key is an argument of its constructor, checked against the
annotation there. `[federation]` is `Settings`. An override is dotted (`federation.rounds=6`, `algorithm.FedProx.mu=0.01`); any part of
the path but the last may be left out as long as one place only is meant (`FedProx.mu=0.01`, `rounds=6`). `[federation]` goes first:
`seed=1` means the federation's seed, and an argument `seed` that nobody gave follows it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from fedlens.lazy import named
from fedlens.values import NONE, Written, convert, nearest, section, toml
from fedlens.values import ConfigError as ConfigError

if TYPE_CHECKING:
    from fedlens.algorithm import Algorithm
    from fedlens.data.source import Source
    from fedlens.tasks.task import Task

SHIPPED = Path(__file__).parent / "recipes"
PACKAGES = {
    "task": ("tasks",),
    "data": ("data",),
    "algorithm": ("algorithms", "layers"),
    "any": ("models", "generators", "layers", "algorithms", "data", "tasks", "metrics"),
}


class UnknownKey(ConfigError):
    """An override that fits nothing in this recipe."""


@dataclass(frozen=True)
class Settings:
    """clients: how many hold data. cohort: how many are asked in a round (default: all). seed: of everything. workers: processes
    (default: cores), 0 for none. threads: of torch in each. evaluate_every, checkpoint_every: rounds, 0 for never. personal: evaluate
    on the clients' held-out parts too. timeout: seconds a client may take. late: rounds a reply may be late."""

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
                raise ConfigError(f"federation.{name} is {getattr(self, name)}: at least 1 is needed")
        for name in ("seed", "workers", "evaluate_every", "checkpoint_every", "late"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"federation.{name} is {getattr(self, name)}: it cannot be negative")
        if self.cohort is not None and self.cohort < 1:
            raise ConfigError(f"federation.cohort is {self.cohort}: at least one client has to be asked")
        if self.cohort is not None and self.cohort > self.clients:
            raise ConfigError(f"federation.cohort is {self.cohort}, but there are only {self.clients} clients (federation.clients)")
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"federation.timeout is {self.timeout:g}: it has to be more than 0 seconds")


@dataclass(frozen=True)
class Parameter:
    name: str
    hint: Any
    default: Any  # inspect.Parameter.empty where it must be given


@dataclass(frozen=True)
class Part:
    """A constructor call to be: `given` holds the arguments the recipe has, nested calls as parts of their own."""

    where: str  # "task", "federation", "algorithm.FedProx"
    cls: type
    given: Mapping[str, Any] = field(default_factory=dict)
    spelled: str = ""  # "module:Class" for a class that is not ours

    @property
    def name(self) -> str:
        return self.cls.__name__

    def with_value(self, key: str, value: Any) -> Part:
        return replace(self, given={**self.given, key: value})

    def checked(self) -> Part:
        """The same with every argument known, present and of its type."""
        known = parameters(self.cls)
        for key in self.given:
            if key not in known:
                raise ConfigError(f"{self.where} has no {key!r}{nearest(key, known, self.where + '.')}")
        for p in known.values():
            if p.default is inspect.Parameter.empty and p.name not in self.given:
                raise ConfigError(f"{self.where} ({self.name}) needs {p.name!r}: add {self.where}.{p.name}=...")
        return replace(self, given={k: _checked(v, known[k].hint, f"{self.where}.{k}") for k, v in self.given.items()})

    def resolved(self) -> dict[str, Any]:
        """Every argument, given or by default."""
        return {p.name: self.given.get(p.name, p.default) for p in parameters(self.cls).values()}

    def build(self, **filled: Any) -> Any:
        arguments = {k: v.build() if isinstance(v, Part) else v for k, v in self.given.items()}
        accepted = inspect.signature(self.cls).parameters
        try:
            return self.cls(**arguments, **{k: v for k, v in filled.items() if k in accepted and k not in arguments})
        except (TypeError, ValueError) as e:
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"{self.where} ({self.name}): {e}") from e


def _checked(value: Any, hint: Any, where: str) -> Any:
    return value.checked() if isinstance(value, Part) else convert(value, hint, where)


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
        from fedlens.algorithm import stack

        base, *layers = (part.build(task=task, seed=self.settings.seed) for part in self.algorithm)
        return stack(base, *layers)

    def tables(self) -> dict[str, Any]:
        """Everything resolved, as plain values: what config.toml says."""
        out: dict[str, Any] = {"about": self.about} if self.about else {}
        out |= {"task": _table(self.task), "data": _table(self.data)}
        out["federation"] = {k: v for k, v in _table(self.federation).items() if k != "name"}
        out["algorithm"] = [_table(part) for part in self.algorithm]
        return out

    def to_toml(self) -> str:
        tables = self.tables()
        pieces = [f"about = {toml(tables['about'])}\n"] if "about" in tables else []
        for key in ("task", "data", "federation"):
            pieces.append(section(f"[{key}]", tables[key]))
        pieces += [section("[[algorithm]]", part) for part in tables["algorithm"]]
        return "\n".join(pieces)

    def difference(self, other: Mapping[str, Any], free: Iterable[str] = ()) -> str | None:
        """The first setting in which the tables of another run differ, as a clause; settings named in `free` may."""
        mine, theirs = dict(_flat(self.tables())), dict(_flat(other))
        for key in dict.fromkeys([*mine, *theirs]):
            if key != "about" and key not in free and mine.get(key) != theirs.get(key):
                return f"{key} was {theirs.get(key, 'not set')}, now it is {mine.get(key, 'not set')}"
        return None


# -- reading --------------------------------------------------------------------------------------------------------------------------


def read(recipe: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), algorithm: str | None = None) -> Config:
    """A shipped recipe by name, a TOML file, or a run folder (its config.toml); then another algorithm, then the overrides."""
    path = find_recipe(recipe)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    name = path.parent.name if path.name == "config.toml" else path.stem
    return from_tables(tables, name, overrides, algorithm)


def from_tables(
    tables: Mapping[str, Any], name: str = "recipe", overrides: Sequence[str] | Mapping[str, Any] = (), algorithm: str | None = None
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
    if not isinstance(own, list) or not all(isinstance(t, Mapping) for t in own) or not (own or algorithm):
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
    config = override(config, pairs)
    config = replace(
        config,
        task=config.task.checked(),
        data=config.data.checked(),
        federation=config.federation.checked(),
        algorithm=tuple(p.checked() for p in config.algorithm),
    )
    if "clients" not in config.federation.given and (usual := config.data.build().default_clients()) is not None:
        config = replace(config, federation=config.federation.with_value("clients", usual))
    config.settings  # noqa: B018  refuses impossible numbers now
    return config


def find_recipe(recipe: str | Path) -> Path:
    path = Path(recipe)
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml"
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(recipe) in shipped:
        return shipped[str(recipe)]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"there is no recipe file {recipe}")
    raise ConfigError(f"there is no recipe {str(recipe)!r}{nearest(str(recipe), shipped)}; `fedlens list recipes` shows them all")


def shipped_recipes() -> dict[str, Path]:
    return {p.relative_to(SHIPPED).with_suffix("").as_posix(): p for p in sorted(SHIPPED.rglob("*.toml"))}


def split(overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`key=value` strings, or a mapping of values as they are."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{text!r} is not an override: write key=value, such as rounds=6")
        pairs.append((key.strip(), Written(value.strip())))
    return pairs


# -- classes ---------------------------------------------------------------------------------------------------------------------------


def names(kind: str) -> dict[str, str]:
    """Exported names of a kind ("task", "data", "algorithm", "any") and the package each is found in."""
    found: dict[str, str] = {}
    for package in PACKAGES[kind]:
        module = importlib.import_module(f"fedlens.{package}")
        found |= {n: package for n in module.__all__ if n not in found}
    return found


def find_class(kind: str, name: str, where: str, wanted: type | None = None) -> type:
    """An exported class by its name in any case, or the user's own as "module:Class"."""
    wanted = wanted or _wanted(kind)
    if ":" in name:
        return _own_class(name, where, wanted)
    exported = names(kind)
    match = next((n for n in exported if n.lower() == name.lower()), None)
    if match is None:
        noun = {"task": "task", "data": "data source", "algorithm": "algorithm or layer", "any": "part"}[kind]
        raise ConfigError(f"there is no {noun} {name!r}{nearest(name, exported)}")
    try:
        cls = getattr(importlib.import_module(f"fedlens.{exported[match]}"), match)
    except ImportError as e:
        raise ConfigError(f"{match} cannot be loaded: {e}") from e
    return _is_a(cls, wanted, match, where)


def _own_class(name: str, where: str, wanted: type) -> type:
    try:
        cls = named(name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{where}: {name} cannot be loaded ({e})") from e
    return _is_a(cls, wanted, name, where)


def _is_a(cls: Any, wanted: type, name: str, where: str) -> type:
    if not isinstance(cls, type) or not issubclass(cls, wanted):
        raise ConfigError(f"{where}: {name} is not a {wanted.__name__}")
    return cls


def _wanted(kind: str) -> type:
    if kind == "task":
        from fedlens.tasks.task import Task

        return Task
    if kind == "data":
        from fedlens.data.source import Source

        return Source
    from fedlens.algorithm import Algorithm

    return Algorithm if kind == "algorithm" else object


@functools.cache
def parameters(cls: type) -> dict[str, Parameter]:
    """The arguments a recipe may give: those of the constructor, without the task that is filled in."""
    from fedlens.tasks.task import Task

    hints = typing.get_type_hints(cls if is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
    out = {}
    for p in inspect.signature(cls).parameters.values():
        hint = hints.get(p.name, Any)
        filled = any(isinstance(h, type) and issubclass(h, Task) for h in (hint, *typing.get_args(hint)))
        if not filled and not p.name.startswith("_") and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            out[p.name] = Parameter(p.name, hint, p.default)
    return out


def make_part(kind: str, table: Mapping[str, Any], where: str, wanted: type | None = None) -> Part:
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"[{where.split('.')[0]}] needs a name, such as name = {_example(kind)}")
    cls = find_class(kind, name, where, wanted)
    where = f"algorithm.{cls.__name__}" if kind == "algorithm" else where
    known = parameters(cls)
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key == "name" and "name" not in known:
            continue
        inner = nested_class(known[key].hint) if key in known else None
        if inner is not None and isinstance(value, (str, Mapping)) and not (isinstance(value, str) and value in NONE):
            value = make_part("any", {"name": value} if isinstance(value, str) else value, f"{where}.{key}", inner)
        given[key] = value
    return Part(where, cls, given, name if ":" in name else "")


def nested_class(hint: Any) -> type | None:
    """The class whose constructor a nested table calls, where the annotation is one."""
    for h in typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,):
        if isinstance(h, type) and h.__module__.startswith("fedlens.") and h is not Settings:
            return h
    return None


def algorithm_tables(name: str) -> list[dict[str, Any]]:
    """A paper's name, a layer's name (then on FedAvg), or parts joined by "+": `FedAvg+FedProx+Median`."""
    from fedlens.algorithm import Layer
    from fedlens.algorithms.recipes import NAMED

    if name.lower() in NAMED:
        return NAMED[name.lower()].tables()
    pieces = [p.strip() for p in name.split("+")]
    exported = {n.lower(): n for n in names("algorithm")}
    for piece in pieces:
        if piece.lower() not in exported and ":" not in piece:
            raise ConfigError(f"there is no algorithm {piece!r}{nearest(piece, [*NAMED, *exported.values()])}")
    first = find_class("algorithm", pieces[0], "algorithm")
    pieces = ["FedAvg", *pieces] if issubclass(first, Layer) else pieces
    return [{"name": exported.get(p.lower(), p)} for p in pieces]


def carry_over(new: list[dict[str, Any]], old: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Keys of the same name carry over to a part of the same name, and from base to base. Not between layers: there a Greek letter
    means something else in each."""
    before = {str(t.get("name", "")).lower(): t for t in old}
    out = []
    for k, table in enumerate(new):
        source = before.get(table["name"].lower()) or (old[0] if k == 0 and old else {})
        known = parameters(find_class("algorithm", table["name"], "algorithm"))
        out.append({**{key: v for key, v in source.items() if key in known}, **table})  # what a name stands for goes first
    return out


def _swap(key: str, table: Mapping[str, Any], pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """`data.name=Cifar10` names another class; keys that it knows carry over."""
    for pair in [p for p in pairs if p[0].lower() == f"{key}.name"]:
        pairs.remove(pair)
        name = str(pair[1]).strip("\"'")
        cls = find_class(key, name, key)
        table = {"name": name, **{k: v for k, v in table.items() if k != "name" and k in parameters(cls)}}
    return table


# -- overrides -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """An argument that can be overridden: the way to it and its key."""

    path: tuple[str, ...]  # ("algorithm", "FedProx", "mu")
    route: tuple[str, ...]  # keys from the part down to the argument, nested parts included
    part: int  # position in Config.parts

    @property
    def text(self) -> str:
        return ".".join(self.path)

    def meant_by(self, words: Sequence[str]) -> bool:
        """The last word is the key, the others appear in the path in this order; a layer may be meant by its place in the stack."""
        if words[-1] != self.path[-1]:
            return False
        rest = iter(p.lower() for p in self.path[:-1])
        return all(any(w.lower() == p for p in rest) for w in words[:-1])


def places(config: Config) -> list[Place]:
    out: list[Place] = []

    def visit(part: Part, path: tuple[str, ...], route: tuple[str, ...], index: int) -> None:
        for p in parameters(part.cls).values():
            out.append(Place((*path, p.name), (*route, p.name), index))
            inner = part.given.get(p.name)
            if isinstance(inner, Part):
                visit(inner, (*path, p.name, inner.name), (*route, p.name), index)

    for index, part in enumerate(config.parts):
        visit(part, tuple(part.where.split(".")), (), index)
    return out


def override(config: Config, pairs: Sequence[tuple[str, Any]]) -> Config:
    for key, value in pairs:
        place = find_place(config, key)
        parts = list(config.parts)
        parts[place.part] = _put(parts[place.part], place.route, value)
        config = replace(config, federation=parts[0], task=parts[1], data=parts[2], algorithm=tuple(parts[3:]))
    return config


def find_place(config: Config, key: str) -> Place:
    everything = places(config)
    words = key.split(".")
    found = [p for p in everything if p.meant_by(words)]
    if len(found) > 1:
        exact = [p for p in found if len(p.path) == len(words)]
        federation = [p for p in found if p.path[0] == "federation"]
        found = (exact if len(exact) == 1 else []) or federation or found
    if len(found) == 1:
        return found[0]
    if found:
        if len({p.text for p in found}) == 1:
            raise ConfigError(f"{key} is ambiguous: {found[0].path[1]} stands in the stack {len(found)} times, so set it in a recipe file")
        raise ConfigError(f"{key} could mean {' or '.join(p.text for p in found)}: write one of these")
    stack = [p.name for p in config.algorithm]
    if words[0] == "algorithm" and len(words) > 2 and words[1].lower() not in [s.lower() for s in stack]:
        raise UnknownKey(f"{words[1]} is not in the stack ({', '.join(stack)}){nearest(words[1], stack)}")
    choices = {p.path[-1] for p in everything} if len(words) == 1 else {p.text for p in everything}
    raise UnknownKey(f"nothing here is called {key!r}{nearest(key, choices)}")


def _put(part: Part, route: tuple[str, ...], value: Any) -> Part:
    key, *rest = route
    if rest:
        return part.with_value(key, _put(part.given[key], tuple(rest), value))
    inner = nested_class(parameters(part.cls)[key].hint)
    if inner is not None and isinstance(value, str) and value not in NONE:
        value = make_part("any", {"name": str(value).strip("\"'")}, f"{part.where}.{key}", inner)
    return part.with_value(key, value)


def _example(kind: str) -> str:
    return {"task": '"Classification"', "data": '"Synthetic"', "algorithm": '"FedAvg"'}.get(kind, '"..."')


# -- writing ---------------------------------------------------------------------------------------------------------------------------


def _table(part: Part) -> dict[str, Any]:
    """Plain values by name; what is none by default, or cannot be written down, is left out."""
    out: dict[str, Any] = {"name": part.spelled or part.name}
    for p in parameters(part.cls).values():
        if p.name == "seed" and "seed" not in part.given and part.cls is not Settings:
            continue  # it follows the federation's, also in a run that starts from this file
        value = part.given.get(p.name, p.default)
        if value is None and p.default is not None:
            value = NONE[0]
        if isinstance(value, Part):
            value = _table(value)
        if _writable(value):
            out[p.name] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return out


def _writable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_writable(v) for v in value)
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _writable(v) for k, v in value.items())
    return isinstance(value, (str, int, float, bool, Path))


def _flat(tables: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    items = tables.items() if isinstance(tables, Mapping) else enumerate(tables)
    if isinstance(tables, list):
        yield prefix.rstrip("."), " + ".join(str(t.get("name", "?")) for t in tables)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(tables, list) and isinstance(value, Mapping):
            name = f"{prefix}{value.get('name', key)}" if sum(v.get("name") == value.get("name") for v in tables) == 1 else name
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value)):
            yield from _flat(value, f"{name}.")
        else:
            yield name, toml(value)

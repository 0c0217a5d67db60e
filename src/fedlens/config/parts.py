"""Parts: a table that names a class becomes a checked constructor call, and a table again.

Every key besides `name` is an argument of the class's constructor, checked against the annotation
there. Where an annotation is itself a class of ours, the value may be its name or a table of its
own: a part within a part.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Union

from fedlens.config.convert import NONE, ConfigError, convert, suggestion
from fedlens.core.imports import (
    OwnCodeError,
    describe_given,
    load_plugin,
    load_reference,
    plugins,
)

# where each kind of part is looked for, what messages call it, and an example of one
PACKAGES = {
    "task": ("tasks", "deblur"),
    "data": ("data", "deblur"),
    "algorithm": ("algorithms", "layers", "deblur", "trust"),
    "any": ("models", "generators", "layers", "algorithms", "data", "tasks", "deblur", "metrics"),
}
# groups of entry points under which installed packages offer parts of each kind
_GROUPS = {
    "task": ("tasks",),
    "data": ("datasets",),
    "algorithm": ("layers",),
    "any": ("models", "generators", "metrics", "layers", "tasks", "datasets"),
}
DEFAULT_BASE = "FedAvg"  # what layers stand on where nobody names a base
# What `federation.secure` puts around a stack. By its name, as every part: its room is after this.
SECURING_LAYER = "SecureSum"
NOUNS = {"task": "task", "data": "data source", "algorithm": "algorithm or layer", "any": "part"}
EXAMPLES = {"task": "Classification", "data": "Synthetic", "algorithm": DEFAULT_BASE, "any": "..."}


@dataclass(frozen=True)
class Parameter:
    name: str
    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Part:
    """A constructor call to be: `given` holds the arguments the recipe has, nested calls as parts
    of their own.
    """

    where: str  # "task", "federation", "algorithm.FedProx"
    cls: type
    given: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""  # "module:Class" for a class that is not ours

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
                raise ConfigError(
                    f"{self.where} has no {key!r}{suggestion(key, known, self.where + '.')}"
                )
        for p in known.values():
            if p.required and p.name not in self.given:
                raise ConfigError(
                    f"{self.where} ({self.name}) needs {p.name!r}: add {self.where}.{p.name}=..."
                )
        checked = {}
        for key, value in self.given.items():
            checked[key] = _checked(value, known[key].hint, f"{self.where}.{key}")
        return replace(self, given=checked)

    def resolved(self) -> dict[str, Any]:
        """Every argument, given or by default."""
        return {p.name: self.given.get(p.name, p.default) for p in parameters(self.cls).values()}

    def table(self) -> dict[str, Any]:
        """Plain values by name, without what is None by default; an object from Python is named or
        described."""
        out: dict[str, Any] = {"name": self.reference or self.name}
        for p in parameters(self.cls).values():
            if p.name == "seed" and "seed" not in self.given and self.where != "federation":
                continue  # it follows the federation's, also in a run that starts from this file
            value = self.given.get(p.name, p.default)
            if value is None and p.default is not None:
                value = NONE[0]
            if isinstance(value, Part) or _writable(value):
                out[p.name] = _plain(value)
            elif value is not None and p.name in self.given:
                out[p.name] = describe_given(value)
        return out

    def with_nested_value(self, route: Sequence[str], value: Any) -> Part:
        """The same with another value for the argument at the end of `route`, which leads through
        nested parts.
        """
        key, *rest = route
        if rest:
            return self.with_value(key, self.given[key].with_nested_value(rest, value))
        inner = nested_class(parameters(self.cls)[key].hint)
        if inner is not None and isinstance(value, str) and value not in NONE:
            table = {"name": str(value).strip("\"'")}
            value = make_part("any", table, f"{self.where}.{key}", inner)
        return self.with_value(key, value)

    def build(self, **defaults: Any) -> Any:
        """Call the constructor; `defaults` fill what it takes and the recipe does not give."""
        accepted = inspect.signature(self.cls).parameters
        arguments = {k: v for k, v in defaults.items() if k in accepted}
        for key, value in self.given.items():
            arguments[key] = value.build() if isinstance(value, Part) else value
        try:
            return self.cls(**arguments)
        except (TypeError, ValueError) as e:
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"{self.where} ({self.name}): {e}") from e


def _writable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_writable(v) for v in value)
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _writable(v) for k, v in value.items())
    return isinstance(value, (str, int, float, bool, Path))


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.table()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _checked(value: Any, hint: Any, where: str) -> Any:
    return value.checked() if isinstance(value, Part) else convert(value, hint, where)


# -- finding classes -------------------------------------------------------------------------------


def exported_names(kind: str) -> dict[str, str]:
    """Names of a kind ("task", "data", "algorithm", "any") and the place each is in, for
    `load_part`: one of our packages, or a group of entry points. A name of ours goes first.
    """
    found: dict[str, str] = {}
    for package in PACKAGES[kind]:
        module = importlib.import_module(f"fedlens.{package}")
        offered = getattr(module, "PART_KINDS", {}).get(kind, module.__all__)
        found |= {n: package for n in offered if n not in found}
    for group in _GROUPS[kind]:
        found |= {n: f"entry points {group}" for n in plugins(group) if n not in found}
    return found


def load_part(place: str, name: str) -> Any:
    """What `exported_names` found."""
    if place.startswith("entry points "):
        return load_plugin(plugins(place.removeprefix("entry points "))[name])
    return getattr(importlib.import_module(f"fedlens.{place}"), name)


def find_class(kind: str, name: str, where: str, wanted: type | None = None) -> type:
    """An exported class by its name in any case, or the user's own as "module:Class"."""
    wanted = wanted or _interface(kind)
    if ":" in name:
        return _own_class(name, where, wanted)
    exported = exported_names(kind)
    match = next((n for n in exported if n.lower() == name.lower()), None)
    if match is None:
        raise ConfigError(f"there is no {NOUNS[kind]} {name!r}{suggestion(name, exported)}")
    try:
        cls = load_part(exported[match], match)
    except (ImportError, OwnCodeError) as e:
        raise ConfigError(f"{match} cannot be loaded: {e}") from e
    return _require_subclass(cls, wanted, match, where)


def _own_class(name: str, where: str, wanted: type) -> type:
    try:
        cls = load_reference(name)
    except OwnCodeError as e:
        raise ConfigError(f"{where}: {e}") from e
    return _require_subclass(cls, wanted, name, where)


def _require_subclass(cls: Any, wanted: type, name: str, where: str) -> type:
    if not isinstance(cls, type) or not issubclass(cls, wanted):
        raise ConfigError(f"{where}: {name} is not a {wanted.__name__}")
    return cls


def _interface(kind: str) -> type:
    """What a class of this kind has to be."""
    if kind == "task":
        from fedlens.core.task import Task

        return Task
    if kind == "data":
        from fedlens.data.source import Source

        return Source
    from fedlens.core.algorithm import Algorithm

    return Algorithm if kind == "algorithm" else object


@functools.cache
def parameters(cls: type) -> dict[str, Parameter]:
    """The arguments a recipe may give: the constructor's, without the task, which the config fills
    in.
    """
    hints = typing.get_type_hints(cls if is_dataclass(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]
    out = {}
    for p in inspect.signature(cls).parameters.values():
        hint = hints.get(p.name, Any)
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            continue
        if not p.name.startswith("_") and not _is_task(hint):
            out[p.name] = Parameter(p.name, hint, p.default)
    return out


def _is_task(hint: Any) -> bool:
    from fedlens.core.task import Task

    return any(isinstance(h, type) and issubclass(h, Task) for h in (hint, *typing.get_args(hint)))


def part_of(thing: Any, where: str) -> Part:
    """The part that a class or an object from Python stands for: its constructor's arguments, as
    far as it keeps them under their names."""
    cls = thing if isinstance(thing, type) else type(thing)
    missing = object()
    held = {} if thing is cls else {k: getattr(thing, k, missing) for k in parameters(cls)}
    if lost := [k for k, v in held.items() if v is missing]:
        raise ConfigError(
            f"{where}: a {cls.__name__} does not keep its argument {lost[0]!r} under that name, so"
            " it cannot be written down: make it a dataclass"
        )
    ours = cls.__module__.startswith("fedlens.")
    return Part(where, cls, held, "" if ours else describe_given(cls))


def make_part(
    kind: str, table: Mapping[str, Any] | Part, where: str, wanted: type | None = None
) -> Part:
    """The part that a recipe's table stands for, with nested tables as parts of their own."""
    if isinstance(table, Part):
        return table
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f'[{where.split(".")[0]}] needs a name, such as name = "{EXAMPLES[kind]}"'
        )
    cls = find_class(kind, name, where, wanted)
    where = f"algorithm.{cls.__name__}" if kind == "algorithm" else where
    known = parameters(cls)
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key == "name" and "name" not in known:
            continue
        inner = nested_class(known[key].hint) if key in known else None
        if isinstance(value, str) and value not in NONE and inner is not None:
            value = {"name": value}
        if isinstance(value, Mapping) and inner is not None:
            value = make_part("any", value, f"{where}.{key}", inner)
        given[key] = value
    return Part(where, cls, given, name if ":" in name else "")


def nested_class(hint: Any) -> type | None:
    """The class whose constructor a nested table calls, where the annotation is one."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    for choice in typing.get_args(hint) if union else (hint,):
        if isinstance(choice, type) and choice.__module__.startswith("fedlens."):
            return choice
    return None

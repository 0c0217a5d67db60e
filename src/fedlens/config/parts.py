"""Parts: a table that names a class becomes a checked constructor call, and can be written down
again.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Union

from fedlens.config.convert import NONE, ConfigError, convert, nearest
from fedlens.core.lazy import named

PACKAGES = {
    "task": ("tasks", "deblur"),
    "data": ("data", "deblur"),
    "algorithm": ("algorithms", "layers", "deblur"),
    "any": ("models", "generators", "layers", "algorithms", "data", "tasks", "deblur", "metrics"),
}


@dataclass(frozen=True)
class Parameter:
    name: str
    hint: Any
    default: Any  # inspect.Parameter.empty where it must be given


@dataclass(frozen=True)
class Part:
    """A constructor call to be: `given` holds the arguments the recipe has, nested calls as parts
    of their own.
    """

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
                raise ConfigError(
                    f"{self.where} has no {key!r}{nearest(key, known, self.where + '.')}"
                )
        for p in known.values():
            if p.default is inspect.Parameter.empty and p.name not in self.given:
                raise ConfigError(
                    f"{self.where} ({self.name}) needs {p.name!r}: add {self.where}.{p.name}=..."
                )
        return replace(
            self,
            given={
                k: _checked(v, known[k].hint, f"{self.where}.{k}") for k, v in self.given.items()
            },
        )

    def resolved(self) -> dict[str, Any]:
        """Every argument, given or by default."""
        return {p.name: self.given.get(p.name, p.default) for p in parameters(self.cls).values()}

    def table(self) -> dict[str, Any]:
        """Plain values by name; what is none by default, or cannot be written down, is left out."""
        out: dict[str, Any] = {"name": self.spelled or self.name}
        for p in parameters(self.cls).values():
            if p.name == "seed" and "seed" not in self.given and self.where != "federation":
                continue  # it follows the federation's, also in a run that starts from this file
            value = self.given.get(p.name, p.default)
            if value is None and p.default is not None:
                value = NONE[0]
            if isinstance(value, Part):
                value = value.table()
            if _writable(value):
                out[p.name] = (
                    list(value)
                    if isinstance(value, tuple)
                    else str(value)
                    if isinstance(value, Path)
                    else value
                )
        return out

    def put(self, route: tuple[str, ...], value: Any) -> Part:
        """The same with another value, some parts further in."""
        key, *rest = route
        if rest:
            return self.with_value(key, self.given[key].put(tuple(rest), value))
        inner = nested_class(parameters(self.cls)[key].hint)
        if inner is not None and isinstance(value, str) and value not in NONE:
            value = make_part(
                "any", {"name": str(value).strip("\"'")}, f"{self.where}.{key}", inner
            )
        return self.with_value(key, value)

    def build(self, **filled: Any) -> Any:
        arguments = {k: v.build() if isinstance(v, Part) else v for k, v in self.given.items()}
        accepted = inspect.signature(self.cls).parameters
        try:
            return self.cls(
                **arguments,
                **{k: v for k, v in filled.items() if k in accepted and k not in arguments},
            )
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


def _checked(value: Any, hint: Any, where: str) -> Any:
    return value.checked() if isinstance(value, Part) else convert(value, hint, where)


# -- finding classes -------------------------------------------------------------------------------


def names(kind: str) -> dict[str, str]:
    """Exported names of a kind ("task", "data", "algorithm", "any") and the package each is found
    in.
    """
    found: dict[str, str] = {}
    for package in PACKAGES[kind]:
        module = importlib.import_module(f"fedlens.{package}")
        offered = getattr(module, "KINDS", {}).get(kind, module.__all__)
        found |= {n: package for n in offered if n not in found}
    return found


def find_class(kind: str, name: str, where: str, wanted: type | None = None) -> type:
    """An exported class by its name in any case, or the user's own as "module:Class"."""
    wanted = wanted or _wanted(kind)
    if ":" in name:
        return _own_class(name, where, wanted)
    exported = names(kind)
    match = next((n for n in exported if n.lower() == name.lower()), None)
    if match is None:
        noun = {
            "task": "task",
            "data": "data source",
            "algorithm": "algorithm or layer",
            "any": "part",
        }[kind]
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
        from fedlens.core.task import Task

        return Task
    if kind == "data":
        from fedlens.data.source import Source

        return Source
    from fedlens.core.algorithm import Algorithm

    return Algorithm if kind == "algorithm" else object


@functools.cache
def parameters(cls: type) -> dict[str, Parameter]:
    """The arguments a recipe may give: those of the constructor, without the task that is filled
    in.
    """
    from fedlens.core.task import Task

    hints = typing.get_type_hints(cls if is_dataclass(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]
    out = {}
    for p in inspect.signature(cls).parameters.values():
        hint = hints.get(p.name, Any)
        filled = any(
            isinstance(h, type) and issubclass(h, Task) for h in (hint, *typing.get_args(hint))
        )
        if (
            not filled
            and not p.name.startswith("_")
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ):
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
        if (
            inner is not None
            and isinstance(value, (str, Mapping))
            and not (isinstance(value, str) and value in NONE)
        ):
            value = make_part(
                "any", {"name": value} if isinstance(value, str) else value, f"{where}.{key}", inner
            )
        given[key] = value
    return Part(where, cls, given, name if ":" in name else "")


def nested_class(hint: Any) -> type | None:
    """The class whose constructor a nested table calls, where the annotation is one."""
    for h in (
        typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    ):
        if isinstance(h, type) and h.__module__.startswith("fedlens."):
            return h
    return None


def _example(kind: str) -> str:
    return {"task": '"Classification"', "data": '"Synthetic"', "algorithm": '"FedAvg"'}.get(
        kind, '"..."'
    )

"""Values: what a recipe or a command line says becomes what an argument's annotation asks for, and
is written as TOML again.

A text of the command line has no type of its own: `8` is a number where a number is wanted and a
name where a name is. What does not fit is refused with a message that says what would.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from fedlens.core.limits import describe_limits

PLAIN_TYPES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "none",
    Path: "a path",
}
# as annotated_types calls them
# TOML has no such word, so these strings stand for it wherever an argument may be None
NONE = (
    "none",
    "null",
)


class ConfigError(ValueError):
    """A recipe or an override that cannot be meant; with one error message for the user."""


class Untyped(str):
    """A value as typed on the command line: its type depends on the argument it is for."""

    def candidates(self) -> Iterator[Any]:
        """What it may mean, the most specific first: a TOML value, a number, the text itself."""
        try:
            yield tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            with contextlib.suppress(ValueError):
                yield float(self)
        yield str(self)


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it, or an error. Strict, but a whole number is a number and
    a list a tuple; on the command line, one thing is a list of it.
    """
    import pydantic

    if hint is Any and not isinstance(value, Untyped):
        return value
    adapter = _adapter(hint)
    candidates = list(value.candidates()) if isinstance(value, Untyped) else [value]
    if isinstance(value, Untyped):
        candidates += [[one] for one in candidates]
    for candidate in candidates:
        try:
            return adapter.validate_json(json.dumps(candidate, default=str), strict=True)
        except pydantic.ValidationError:
            if _means_none(candidate, hint):
                return None
        if _is_instance(candidate, hint):
            return candidate
    choices = [str(a) for a in typing.get_args(hint)] if typing.get_origin(hint) is Literal else []
    first = candidates[0]
    raise ConfigError(
        f"{where} must be {describe_type(hint)}, not {toml_value(first)}"
        f"{did_you_mean(str(first), choices)}"
    )


def _means_none(value: Any, hint: Any) -> bool:
    optional = type(None) in typing.get_args(hint)
    return optional and isinstance(value, str) and value.lower() in NONE


def _is_instance(value: Any, hint: Any) -> bool:
    """An object from Python where the annotation is its class."""
    plain = isinstance(value, (str, int, float, list, dict))
    return not plain and inspect.isclass(hint) and isinstance(value, hint)


@functools.cache
def _adapter(hint: Any) -> Any:
    import pydantic

    # A class of ours: only an instance will do. Nothing here can mean NaN or infinity.
    config = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        return pydantic.TypeAdapter(hint, config=config)
    except pydantic.errors.PydanticUserError:  # a dataclass has a configuration of its own
        return pydantic.TypeAdapter(hint)


def describe_type(hint: Any) -> str:
    """An annotation in words: "a whole number of at least 1"."""
    if hint in PLAIN_TYPES:
        return PLAIN_TYPES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return f"a {getattr(hint, '__name__', hint)}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(a) for a in arguments)
    if origin is typing.Annotated:
        inner, *metadata = arguments
        return f"{describe_type(inner)} {describe_limits(metadata)}".rstrip()
    if issubclass(origin, Mapping):
        return "a table"
    if not arguments:
        return "a list"
    if origin is tuple and arguments[-1] is not Ellipsis:
        each = ", ".join(describe_type(a) for a in arguments)
        return f"a list of {len(arguments)} ({each})"
    return f"a list, each {describe_type(arguments[0])}"


def suggestion(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """ ": did you mean ...?" where something is close, otherwise what there is, if that is
    short.
    """
    options = list(dict.fromkeys(choices))
    listed = f" (there is {', '.join(sorted(options))})" if 0 < len(options) <= 16 else ""
    return did_you_mean(word, options, prefix) or listed


def did_you_mean(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """ ": did you mean ...?" where something is close."""
    lowered = {c.lower(): c for c in choices}
    close = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.55)
    return f": did you mean {prefix}{lowered[close[0]]}?" if close else ""


# -- writing TOML ----------------------------------------------------------------------------------


def toml_section(header: str, table: Mapping[str, Any]) -> str:
    return "\n".join([header, *_assignments(table)]) + "\n"


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(key)} = {toml_value(value)}" for key, value in table.items()]


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else json.dumps(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_assignments(value)) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

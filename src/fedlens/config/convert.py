"""Values: what somebody wrote becomes what an argument's annotation asks for, and is written down
again as TOML.

A text of the command line has no type of its own: `8` is a number where a number is wanted and a
name where a name is. What does not fit is refused in one sentence that says what would.
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

# as annotated_types calls them
LIMITS = {
    "gt": "above {}",
    "ge": "of at least {}",
    "lt": "below {}",
    "le": "at most {}",
}
# TOML has no such word, so these strings stand for it wherever an argument may be None
NONE = (
    "none",
    "null",
)


class ConfigError(ValueError):
    """A recipe or an override that cannot be meant; the message is one sentence for the user."""


class Written(str):
    """A value as typed on the command line: what it is depends on the argument it is for."""

    def guesses(self) -> Iterator[Any]:
        try:
            yield tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            with contextlib.suppress(ValueError):
                yield float(self)
        yield str(self)


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it, or a sentence. Strict, but a whole number is a number
    and a list a tuple.
    """
    import pydantic

    if hint is Any and not isinstance(value, Written):
        return value
    adapter = _adapter(hint)
    first = None
    for guess in value.guesses() if isinstance(value, Written) else [value]:
        first = guess if first is None else first
        try:
            return adapter.validate_json(json.dumps(guess, default=str), strict=True)
        except pydantic.ValidationError:
            if (
                isinstance(guess, str)
                and guess.lower() in NONE
                and type(None) in typing.get_args(hint)
            ):
                return None
        if (
            inspect.isclass(hint)
            and not isinstance(guess, (str, int, float, list, dict))
            and isinstance(guess, hint)
        ):
            return guess
    choices = [str(a) for a in typing.get_args(hint)] if typing.get_origin(hint) is Literal else []
    raise ConfigError(
        f"{where} must be {wording(hint)}, not {toml(first)}{closest(str(first), choices)}"
    )


@functools.cache
def _adapter(hint: Any) -> Any:
    import pydantic

    # A class of ours: only an instance will do. Nothing here can mean NaN or infinity.
    config = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        return pydantic.TypeAdapter(hint, config=config)
    except pydantic.errors.PydanticUserError:  # a dataclass has a configuration of its own
        return pydantic.TypeAdapter(hint)


def wording(hint: Any) -> str:
    plain = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
        Path: "a path",
    }
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(wording(a) for a in arguments)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} ({', '.join(wording(a) for a in arguments)})"
    if origin is typing.Annotated:
        limits = [
            words.format(getattr(m, key))
            for m in arguments[1:]
            for key, words in LIMITS.items()
            if hasattr(m, key)
        ]
        return f"{wording(arguments[0])} {' and '.join(limits)}".rstrip()
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if origin is not None:
        return "a list" + (f", each {wording(arguments[0])}" if arguments else "")
    return f"a {getattr(hint, '__name__', hint)}"


def nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """ ": did you mean ...?" where something is close, otherwise what there is, if that is
    short.
    """
    options = list(dict.fromkeys(choices))
    listed = f" (there is {', '.join(sorted(options))})" if 0 < len(options) <= 16 else ""
    return closest(word, options, prefix) or listed


def closest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """ ": did you mean ...?" where something is close."""
    lowered = {c.lower(): c for c in choices}
    close = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.55)
    return f": did you mean {prefix}{lowered[close[0]]}?" if close else ""


def section(header: str, table: Mapping[str, Any]) -> str:
    return "\n".join([header, *(f"{_key(k)} = {toml(v)}" for k, v in table.items())]) + "\n"


def _key(key: str) -> str:
    return (
        key
        if key.replace("_", "").replace("-", "").isalnum() and key.isascii()
        else json.dumps(key)
    )


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(v) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return (
        str(value)
        if isinstance(value, int)
        else json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    )

"""What an argument can be, said where it is declared: `lr: Positive = 0.1`. Recipes are held to it
by `config.convert`, objects made in Python by the metaclass `Limited`.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from abc import ABCMeta
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
# more of them do not start, or take the machine with them
Processes = Annotated[int, Ge(0), Le(1024)]
Threads = Annotated[int, Ge(1), Le(256)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]  # never the whole
PositiveShare = Annotated[float, Gt(0), Le(1)]  # never nothing
ProperShare = Annotated[float, Gt(0), Lt(1)]  # neither
Minority = Annotated[float, Ge(0), Lt(0.5)]
Several = Annotated[int, Ge(2)]  # classes to be told apart, a batch that is normalised

MOST_WEIGHT = 1e9  # that one reply may claim, unless the recipe says otherwise

EVERYWHERE = " in every entry"
_WORDS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "at most {}"}


def describe_limits(metadata: Iterable[Any]) -> str:
    """ "of at least 0 and below 1"."""
    found = []
    for limit in metadata:
        for key, words in _WORDS.items():
            if hasattr(limit, key):
                found.append(words.format(getattr(limit, key)))
    return " and ".join(found)


def broken_limit(value: Any, hint: Any) -> str | None:
    """What a value must be and is not; None where it is, or where the annotation sets no limit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        reasons = [broken_limit(value, option) for option in options]
        return None if value is None or None in reasons else reasons[0]
    if origin is Literal and value not in arguments:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and arguments and isinstance(value, tuple | list):
        return _broken_entry(value, arguments)
    if origin is not Annotated or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    kept = all(
        (not hasattr(limit, "gt") or value > limit.gt)
        and (not hasattr(limit, "ge") or value >= limit.ge)
        and (not hasattr(limit, "lt") or value < limit.lt)
        and (not hasattr(limit, "le") or value <= limit.le)
        for limit in arguments[1:]
    )
    return None if kept else describe_limits(arguments[1:])


def _broken_entry(values: Sequence[Any], hints: Sequence[Any]) -> str | None:
    each = [hints[0]] * len(values) if hints[-1] is Ellipsis else hints
    reasons = (broken_limit(v, hint) for v, hint in zip(values, each, strict=False))
    reason = next((r for r in reasons if r), None)
    return None if reason is None else f"{reason.removesuffix(EVERYWHERE)}{EVERYWHERE}"


class Limited(ABCMeta):
    """The metaclass of everything that a recipe can build: whoever builds it in Python is held to
    the same limits.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        for name, hint in _hints(cls).items():
            value = getattr(made, name, None)
            if must := broken_limit(value, hint):
                raise ValueError(f"{cls.__name__}: {name} is {value}, but it must be {must}")
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's: Python would show that of `__call__` above."""
        _, *arguments = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(arguments)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of the constructor's arguments that set limits."""
    source: Any = cls if "__dataclass_fields__" in vars(cls) else cls.__init__  # type: ignore[misc]
    hints = typing.get_type_hints(source, include_extras=True)
    names = inspect.signature(cls).parameters
    return {name: hint for name, hint in hints.items() if name in names}

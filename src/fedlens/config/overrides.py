"""Overrides: `key=value` finds the one argument that is meant, in whatever part it stands.

The full way is dotted (`federation.rounds`, `algorithm.FedProx.mu`); any word but the last may be
left out as long as one place only is meant. `[federation]` goes first: `seed=1` means the
federation's seed. What means the same in `[task]` and `[data]`, such as the size of an image, is
set in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.config.convert import ConfigError, Untyped, did_you_mean, suggestion
from fedlens.config.parts import Part, exported_names, load_part, parameters


class UnknownKey(ConfigError):
    """An override that fits nothing in this recipe."""


def parse_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`key=value` strings, or a mapping of values as they are."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{text!r} is not an override: write key=value, such as rounds=6")
        pairs.append((key.strip(), Untyped(value.strip())))
    return pairs


@dataclass(frozen=True)
class Place:
    """An argument that can be overridden, and where it is."""

    path: tuple[str, ...]  # ("algorithm", "FedProx", "mu")
    route: tuple[str, ...]  # keys from the part down to the argument, nested parts included
    part: int  # position among the parts

    @property
    def text(self) -> str:
        return ".".join(self.path)

    def matches(self, words: Sequence[str]) -> bool:
        """The last word is the key, the others appear in the path in this order; a layer may be
        meant by its place in the stack.
        """
        if words[-1] != self.path[-1]:
            return False
        # one iterator for all words: each is looked for behind the one before
        rest = iter(p.lower() for p in self.path[:-1])
        return all(any(word.lower() == p for p in rest) for word in words[:-1])


def list_places(parts: Sequence[Part]) -> Iterator[Place]:
    for index, part in enumerate(parts):
        yield from _places_in(part, tuple(part.where.split(".")), (), index)


def _places_in(
    part: Part, path: tuple[str, ...], route: tuple[str, ...], index: int
) -> Iterator[Place]:
    for key in parameters(part.cls):
        yield Place((*path, key), (*route, key), index)
        inner = part.given.get(key)
        if isinstance(inner, Part):
            yield from _places_in(inner, (*path, key, inner.name), (*route, key), index)


def apply_overrides(parts: Sequence[Part], pairs: Sequence[tuple[str, Any]]) -> list[Part]:
    changed = list(parts)
    for key, value in pairs:
        for place in find_places(changed, key):
            changed[place.part] = changed[place.part].with_nested_value(place.route, value)
    return changed


def find_places(parts: Sequence[Part], key: str) -> list[Place]:
    """The one argument that `key` means; or two, where task and data have one of that name and the
    task says that it is the same thing."""
    places = [p for p in list_places(parts) if p.matches([key])] if "." not in key else []
    if {p.text for p in places} == {f"task.{key}", f"data.{key}"}:
        task = next(part for part in parts if part.where == "task")
        if key in task.cls.shared:  # type: ignore[attr-defined]
            return places
    return [find_place(parts, key)]


def find_place(parts: Sequence[Part], key: str) -> Place:
    """The one argument that `key` means, or an error that says what is missing or ambiguous."""
    everything = list(list_places(parts))
    words = key.split(".")
    found = [p for p in everything if p.matches(words)]
    if len(found) > 1:
        exact = [p for p in found if len(p.path) == len(words)]
        federation = [p for p in found if p.path[0] == "federation"]
        found = exact if len(exact) == 1 else federation or found
    if len(found) == 1:
        return found[0]
    if found:
        if len({p.text for p in found}) == 1:
            raise ConfigError(
                f"{key} is ambiguous: {found[0].path[1]} stands in the stack {len(found)} times, so"
                " set it in a recipe file"
            )
        raise ConfigError(
            f"{key} could mean {' or '.join(p.text for p in found)}: write one of these"
        )
    if problem := _not_stacked(parts, everything, words):
        raise UnknownKey(problem)
    if others := _other_sources(words):
        data = next(p.name for p in parts if p.where == "data")
        raise UnknownKey(f"{data} has no {words[-1]}: set data.name to one that has it ({others})")
    choices = {p.path[-1] if len(words) == 1 else p.text for p in everything}
    raise UnknownKey(f"nothing here is called {key!r}{suggestion(key, choices)}")


def _other_sources(words: Sequence[str]) -> str:
    """Data sets that have such a key, where the recipe's own has not: `root=photos`, with nothing
    said about what kind of data that is."""
    if words[:-1] not in ([], ["data"]):
        return ""
    known = exported_names("data").items()
    return ", ".join(n for n, place in known if words[-1] in parameters(load_part(place, n)))


def _not_stacked(
    parts: Sequence[Part], everything: Sequence[Place], words: Sequence[str]
) -> str | None:
    """An error for a key of a layer (or nearly one) that is not in this stack; without it the
    suggested key would be some other part's.
    """
    if len(words) == 1:
        return None
    full = words[0].lower() == "algorithm" and len(words) > 2
    name = words[1] if full else words[0]
    here = {word for place in everything for word in place.path[:-1]}
    if name.lower() in [word.lower() for word in here]:
        return None
    stack = [p.name for p in parts if p.where.startswith("algorithm.")]
    known = exported_names("algorithm")
    hint = did_you_mean(name, [*(stack if full else here), *known])
    if not full and hint == did_you_mean(name, here):
        return None
    if name.lower() in map(str.lower, known):
        hint = ""
    return f"{name} is not in the stack ({', '.join(stack)}){hint}"

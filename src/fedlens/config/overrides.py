"""Overrides: `key=value` finds the one argument that is meant, in whatever part it stands.

The full way is dotted (`federation.rounds`, `algorithm.FedProx.mu`); any word but the last may be
left out as long as one place only is meant. `[federation]` goes first: `seed=1` means the
federation's seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.config.convert import ConfigError, Written, closest, nearest
from fedlens.config.parts import Part, names, parameters


class UnknownKey(ConfigError):
    """An override that fits nothing in this recipe."""


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


@dataclass(frozen=True)
class Place:
    """An argument that can be overridden: the way to it and its key."""

    path: tuple[str, ...]  # ("algorithm", "FedProx", "mu")
    route: tuple[str, ...]  # keys from the part down to the argument, nested parts included
    part: int  # position among the parts

    @property
    def text(self) -> str:
        return ".".join(self.path)

    def meant_by(self, words: Sequence[str]) -> bool:
        """The last word is the key, the others appear in the path in this order; a layer may be
        meant by its place in the stack.
        """
        if words[-1] != self.path[-1]:
            return False
        rest = iter(p.lower() for p in self.path[:-1])
        return all(any(w.lower() == p for p in rest) for w in words[:-1])


def places(parts: Sequence[Part]) -> list[Place]:
    out: list[Place] = []

    def visit(part: Part, path: tuple[str, ...], route: tuple[str, ...], index: int) -> None:
        for p in parameters(part.cls).values():
            out.append(Place((*path, p.name), (*route, p.name), index))
            inner = part.given.get(p.name)
            if isinstance(inner, Part):
                visit(inner, (*path, p.name, inner.name), (*route, p.name), index)

    for index, part in enumerate(parts):
        visit(part, tuple(part.where.split(".")), (), index)
    return out


def override(parts: Sequence[Part], pairs: Sequence[tuple[str, Any]]) -> list[Part]:
    changed = list(parts)
    for key, value in pairs:
        place = find_place(changed, key)
        changed[place.part] = changed[place.part].put(place.route, value)
    return changed


def find_place(parts: Sequence[Part], key: str) -> Place:
    everything = places(parts)
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
            raise ConfigError(
                f"{key} is ambiguous: {found[0].path[1]} stands in the stack {len(found)} times, so"
                " set it in a recipe file"
            )
        raise ConfigError(
            f"{key} could mean {' or '.join(p.text for p in found)}: write one of these"
        )
    if why := _not_stacked(parts, everything, words):
        raise UnknownKey(why)
    choices = {p.path[-1] for p in everything} if len(words) == 1 else {p.text for p in everything}
    raise UnknownKey(f"nothing here is called {key!r}{nearest(key, choices)}")


def _not_stacked(
    parts: Sequence[Part], everything: Sequence[Place], words: Sequence[str]
) -> str | None:
    """A sentence where a key is of a layer, or nearly, that is not in this stack; without it the
    nearest key would be some other part's.
    """
    full = words[0].lower() == "algorithm" and len(words) > 2
    name, here = words[int(full)], {w for p in everything for w in p.path[:-1]}
    if len(words) == 1 or name.lower() in [w.lower() for w in here]:
        return None
    stack, known = [p.name for p in parts if p.where.startswith("algorithm.")], names("algorithm")
    hint = closest(name, [*(stack if full else here), *known])
    if not full and hint == closest(name, here):
        return None
    return f"{name} is not in the stack ({', '.join(stack)})" + (
        "" if name.lower() in map(str.lower, known) else hint
    )

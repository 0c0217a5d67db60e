"""What a recipe takes over from another one: by `extends`, by another class, by another algorithm.

Tables merge key by key. Where a class gives way to another, the keys that the new one knows stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.config.convert import ConfigError
from fedlens.config.parts import DEFAULT_BASE, find_class, parameters

Table = Mapping[str, Any]


def check_types(tables: Table) -> None:
    """What has to hold of a file before it is merged with another."""
    for key in ("task", "data", "federation"):
        table = tables.get(key, {})
        _expect(isinstance(table, Mapping), f"[{key}] must be a table")
        _expect(isinstance(table.get("name", ""), str), f"the name of [{key}] must be a text")
    parts = tables.get("algorithm", [])
    _expect(
        isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts),
        "algorithm must be [[algorithm]] tables",
    )
    _expect(
        all(isinstance(part.get("name"), str) for part in parts),
        "each [[algorithm]] table needs a name",
    )
    names = tables.get("stack", [DEFAULT_BASE])
    _expect(
        isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names),
        'stack must be a list of names, such as ["FedAvg", "FedProx"]',
    )


def extend(base: Table, own: Table) -> dict[str, Any]:
    """The tables of a base with what a recipe says of its own. `about` is of one file only."""
    merged = {key: value for key, value in base.items() if key != "about"}
    for key, value in own.items():
        if key in ("task", "data", "federation"):
            before = base.get(key, {})
            if key != "federation" and value.get("name", before.get("name")) != before.get("name"):
                before = renamed_part(key, value["name"], before)
            merged[key] = _merge(before, value)
        elif key not in ("stack", "algorithm"):
            merged[key] = value
    parts = base.get("algorithm", [])
    if "stack" in own:
        parts = carry_over([{"name": name} for name in own["stack"]], parts)
    merged["algorithm"] = _change(parts, own.get("algorithm", []), closed="stack" in own)
    return merged


def renamed_part(kind: str, name: str, table: Table) -> dict[str, Any]:
    """A table for another class: keys that it knows stay."""
    known = parameters(find_class(kind, name, kind))
    kept = {key: value for key, value in table.items() if key != "name" and key in known}
    return {"name": name, **kept}


def carry_over(new: Sequence[Table], old: Sequence[Table]) -> list[dict[str, Any]]:
    """Keys of the same name carry over to a part of the same name, and from base to base. Not
    between layers: there a Greek letter means something else in each."""
    before: dict[str, list[Table]] = {}
    for table in old:
        before.setdefault(_name(table), []).append(table)
    out = []
    for k, table in enumerate(new):
        same = before.get(_name(table), [])
        if same:
            # of several parts of one name the first takes over from the first
            source = same.pop(0) if len(same) > 1 else same[0]
        else:
            source = old[0] if k == 0 and old else {}
        known = parameters(find_class("algorithm", table["name"], "algorithm"))
        # what a name stands for goes first
        out.append({**{key: v for key, v in source.items() if key in known}, **table})
    return out


def _change(parts: Sequence[Table], own: Sequence[Table], closed: bool) -> list[dict[str, Any]]:
    """The parts, each changed by the own table of its name; other tables are parts that come after
    them, unless the stack is closed.
    """
    out = [dict(part) for part in parts]
    untouched = list(range(len(out)))
    for table in own:
        k = next((k for k in untouched if _name(out[k]) == _name(table)), None)
        if k is not None:
            untouched.remove(k)
            out[k] = _merge(out[k], table)
        else:
            _expect(not closed, f"{table['name']} is not in its stack")
            out.append(dict(table))
    return out


def _merge(base: Table, own: Table) -> dict[str, Any]:
    """Key by key, also in tables within; one within that names another class is new altogether."""
    out = dict(base)
    for key, value in own.items():
        before = out.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            same = value.get("name", before.get("name")) == before.get("name")
            out[key] = _merge(before, value) if same else value
        else:
            out[key] = value
    return out


def _name(table: Table) -> str:
    return str(table.get("name", "")).lower()


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise ConfigError(otherwise)

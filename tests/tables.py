"""A part as a recipe's table makes it: limits that are annotated are checked there."""

from __future__ import annotations

from typing import Any

from fedlens.config.parts import make_part


def from_table(kind: str, name: str, **keys: Any) -> Any:
    return make_part(kind, {"name": name, **keys}, kind).checked().build()

"""Exports that are loaded on first use, so that importing a package costs nothing until something
in it is wanted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazily(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's `__getattr__` and `__dir__`, so that `dir()` and tab completion show what is not
    loaded yet. where: in which module of the package each name is."""

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    def names() -> list[str]:
        here = vars(sys.modules[package])
        rooms = (n for n, v in here.items() if isinstance(v, ModuleType))
        own = (n for n in here if n.startswith("__"))
        return sorted({*rooms, *own, *here.get("__all__", ()), *where})

    return load, names

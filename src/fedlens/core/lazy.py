"""Exports that are loaded on first use, so that importing a package costs nothing until something
in it is wanted; and what a user's "module:Class" stands for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def lazily(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`. where: in which module of the package each name is."""

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    return load


def named(name: str) -> Any:
    """What "module:Class" names. Looked for in the working directory too: an installed command does
    not look beside the user by itself.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module), attribute)

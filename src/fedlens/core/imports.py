"""References to a user's own code: "module:Class" in a recipe or an argument."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def load_reference(reference: str) -> Any:
    """What "module:Class" stands for. The working directory is searched too, which an installed
    command does not do by itself.
    """
    module, _, attribute = reference.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module), attribute)

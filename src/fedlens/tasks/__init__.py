"""Loaded on first use, so that `import fedlens` stays quick."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "ActionRecognition": "action",
    "Classification": "classification",
    "CtP": "ctp",
    "Deblurring": "deblurring",
    "Generation": "generation",
    "Pose": "pose",
    "Speed": "speed",
    "SuperResolution": "super_resolution",
    "VCOP": "vcop",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

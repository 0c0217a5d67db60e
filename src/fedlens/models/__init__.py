"""Loaded on first use, so that `import fedlens` stays quick."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "BidirectionalVSR": "vsr",
    "Classifier": "classification",
    "Denoiser": "diffusion",
    "IART": "iart",
    "LightVSR": "vsr",
    "RVRT": "rvrt",
    "SimpleBaseline": "vitpose",
    "SpyNet": "spynet",
    "VRT": "vrt",
    "VideoBackbone": "video",
    "ViTPose": "vitpose",
    "iart_small": "iart",
    "r3d10": "video",
    "rvrt_small": "rvrt",
    "vrt_small": "vrt",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

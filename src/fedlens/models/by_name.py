"""Networks for video super-resolution by name: one of ours, or the user's own as "module:Class"."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedlens.core.imports import load_reference

SHORT_NAMES = {"light": "LightVSR", "bidirectional": "BidirectionalVSR"}


def network_builder(model: Any, scale: int, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """What builds the network. A name is looked up now, so that a wrong one is refused before work
    starts.
    """
    if isinstance(model, nn.Module):
        raise ValueError(
            "give the class of the network or a function that builds it, not a network: every run"
            " starts from a fresh one"
        )
    make = find_network(model) if isinstance(model, str) else model
    if not callable(make):
        raise ValueError(f"a network's name or something that builds one is needed, not {model!r}")
    accepts = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    extra = {"scale": scale} if "scale" in accepts or takes_all else {}
    if unknown := [k for k in options if k not in accepts and not takes_all]:
        raise ValueError(
            f"{getattr(make, '__name__', make)} has no argument {unknown[0]!r}: it takes"
            f" {', '.join(accepts)}"
        )
    return Call(make, {**extra, **options})


class Call:
    """A call to be made later; unlike a lambda it can be sent to another process."""

    def __init__(self, make: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> None:
        self.make, self.arguments = make, dict(arguments)

    def __call__(self) -> nn.Module:
        return self.make(**self.arguments)


def find_network(name: str) -> Callable[..., nn.Module]:
    if ":" in name:
        own: Callable[..., nn.Module] = load_reference(name)
        return own
    models = importlib.import_module("fedlens.models")
    wanted = SHORT_NAMES.get(name.lower(), name).lower()
    for export in models.__all__:
        if export.lower() == wanted:
            found: Callable[..., nn.Module] = getattr(models, export)
            return found
    raise ValueError(
        f"there is no network {name!r}: {', '.join([*SHORT_NAMES, *models.__all__])} are known, or"
        " module:Class"
    )

"""Networks by name: one of ours, the user's own as "module:Class", or one that an installed package
offers under `fedlens.models`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedlens.core.imports import load_plugin, load_reference, plugins

SHORT_NAMES = {
    "light": "LightVSR",
    "bidirectional": "BidirectionalVSR",
    "recurrent": "RecurrentRLFN",
}


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


def is_own(name: str) -> bool:
    """Is this the name of a user's network, or of an installed package's?"""
    return (":" in name and not name.startswith("timm:")) or name in plugins("models")


def load_own(name: str) -> Callable[..., nn.Module]:
    """The class or function behind such a name."""
    found: Callable[..., nn.Module] = (
        load_reference(name) if ":" in name else load_plugin(plugins("models")[name])
    )
    if not callable(found):
        raise ValueError(f"{name} is no class and no function that makes a network")
    return found


def make_own(name: str, **offered: Any) -> nn.Module:
    """A network of the user's, told as much of this as its constructor asks for."""
    make = load_own(name)
    accepts = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    asked = {k: v for k, v in offered.items() if k in accepts or takes_all}
    needed = [p for p in accepts.values() if p.default is p.empty and p.name not in asked]
    named = [p.name for p in needed if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if named:
        raise ValueError(
            f"{name} wants {named[0]!r}, which nobody here knows: it can be told"
            f" {', '.join(offered)}, anything else needs a default"
        )
    net = make(**asked)
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name} made a {type(net).__name__}, not a torch.nn.Module")
    return net


def find_network(name: str) -> Callable[..., nn.Module]:
    if is_own(name):
        return load_own(name)
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

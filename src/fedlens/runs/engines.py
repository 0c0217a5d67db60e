"""Which engines a job can run on, and how each is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlens.config.convert import suggestion
from fedlens.config.recipe import ConfigError
from fedlens.core.log import Log
from fedlens.core.rounds import Engine
from fedlens.runs.setup import Setup
from fedlens.trust.ledger import Ledgers, protection

ENGINES = ("simulator", "ray", "flower")
MakeEngine = Callable[[Setup, Path, Log], Engine]


def make_ledgers(setup: Setup, folder: Path) -> Ledgers:
    """The ledgers of a simulation's clients, in its run folder."""
    digest, hiding = setup.config.digest(), protection(setup.algorithm)
    return Ledgers(folder.absolute() / "ledger", setup.config.name, digest, hiding)


def make_engine(name: str | MakeEngine, setup: Setup, folder: Path, log: Log) -> Engine:
    """name: one of `ENGINES`, or a function for an engine that needs more than a config, such as a
    network.
    """
    if not isinstance(name, str):
        return name(setup, folder, log)
    require_engine(name)
    settings = setup.settings
    options: dict[str, Any] = {
        "workers": settings.workers,
        "threads": settings.threads,
        "timeout": settings.timeout,
        "folder": folder / "memory",
        "log": log,
        "ledgers": make_ledgers(setup, folder) if settings.ledger else None,
    }
    if name == "simulator":
        from fedlens.engines.simulator import Simulator

        return Simulator(setup.algorithm, setup.federation, **options)
    from fedlens.engines.ray import Ray

    # As everywhere with Ray: the cluster that RAY_ADDRESS names, or a local one.
    address = os.environ.get("RAY_ADDRESS")
    return Ray(setup.algorithm, setup.federation, address=address, **options)


def require_engine(name: str) -> None:
    """Refuse an engine that is not there, before any work."""
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}{suggestion(name, ENGINES)}")
    if name == "flower":
        raise ConfigError(
            "Flower runs at a SuperLink: fedlens run RECIPE --engine flower --superlink host:port"
        )
    if name == "ray":
        try:
            import fedlens.engines.ray  # noqa: F401
        except ImportError as e:
            raise ConfigError(f"the engine {name} cannot be loaded: {e}") from e

"""Where a federation's data comes from. Constructor arguments are the `[data]` table of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fedlens.federation import Federation


class DataError(ValueError):
    """Data that is missing or broken; the message is one clear sentence for the user."""


class Source(ABC):
    @abstractmethod
    def federation(self, clients: int, seed: int) -> Federation:
        """Split among `clients` clients, reproducibly. Raises DataError before any work starts."""

"""Where a federation's data comes from. Constructor arguments are the `[data]` table of a
recipe.
"""

from __future__ import annotations

from abc import abstractmethod

from fedlens.core.federation import Federation
from fedlens.core.limits import Limited


class DataError(ValueError):
    """Data that is missing or broken; the message is for the user."""


class Source(metaclass=Limited):
    def default_clients(self) -> int | None:
        """How many clients there are when nobody says: data that comes divided knows it, other data
        leaves it to the recipe.
        """
        return None

    @abstractmethod
    def federation(self, clients: int, seed: int) -> Federation:
        """Split among `clients` clients, reproducibly. Raises DataError before any work starts."""

"""Who holds what: the data of every client, its held-out part, and what the server tests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.client import Data
from fedlens.core.facts import Facts


@dataclass(frozen=True)
class Federation:
    """`holdings[i]` belongs to client i. `facts` describe the split for tables and pictures (label
    counts and the like).
    """

    holdings: Sequence[Any]
    held_out: Sequence[Data | None] = ()
    test: Any | None = None
    facts: Facts = field(default_factory=Facts)

    def __len__(self) -> int:
        return len(self.holdings)

    def held_out_of(self, client: int) -> Data | None:
        return self.held_out[client] if self.held_out else None

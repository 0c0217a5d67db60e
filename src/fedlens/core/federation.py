"""Who holds what: the data of every client, its held-out part, and what the server tests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.client import Data
from fedlens.core.datasets import as_data
from fedlens.core.facts import Facts


@dataclass(frozen=True)
class Federation:
    """Who holds what. An ordinary torch Dataset will do wherever data is held.

    Args:
        holdings: data; `holdings[i]` belongs to client i.
        held_out: what each client evaluates on.
        test: what the server tests on.
        facts: what is public about the split, for tables and pictures.
    """

    holdings: Sequence[Any]
    held_out: Sequence[Data | None] = ()
    test: Any | None = None
    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        for name in ("holdings", "held_out"):
            held = getattr(self, name)
            if isinstance(held, list | tuple):  # others fetch a client's data when it is wanted
                object.__setattr__(self, name, [as_data(h) for h in held])
        object.__setattr__(self, "test", as_data(self.test))

    def __len__(self) -> int:
        return len(self.holdings)

    def held_out_of(self, client: int) -> Data | None:
        return self.held_out[client] if self.held_out else None

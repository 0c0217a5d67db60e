"""Where a line about what happens goes: a function that takes it."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]

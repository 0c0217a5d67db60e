"""Words, numbers and small text graphics for a terminal; plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

ACCENT = "cyan"
BLOCKS = " ▁▂▃▄▅▆▇█"


def console() -> Console:
    """Made when it is needed, so that it looks at the terminal of the moment; a pipe gets lines
    that are not cut.
    """
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=200, no_color=True)


def rounded(value: float) -> str:
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def count(n: int, thing: str) -> str:
    """1 round, 2 rounds."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def few(words: Sequence[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def plain(text: str) -> str:
    """Somebody else's words: no markup, nothing that a terminal would obey."""
    return escape("".join(c if c.isprintable() else "?" for c in text))


def bars(counts: Sequence[int]) -> str:
    """A bar of text for every count; nothing at all stays blank, and the smallest something is
    seen.
    """
    top = max(counts, default=0) or 1
    return "".join(BLOCKS[0 if c == 0 else max(1, round(8 * c / top))] for c in counts)


def spark(values: Sequence[float], width: int = 16) -> str:
    """The last values as a line of text, from their lowest to their highest."""
    recent = list(values)[-width:]
    low, high = min(recent, default=0.0), max(recent, default=0.0)
    return "".join(
        BLOCKS[1 + round(7 * (v - low) / (high - low))] if high > low else BLOCKS[1] for v in recent
    )

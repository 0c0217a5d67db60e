"""docs/LOG.md is newest first: days, and within a day one heading a group, its entries by time."""

from __future__ import annotations

import re
from pathlib import Path

LOG = Path(__file__).resolve().parents[2] / "docs" / "LOG.md"


def disorder(log: str) -> list[str]:
    """Headings that stand twice or in the wrong place, and entries that stand below older ones."""
    found: list[str] = []
    day, group, entry, groups = "9999", "", "99:99", set[str]()
    for line in log.splitlines():
        if line.startswith("## "):
            found += [line] if line[3:] >= day else []
            day, group, groups = line[3:], "", set()
        elif line.startswith("### "):
            found += [line] if line in groups else []
            group, entry = line, "99:99"
            groups.add(group)
        elif time := re.match(r"\*\*(\S+) ", line):
            dated = re.fullmatch(r"\d\d:\d\d", time[1])
            found += [line] if not dated or not group or time[1] > entry else []
            entry = time[1]
    return found


def test_the_log_is_newest_first() -> None:
    assert disorder(LOG.read_text()) == []


def test_the_rule_sees_disorder() -> None:
    planted = """
## 2026-11-16
**10:00 no group**
### Speed
**10:00 a**
**11:00 younger**
### Memory
**12:00 b**
### Speed
**09:00 c**
**yesterday d**
## 2026-11-17
"""
    lines = ["**10:00 no group**", "**11:00 younger**", "### Speed", "**yesterday d**"]
    assert disorder(planted) == [*lines, "## 2026-11-17"]

"""README files hold prose and, between <!-- name --> and <!-- /name -->, blocks that a program
writes: no result is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

Blocks = Mapping[str, Callable[[], str]]


def render(text: str, blocks: Blocks) -> str:
    """The text with every block written anew."""

    def block(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- {name} -->\n{blocks[name]()}\n<!-- /{name} -->"

    return re.sub(r"<!-- ([\w.-]+) -->\n.*?<!-- /\1 -->", block, text, flags=re.DOTALL)


def fill(readme: Path, blocks: Blocks) -> None:
    readme.write_text(render(readme.read_text(), blocks))

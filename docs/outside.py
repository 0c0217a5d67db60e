"""A hook of mkdocs: pages of the repository that lie outside docs/ become pages of the site.

A page's address is its path in the repository, without `docs/` at the front. Links are written for
the repository, so that they work there too; here they are rewritten for the site. A link to
something that is no page (a folder of code) becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "experiments/**/README.md",
    "experiments/*/results/*.png",
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=os.fspath(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    address = page.file.src_uri
    lies_in = Path(address if is_outside(address) else f"docs/{address}").parent.as_posix()

    def rewritten(link: re.Match[str]) -> str:
        target = site_address(normpath(f"{lies_in}/{link[2]}"))
        if files.get_file_from_path(target) is None:
            return link[0] if target.endswith(".md") else link[1]  # strict mode names a lost page
        return f"[{link[1]}]({relpath(target, Path(address).parent.as_posix())}{link[3] or ''})"

    return LINK.sub(rewritten, markdown)


def is_outside(address: str) -> bool:
    return any(Path(address).match(p) for p in OUTSIDE) or address.startswith("experiments/")


def site_address(place: str) -> str:
    """Of a path in the repository; a folder with a README is that page, a notebook the page that is
    made of it (docs/notebooks.py)."""
    folder = (ROOT / place / "README.md").is_file()
    page = f"{place}/README.md" if folder else re.sub(r"\.ipynb$", ".md", place)
    return page.removeprefix("docs/")

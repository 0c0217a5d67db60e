"""Links, headings they point at, images and figures of the documentation.

Written for the repository: a link is a path from the file it stands in. `make docs` checks the same
for the site, where pages from outside docs/ have moved (docs/outside.py).
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s:]*?)(?:#([^)\s]*))?\)")
LARGEST_IMAGE = 300_000  # bytes; a clone carries every version of it


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """Of its headings, as Python-Markdown and GitHub make them."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"\s+", "-", title) for title in plain}


def broken_links(markdown: str, page: Path) -> list[str]:
    found = []
    for place, anchor in LINK.findall(without_code(markdown)):
        target = (page.parent / place).resolve() if place else page
        if (target != page and not target.exists()) or not target.is_relative_to(ROOT):
            found.append(place)
        elif anchor and anchor not in anchors(markdown if target == page else target.read_text()):
            found.append(f"{place}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page) == []


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"[\w./-]+\.md", nav))
    docs = ROOT / "docs"
    written = [*docs.rglob("*.md"), *(p.with_suffix(".md") for p in docs.glob("notebooks/*.ipynb"))]
    pages = {p.relative_to(docs).as_posix() for p in written}
    outside = named - pages
    assert pages - named == set()
    assert [name for name in outside if not (ROOT / name).is_file()] == []


def test_figures_are_those_that_their_program_draws() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))["FIGURES"]
    drawn = {name: draw() for name, draw in figures.items()}
    assert {p.name: p.read_text() for p in (ROOT / "docs" / "figures").glob("*.svg")} == drawn


def test_images_are_small_and_used() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for image in sorted((ROOT / "docs" / "images").iterdir()):
        assert image.stat().st_size < LARGEST_IMAGE, image
        assert image.name in shown, f"no page shows {image}"


def test_the_rule_sees_broken_links() -> None:
    planted = """
# A page
[good](glossary.md), [self](#a-page), [far](sites.md#2-keys), `[code](nowhere.md)`
[lost](nowhere.md), [no heading](sites.md#9-keys), [web](https://flower.ai), ![gone](images/no.png)
[outside](../../../etc/passwd)
"""
    assert broken_links(planted, ROOT / "docs" / "planted.md") == [
        "nowhere.md",
        "sites.md#9-keys",
        "images/no.png",
        "../../../etc/passwd",
    ]

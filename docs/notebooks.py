"""A hook of mkdocs: notebooks of docs/notebooks are run, and what they show becomes a page.

They lie in the repository without output, so that what a page shows is what the program does now;
a cell that fails, fails the build. A page has the notebook's text, its programs and their output,
pictures as files beside it, and nothing that is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
PATIENCE = 300  # seconds for one cell
ONLY_ERRORS = "--log-level=40"  # of the kernel, which warns about its socket on this machine
# not as Markdown: a link to a notebook leads to its page (docs/outside.py)
DOWNLOAD = '*<a href="{0}.ipynb">This page as a notebook</a>. It ran when this site was built.*'


class Page(NamedTuple):
    """pictures: by the name that the text has for them."""

    text: str
    pictures: dict[str, bytes]


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(FOLDER.glob("*.ipynb")):
        page = as_page(run_notebook(path), path.stem)
        place = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, place, content=page.text))
        for name, content in page.pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def run_notebook(path: Path) -> Any:
    """The notebook with its output, run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=PATIENCE, resources=place, extra_arguments=[ONLY_ERRORS]
        ).execute()
    return notebook


def as_page(notebook: Any, name: str) -> Page:
    """Of a notebook that has run. name: its own, and how those of its pictures begin."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for kind, content in outputs(cell):
            if kind == "picture":
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(content)
                parts.append(f"![Output of the cell above]({file})")
            else:
                parts.append(f"```text\n{content.rstrip()}\n```")
    parts.insert(1, DOWNLOAD.format(name))
    return Page("\n\n".join(parts) + "\n", pictures)


def outputs(cell: Any) -> Iterator[tuple[str, str]]:
    """What a cell has printed and shown: ("text", ...), then ("picture", base64)."""
    printed = [o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"]
    shown = [o.data for o in cell.outputs if "data" in o]
    texts = [data["text/plain"] for data in shown if "image/png" not in data]
    if text := "".join([*printed, *texts]):
        yield "text", text
    yield from (("picture", data["image/png"]) for data in shown if "image/png" in data)

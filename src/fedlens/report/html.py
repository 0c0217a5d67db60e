"""From run folders to one self-contained `report.html`.

A report needs nothing but the folder: no task, no model, no network, when it is written and when it
is opened. The page itself is plain HTML, CSS and JavaScript in `page/`, shared with the board; this
file only gathers the facts and puts the pieces together.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.core.files import write_atomically
from fedlens.report.page_data import run_view
from fedlens.report.reading import (
    RunFolder,
    distinct_names,
    image_digest,
    printable,
    read_run,
    runs_in,
)

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("draw.js", "pictures.js", "view.js")
# bytes of images embedded untouched; more are compressed, so that a report stays below 5 MB (base64
# adds a third)
_PICTURES = 3_300_000


def write_report(folder: Path | str) -> Path:
    """(Re)write `folder/report.html` and return its path. A run that died or is still running gets
    the report of what there is; a folder of runs gets them side by side."""
    run = read_run(Path(folder))
    if run.status == "not a run" and (below := runs_in(run.path)):
        return write_comparison(below, run.path)
    if run.status in ("empty", "not a run"):
        raise ValueError(_refusal(run))
    return _save(render_page([run]), run.path / "report.html")


def write_comparison(runs: Sequence[Path | str], out: Path | str, title: str | None = None) -> Path:
    """Several runs side by side. `out` is the file to write, or a folder that gets a
    `report.html`.
    """
    read = [read_run(Path(one)) for one in runs]
    for run in read:
        if run.status in ("empty", "not a run"):
            raise ValueError(_refusal(run))
    if not read:
        raise ValueError("There are no runs to compare.")
    target = Path(out)
    target = target if target.suffix == ".html" else target / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    return _save(render_page(read, title or target.parent.resolve().name), target)


def render_page(runs: Sequence[RunFolder], title: str | None = None) -> str:
    """The page as text. With a title it is a comparison, however many runs there are."""
    images = _Images(runs)
    views = [run_view(run, images.name) for run in runs]
    title = title and printable(title)
    names = distinct_names([run.path.resolve() for run in runs])
    for seen, name in zip(views, names):
        seen["name"] = name
    data = {"views": views, "images": images.addresses, "title": title}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    pieces = {
        "title": html.escape(f"{title or names[0]} · FedLens"),
        "style": (PAGE / "page.css").read_text(),
        "script": "\n".join((PAGE / name).read_text() for name in SCRIPTS),
        "plain": _plain(views),
        # Nothing inside a JSON block may look like markup to the HTML parser.
        "data": (
            text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        ),
    }
    page = (PAGE / "report.html").read_text()
    first, *rest = page.split("<!--")
    whole = first + "".join(
        pieces[name] + after for name, _, after in (part.partition("-->") for part in rest)
    )
    # half a character, as JSON can have it in a caption, cannot be written
    return whole.encode("utf-8", "replace").decode()


class _Images:
    """Every picture once, as a data URI. The whole has a budget: what does not fit is re-encoded as
    WebP, largest files first, and the labels stay true because the originals remain in the run
    folder."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        paths = {
            image_digest(p): p for run in runs for entry in run.pictures for p in entry["paths"]
        }
        excess = sum(p.stat().st_size for p in paths.values()) - _PICTURES
        self.addresses: list[str] = []
        self._place: dict[str, int] = {}
        for id, path in sorted(paths.items(), key=lambda item: -item[1].stat().st_size):
            raw, kind = path.read_bytes(), path.suffix.lower().lstrip(".").replace("jpg", "jpeg")
            if excess > 0 and (smaller := _compressed(raw)) is not None and len(smaller) < len(raw):
                excess -= len(raw) - len(smaller)
                raw, kind = smaller, "webp"
            self._place[id] = len(self.addresses)
            self.addresses.append(f"data:image/{kind};base64,{base64.b64encode(raw).decode()}")

    def name(self, path: Path) -> str:
        return f"#{self._place[image_digest(path)]}"


def _compressed(raw: bytes, most: int = 1600) -> bytes | None:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(raw))
        image.thumbnail((most, most))
        out = io.BytesIO()
        image.convert("RGB").save(out, "WEBP", quality=88, method=2)
    except (OSError, ValueError):
        return None
    return out.getvalue()


def _plain(views: Sequence[dict[str, Any]]) -> str:
    """For readers without JavaScript: the results as a table."""
    rows = "".join(
        f"<tr><td>{html.escape(str(v['name']))}</td><td>{html.escape(str(k))}</td><td>{x}</td></tr>"
        for v in views
        for k, x in v["final"].items()
    )
    return (
        "<h1>FedLens</h1><p>Curves and pictures need JavaScript. Final"
        f" metrics:</p><table>{rows}</table>"
    )


def _refusal(run: RunFolder) -> str:
    what = (
        "is empty"
        if run.status == "empty"
        else "is not a run folder: it has no config.toml, metrics.jsonl or summary.json"
    )
    return f"{run.path} {what}."


def _save(text: str, path: Path) -> Path:
    write_atomically(path, text, sync=False)
    return path

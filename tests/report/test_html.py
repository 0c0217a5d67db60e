"""The report as a file: complete in itself, harmless, small, and refused in one sentence where
there is nothing to report.
"""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_folders import write_run

from fedlens.core.picture import Picture, save_pictures
from fedlens.report import html as report


class Addresses(HTMLParser):
    """Everything a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or ""
            for key, value in attrs
            if key in ("src", "href", "data", "action", "srcset")
        ]
        self.scripts += tag == "script"


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    loaded: dict[str, object] = json.loads(found[1])
    return loaded


def test_a_report_needs_nothing_else(tmp_path: Path) -> None:
    path = report.write_report(write_run(tmp_path / "run", rounds=4))
    page = path.read_text()
    seen = Addresses()
    seen.feed(page)
    assert seen.found == ["#main"]
    assert "default-src 'none'" in page and "@import" not in page
    assert "url(" not in page.replace("url(#", "")  # of itself, a plot may use a part
    assert path.name == "report.html" and not list(path.parent.glob(".*.part*"))


def test_what_a_run_says_cannot_become_markup(tmp_path: Path) -> None:
    """A caption that closes the script would run in the reader's browser: there must be exactly the
    page's own three scripts.
    """
    run = write_run(tmp_path / "run</script><script>alert(1)", rounds=2)
    index = json.loads((run / "pictures" / "index.json").read_text())
    index[0]["caption"] = "</script><script>alert(2)</script><!--"
    (run / "pictures" / "index.json").write_text(json.dumps(index))
    page = report.write_report(run).read_text()
    seen = Addresses()
    seen.feed(page)
    assert seen.scripts == 3
    views = data_of(page)["views"]
    assert (
        isinstance(views, list)
        and views[0]["pictures"][0]["caption"] == "</script><script>alert(2)</script><!--"
    )


def test_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        report.write_report(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="is not a run folder"):
        report.write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        report.write_report(tmp_path / "absent")
    with pytest.raises(ValueError, match="no runs"):
        report.write_comparison([], tmp_path)


def test_large_pictures_are_made_to_fit(tmp_path: Path) -> None:
    """Eight images of noise are 25 MB as PNG, which nothing makes smaller without loss; the report
    stays below 5 MB.
    """
    run = write_run(tmp_path / "run", rounds=2, pictures=False)
    (run / "pictures").mkdir()
    noise, names = np.random.default_rng(0), [f"{k}.png" for k in range(8)]
    for name in names:
        smooth = np.repeat(
            np.repeat(noise.integers(0, 255, (64, 64, 3)), 16, 0), 16, 1
        ) + noise.integers(-9, 9, (1024, 1024, 3))
        Image.fromarray(np.clip(smooth, 0, 255).astype(np.uint8)).save(
            run / "pictures" / name, compress_level=1
        )
    (run / "pictures" / "index.json").write_text(
        json.dumps([{"caption": "c", "kind": "compare", "files": names}])
    )
    assert sum(p.stat().st_size for p in (run / "pictures").glob("*.png")) > 10_000_000
    assert report.write_report(run).stat().st_size < 5_000_000


def test_a_comparison_holds_shared_images_once(tmp_path: Path) -> None:
    """Both runs have the same 28 images but one (the restored scene differs), so 29 are stored."""
    runs = [
        write_run(tmp_path / name, rounds=2, gain=gain) for name, gain in (("a", 0.0), ("b", -0.2))
    ]
    path = report.write_comparison(runs, tmp_path / "both")
    images = data_of(path.read_text())["images"]
    one = len(list((runs[0] / "pictures").glob("*.png")))
    distinct = len({p.read_bytes() for run in runs for p in (run / "pictures").glob("*.png")})
    assert path == tmp_path / "both" / "report.html"
    assert isinstance(images, list) and len(images) == distinct == one + 1


def test_a_folder_of_runs_gets_them_side_by_side(tmp_path: Path) -> None:
    for name in ("fedavg", "fedprox"):
        write_run(tmp_path / name / "seed-0", rounds=1, pictures=False)
    (tmp_path / "table.md").write_text("x")
    data = data_of(report.write_report(tmp_path).read_text())
    views = data["views"]
    assert isinstance(views, list) and [v["name"] for v in views] == [
        "fedavg/seed-0",
        "fedprox/seed-0",
    ]
    assert data["title"] == tmp_path.name


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / group / "seed0", rounds=1, pictures=False) for group in ("x", "y")]
    views = data_of(report.write_comparison(runs, tmp_path / "c.html").read_text())["views"]
    assert isinstance(views, list) and [v["name"] for v in views] == ["x/seed0", "y/seed0"]


def test_a_map_says_what_its_colours_mean(tmp_path: Path) -> None:
    import torch

    save_pictures([Picture("m", [torch.tensor([[[-2.0, 0.5], [1.0, 3.0]]])], kind="map")], tmp_path)
    assert json.loads((tmp_path / "index.json").read_text())[0]["ranges"] == [[-2.0, 3.0]]


def test_a_folder_whose_name_is_not_utf8_gets_its_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"bad\xffname"), rounds=1, pictures=False)
    for folder in (run, tmp_path):  # alone, and among the runs below a folder
        views = data_of(report.write_report(folder).read_text(encoding="utf-8"))["views"]
        assert isinstance(views, list) and views[0]["name"] == "bad\\udcffname"
    assert not list(tmp_path.rglob(".*.part*"))


def test_half_a_character_in_a_caption_does_not_cost_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1)
    index = json.loads((run / "pictures" / "index.json").read_text())
    index[0]["caption"] = "half \ud800"
    (run / "pictures" / "index.json").write_text(json.dumps(index))
    assert "half ?" in report.write_report(run).read_text(encoding="utf-8")


def test_a_report_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    (run / "report.html").mkdir()
    with pytest.raises(OSError):
        report.write_report(run)
    assert not list(run.glob(".*.part*"))

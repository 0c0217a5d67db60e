"""The page says what left each client, in the numbers of the ledgers, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

from browser import Tab, chromium

from fedlens.report.html import write_report
from fedlens.report.page_data import run_view
from fedlens.report.reading import read_run
from fedlens.runs.job import experiment

FEW = {"data.images": 60, "data.test_images": 12, "clients": 3, "cohort": None, "workers": 0}


def test_the_view_adds_up_the_ledgers_and_the_page_shows_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment("demo", rounds=2, ledger=True, out=run, **FEW)
    texts = [(run / "ledger" / f"{k}.jsonl").read_text() for k in range(3)]
    lines = [[json.loads(line) for line in text.splitlines()[1:]] for text in texts]
    left = run_view(read_run(run), str)["left"]
    assert [row[:3] for row in left["clients"]] == [
        [k, 2, sum(line["bytes"] for line in lines[k])] for k in range(3)
    ]
    assert left["trees"] == [["delta", 6, 6 * 85_384, 10]] and left["readable"] == 6
    assert left["numbers"] == [["examples", 6], ["loss", 6]] and left["hidden"] == 0
    write_report(run)
    with chromium() as browser:
        tab = Tab(browser)
        tab.page.goto((run / "report.html").as_uri())
        part = tab.page.locator("#left")
        assert part.is_visible() and not tab.complaints
        assert "6 replies left in a form that the server can read" in part.inner_text()
        assert part.locator("table").nth(1).locator("tbody tr").count() == 3


def test_a_run_without_ledgers_has_no_such_part(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment("demo", rounds=1, out=run, **FEW)
    assert run_view(read_run(run), str)["left"]["clients"] == []

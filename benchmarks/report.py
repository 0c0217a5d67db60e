"""How fast the report and the board are. Ends by printing one JSON object.

The report: 100 rounds x 40 clients with pictures, written ten times; seconds (median) and bytes.
The board: 200 run folders (100 rounds x 40 clients each), the time from a request to the complete
list, first with nothing cached and then again; and the time from a round being written to the event
that reaches a listener, and to the page that shows it where a browser is installed.

    python benchmarks/report.py
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from run_folders import round_line, write_run

from fedlens.cli import board as cli_board
from fedlens.report.html import write_report


def measure_report(folder: Path) -> dict[str, float]:
    run = write_run(folder / "large", rounds=100, clients=40, cohort=40)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        path = write_report(run)
        seconds.append(time.perf_counter() - began)
    return {
        "report_seconds": statistics.median(seconds),
        "report_seconds_worst": max(seconds),
        "report_bytes": path.stat().st_size,
    }


def serve(root: Path) -> tuple[Any, threading.Thread, int]:
    import uvicorn

    from fedlens.report.board.app import make_app

    listener = cli_board.listen_at("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(make_app(root), log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    return server, thread, listener.getsockname()[1]


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def measure_board(folder: Path) -> dict[str, Any]:
    root = folder / "runs"
    model = write_run(root / "run-000", rounds=100, clients=40, cohort=40, pictures=False)
    for k in range(1, 200):
        shutil.copytree(model, root / f"run-{k:03d}")
    live = write_run(
        folder / "live",
        rounds=50,
        planned=200,
        clients=40,
        cohort=40,
        pictures=False,
        finished=False,
    )
    (root / "run-199").rename(folder / "spare")
    live = live.rename(root / "run-199")
    server, thread, port = serve(root)
    lists = []
    for _ in range(10):
        began = time.perf_counter()
        runs = json.loads(get(port, "/api/runs"))["runs"]
        lists.append(time.perf_counter() - began)
    assert len(runs) == 200
    found = {
        "folders": len(runs),
        "list_seconds_first": lists[0],
        "list_seconds_again": statistics.median(lists[1:]),
        "event_seconds": statistics.median(follow_events(port, live)),
        **follow_page(port, live),
    }
    server.should_exit = True
    thread.join()
    return found


def add_round(live: Path, number: int) -> None:
    with (live / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(round_line(number, random.Random(number), np.full((40, 10), 30), 40)) + "\n"
        )


def follow_events(port: int, live: Path) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/events?run=run-199")
    stream, seconds = connection.getresponse(), []
    for k in range(10):
        time.sleep(0.3 + 0.037 * k)
        began = time.perf_counter()
        add_round(live, 50 + k)
        while not stream.readline().startswith(b"event: change"):
            pass
        seconds.append(time.perf_counter() - began)
    connection.close()
    return seconds


def follow_page(port: int, live: Path) -> dict[str, Any]:
    """From the write to the page saying so, as a reader would see it."""
    program = next(
        (p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None
    )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        return {"visible_seconds": None}
    from browser import FLAGS

    seconds = []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which(program), args=FLAGS)
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/#/run/run-199")
        page.locator(".what").wait_for()
        page.wait_for_timeout(1000)
        for k in range(60, 70):
            page.wait_for_timeout(700)
            began = time.perf_counter()
            add_round(live, k)
            while f"{k + 1} of 200" not in page.locator(".what").inner_text():
                page.wait_for_timeout(5)
            seconds.append(time.perf_counter() - began)
        browser.close()
    return {"visible_seconds": statistics.median(seconds), "visible_seconds_worst": max(seconds)}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {**measure_report(folder), **measure_board(folder)}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}))


if __name__ == "__main__":
    main()

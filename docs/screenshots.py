"""Pages as they look, to be looked at: every report and audit below a folder of runs, and the board
over it, on a desk and on a telephone, in light and in dark.

    python docs/screenshots.py runs --out /tmp/look        all of them, to review
    python docs/screenshots.py runs --keep                 and those that the docs show, kept there

Needs Chromium (Debian: chromium), playwright and `pip install "fedlens[board]"`. A page that is
wider than its window, or that complains in the console, makes it fail.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WINDOWS = {"desktop": (1200, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# what the docs show: page, window, theme -> file in docs/images
KEPT = {
    ("board", "desktop", "light"): "board.png",
    ("comparison", "desktop", "dark"): "comparison-dark.png",
    ("comparison", "phone", "light"): "comparison-phone.png",
}


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The board over these runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "fedlens.cli.main", "board", str(runs), "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


def pages(runs: Path, board: str) -> dict[str, str]:
    """Address by name: the board, a page for each report, `comparison` for one of several runs, and
    `NAME-audit`.
    """
    found = {"board": board}
    for report in sorted(runs.rglob("report.html")):
        name = "-".join(report.parent.relative_to(runs).parts) or "comparison"
        found[name] = report.resolve().as_uri()
        if (audit := report.with_name("audit.html")).is_file():
            found[f"{name}-audit"] = audit.resolve().as_uri()
    return found


def shoot(
    browser: Any, address: str, file: Path, window: str, theme: str, kept: Path | None
) -> list[str]:
    """Save a picture of a page, and of what is first seen of it for the docs; what is wrong with
    it."""
    width, height = WINDOWS[window]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.goto(address)
    page.wait_for_selector("main h1")
    page.wait_for_timeout(600)
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        wrong.append(f"{wide} pixels wide in a window of {width}")
    page.screenshot(path=str(file), full_page=True)
    if kept:
        page.screenshot(path=str(kept))
    context.close()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("screenshots"))
    parser.add_argument("--keep", action="store_true", help="copy what the docs show")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium is installed")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with served(options.runs) as board, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=FLAGS)
        for name, address in pages(options.runs, board).items():
            for window in WINDOWS:
                for theme in THEMES:
                    file = options.out / f"{name}-{window}-{theme}.png"
                    shown = KEPT.get((name, window, theme)) if options.keep else None
                    kept = Path(__file__).parent / "images" / shown if shown else None
                    for line in shoot(browser, address, file, window, theme, kept):
                        failed = True
                        print(f"{file.name}: {line}")
        browser.close()
    print(f"pictures in {options.out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

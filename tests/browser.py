"""A real browser for tests of pages. Tests that use it skip, with the reason, where there is
none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    play = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )
    if program is None:
        pytest.skip("no Chromium or Chrome is installed")
    with play.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A page and everything it complained about."""

    def __init__(self, browser: Any, width: int = 1200, **options: Any) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, reduced_motion="reduce", **options
        )
        self.context.set_default_timeout(120_000)  # generous: a busy machine is not a broken page
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on(
            "console",
            lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Until the expression holds. Playwright's own waiting evaluates inside the page, which our
        content policy forbids.
        """
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never came true: {expression}"
            self.page.wait_for_timeout(30)

    def close(self) -> None:
        self.context.close()

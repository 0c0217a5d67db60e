"""The board in a real browser, over a real server, while runs are being written."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Tab, chromium
from run_folders import round_line, write_pictures, write_run

uvicorn = pytest.importorskip("uvicorn", reason='the board needs "fedlens[board]"')

from fedlens import cli_board  # noqa: E402
from fedlens.board.app import make  # noqa: E402

COUNTS = np.full((6, 10), 20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    here = tmp_path / "runs"
    write_run(here / "first", rounds=6, clients=6, cohort=5)
    write_run(here / "second", rounds=6, clients=6, cohort=5, layer="FedProx", gain=-0.1)
    write_run(here / "live", rounds=3, clients=6, cohort=5, planned=20, finished=False)
    (here / "empty").mkdir()
    return here


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    listener = cli_board._listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make(root), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)
    listener.close()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.close()
    assert tab.complaints == []


def add_round(run: Path, number: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(round_line(number, random.Random(number), COUNTS, 5)) + "\n")


def names(tab: Tab) -> list[str]:
    found: list[str] = tab.page.locator(".runs tbody .name").all_inner_texts()
    return found


def test_list_filter_sort_choose_compare(tab: Tab, address: str) -> None:
    page = tab.page
    page.goto(address)
    page.locator(".runs tbody tr").first.wait_for()
    assert sorted(names(tab)) == ["empty", "first", "live", "second"] and names(tab)[-1] == "empty"
    page.locator("th[data-column=name] button").click()
    assert names(tab) == ["first", "live", "second", "empty"]
    page.locator("th[data-column=name] button").click()
    assert names(tab) == ["second", "live", "first", "empty"]
    page.get_by_label("Filter runs").fill("prox")
    assert names(tab) == ["second"]
    page.get_by_label("Filter runs").fill("")
    page.get_by_label("Status").select_option("running")
    assert names(tab) == ["live"]
    page.get_by_label("Status").select_option("")
    page.get_by_label("Choose first").check()
    assert page.get_by_role("button", name="Compare").is_disabled()
    page.get_by_label("Choose second").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.locator(".results tbody tr").nth(1).wait_for()
    assert page.locator("[data-chart=accuracy] path.series").count() == 2
    assert page.locator(".results tbody tr").count() == 2


def test_a_run_is_followed_live_and_the_reader_is_left_alone(tab: Tab, address: str, root: Path) -> None:
    """New rounds and better pictures arrive by themselves; the slider stays where it was put."""
    page = tab.page
    page.goto(address + "#/run/live")
    tab.wait("document.querySelector('.compare .stage')?.clientHeight > 100")
    page.locator(".split").fill("30")
    assert "3 of 20 rounds" in page.locator(".what").inner_text()
    before = page.locator("[data-chart=training] path.series").get_attribute("d")
    add_round(root / "live", 3)
    tab.wait("document.querySelector('.what').textContent.includes('4 of 20 rounds')")
    assert page.locator("[data-chart=training] path.series").get_attribute("d") != before
    seen = page.locator(".compare .stage img").first.get_attribute("src")
    write_pictures(root / "live" / "pictures", quality=0.9)
    tab.wait(f"document.querySelector('.compare .stage img').getAttribute('src') !== {json.dumps(seen)}")
    assert page.locator(".split").input_value() == "30"
    assert page.evaluate("document.querySelector('.stage .divider').style.left") == "30%"


def test_the_list_changes_by_itself(tab: Tab, address: str, root: Path) -> None:
    page = tab.page
    page.goto(address)
    page.locator("[data-run=live]").wait_for()
    add_round(root / "live", 3)
    tab.wait("document.querySelector('[data-run=live]').textContent.includes('4 / 20')")
    write_run(root / "new", rounds=2, pictures=False)
    page.locator("[data-run=new]").wait_for()
    shutil.rmtree(root / "second")
    tab.wait("!document.querySelector('[data-run=second]')")


def test_half_a_line_is_not_shown_until_it_is_whole(tab: Tab, address: str, root: Path) -> None:
    page = tab.page
    page.goto(address + "#/run/live")
    page.locator(".what").wait_for()
    text = json.dumps(round_line(3, random.Random(3), COUNTS, 5)) + "\n"
    with (root / "live" / "metrics.jsonl").open("a") as file:
        file.write(text[:40])
        file.flush()
        tab.wait("document.querySelector('.problems')?.textContent.includes('incomplete')")
        assert "3 of 20 rounds" in page.locator(".what").inner_text()
        file.write(text[40:])
    tab.wait("document.querySelector('.what').textContent.includes('4 of 20 rounds') && !document.querySelector('.problems')")


def test_what_is_not_there_is_a_sentence(browser: Any, address: str) -> None:
    tab = Tab(browser)
    tab.page.goto(address + "#/run/..%2F..%2Fetc")
    tab.page.locator(".problems").wait_for()
    assert tab.page.locator(".problems").inner_text() == "There is no such run."
    tab.page.get_by_role("link", name="FedLens board").click()
    tab.page.locator(".runs tbody tr").first.wait_for()
    tab.page.get_by_role("link", name="empty").click()
    tab.wait("document.querySelector('.problems')?.textContent === 'This folder is empty.'")
    tab.close()


def test_readable_on_a_phone_and_by_keyboard(browser: Any, address: str) -> None:
    tab = Tab(browser, width=360)
    tab.page.goto(address)
    tab.page.locator(".runs tbody tr").first.wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.page.get_by_role("link", name="first").focus()
    tab.page.keyboard.press("Enter")
    tab.wait("document.querySelector('h1').textContent === 'first' && document.querySelector('.compare .stage')?.clientHeight > 100")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.close()
    assert tab.complaints == []

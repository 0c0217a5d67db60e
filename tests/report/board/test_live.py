"""The board in a real browser, over a real server, while runs are being written."""

from __future__ import annotations

import json
import os
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

from fedlens.cli import board as cli_board  # noqa: E402
from fedlens.report.board.app import make_app  # noqa: E402

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
    listener = cli_board.listen_at("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(make_app(root), log_level="warning", timeout_graceful_shutdown=1)
    )
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


def test_a_setting_becomes_a_column(tab: Tab, address: str) -> None:
    """Only settings in which runs differ are offered; sorted as numbers, and taken away again."""
    page = tab.page
    page.goto(address)
    page.wait_for_selector(".runs tbody tr")
    menu = page.get_by_label("Add a setting as a column")
    offered = menu.locator("option").all_inner_texts()
    assert "federation.rounds" in offered and "task.name" not in offered
    menu.select_option("federation.rounds")
    head = page.locator("[data-column='set:federation.rounds']")
    head.locator("button").first.click()
    rounds = [int(t) for t in page.locator(".runs td.num").all_inner_texts() if t.strip()]
    assert len(set(rounds)) > 1 and rounds in (sorted(rounds), sorted(rounds, reverse=True))
    head.get_by_label("Remove").click()
    assert head.count() == 0


def test_a_run_is_followed_live_and_the_reader_is_left_alone(
    tab: Tab, address: str, root: Path
) -> None:
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
    tab.wait(
        f"document.querySelector('.compare .stage img').getAttribute('src') !== {json.dumps(seen)}"
    )
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
    tab.wait(
        "document.querySelector('.what').textContent.includes('4 of 20 rounds') &&"
        " !document.querySelector('.problems')"
    )


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


# The streams a page opened, so that a test can count them and cut them.
RECORD = """window.streams = []; window.EventSource = class extends EventSource {
    constructor(url) { super(url); window.streams.push(this); } };"""


def test_a_slow_page_does_not_replace_a_newer_one(tab: Tab, address: str) -> None:
    page = tab.page
    held: list[Any] = []
    page.add_init_script(RECORD)
    page.route(lambda url: url.endswith("/api/run?name=first"), lambda route: held.append(route))
    page.goto(address + "#/run/first")
    while not held:
        page.wait_for_timeout(20)
    page.evaluate("location.hash = '#/run/second'")
    tab.wait("document.querySelector('h1')?.textContent === 'second' && streams.length > 0")
    with page.expect_response(lambda answer: answer.url.endswith("name=first")):
        held[0].continue_()
    page.wait_for_timeout(300)
    assert page.locator("h1").inner_text() == "second" and page.title().startswith("second")
    assert page.evaluate(
        "streams.filter((s) => s.readyState !== 2).map((s) => s.url.split('?')[1])"
    ) == ["run=second"]


def test_what_was_deleted_while_the_connection_was_lost_leaves_the_list(
    tab: Tab, address: str, root: Path
) -> None:
    page = tab.page
    page.add_init_script(RECORD)
    page.goto(address)
    for name in ("first", "second"):
        page.get_by_label(f"Choose {name}").check()
    tab.wait("streams.at(-1)?.readyState === 1")
    page.evaluate("streams.at(-1).close()")
    shutil.rmtree(root / "second")
    # what the browser says when it is connected again
    page.evaluate("streams.at(-1).dispatchEvent(new Event('open'))")
    tab.wait("!document.querySelector('[data-run=second]')")
    assert page.get_by_role("button", name="Compare").is_disabled()


def test_an_open_run_that_is_deleted_says_so_until_it_is_back(
    browser: Any, address: str, root: Path
) -> None:
    tab = Tab(browser)
    tab.page.goto(address + "#/run/second")
    tab.page.locator(".what").wait_for()
    (root / "second").rename(root.parent / "away")
    tab.wait("document.querySelector('.problems')?.textContent.includes('no longer there')")
    assert tab.page.locator("[data-chart=accuracy]").count() == 1
    (root.parent / "away").rename(root / "second")
    tab.wait("!document.querySelector('.problems')")
    tab.close()


def test_a_run_that_is_back_before_the_stream_saw_it_gone_is_shown_again(
    browser: Any, address: str, root: Path
) -> None:
    """Here the stream is silent altogether: a page that was told 404 asks again by itself."""
    tab = Tab(browser)
    page = tab.page
    page.add_init_script(RECORD)
    page.goto(address + "#/run/second")
    tab.wait("streams.at(-1)?.readyState === 1")
    page.evaluate("streams.at(-1).close()")
    (root / "second").rename(root.parent / "away")
    page.evaluate("streams.at(-1).dispatchEvent(new Event('open'))")
    tab.wait("document.querySelector('.problems')?.textContent.includes('no longer there')")
    (root.parent / "away").rename(root / "second")
    tab.wait("!document.querySelector('.problems')")
    tab.close()


def test_a_run_that_goes_before_its_stream_opens_is_noticed_too(
    browser: Any, address: str, root: Path
) -> None:
    write_run(root / "bare", rounds=2, pictures=False)
    tab = Tab(browser)
    held: list[Any] = []
    tab.page.route(lambda url: "/events" in url, lambda route: held.append(route))
    tab.page.goto(address + "#/run/bare")
    while not held:
        tab.page.wait_for_timeout(20)
    (root / "bare").rename(root.parent / "away")
    held[0].continue_()
    tab.page.unroute_all()
    tab.wait("document.querySelector('.problems')?.textContent.includes('no longer there')")
    (root.parent / "away").rename(root / "bare")
    tab.wait("!document.querySelector('.problems')")
    tab.close()


def test_a_comparison_goes_on_without_a_run_that_is_deleted(
    browser: Any, address: str, root: Path
) -> None:
    tab = Tab(browser)
    page = tab.page
    page.goto(address + "#/compare/first/second/live")
    page.locator(".results tbody tr").nth(2).wait_for()
    shutil.rmtree(root / "second")
    tab.wait("document.querySelector('.problems')?.textContent.includes('second is not there')")
    tab.wait("!document.querySelector('.results').textContent.includes('second')")
    page.reload()
    tab.wait("document.querySelector('.problems')?.textContent.includes('second is not there')")
    add_round(root / "live", 3)
    add_round(root / "live", 4)
    tab.wait("document.querySelectorAll('[data-chart=accuracy] path.series').length === 2")
    tab.close()
    # pictures of what was deleted may be asked for once more
    assert [c for c in tab.complaints if "Failed to load" not in c] == []


def test_a_comparison_that_is_cut_says_so(tab: Tab, address: str, root: Path) -> None:
    many = [f"r{k}" for k in range(26)]
    for name in many:
        write_run(root / name, rounds=1, clients=2, cohort=2, pictures=False)
    tab.page.goto(f"{address}#/compare/{'/'.join(many)}")
    tab.page.locator(".problems").wait_for()
    assert (
        tab.page.locator(".problems").inner_text()
        == "Only the first 24 of 26 runs are compared; 2 did not fit."
    )
    assert tab.page.locator("h1").inner_text() == "24 runs side by side"


def test_a_damaged_address_is_a_sentence(tab: Tab, address: str) -> None:
    tab.page.goto(address + "#/run/%E0%A4%A")
    tab.page.locator(".problems").wait_for()
    assert (
        tab.page.locator(".problems").inner_text()
        == "This address cannot be read: a % in it stands for nothing."
    )


def test_a_name_that_is_not_utf8_does_not_cost_the_list(tab: Tab, address: str, root: Path) -> None:
    write_run(root / os.fsdecode(b"bad\xffname"), rounds=1, pictures=False)
    tab.page.goto(address)
    tab.wait("document.querySelectorAll('.runs tbody tr').length === 5")
    odd = tab.page.locator(".runs tbody tr", has_text="not UTF-8")
    assert odd.locator("a").count() == 0 and odd.get_by_role("checkbox").is_disabled()


def test_readable_on_a_phone_and_by_keyboard(browser: Any, address: str) -> None:
    tab = Tab(browser, width=360)
    tab.page.goto(address)
    tab.page.locator(".runs tbody tr").first.wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.page.get_by_role("link", name="first").focus()
    tab.page.keyboard.press("Enter")
    tab.wait(
        "document.querySelector('h1').textContent === 'first' && document.querySelector('.compare"
        " .stage')?.clientHeight > 100"
    )
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.close()
    assert tab.complaints == []

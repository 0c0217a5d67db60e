"""The report in a real browser: what a reader sees and can do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Tab, chromium
from run_folders import write_run

from fedlens.core.picture import Picture, save_pictures
from fedlens.report import html as report
from fedlens.tasks.classification import confusion_picture

Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("report") / "run", rounds=12, clients=8, cohort=6)
    report.write_report(run)
    return run


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Opens a file; at the end of the test nothing may have been complained about."""
    tabs = []

    def go(path: Path, **options: Any) -> Tab:
        tab = Tab(browser, **options)
        tabs.append(tab)
        tab.page.goto(path.as_uri())
        return tab

    yield go
    for tab in tabs:
        tab.close()
        assert tab.complaints == []


def divider(page: Any) -> float:
    found: float = page.evaluate("parseFloat(document.querySelector('.stage .divider').style.left)")
    return found


def test_headline_and_sections(folder: Path, show: Open) -> None:
    page = show(folder / "report.html").page
    final = json.loads((folder / "summary.json").read_text())["metrics"]["accuracy"]
    assert page.locator("[data-metric=accuracy] .value").inner_text() == f"{final:.4f}"
    heads = page.locator("section h2:visible").all_inner_texts()
    assert heads == ["Pictures", "Curves", "The federation", "Cost", "Do it again"]
    assert "fedlens run classify" in page.locator(".command").inner_text()


def test_slider_by_mouse_and_by_keyboard(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    stage = page.locator(".compare .stage").first
    stage.scroll_into_view_if_needed()
    tab.wait("document.querySelector('.compare .stage').clientHeight > 100")
    assert divider(page) == 50
    box = stage.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.up()
    assert divider(page) == pytest.approx(25, abs=0.5)
    assert (
        page.locator(".stage .over").first.evaluate("n => n.style.clipPath")
        == f"inset(0px {100 - divider(page):g}% 0px 0px)"
    )
    page.locator(".split").focus()
    before = divider(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert divider(page) == pytest.approx(before + 1, abs=0.3)


def test_zoom_and_pan(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    stage = page.locator(".compare .stage").first
    tab.wait("document.querySelector('.compare .stage').clientHeight > 100")
    page.get_by_label("Zoom in").first.click()
    page.get_by_label("Zoom in").first.click()
    scale = "n => new DOMMatrix(getComputedStyle(n).transform)"
    image = page.locator(".compare .stage img").first
    assert image.evaluate(f"n => ({scale})(n).a") == 4
    left = image.evaluate(f"n => ({scale})(n).e")
    stage.focus()
    page.keyboard.press("ArrowRight")
    assert image.evaluate(f"n => ({scale})(n).e") < left
    page.keyboard.press("0")
    assert image.evaluate(f"n => ({scale})(n).a") == 1


def test_residual_is_the_difference_of_the_two_images(folder: Path, show: Open) -> None:
    """The page says how far the images are apart; numpy says the same of the files."""
    import numpy as np
    from PIL import Image

    tab = show(folder / "report.html")
    page = tab.page
    page.get_by_role("button", name="Residual").first.click()
    restored, sharp = (
        np.asarray(Image.open(folder / "pictures" / f"00-0{k}.png"), dtype=float) / 255
        for k in (1, 2)
    )
    decibels = -10 * np.log10(np.mean((restored - sharp) ** 2))
    tab.wait("document.querySelector('.compare .legend')?.textContent.includes('dB')")
    text = page.locator(".compare .legend").first.inner_text()
    assert (
        f"{decibels:.2f} dB" in text and f"mean {np.abs(restored - sharp).mean():.3f}"[:9] in text
    )
    assert page.locator(".compare .stage canvas").first.evaluate("n => [n.width, n.height]") == [
        256,
        256,
    ]


def test_side_by_side_shows_all(folder: Path, show: Open) -> None:
    page = show(folder / "report.html").page
    page.get_by_role("button", name="Side by side").first.click()
    assert page.locator(".panes figcaption").all_inner_texts() == [
        "client 0, blurred",
        "restored",
        "sharp",
    ]
    tops = page.locator(".panes .stage").evaluate_all(
        "list => list.map(n => n.getBoundingClientRect().top)"
    )
    assert len(set(tops)) == 1


def test_curves_draw_and_can_be_read(folder: Path, show: Open) -> None:
    page = show(folder / "report.html").page
    chart = page.locator("[data-chart=training]")
    path = chart.locator("path.series").get_attribute("d")
    assert path is not None and path.count("L") == 11
    chart.locator("svg").first.focus()
    page.keyboard.press("ArrowRight")
    loss = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert f"round 0 {loss:.3f}" in " ".join(chart.locator(".key").inner_text().split())
    box = chart.locator("svg").first.bounding_box()
    chart.locator("svg").first.hover(position={"x": box["width"] - 12, "y": 60})
    assert "round 11" in " ".join(chart.locator(".key").inner_text().split())
    assert page.locator("[data-chart=accuracy] path.series").count() == 3


def test_who_took_part_can_be_read_cell_by_cell(folder: Path, show: Open) -> None:
    """The first line of metrics.jsonl: a client that was heard has a share of the mean, one that
    was lost says so.
    """
    page = show(folder / "report.html").page
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    grid = page.locator("#federation .matrix").nth(1)
    grid.locator("canvas").focus()
    said = {}
    page.keyboard.press("ArrowDown")
    for id in range(8):
        said[id] = grid.locator(".readout").inner_text()
        page.keyboard.press("ArrowDown")
    total = sum(c["weight"] for c in first["clients"].values())
    for id, text in said.items():
        assert text.startswith(f"client {id}, round 0: ")
        if str(id) in first["clients"]:
            share = 100 * first["clients"][str(id)]["weight"] / total
            assert float(text.split(": ")[1].split(" %")[0]) == pytest.approx(share, abs=0.06)
        elif id in [x["client"] for x in first["lost"]]:
            assert text.endswith("asked, reply lost")
        else:
            assert text.endswith("not asked")


def test_every_kind_of_picture_is_there(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    tab.wait("[...document.querySelectorAll('.picture canvas')].every(c => c.width > 1)")
    kinds = page.locator(".picture").evaluate_all("list => list.map(n => n.dataset.kind)")
    assert kinds == ["compare", "strip", "sheet", "map", "map", "image"]
    assert page.locator("[data-kind=sheet] figcaption").nth(1).inner_text() == "query: climb"
    bar = page.locator("[data-kind=map] .bar").first.inner_text().split()
    assert bar == ["−0.699", "0.699"]
    middle = page.locator("[data-kind=map] canvas").first.evaluate(
        "c => [...c.getContext('2d').getImageData(0, 20, 1, 1).data]"
    )
    assert min(middle[:3]) > 240  # sin(0) = 0: zero is white on the signed scale


def test_strip_plays_and_its_profile_has_a_row_for_each_frame(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    strip = page.locator("[data-kind=strip]")
    tab.wait("document.querySelector('.film canvas').width === 160")
    assert strip.locator("canvas").evaluate("c => c.height % 12") == 0
    strip.get_by_role("button", name="Frame frame 7").click()
    assert strip.locator("input").first.input_value() == "7"
    strip.get_by_role("button", name="Play").click()
    tab.wait("document.querySelector('[data-kind=strip] input').value !== '7'")
    strip.get_by_role("button", name="Pause").click()


def test_closer_look_opens_and_closes_by_keyboard(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    page.locator("[data-kind=sheet] .look").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    tab.wait("!document.querySelector('dialog')")


def test_everything_is_reached_by_keyboard_with_a_visible_focus(folder: Path, show: Open) -> None:
    tab = show(folder / "report.html")
    page = tab.page
    tab.wait("[...document.querySelectorAll('.picture canvas')].every(c => c.width > 1)")
    seen = set()
    for _ in range(110):
        page.keyboard.press("Tab")
        kind = page.evaluate("""() => { const n = document.activeElement;
            if (n === document.body) return "end";
            if (getComputedStyle(n).outlineStyle === "none")
                return "no outline: " + n.outerHTML.slice(0, 80);
            return n.closest("[data-kind]")?.dataset.kind
                || n.closest("[data-chart]")?.dataset.chart
                || n.closest("section")?.id || n.className; }""")
        seen.add(kind)
        if kind == "end":
            break
    assert {
        "compare",
        "strip",
        "sheet",
        "map",
        "image",
        "training",
        "accuracy",
        "federation",
        "repeat",
        "theme",
    } <= seen
    assert not [kind for kind in seen if kind.startswith("no outline")]


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_sticks_out(folder: Path, show: Open, width: int) -> None:
    page = show(folder / "report.html", width=width).page
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate(
        """[...document.querySelectorAll("p, h1, h2, h3, button, td, dd, figcaption")].filter(
        (n) => n.offsetParent && parseFloat(getComputedStyle(n).fontSize) < 12
        ).map((n) => n.textContent)"""
    )
    assert small == []


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast(folder: Path, show: Open, scheme: str) -> None:
    """Text at least 4.5 : 1 (WCAG AA), curves and marks at least 3 : 1, on paper in both."""
    page = show(folder / "report.html", color_scheme=scheme).page
    names = [
        "--paper",
        "--ink",
        "--soft",
        "--good",
        "--bad",
        "--accent",
        *[f"--c{k}" for k in range(8)],
    ]
    colours = page.evaluate(
        "names => names.map(n =>"
        " getComputedStyle(document.documentElement).getPropertyValue(n).trim())",
        names,
    )
    light = dict(zip(names, map(luminance, colours)))
    paper = light.pop("--paper")
    assert (paper > 0.5) == (scheme == "light")
    for name, value in light.items():
        ratio = (max(value, paper) + 0.05) / (min(value, paper) + 0.05)
        assert ratio >= (3 if name.startswith("--c") else 4.5), name
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator(".theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_comparison_shows_both_and_shares_the_reference(
    folder: Path, show: Open, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "prox", rounds=12, clients=8, cohort=6, layer="FedProx", gain=-0.1)
    page = show(report.write_comparison([folder, other], tmp_path)).page
    assert page.locator(".results tbody tr").count() == 2
    assert page.locator("[data-chart=accuracy] path.series").count() == 2
    page.get_by_role("button", name="Side by side").first.click()
    labels = page.locator(".panes figcaption").all_inner_texts()
    assert labels == ["client 0, blurred", "run: restored", "prox: restored", "sharp"]
    differing = page.locator("#settings code").all_inner_texts()
    assert differing[:3] == ["algorithm", "FedAvg + LossAware", "FedAvg + FedProx"]


def test_confusion_matrices_of_a_comparison_keep_their_names(show: Open, tmp_path: Path) -> None:
    """A matrix for each method: seeds are added up. By hand: of 10 cats 2 + 3 were taken for dogs
    by FedProx's two seeds, so 5 of 20."""
    for layer, wrong in (("FedProx", (2, 3)), ("Scaffold", (4, 4))):
        for seed, k in enumerate(wrong):
            run = write_run(
                tmp_path / layer / f"seed-{seed}", rounds=2, seed=seed, layer=layer, pictures=False
            )
            table = torch.tensor([[10.0 - k, k], [0, 10]])
            save_pictures([confusion_picture(table, ["cat", "dog"])], run / "pictures")
    runs = sorted(p.parent for p in tmp_path.rglob("config.toml"))
    page = show(report.write_comparison(runs, tmp_path)).page
    figures = page.locator("figure[data-kind=map]")
    assert figures.locator("h3").all_inner_texts() == [
        f"{name} (2 seeds): Confusion matrix: truth in rows, prediction in columns"
        for name in ("FedProx", "Scaffold")
    ]
    figures.first.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert figures.first.locator(".readout").inner_text() == "cat taken for dog: 5 of 20 (25 %)"


def test_bands_stay_on_the_paper(show: Open, tmp_path: Path) -> None:
    """Two methods, three seeds each that lie far apart: a band is drawn only where its plot is, and
    the curves keep at least half of it."""
    runs = [
        write_run(tmp_path / layer / f"seed-{seed}", rounds=8, seed=seed, layer=layer,
                  gain=0.3 * seed, pictures=False)
        for layer in ("FedProx", "Scaffold")
        for seed in range(3)
    ]  # fmt: skip
    report.write_comparison(runs, tmp_path)
    page = show(tmp_path / "report.html").page
    page.wait_for_selector(".chart .area")
    outside = page.evaluate(
        """() => [...document.querySelectorAll('.chart .area')].filter((band) => {
          const group = band.parentElement, clip = group.getAttribute('clip-path');
          const rect = clip && document.querySelector(clip.slice(4, -1) + ' rect');
          const svg = band.closest('svg').viewBox.baseVal;
          return !rect || +rect.getAttribute('y') < 0
            || +rect.getAttribute('y') + +rect.getAttribute('height') > svg.height
            || +rect.getAttribute('x') + +rect.getAttribute('width') > svg.width;
        }).length"""
    )
    assert page.locator(".chart .area").count() > 0 and outside == 0


def test_a_long_sheet_is_folded_until_somebody_asks(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, clients=4, cohort=4, pictures=False)
    many = Picture("Many", [torch.rand(3, 8, 8) for _ in range(144)], kind="sheet")
    save_pictures([many], run / "pictures")
    report.write_report(run)
    page = show(run / "report.html").page
    assert page.locator(".sheet figure").count() == 24
    page.get_by_text("Show all 144").click()
    assert page.locator(".sheet figure").count() == 144
    page.get_by_text("Show only 24").click()
    assert page.locator(".sheet figure").count() == 24


def test_smoothing_draws_a_second_line_and_leaves_the_first(folder: Path, show: Open) -> None:
    """At 0.5 from 1, 0: 1, then 0.5."""
    page = show(folder / "report.html").page
    page.wait_for_selector(".chart path.series")
    before = page.locator("[data-chart=training] path.series").count()
    page.locator(".smoothing input").fill("0.5")
    assert page.locator("[data-chart=training] path.raw").count() == before
    assert page.locator("[data-chart=training] path.series").count() == 2 * before


def test_what_restores_has_a_misfit_and_no_training_loss(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3, clients=4, cohort=4, pictures=False)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "loss_name": "misfit"}))
    report.write_report(run)
    page = show(run / "report.html").page
    page.wait_for_selector("[data-chart=training] h3")
    assert page.locator("[data-chart=training] h3").inner_text() == "Misfit, mean of clients"
    assert "training loss" not in page.locator("main").inner_text().lower()


def test_a_run_that_died_says_so(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "died", rounds=3, planned=20, pictures=False, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "los')
    page = show(report.write_report(run)).page
    assert "incomplete" in page.locator(".problems").inner_text()
    assert "3 of 20 rounds" in page.locator(".what").inner_text()


def test_a_run_without_a_single_round(show: Open, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[task]\nname = "Classification"\n')
    page = show(report.write_report(tmp_path)).page
    assert "There is no metrics.jsonl yet." in page.locator(".problems").inner_text()


def test_captions_are_text(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=2)
    index = json.loads((run / "pictures" / "index.json").read_text())
    index[0]["caption"] = index[2]["labels"][0] = (
        "<img src=x onerror=alert(1)></script><script>document.title='owned'</script>"
    )
    (run / "pictures" / "index.json").write_text(json.dumps(index))
    page = show(report.write_report(run)).page
    assert page.locator(".picture h3").first.inner_text().startswith("<img src=x")
    assert page.title() == "run · FedLens"

"""What the data knows is not asked for twice; runs without rounds; weights from elsewhere."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import save_png

from fedlens.cli.main import invoke
from fedlens.config import recipe as recipes
from fedlens.runs.setup import make_setup

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three colours, twelve images each, of two sizes."""
    for name, colour in COLOURS.items():
        for k in range(12):
            pixels = torch.tensor(colour, dtype=torch.uint8).view(3, 1, 1)
            save_png(tmp_path / "photos" / name / f"{k}.png", pixels.repeat(1, 18 + k % 2, 18))
    return tmp_path / "photos"


def arguments(photos: Path) -> list[str]:
    return ["data.name=ImageFolder", f"data.root={photos}", "clients=3", "workers=0"]


def test_classes_sizes_and_names_come_from_the_data(photos: Path, tmp_path: Path) -> None:
    """`size` alone sets task and data; classes, channels and names nobody has to say. A run and its
    folder know them, and going on does not trip over them."""
    out = tmp_path / "run"
    more = ["size=16", "rounds=1", "--out", str(out)]
    assert invoke(["run", "classification", *arguments(photos), *more]) == 0
    config = recipes.read(out)
    assert config.task.given["classes"] == 3 and config.task.given["size"] == 16
    assert config.task.given["names"] == ("blue", "green", "red")
    assert config.data.given["size"] == 16
    assert load_file(out / "model.safetensors")["head.weight"].shape[0] == 3
    more[1] = "rounds=2"
    assert invoke(["run", "classification", *arguments(photos), *more, "--resume"]) == 0


def test_what_is_given_stays(photos: Path) -> None:
    keys = {"data.name": "ImageFolder", "data.root": str(photos), "clients": 3, "size": 16}
    given = {**keys, "task.classes": 5, "data.gray": True}
    setup = make_setup(recipes.read("classification", given))
    assert setup.task.classes == 5 and setup.task.channels == 1  # type: ignore[attr-defined]
    assert not setup.task.names  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the data has 3 classes, but the task says 2"):
        make_setup(recipes.read("classification", {**keys, "task.classes": 2}))
    server = make_setup(recipes.read("classification", keys), learn=False)
    assert server.config.task.given.get("classes") is None


def test_a_key_of_both_tables_is_ambiguous_unless_it_means_one_thing() -> None:
    both = recipes.read("fedvsr", {"scale": 2})
    assert both.task.given["scale"] == both.data.given["scale"] == 2
    with pytest.raises(recipes.ConfigError, match=r"sizes could mean task\.sizes or"):
        recipes.read("raf", {"sizes": [[64, 48]]})


def test_a_run_without_rounds_judges_its_start(photos: Path, tmp_path: Path) -> None:
    """The same figures as the run that ended in these weights, and the same weights."""
    first, again = tmp_path / "first", tmp_path / "again"
    common = ["run", "classification", *arguments(photos), "size=16"]
    assert invoke([*common, "rounds=2", "--out", str(first)]) == 0
    start = [f"task.init={first}/model.safetensors", "rounds=0", "--out", str(again)]
    assert invoke([*common, *start]) == 0
    a, b = (json.loads((f / "summary.json").read_text()) for f in (first, again))
    assert b["rounds"] == 0 and b["metrics"] == pytest.approx(a["metrics"])
    before, after = (load_file(f / "model.safetensors") for f in (first, again))
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    assert (again / "report.html").is_file()


def test_weights_from_elsewhere_are_applied_without_a_run(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torch file of a network whose head knows three classes; red is told from its file's name,
    which says the same as the run itself."""
    out = tmp_path / "run"
    more = ["size=16", "rounds=1", "--out", str(out)]
    assert invoke(["run", "classification", *arguments(photos), *more]) == 0
    torch.save({"state_dict": load_file(out / "model.safetensors")}, tmp_path / "own.pth")
    weights, red = str(tmp_path / "own.pth"), str(photos / "red")
    names = 'names=["blue", "green", "red"]'
    asked = ["apply", weights, red, str(tmp_path / "a.csv"), "--task", "Classification"]
    assert invoke([*asked, "model=niid", "size=16", names]) == 0
    assert invoke(["apply", str(out), red, str(tmp_path / "b.csv")]) == 0
    rows = [list(csv.reader((tmp_path / f).read_text().splitlines())) for f in ("a.csv", "b.csv")]
    assert rows[0] == rows[1] and len(rows[0]) == 13
    of_recipe = [*asked[:4], "--task", "demo", "size=16", "classes=3"]
    assert invoke(of_recipe) == 0
    capsys.readouterr()
    for argv, says in (
        (asked[:4], "say what it is for, with --task"),
        ([*asked[:4], "--task", "Clasification"], "did you mean Classification"),
        ([*asked, "model=niid", "size=20"], "does not fit"),
        (["apply", str(out), red, "x.csv", "--task", "Classification"], "--task is for a file"),
    ):
        assert invoke(argv) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1

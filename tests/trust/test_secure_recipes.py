"""`fedlens run RECIPE --secure` for every shipped recipe of the five methods: it works, or it is
refused in words before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.cli.main import invoke
from fedlens.config import recipe as recipes
from fedlens.config.files import shipped_recipes
from fedlens.core.algorithm import StackError
from fedlens.runs.folder import read_records

METHODS = ("deblur", "fbl", "fedvsr", "fedvssl", "raf")
RECIPES = [name for name, path in shipped_recipes().items() if path.parent.name in METHODS]
# what is not federated has nothing to hide from a server, or shows it single replies
REFUSED = {}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_secured_or_refused_in_words(name: str) -> None:
    try:
        config = recipes.read(name, ["federation.secure=true"])
        algorithm = config.build_algorithm(config.build_task())
    except (StackError, recipes.ConfigError) as e:
        assert REFUSED[name] in str(e)
        return
    assert name not in REFUSED
    assert type(algorithm).__name__ == "SecureSum" and algorithm.hides_singles


def test_fewer_than_three_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    for few in (["clients=2"], ["cohort=2"]):
        assert invoke(["run", "deblur", "--secure", *few, "data.size=32", "--out", out]) == 2
        assert "hides a client among at least 3, but 2 are asked" in capsys.readouterr().err
    assert not Path(out).exists()


SMALL = {
    "deblur": ["clients=3", "rounds=2", "data.size=32", "evaluate_every=1"],
    "deblur-partial": ["clients=3", "rounds=2", "data.size=48", "evaluate_every=1"],
    "fedvsr": ["clients=3", "cohort=3", "rounds=1", "evaluate_every=1", "data.crop=32",
               "data.clips=3", "data.groups=3"],
    "fedvssl": ["clients=3", "cohort=3", "rounds=1", "evaluate_every=1", "data.videos=24",
                "data.tests=16", "epochs=1"],
    "raf": ["rounds=1", "evaluate_every=1", "data.people=30", "data.tests=10"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_methods_run_by_the_command_line_and_the_report_says_why(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / "run"
    assert invoke(["run", name, "--secure", *SMALL[name], "workers=0", "--out", str(out)]) == 0
    rounds = read_records(out / "metrics.jsonl")
    assert all(r["heard"] == 3 and not r["clients"] for r in rounds)
    assert (
        "replies are added up under masks (SecureSum): there is no worst client"
        in (out / "report.html").read_text()
    )

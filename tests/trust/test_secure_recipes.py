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
# What shows the server single replies; and what is not federated, of which nobody could be hidden.
SINGLES = {"deblur-central": "CenDeblur", "fedvsr-failures": "UploadFailures"}
ALONE = {
    "fedvsr-centralised",
    "fedvssl-central",
    "fedvssl-finetune",
    "fedvssl-jhmdb-finetune",
    "fedvssl-probe",
    "raf-figure3",
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_secured_or_refused_in_words(name: str) -> None:
    config = recipes.read(name, ["federation.secure=true"])
    if name in SINGLES:
        with pytest.raises(StackError, match=f"hides single replies, but {SINGLES[name]} needs"):
            config.build_algorithm(config.build_task())
        return
    algorithm = config.build_algorithm(config.build_task())
    assert type(algorithm).__name__ == "SecureSum" and algorithm.hides_singles
    asked = config.settings.cohort or config.settings.clients
    if name in ALONE:
        with pytest.raises(ValueError, match=f"at least 3, but {asked} are asked"):
            algorithm.check_cohort(asked)
    else:
        algorithm.check_cohort(asked)


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
    "fedvssl": ["clients=3", "cohort=3", "rounds=2", "evaluate_every=1", "data.videos=24",
                "data.tests=16", "epochs=1"],
    "raf": ["rounds=1", "evaluate_every=1", "data.people=30", "data.tests=10"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_methods_run_by_the_command_line_and_the_report_says_why(
    tmp_path: Path, name: str
) -> None:
    """FedVSSL's first sum only tells how small exp(-loss) is (`fixed_point.too_coarse`)."""
    out = tmp_path / "run"
    assert invoke(["run", name, "--secure", *SMALL[name], "workers=0", "--out", str(out)]) == 0
    rounds = read_records(out / "metrics.jsonl")
    unused = 1 if name == "fedvssl" else 0
    assert [r["heard"] for r in rounds] == [0] * unused + [3] * (len(rounds) - unused)
    assert not any(r["clients"] for r in rounds)
    assert (
        "replies are added up under masks (SecureSum): there is no worst client"
        in (out / "report.html").read_text()
    )

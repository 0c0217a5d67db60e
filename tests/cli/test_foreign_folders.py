"""A run folder from somewhere else: no command imports what it names, unless its user says so.

The folder is that of a real, finished run; then its config.toml names a module of the attacker's,
which lies in the folder itself, in the working directory and where `folders` says. Whoever imports
it leaves a marker.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.cli.main import invoke
from fedlens.config import recipe as recipes
from fedlens.config.convert import ConfigError
from fedlens.core import imports
from fedlens.report.board.app import make_app
from fedlens.report.html import write_report
from fedlens.runs.job import experiment, run_job

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("imported")
from fedlens import Layer
from fedlens.data import Synthetic as Data
from fedlens.tasks import Classification as Task
from torch.nn import Linear as Net
"""
SMALL = {
    "rounds": 1,
    "clients": 2,
    "cohort": 2,
    "workers": 0,
    "images": 60,
    "test_images": 20,
    "epochs": 1,
    "schedule": "constant",
}
# what a config.toml may say in place of what: every way by which a name leads to code
PLACES = {
    "task": ('name = "Classification"', 'name = "evil:Task"'),
    "data": ('name = "Synthetic"', 'name = "evil:Data"'),
    "layer": ("[[algorithm]]", '[[algorithm]]\nname = "evil:Layer"\n\n[[algorithm]]'),
    "network": ('model = "niid"', 'model = "evil:Net"'),
    "odd name": ('name = "Classification"', 'name = " evil:Task"'),
}
COMMANDS = {
    "apply": "apply RUN photos out.csv",
    "apply --client": "apply RUN photos out.csv --client 0",
    "apply --task": "apply RUN/model.safetensors photos out.csv --task RUN",
    "evaluate": "evaluate RUN",
    "export": "export RUN",
    "audit": "audit RUN --budget 0.01 --rounds 1 --plain",
    "analyse landscape": "analyse landscape RUN --points 2",
    "analyse perturbation": "analyse perturbation RUN",
    "analyse target": "analyse target RUN --value 0.1",
    "resume": "run RUN rounds=2 --resume",
    "run again": "run RUN --out again",
    "dry run": "run RUN --dry-run",
    "partition": "partition RUN",
    "compare": "compare RUN --algorithms fedavg --dry-run",
    "sweep": "sweep RUN lr=0.1,0.2 --trials 1",
    "policy": "policy init RUN",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "theirs"
    experiment("demo", out=folder, **SMALL)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to be tampered with; RUN lies in the working directory."""
    folder = shutil.copytree(finished, tmp_path / "RUN")
    for place in (folder, tmp_path, tmp_path / "elsewhere"):
        place.mkdir(exist_ok=True)
        for name in ("evil.py", " evil.py"):
            (place / name).write_text(EVIL.format(marker=str(tmp_path / "marker")))
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("evil", None)


def tamper(run: Path, place: str) -> None:
    text = (run / "config.toml").read_text()
    old, new = PLACES[place]
    assert text.count(old) == 1, text
    text = text.replace(old, new)
    text = f'folders = ["{run.parent / "elsewhere"}", "{run}"]\n' + text
    tomllib.loads(text)
    (run / "config.toml").write_text(text)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_a_folder_names(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message that names the module and says what would allow it."""
    tamper(run, "task")
    assert invoke(COMMANDS[command].split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert not (run.parent / "marker").exists()
    file = run.parent / "elsewhere" / "evil.py"
    assert "evil:Task is not imported" in said and f"--module {file}" in said


@pytest.mark.parametrize("place", PLACES)
def test_whatever_way_leads_to_it(run: Path, place: str) -> None:
    """Reading the config, building it, and going on with the run in other processes."""
    tamper(run, place)
    with pytest.raises(ValueError, match=r"evil:\w+ is not imported"):
        run_job(recipes.read(run, ["rounds=2", "workers=1"]), run, resume=True)
    assert not (run.parent / "marker").exists()


def test_a_recipe_of_ones_own_does_not_bring_in_what_the_folder_names(run: Path) -> None:
    """`fedlens run demo --resume --out RUN`: the two are compared without importing anything."""
    tamper(run, "task")
    with pytest.raises(ConfigError, match=r"task.name was .*evil:Task"):
        experiment("demo", out=run, resume=True, **{**SMALL, "rounds": 2})
    assert not (run.parent / "marker").exists()
    assert not imports.rules().closed


def test_pages_import_nothing(run: Path) -> None:
    """The report and the board read the same folder as text."""
    from starlette.testclient import TestClient

    tamper(run, "task")
    assert "evil:Task" in write_report(run).read_text()
    with TestClient(make_app(run.parent, ("*",))) as browser:
        for page in ("/", "/api/runs"):
            browser.get(page)
    assert not (run.parent / "marker").exists()


@pytest.mark.parametrize("option", ["evil", "elsewhere/evil.py"])
def test_who_trusts_a_module_says_so(
    run: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name it is looked for in the working directory, never in the folder; by its file there."""
    tamper(run, "task")
    (run / "evil.py").write_text("raise AssertionError('of the folder itself')")
    (run.parent / "evil.py").unlink() if "/" in option else None
    assert invoke(["evaluate", "RUN", "--module", option]) == 0, capsys.readouterr().err
    assert (run.parent / "marker").read_text() == "imported"


def test_a_folders_own_module_is_not_found_by_its_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--module parts` means one's own parts.py, not the one that came with the folder."""
    tamper(run, "task")
    for place in (run.parent, run.parent / "elsewhere"):
        (place / "evil.py").unlink()
    assert invoke(["evaluate", "RUN", "--module", "evil"]) == 2
    assert "there is no module evil" in capsys.readouterr().err
    assert not (run.parent / "marker").exists()

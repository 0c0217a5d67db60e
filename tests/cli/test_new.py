"""`fedlens new`: what it writes works, and its tests pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedlens.cli.main import invoke
from fedlens.cli.new import files_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_tests(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_part_passes_its_own_test(tmp_path: Path) -> None:
    for kind in ("layer", "task", "dataset", "model"):
        assert invoke(["new", kind, f"own_{kind}"]) == 0
    assert "8 passed" in run_tests(tmp_path)


def test_a_recipe_of_all_of_them_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["new", "project", "hospitals"]) == 0
    assert invoke(["new", "recipe", "plain"]) == 0
    out = str(tmp_path / "run")
    assert invoke(["run", "hospitals/hospitals.toml", "rounds=1", "workers=0", "--out", out]) == 0
    config = (tmp_path / "run" / "config.toml").read_text()
    assert '"hospitals_layer:Soften"' in config and '"hospitals_model:Net"' in config
    assert invoke(["run", out, "--resume", "rounds=2", "workers=0"]) == 0
    assert invoke(["run", "plain.toml", "--dry-run"]) == 0
    assert "FedProx(mu=0.01)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["layre", "a"], "did you mean layer"),
        (["layer", "1st"], "cannot be the name of a Python module"),
        (["layer", "class"], "cannot be the name of a Python module"),
    ],
)
def test_refusals(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["new", *argv]) == 2
    assert says in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    assert invoke(["new", "layer", "mine"]) == 2
    assert "test_mine.py is already there" in capsys.readouterr().err
    assert (tmp_path / "test_mine.py").read_text() == "mine" and not Path("mine.py").exists()


def test_names() -> None:
    files = files_of("layer", "parts/my-layer.py")
    assert list(files) == [Path("parts/my_layer.py"), Path("parts/test_my_layer.py")]
    assert "class MyLayer(Layer)" in files[Path("parts/my_layer.py")]

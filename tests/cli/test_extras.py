"""Packages that are not installed cost one line; what is not loaded yet is seen by `dir` and by a
shell's completion.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_job import write_recipe

import fedlens
from fedlens.cli.main import invoke
from fedlens.cli.options import complete_algorithm, complete_recipe, one_of
from fedlens.core.extras import explain_missing, extra_of, is_installed


@pytest.mark.parametrize(
    ("blocked", "argv", "says"),
    [
        ("fedlens.engines.ray", ["--engine", "ray"], "the engine ray cannot be loaded"),
        ("flwr", ["--engine", "flower"], "fedlens[flower]"),
        ("dp_accounting", ["--algorithm", "FedAvg+DPSGD"], "fedlens[privacy]"),
        ("timm", ["task.model=timm:vit_tiny_patch16_224"], "fedlens[models]"),
    ],
)
def test_a_missing_extra_is_one_line_and_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    blocked: str,
    argv: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, blocked, None)  # type: ignore[arg-type]
    assert invoke(["run", "demo", "rounds=1", *argv]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_weights_that_cannot_be_fetched_are_one_line_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's own lines about each of its attempts are kept back, and so is its second one."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def away(name: str, file: str) -> str:
        asked.append(file)
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise hub.errors.LocalEntryNotFoundError("The hub is away. Please check your connection.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hf_hub_download", away)
    assert invoke(["run", "demo", "rounds=1", "task.pretrained=hub:a/b", "task.model=resnet8"]) == 2
    said = capsys.readouterr().err
    assert "a/b cannot be fetched (The hub is away): bring the file" in said
    assert said.count("\n") == 1 and asked == ["model.safetensors"]
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_within_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a command imports on its way: here the report's figures, without matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]

    def report(*_: object) -> None:
        import matplotlib  # noqa: F401

    monkeypatch.setattr("fedlens.cli.main.command_group", lambda: lambda **_: report())
    assert invoke([]) == 2
    said = capsys.readouterr().err
    assert "needs" in said and "matplotlib" in said and said.count("\n") == 1


def test_a_run_needs_neither_matplotlib_nor_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    fedlens.experiment(write_recipe(tmp_path), out=tmp_path / "run", rounds=1)
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_which_extra_brings_a_package() -> None:
    assert (extra_of("timm"), extra_of("PyWavelets"), extra_of("nothing")) == (
        "models",
        "deblur",
        None,
    )
    missing = ModuleNotFoundError("No module named 'av'", name="av")
    if is_installed("av"):
        assert explain_missing(missing) is None  # broken for another reason: not hidden
    nothing = ModuleNotFoundError("No module named 'not_there'", name="not_there.inner")
    assert "pip install not_there" in str(explain_missing(nothing))
    assert explain_missing(ImportError("cannot import name 'x'", name="fedlens.core")) is None


def test_dir_shows_what_is_not_loaded() -> None:
    import fedlens.layers as layers
    import fedlens.tasks as tasks

    assert {"fit", "experiment", "Layer", "__version__"} <= set(dir(fedlens))
    assert "Classification" in dir(tasks) and "FedProx" in dir(layers)
    assert set(fedlens.__all__) <= set(dir(fedlens))
    assert not {"TYPE_CHECKING", "annotations", "lazily"} & set(dir(fedlens))  # nobody's to use


def test_the_shell_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demolition.toml").write_text("")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.toml").write_text("")
    assert complete_recipe("dem") == ["demo", "demo-private", "demolition.toml"]
    assert complete_recipe("ru") == ["runs/"] and complete_recipe("runs/") == ["runs/a"]
    assert "fedprox" in complete_algorithm("fedp")
    assert one_of(("onnx", "torch-export"))("t") == ["torch-export"]
    environment = {
        **os.environ,
        "_FEDLENS_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedlens run dem",
        "COMP_CWORD": "2",
    }
    code = "from fedlens.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["demo", "demo-private", "demolition.toml"], done.stderr

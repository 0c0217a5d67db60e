"""Files for other programs: read back, they give the network's outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import experiment
from fedlens.cli import main as cli
from fedlens.config import recipe as recipes
from fedlens.config.recipe import ConfigError
from fedlens.core.weights import load_weights
from fedlens.runs import export
from fedlens.runs.export import export_run

SMALL = {
    "data.images": 60,
    "data.test_images": 12,
    "federation.clients": 2,
    "federation.cohort": 2,
    "federation.rounds": 1,
    "federation.workers": 0,
}


def trained(folder: Path, **more: Any) -> Path:
    experiment("demo", out=folder, **{**SMALL, **more})
    return folder


def test_a_classifier_as_onnx_at_sizes_it_was_not_checked_at(tmp_path: Path) -> None:
    """resnet8 takes pictures of any size and any number of them; onnxruntime and the trained
    network agree on other inputs than those of the check."""
    onnxruntime = pytest.importorskip("onnxruntime")
    run = trained(tmp_path / "run", **{"task.model": "resnet8"})
    done = export_run(run, "onnx")
    assert done.file == run / "export" / "model.onnx" and done.input == (None, 3, None, None)
    assert list(done.differences) == ["2x3x20x20", "1x3x12x12"]
    assert max(done.differences.values()) <= 1e-5 and done.note == ""
    assert len(json.loads((run / "export" / "model.json").read_text())["classes"]) == 6
    session = onnxruntime.InferenceSession(str(done.file), providers=["CPUExecutionProvider"])
    task: Any = recipes.read(run).build_task()
    model = load_weights(task.model(), run / "model.safetensors").eval()
    x = torch.rand(3, 3, 28, 24)
    with torch.no_grad():
        expected = model(x)
    (found,) = session.run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5)


def test_a_network_of_one_size_is_checked_with_another_number_of_pictures(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    done = export_run(run, "torch-export", tmp_path / "small.pt2")
    assert done.input == (None, 3, 20, 20) and list(done.differences) == ["2x3x20x20", "1x3x20x20"]
    program = torch.export.load(str(tmp_path / "small.pt2")).module()
    task: Any = recipes.read(run).build_task()
    model = load_weights(task.model(), run / "model.safetensors").eval()
    x = torch.rand(5, 3, 20, 20)
    with torch.no_grad():
        assert torch.allclose(program(x), model(x), atol=1e-6)


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run")
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ConfigError, match="at 2x3x20x20 it differs from the network by"):
        export_run(run, "torch-export")
    assert list((run / "export").iterdir()) == []


def test_a_client_s_own_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    out = tmp_path / "own.pt2"
    assert cli.invoke(["export", str(run), "--to", "torch-export", "--client", "1"]) == 2
    experiment("demo", algorithm="ditto", out=tmp_path / "ditto", **SMALL)
    words = ["export", str(tmp_path / "ditto"), "--to", "torch-export", "--client", "1"]
    assert cli.invoke([*words, "--out", str(out)]) == 0 and out.is_file()
    assert "takes any x 3 x 20 x 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--to", "tflite"], "--to is onnx or torch-export"), (["--out", "x.bin"], "end in .onnx")],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run")
    assert cli.invoke(["export", str(run), *arguments]) == 2
    assert why in capsys.readouterr().err


OWN = """
import torch
from torch import nn

class Waves(nn.Module):
    def __init__(self, scale=4):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.scale = scale

    def forward(self, x):
        waves = torch.special.bessel_j1(self.conv(x.flatten(0, 1)).detach()) + self.conv.bias[0]
        large = nn.functional.interpolate(waves, scale_factor=self.scale)
        return large.view(*x.shape[:2], *large.shape[1:])
"""


@pytest.mark.slow
def test_video_networks_and_an_operator_that_onnx_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightVSR's height and width can be left open for torch.export, not for ONNX, and that is
    said."""
    pytest.importorskip("onnxruntime")
    (tmp_path / "waves.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = {
        "federation.clients": 2, "federation.cohort": 2, "federation.rounds": 1,
        "federation.workers": 0, "FedAvg.steps": 1,
    }  # fmt: skip
    run = tmp_path / "light"
    experiment("fedvsr", algorithm="fedavg", out=run, **small)
    free = export_run(run, "torch-export")
    assert free.input[-2:] == (None, None) and len(free.differences) == 2
    fixed = export_run(run, "onnx")
    assert fixed.input[0] is None and None not in fixed.input[1:] and fixed.note
    assert max(fixed.differences.values()) <= 1e-5
    waves = tmp_path / "waves"
    experiment("fedvsr", algorithm="fedavg", out=waves, **small, **{"task.model": "waves:Waves"})
    with pytest.raises(ConfigError, match="bessel_j1"):
        export_run(waves, "onnx")

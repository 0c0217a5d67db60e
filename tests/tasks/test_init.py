"""`task.init=PATH`: every task that learns starts from given weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedlens import tasks
from fedlens.algorithms import FedAvg
from fedlens.cli import main as cli
from fedlens.config.parts import exported_names, parameters
from fedlens.core.task import LearningTask

SMALL: dict[str, dict[str, Any]] = {
    "Classification": {"model": "niid", "classes": 3},
    "Custom": {"model": partial(nn.Linear, 3, 2), "loss": "mse_loss"},
    "Generation": {"size": 8, "widths": (8,), "attention": False},
    "Pose": {"network": "vit-nano", "size": (16, 16)},
    "Segmentation": {"network": "dilated"},
    "SuperResolution": {"options": {"width": 4, "blocks": 1}},
    **{
        name: {"backbone": "r3d10s", "frames": 4, "size": 16}
        for name in ("ActionRecognition", "ClipAgreement", "CtP", "Speed", "VCOP")
    },
}


def learning() -> list[str]:
    return [
        n
        for n, room in exported_names("task").items()
        if room == "tasks" and issubclass(getattr(tasks, n), LearningTask)
    ]


@pytest.mark.parametrize("name", learning())
def test_every_task_that_learns_starts_from_given_weights(name: str, tmp_path: Path) -> None:
    cls = getattr(tasks, name)
    assert "init" in parameters(cls)
    fresh = FedAvg(cls(**SMALL[name])).init().trees["model"]
    save_file({n: t + 1 for n, t in fresh.items()}, tmp_path / "w.safetensors")
    begun = FedAvg(cls(**SMALL[name], init=str(tmp_path / "w.safetensors"))).init().trees["model"]
    backbone_only = (
        {n for n in fresh if n.startswith("backbone.")}
        if name in ("ActionRecognition", "ClipAgreement", "CtP", "Speed", "VCOP")
        else None
    )
    for n, t in begun.items():
        taken = backbone_only is None or n in backbone_only
        assert torch.equal(t, fresh[n] + 1 if taken else fresh[n]), n


def test_a_run_starts_from_another_and_a_stranger_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate near nothing, what comes out is what went in."""
    small = [
        "run",
        "demo",
        "rounds=1",
        "clients=2",
        "cohort=none",
        "workers=0",
        "images=40",
        "test_images=10",
        "epochs=1",
    ]
    assert cli.invoke([*small, "--out", str(tmp_path / "a")]) == 0
    given = tmp_path / "a" / "model.safetensors"
    assert (
        cli.invoke(
            [*small, "lr=1e-30", "momentum=0", f"task.init={given}", "--out", str(tmp_path / "b")]
        )
        == 0
    )
    before, after = load_file(given), load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    capsys.readouterr()
    assert (
        cli.invoke([*small, f"task.init={given}", "task.classes=7", "--out", str(tmp_path / "c")])
        == 2
    )
    said = capsys.readouterr().err
    assert "does not fit" in said and "is (6," in said and said.count("\n") == 1

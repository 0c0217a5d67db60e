"""Networks of a user's own, by module:Class, in every task that has a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.core.imports import search_in
from fedlens.tasks import ActionRecognition, Classification, Pose, Speed, SuperResolution

NETWORKS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, classes, channels=3):
        super().__init__()
        self.last = nn.Linear(channels, classes)
    def forward(self, x):
        return self.last(x.mean((2, 3)))

class Heat(nn.Module):
    multiple = 8
    def __init__(self, joints, size=(64, 48)):
        super().__init__()
        self.maps = nn.Conv2d(3, joints, 4, 4)
    def forward(self, x):
        return self.maps(x)

class Larger(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.up = nn.Upsample(scale_factor=scale)
    def forward(self, x):
        return torch.stack([self.up(frames) for frames in x])

class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 3, (1, 4, 4), 1)
    def forward_features(self, x):
        return self.conv(x)

class Greedy(nn.Module):
    def __init__(self, depth, classes):
        super().__init__()

def seven():
    return 7
"""


@pytest.fixture(autouse=True)
def networks(tmp_path: Path) -> None:
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    search_in(tmp_path)


def test_each_task_takes_one() -> None:
    """The shapes that come out: classes, a map a joint, frames twice as large, a map of a clip."""
    x = torch.rand(2, 1, 8, 8)
    small = Classification("own_networks:Small", classes=5, channels=1).model()
    assert small(x).shape == (2, 5)
    task = Pose("lsp", "own_networks:Heat")
    assert task.model()(torch.rand(1, 3, 64, 48)).shape == (1, 14, 16, 12) and task.multiple == 8
    larger = SuperResolution("own_networks:Larger", scale=2).model()
    assert larger(torch.rand(1, 2, 3, 4, 4)).shape == (1, 2, 3, 8, 8)
    assert Speed(backbone="own_networks:Clip", frames=4, size=8).model() is not None
    made = ActionRecognition(3, backbone="own_networks:Clip", frames=4, size=8).model()
    assert made.head[-1].out_features == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_networks:Greedy", "wants 'depth', which nobody here knows: it can be told classes"),
        ("own_networks:seven", "made a int, not a"),
        ("own_networks:Nothing", "has no Nothing"),
    ],
)
def test_one_that_cannot_be_made(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Classification(name).model()


def test_a_classifier_of_ones_own_is_trained_by_its_pixels() -> None:
    """It sees pixels in [0, 1] as they are: no mean is taken off."""
    task = Classification("own_networks:Small", classes=2, channels=1)
    model: Any = task.model()
    with torch.no_grad():
        model.last.weight.copy_(torch.tensor([[1.0], [0.0]]))
        model.last.bias.zero_()
    out = task.forward(model, {"x": torch.full((1, 1, 2, 2), 0.5)})
    assert out.prediction.tolist() == [[0.5, 0.0]]
    with pytest.raises(ValueError, match="a projection can be put into our own networks only"):
        Classification("own_networks:Small", projection=8)

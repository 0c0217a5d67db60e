"""`fedlens apply FILE --task`: weights that were made elsewhere, with the names and wrappings that
their authors gave them, and nothing trained here.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedlens.cli.main import invoke
from fedlens.core.weights import read_weights
from fedlens.data.images.labelled import load_image
from fedlens.models import IART, RVRT, VRT, ViTPose
from fedlens.tasks import Classification, Pose, SuperResolution

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.body(x).flatten(1))
"""
# akamaster's ResNet-20 for CIFAR-10, as its checkpoint names it; pixels are normalised outside
RESNET20 = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.more = width - inputs

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(out + x)

class ResNet20(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stage = lambda a, b, s: nn.Sequential(Block(a, b, s), Block(b, b, 1), Block(b, b, 1))
        self.layer1, self.layer2, self.layer3 = stage(16, 16, 1), stage(16, 32, 2), stage(32, 64, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x):
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        x = F.relu(self.bn1(self.conv1((x - mean[:, None, None]) / std[:, None, None])))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for k in range(3):
        pixels = rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{k}.png")
    return tmp_path / "photos"


def own_network() -> nn.Module:
    found: dict[str, Any] = {}
    exec(NETWORK, found)
    net: nn.Module = found["Net"](4)
    return net


@pytest.mark.parametrize("task", ["Classification", "Custom"])
@pytest.mark.parametrize("wrapping", ["plain", "module", "nested"])
def test_a_state_dict_of_ones_own_network(photos: Path, task: str, wrapping: str) -> None:
    """What is written is what the network says, in whatever its weights are wrapped. The file shows
    that there are four classes."""
    module = f"net_{task}_{wrapping}".lower()
    Path(f"{module}.py").write_text(NETWORK + "\ndef four():\n    return Net(4)\n")
    net = own_network()
    weights: dict[str, Any] = dict(net.state_dict())
    if wrapping != "plain":
        weights = {f"module.{n}": t for n, t in weights.items()}
    torch.save(weights if wrapping != "nested" else {"state_dict": weights, "epoch": 3}, "net.pth")
    own = {"Classification": ["Net"], "Custom": ["four", "loss=cross_entropy"]}[task]
    words = ["apply", "net.pth", "photos", "labels.csv", "--task", task]
    assert invoke([*words, f"model={module}:{own[0]}", *own[1:]]) == 0
    rows = list(csv.DictReader(Path("labels.csv").read_text().splitlines()))
    size = Classification().size if task == "Classification" else None  # as the task reads them
    with torch.no_grad():
        expected = [
            int(net(load_image(photos / f"{k}.png", size).float()[None] / 255).argmax())
            for k in range(3)
        ]
    assert [r["label"] for r in rows] == [str(k) for k in expected]


def test_the_data_packs_resnet20(data_pack: Path, photos: Path) -> None:
    """Published with 91.7 % on CIFAR-10's test images; here on 300 of them as lossy JPEG."""
    weights = data_pack / "weights" / "classification" / "resnet20_cifar10.th"
    Path("resnet20.py").write_text(RESNET20)
    source = data_pack / "cifar10" / "jpg" / "test"
    names = sorted(p.name for p in source.iterdir())
    for name in names:
        Path("few", name).mkdir(parents=True)
        for file in sorted((source / name).iterdir())[:30]:
            Path("few", name, file.name).symlink_to(file)
    words = ["apply", str(weights), "few", "labels.csv", "--task", "Classification"]
    assert invoke([*words, "model=resnet20:ResNet20", f"names={json.dumps(names)}"]) == 0
    rows = list(csv.DictReader(Path("labels.csv").read_text().splitlines()))
    right = [r["label"] == r[next(iter(r))].split("/")[0] for r in rows]
    assert len(right) == 300 and sum(right) / 300 > 0.75


def test_public_checkpoints_say_what_they_are(tmp_path: Path) -> None:
    with torch.device("meta"):
        nets: dict[str, nn.Module] = {
            "vrt-6": VRT(4, 6),
            "vrt-7": VRT(4, 7),
            "rvrt": RVRT(4),
            "iart": IART(4),
            "pose": ViTPose("vitpose-b", 17, 16, "absolute", (256, 192)),
            "nano": ViTPose("vit-nano", 14, 4, "conv", (64, 48)),
        }
    states = {name: net.state_dict() for name, net in nets.items()}
    told = SuperResolution.arguments_from_weights
    assert told(states["vrt-6"], {}) == {"model": "vrt", "scale": 4, "options": {"frames": 6}}
    assert told(states["vrt-7"], {"scale": 4})["options"] == {"frames": 7}
    assert told(states["rvrt"], {}) == {"model": "rvrt", "scale": 4, "options": {}}
    assert told(states["iart"], {"model": "iart"}) == {"model": "iart", "scale": 4, "options": {}}
    assert told(states["iart"], {"model": "vrt_small"}) == {}
    with pytest.raises(ValueError, match=r"no network that is known here.*backbone\.pos_embed"):
        told(states["pose"], {})
    pose = Pose.arguments_from_weights(states["pose"], {})
    shape = {"patch": 16, "positions": "absolute", "size": (256, 192)}
    assert pose == {"joints": "coco", "network": "vitpose-b", **shape}
    assert Pose.arguments_from_weights(states["pose"], {"network": "vit-nano"}) == {
        "joints": "coco"
    }
    shape = {"patch": 4, "positions": "conv", "size": (64, 48)}
    nano = {"joints": "lsp", "network": "vit-nano", **shape}
    assert Pose.arguments_from_weights(states["nano"], {}) == nano
    assert Classification.arguments_from_weights({"fc.weight": torch.zeros(7, 3)}, {}) == {
        "classes": 7
    }


def moved(net: nn.Module) -> dict[str, Tensor]:
    """Weights that are not those a network begins with."""
    torch.manual_seed(0)
    return {
        n: t + 0.01 * torch.randn_like(t) if t.is_floating_point() else t
        for n, t in net.state_dict().items()
    }


def test_a_public_pose_checkpoint_finds_joints(photos: Path) -> None:
    weights = moved(ViTPose("vitpose-s", 17, 16, "absolute", (256, 192)))
    torch.save({"meta": {"epoch": 210}, "state_dict": weights}, "vitpose_small.pth")
    assert read_weights("vitpose_small.pth").keys() == weights.keys()
    words = ["apply", "vitpose_small.pth", "photos", "found", "--task", "Pose"]
    with pytest.warns(UserWarning, match="each whole picture counts as one person"):
        assert invoke(words) == 0
    found = json.loads(Path("found/keypoints.json").read_text())
    assert [len(a["keypoints"]) for a in found["annotations"]] == [51] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "wrap"),
    [
        (VRT, lambda w: {"params": w}),
        (RVRT, lambda w: {"params": w}),
        (IART, lambda w: {"params": {}, "params_ema": {f"module.{n}": t for n, t in w.items()}}),
    ],
)
def test_public_video_checkpoints_enlarge(photos: Path, make: Any, wrap: Any) -> None:
    """What is written is what the network makes of the same frames, in whole levels."""
    net = make().eval()
    weights = moved(net)
    torch.save(wrap(weights), "public.pth")
    for k in range(3):
        pixels = np.random.default_rng(k).integers(0, 256, (32, 40, 3), dtype=np.uint8)
        Path("clip").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(f"clip/{k}.png")
    assert invoke(["apply", "public.pth", "clip", "large", "--task", "SuperResolution"]) == 0
    net.load_state_dict(weights)
    clip = torch.stack([load_image(Path(f"clip/{k}.png"), None) for k in range(3)])
    with torch.no_grad():
        expected = (net(clip[None].float() / 255)[0].clamp(0, 1) * 255).round()
    written = [load_image(p, None) for p in sorted(Path("large").iterdir())]
    assert torch.equal(torch.stack(written).float(), expected)


def test_another_network_is_said_in_words(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(ViTPose("vit-nano", 14, 4).state_dict(), "nano.pth")
    Path("bad.pth").write_bytes(b"no file of torch")
    for words, says in (
        (["nano.pth", "--task", "Pose", "network=vit-tiny"], "does not fit ViTPose"),
        (["bad.pth", "--task", "Pose"], "bad.pth cannot be read as weights"),
        (["nano.pth", "--task", "SuperResolution"], "are of no network that is known here"),
        (["nano.pth", "--task", "SuperResolution", "model=light"], "does not fit LightVSR"),
    ):
        assert invoke(["apply", *words[:1], "photos", "out", *words[1:]]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedlens.models.video import (
    SplitNet,
    VideoBackbone,
    backbone,
    frame_differences,
    load_backbone,
    map_shape,
    own_backbone,
)
from fedlens.tasks.ctp import CtP
from fedlens.tasks.speed import Speed
from fedlens.tasks.vcop import VCOP


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "size"), [("r3d10", 903_984), ("r3d10s", 228_120), ("r2plus1d18", 31_300_125)]
)
def test_backbones_have_the_sizes_of_the_table(name: str, size: int) -> None:
    with torch.device("meta"):
        assert count(backbone(name)) == size


def test_heads_on_r3d18() -> None:
    """torchvision's R3D-18 without its classifier (512 x 400 + 400) has 33,371,472 - 205,200 =
    33,166,272. CtP: convolution over two steps 512 x 512 x 2 + 512, 512 x 25 to 512, 512 to 16 x 4:
    524,800 + 6,554,112 + 32,832. VCOP: 1024 to 512 and 3 x 512 to 6: 524,800 + 9,222. Speed: 512 x
    7 + 7."""
    body = backbone("r3d18")
    assert count(body) == 33_166_272
    assert (
        sum(
            b.numel()
            for n, b in body.state_dict(keep_vars=True).items()
            if not isinstance(b, nn.Parameter)
        )
        == 9_620
    )
    shape = (512, 2, 14, 14)
    assert [count(task.head(shape)) for task in (CtP(), VCOP(), Speed())] == [
        7_111_744,
        534_022,
        3_591,
    ]


def test_a_torchvision_checkpoint_fits() -> None:
    from torchvision.models.video import r3d_18

    whole = r3d_18().state_dict()
    body = backbone("r3d18")
    theirs = {n: t for n, t in whole.items() if not n.startswith("fc.")}
    body.load_state_dict(theirs)
    assert all(torch.equal(t, theirs[n]) for n, t in body.state_dict().items())


def test_the_map_is_what_the_network_makes_of_a_clip() -> None:
    """Stem and three stages halve 32 to 2 and 8 frames to 1; with the last stride 1 it is 4, and
    the weights are the same.
    """
    plain, wide = backbone("r3d10s"), backbone("r3d10s", last_stride=1)
    assert map_shape(plain, 8, 32) == (64, 1, 2, 2)
    assert map_shape(wide, 8, 32) == (64, 1, 4, 4)
    wide.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("name", ["r3d10s", "r3d10"])
def test_channels_last_changes_the_order_in_memory_and_nothing_else(name: str) -> None:
    """Features and gradients are those of the same modules called one after the other on an
    ordinary tensor, up to rounding.
    """
    body = backbone(name).eval()
    assert isinstance(body, VideoBackbone)
    x = torch.rand(2, 3, 8, 32, 32)
    plain = nn.Sequential(body.stem, body.layer1, body.layer2, body.layer3, body.layer4)
    out, gradients = [], []
    for features in (body.forward_features(x), plain((x - body.mean) / body.std)):
        body.zero_grad()
        features.square().mean().backward()
        out.append(features.detach())
        gradients.append([p.grad.clone() for p in body.parameters() if p.grad is not None])
    torch.testing.assert_close(out[0], out[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    assert all(g.is_contiguous() for g in gradients[0])  # what travels keeps its order


class Own(nn.Module):
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool3d(x, (2, 8, 8))


def test_any_network_with_forward_features_serves_all_three(tmp_path: object) -> None:
    x = torch.rand(2, 3, 4, 32, 32)
    for task in (CtP(frames=4, size=32), VCOP(frames=4, size=32), Speed(frames=4, size=32)):
        net = SplitNet(Own(), task.head(map_shape(Own(), 4, 32)))
        batch = {"x": x, "boxes": torch.tensor([[[4.0, 4, 20, 20]] * 3] * 2)}
        batch["x"] = x[:, None].expand(-1, 3, -1, -1, -1, -1) if isinstance(task, VCOP) else x
        assert len(task.forward(net, batch).prediction) == 2


def test_a_backbone_beside_the_user_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from an installed command, whose path does not hold the working directory."""
    (tmp_path / "beside.py").write_text(
        "from torch.nn import Identity\n\nclass Net(Identity):\n    forward_features ="
        " Identity.forward\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert type(own_backbone("beside:Net")).__name__ == "Net"


def test_what_is_no_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no backbone 'r3d19': r3d18"):
        backbone("r3d19")
    with pytest.raises(ValueError, match="no forward_features"):
        own_backbone("torch.nn:Identity")


def test_a_backbone_is_loaded_whatever_its_head_was(tmp_path: object) -> None:
    from safetensors.torch import save_file

    first, second = (Speed(backbone="r3d10s", frames=8, size=32).model() for _ in range(2))
    path = Path(str(tmp_path)) / "model.safetensors"
    save_file({n: t for n, t in first.state_dict().items() if n.startswith("backbone.")}, path)
    assert isinstance(second, SplitNet) and isinstance(first, SplitNet)
    load_backbone(second, str(path))
    assert all(
        torch.equal(t, second.backbone.state_dict()[n])
        for n, t in first.backbone.state_dict().items()
    )
    with pytest.raises(ValueError, match="does not fit"):
        load_backbone(SplitNet(backbone("r3d10"), nn.Identity()), str(path))


def test_motion_is_what_changes() -> None:
    """Frames 0, .2, .2, 1: changes .2, 0, .8, halved and from .5 on; the first one twice."""
    frames = torch.tensor([0.0, 0.2, 0.2, 1.0]).view(1, 1, 4, 1, 1).expand(1, 3, 4, 2, 2)
    found = frame_differences(frames)
    assert found.shape == frames.shape
    assert found[0, 0, :, 0, 0].tolist() == pytest.approx([0.6, 0.6, 0.5, 0.9])
    assert frame_differences(frames[:, :, :1]).unique().tolist() == [0.5]


def test_a_network_of_motion_does_not_see_what_stands_still() -> None:
    task = CtP(backbone="r3d10s", frames=4, size=32, motion=True)
    net = task.model().eval()
    still = torch.rand(1, 3, 1, 32, 32).expand(1, 3, 4, 32, 32)
    other = torch.rand(1, 3, 1, 32, 32).expand(1, 3, 4, 32, 32)
    with torch.no_grad():
        assert torch.equal(net.maps(still), net.maps(other))
        plain = CtP(backbone="r3d10s", frames=4, size=32).model().eval()
        assert not torch.equal(plain.maps(still), plain.maps(other))
    assert set(net.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize("theirs", ["r3d_18", "r2plus1d_18"])
def test_torchvisions_state_dicts_load_by_name(theirs: str, tmp_path: Path) -> None:
    """The file is what torchvision saves, classifier included; its features before the pooling,
    asked of torchvision's own network, are the backbone's map.
    """
    from torchvision.models import video

    torch.manual_seed(3)
    whole = getattr(video, theirs)(num_classes=7).eval()
    save_file(whole.state_dict(), tmp_path / "theirs.safetensors")
    task = Speed(
        backbone=theirs, frames=4, size=32, pretrained=str(tmp_path / "theirs.safetensors")
    )
    net = task.model().eval()
    task.load_init(net)
    x = torch.rand(1, 3, 4, 32, 32)
    body = net.backbone
    with torch.no_grad():
        y = whole.stem((x - body.mean) / body.std)
        for k in range(1, 5):
            y = getattr(whole, f"layer{k}")(y)
        torch.testing.assert_close(net.maps(x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_mvit_gives_torchvisions_tokens_as_a_map(tmp_path: Path) -> None:
    from torchvision.models import video

    torch.manual_seed(4)
    whole = video.mvit_v2_s(num_classes=5).eval()
    seen = []
    whole.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    save_file(whole.state_dict(), tmp_path / "theirs.safetensors")
    task = Speed(
        backbone="mvit_v2_s", frames=16, size=224, pretrained=str(tmp_path / "theirs.safetensors")
    )
    net = task.model().eval()
    task.load_init(net)
    x = torch.rand(1, 3, 16, 224, 224)
    with torch.no_grad():
        whole((x - 0.45) / 0.225)
        found = net.maps(x)
    assert found.shape == (1, 768, 8, 7, 7)
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), seen[0][:, 1:])


def test_mvit_says_which_clips_it_takes() -> None:
    net = backbone("mvit_v2_s")
    with pytest.raises(ValueError, match="takes clips of 16 frames of 224x224, not 8 of 32x32"):
        net.forward_features(torch.rand(1, 3, 8, 32, 32))  # type: ignore[operator]


def test_weights_that_do_not_fit_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    save_file({"layer1.0.weight": torch.ones(3)}, tmp_path / "odd.safetensors")
    task = Speed(backbone="r3d10s", frames=4, size=32, pretrained=str(tmp_path / "odd.safetensors"))
    with pytest.raises(ValueError, match=r"odd.safetensors does not fit SplitNet: .* is missing"):
        task.load_init(task.model())
    with pytest.raises(ValueError, match="no published weights of r3d10s"):
        Speed(backbone="r3d10s", pretrained=True).load_init(task.model())

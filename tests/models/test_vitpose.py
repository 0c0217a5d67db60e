"""Sizes and names against the official checkpoints' facts, blocks against timm and torch, positions
by hand.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fedlens.core.weights import load_weights
from fedlens.models.vitpose import (
    SimpleBaseline,
    Transformer,
    ViTAttention,
    ViTBlock,
    ViTPose,
    waves,
)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def official_names() -> set[str]:
    """The names of the state dict that the authors publish for MPII (backbone, keypoint_head)."""
    names = {"backbone.pos_embed"} | {
        f"backbone.{m}.{p}" for m in ("patch_embed.proj", "last_norm") for p in ("weight", "bias")
    }
    inside = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    names |= {
        f"backbone.blocks.{k}.{m}.{p}"
        for k in range(12)
        for m in inside
        for p in ("weight", "bias")
    }
    names |= {f"keypoint_head.deconv_layers.{k}.weight" for k in (0, 3)}
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names |= {f"keypoint_head.deconv_layers.{k}.{p}" for k in (1, 4) for p in norm}
    return names | {"keypoint_head.final_layer.weight", "keypoint_head.final_layer.bias"}


def test_official_size_and_names(tmp_path: Path) -> None:
    model = ViTPose("vitpose-s", positions="absolute")
    assert count(model) == 24_290_320
    assert count(model.keypoint_head) == 2_626_576
    assert model.backbone.pos_embed.numel() == 74_112
    assert set(model.state_dict()) == official_names()
    assert count(ViTPose("vitpose-s")) == 24_223_888
    torch.save({"state_dict": model.state_dict()}, tmp_path / "official.pth")
    fresh = ViTPose("vitpose-s", positions="absolute")
    load_weights(fresh, tmp_path / "official.pth")
    assert torch.equal(fresh.backbone.pos_embed, model.backbone.pos_embed)
    with pytest.raises(ValueError, match="names differ"):
        load_weights(ViTPose("vitpose-s"), tmp_path / "official.pth")


def test_heat_maps_are_a_quarter_of_the_input() -> None:
    """Six resolutions of the paper, shapes only."""
    with torch.device("meta"):
        model = ViTPose("vitpose-s")
        for h, w in ((128, 96), (192, 144), (256, 192), (320, 240), (384, 288), (512, 384)):
            assert model(torch.empty(1, 3, h, w)).shape == (1, 16, h // 4, w // 4)
        small = ViTPose("vit-tiny", 14, patch=4, size=(64, 48))
        for h, w in ((32, 24), (48, 36), (64, 48), (80, 60), (96, 72), (128, 96)):
            assert small(torch.empty(1, 3, h, w)).shape == (1, 14, h, w)


def test_a_size_the_patch_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="36x28 cannot be cut into patches of 8x8"):
        ViTPose("vit-tiny", patch=8, size=(64, 48))(torch.zeros(1, 3, 36, 28))
    with pytest.raises(ValueError, match="no model 'vit-huge'"):
        ViTPose("vit-huge")


def test_block_is_timms_block() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.models.vision_transformer.Block(
        48, 4, qkv_bias=True, norm_layer=lambda d, **_: nn.LayerNorm(d, eps=1e-6)
    ).eval()
    ours = ViTBlock(48, 4, local=False, drop=0.5).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 48)
    assert torch.allclose(ours(x, (3, 2)), theirs(x), atol=1e-5)


def test_stochastic_depth_keeps_the_mean() -> None:
    """With drop 0.5 a branch is there half of the time and then counts double: the mean over many
    samples is the branch itself.
    """
    torch.manual_seed(0)
    block = ViTBlock(8, 2, local=False, drop=0.5).train()
    out = block._sometimes(torch.ones(4000, 1, 1))
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert out.mean().item() == pytest.approx(1, abs=0.06)


def test_local_positions_start_as_plain_attention_and_share_filters() -> None:
    """Zero filters add nothing; with a centre weight of 1 (and the rest 0) the values themselves
    are added to attention's result, in every head."""
    torch.manual_seed(0)
    plain, local = ViTAttention(16, 4, local=False).eval(), ViTAttention(16, 4, local=True).eval()
    assert local.lpe is not None and local.lpe.weight.shape == (4, 1, 3, 3)
    nn.init.zeros_(local.lpe.weight)
    nn.init.zeros_(local.lpe.bias)
    local.load_state_dict({**local.state_dict(), **plain.state_dict()})
    x = torch.randn(2, 6, 16)
    assert torch.allclose(local(x, (3, 2)), plain(x, (3, 2)), atol=1e-6)
    with torch.no_grad():
        local.lpe.weight[:, 0, 1, 1] = 1
    values = plain.qkv(x)[..., 32:]
    expected = plain(x, (3, 2)) + values @ plain.proj.weight.T
    assert torch.allclose(local(x, (3, 2)), expected, atol=1e-5)
    assert all(
        not b.attn.lpe.weight.any() for b in Transformer(16, 2, 4, 4, "conv", (8, 8), 0.0).blocks
    )


def test_waves_by_hand() -> None:
    """dim 8: four channels for the row, four for the column, rates 1, 1, 100, 100 (10000^(2k/4), k
    = 0, 0, 1, 1), sine and cosine in turn. Of 2 rows the first stands at pi, the second at 2 pi; of
    4 columns the first at pi / 2."""
    w = waves((2, 4), 8)[0]
    assert w.shape == (8, 2, 4)
    assert w[:4, 0, 2].tolist() == pytest.approx(
        [math.sin(math.pi), -1, math.sin(math.pi / 100), math.cos(math.pi / 100)], abs=1e-5
    )
    assert w[:2, 1, 0].tolist() == pytest.approx([0, 1], abs=1e-5)
    assert w[4:6, 1, 0].tolist() == pytest.approx([1, 0], abs=1e-5)


def test_absolute_positions_stretch_to_other_sizes() -> None:
    """A constant position map stays constant however large the grid; the first slot is added
    everywhere.
    """
    model = Transformer(8, 1, 2, 4, "absolute", (16, 12), 0.0)
    assert model.pos_embed is not None
    with torch.no_grad():
        model.pos_embed.fill_(0.25)
    for grid in ((4, 3), (8, 6), (2, 2)):
        where = model._where(grid, torch.zeros(1, 8, *grid))
        assert torch.allclose(where, torch.full((1, grid[0] * grid[1], 8), 0.5), atol=1e-6)


def test_simple_baseline() -> None:
    """SimpleBaseline-50 has 34.0 M parameters in its paper's Table 1 (17 joints); heat maps are a
    quarter of the input for any number of stages."""
    with torch.device("meta"):
        assert count(SimpleBaseline(50, 17)) == pytest.approx(34.0e6, rel=2e-3)
        for stages in (1, 2, 3, 4):
            assert SimpleBaseline(18, 14, stages)(torch.empty(2, 3, 64, 96)).shape == (
                2,
                14,
                16,
                24,
            )
    with pytest.raises(ValueError, match="depth of 18"):
        SimpleBaseline(20)

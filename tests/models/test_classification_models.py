from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlens.models.classification import Normalise, classifier


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("cnn", {}, 1_626_442),  # (27 + 1) 32 + (288 + 1) 64 + (64 * 14 * 14 + 1) 128 + 129 * 10
        ("niid", {}, 62_006),  # (75 + 1) 6 + (150 + 1) 16 + 401 * 120 + 121 * 84 + 85 * 10
        (
            "niid",
            {"projection": 256},
            92_626,
        ),  # without the head's 850: 61,156 + 85 * 84 + 85 * 256 + 257 * 10
        ("resnet8", {}, 78_042),
        ("resnet8", {"norm": "group"}, 78_042),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"stem": "imagenet"}, 11_181_642),
    ],
)
def test_sizes_and_the_split_into_body_and_head(
    name: str, options: dict[str, Any], count: int
) -> None:
    model = classifier(name, 10, **options).eval()
    assert sum(p.numel() for p in model.parameters()) == count
    x = torch.rand(2, 3, 32, 32)
    z = model.features(x)
    assert z.dim() == 2 and torch.equal(model.head(z), model(x)) and model(x).shape == (2, 10)
    assert {n.split(".")[0] for n in model.state_dict()} == {"body", "head"}
    assert not any("mean" in n and "running" not in n for n in model.state_dict())


def test_group_norm_leaves_no_statistics() -> None:
    for name in ("resnet8", "resnet18"):
        assert not any(
            isinstance(m, nn.BatchNorm2d) for m in classifier(name, 10, norm="group").modules()
        )


def test_normalisation_is_inside() -> None:
    """Pixel 0.7 with mean 0.5 and std 0.25 is 0.8."""
    assert Normalise((0.5,), (0.25,), 3)(
        torch.full((1, 3, 2, 2), 0.7)
    ).flatten().tolist() == pytest.approx([0.8] * 12)
    with pytest.raises(ValueError, match="one number per channel"):
        Normalise((0.5, 0.5), (0.25,), 3)


def test_other_sizes_and_channels() -> None:
    for name in ("cnn", "niid", "resnet8"):
        assert classifier(name, 4, channels=1, size=28)(torch.rand(2, 1, 28, 28)).shape == (2, 4)


def test_timm_by_name() -> None:
    pytest.importorskip("timm")
    model = classifier("timm:mobilenetv3_small_050", 7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7) and model.training


def test_a_transformer_is_told_the_size() -> None:
    """Made for 224 x 224; at 32 x 32 it has 2 x 2 patches of 16 and one position more for the
    class.
    """
    pytest.importorskip("timm")
    model = classifier("timm:vit_tiny_patch16_224", 7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert model.body[1].pos_embed.shape[1] == 5  # type: ignore[index,union-attr]


def test_timm_networks_that_are_not_there_or_do_not_fit() -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="timm has no network 'resnet9': did you mean resnet"):
        classifier("timm:resnet9", 10)
    with pytest.raises(
        ValueError, match=r"timm:inception_v3 does not work on 3 x 16 x 16 images: .*Kernel size"
    ):
        classifier("timm:inception_v3", 10, size=16)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=(
            "unknown classification model 'resnet9': choose one of cnn, niid, resnet8, resnet18 or"
            " timm:NAME"
        ),
    ):
        classifier("resnet9", 10)

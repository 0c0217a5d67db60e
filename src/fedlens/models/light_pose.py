"""A pose network of somebody's pretrained convolutional backbone (timm) and a light head.

The backbone's maps at strides 4, 8, ... become equally wide by 1x1 convolutions and are added up
from the coarsest to the finest; a depthwise and a 1x1 convolution make one heat map a joint, at a
quarter of the input. With `tf_efficientnet_lite0`, 64 channels and 17 joints: 2,997,905 parameters
in four stages, 39,057 of them the head's.

Names are `backbone` (as timm has them) and `keypoint_head`, so a file for the whole classifier
fills the backbone and leaves the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.models.classification import IMAGENET, published_pixels, timm_with


class LightHead(nn.Module):
    """channels: of the backbone's maps, finest first."""

    def __init__(self, channels: list[int], width: int, joints: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)
        self.refine = nn.Sequential(
            nn.Conv2d(width, width, 5, padding=2, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.final_layer = nn.Conv2d(width, joints, 1)
        nn.init.normal_(self.final_layer.weight, std=0.001)

    def fuse(self, maps: list[Tensor]) -> Tensor:
        sides = [lateral(m) for lateral, m in zip(self.lateral, maps, strict=True)]
        total: Tensor = sides[-1]
        for finer in reversed(sides[:-1]):
            total = finer + F.interpolate(total, size=finer.shape[-2:], mode="nearest")
        return total

    def forward(self, fused: Tensor) -> Tensor:
        return self.final_layer(self.refine(fused))  # type: ignore[no-any-return]


class LightPose(nn.Module):
    """Maps of a timm network, fused by a light head. Pixels come in as ImageNet's mean and
    deviation make them and are brought to what the network's own weights expect.

    Args:
        name: of timm's networks that give maps.
        joints: one heat map each.
        stages: how many of the strides 4, 8, 16, 32 are used; fewer for small inputs.
        width: features of the head.
    """

    def __init__(self, name: str, joints: int, stages: int = 4, width: int = 64) -> None:
        super().__init__()
        wanted = [4 * 2**k for k in range(stages)]
        self.backbone, channels = timm_maps(name, wanted)
        self.keypoint_head = LightHead(channels, width, joints)
        (mean, std), (own_mean, own_std) = IMAGENET, published_pixels(f"timm:{name}", 3)
        scale = torch.tensor(std) / torch.tensor(own_std)
        shift = (torch.tensor(mean) - torch.tensor(own_mean)) / torch.tensor(own_std)
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", scale.view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(-1, 1, 1), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return self.keypoint_head.fuse(self.backbone(x * self.scale + self.shift))

    @property
    def head(self) -> LightHead:
        return self.keypoint_head

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.keypoint_head(self.features(x))
        return found


def timm_maps(name: str, strides: list[int]) -> tuple[nn.Module, list[int]]:
    """A timm network without its classifier that gives its maps at these strides, and their
    channels. Raises ValueError.
    """
    timm = timm_with(name)
    try:
        found: Any = timm.create_model(name, pretrained=False, features_only=True)
        where = {stride: k for k, stride in enumerate(found.feature_info.reduction())}
        picked = [where[stride] for stride in strides]
        net: Any = timm.create_model(
            name, pretrained=False, features_only=True, out_indices=tuple(picked)
        )
    except (AttributeError, KeyError, RuntimeError, TypeError, AssertionError) as e:
        raise ValueError(
            f"timm:{name} gives no maps at strides {', '.join(map(str, strides))}: convolutional"
            " networks do, such as tf_efficientnet_lite0, mobilenetv3_large_100, resnet18"
        ) from e
    return net, [int(c) for c in net.feature_info.channels()]

"""Backbones for clips (B, 3, T, H, W), pixels in [0, 1]: `forward_features` gives a map (B, width,
t, h, w).

Parameters: `r3d18` 33,166,272 (torchvision's, without its classifier; 9,620 values in buffers),
`r2plus1d18` 31,300,125, `r3d10` with one block a stage and widths 16-128 903,984, `r3d10s` with
widths 8-64 228,120. The stem halves height and width, each stage after the first halves all three.
`last_stride` 1 keeps the last stage's height and width (patch tracking does; the same weights fit
both).

Whatever has `forward_features` is a backbone: "module:Class" names one of the user's own. Pixels
are normalised inside, with ImageNet's mean and deviation, so that nothing that feeds a network has
to know about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.imports import load_reference
from fedlens.core.weights import check_fit, fetching, read_weights
from fedlens.data.images.reading import IMAGENET_MEAN, IMAGENET_STD

_SMALL = {"r3d10": (16, 32, 64, 128), "r3d10s": (8, 16, 32, 64)}
LARGE = {"r3d18": "r3d_18", "r2plus1d18": "r2plus1d_18"}
MVIT = ("mvit_v1_b", "mvit_v2_s")
BACKBONES = (*LARGE, *MVIT, *_SMALL)


class VideoBackbone(nn.Module):
    """Stem and four stages under torchvision's names, so that its checkpoints fit.

    Args:
        stem: the first layers.
        stages: the four.
    """

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem = stem
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer(
            "mean", torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(IMAGENET_STD).view(1, 3, 1, 1, 1), persistent=False
        )

    def forward_features(self, x: Tensor) -> Tensor:
        # Channels last: oneDNN's 3-D convolutions, backward above all, are up to 1.8 x faster on a
        # CPU so (docs/LOG.md). The weights stay as they are, so that nothing that travels or is
        # saved looks any different.
        x = (x - self.mean) / self.std
        # vmap, which gives gradients of single examples, knows no such layout
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = x.contiguous(memory_format=torch.channels_last_3d)
        x = self.stem(x)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_features(x)


class TransformerBackbone(nn.Module):
    """torchvision's MViT without its classifier, under its names; clips of one size only, since it
    knows places by heart. Normalised as its published weights were trained.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        from torchvision.models import video

        whole: Any = getattr(video, name)()
        self.conv_proj, self.pos_encoding = whole.conv_proj, whole.pos_encoding
        self.blocks, self.norm = whole.blocks, whole.norm
        places: Any = self.pos_encoding
        self.places = (places.temporal_size, *places.spatial_size)

    def forward_features(self, x: Tensor) -> Tensor:
        patches = self.conv_proj((x - 0.45) / 0.225)
        if patches.shape[2:] != self.places:
            t, h, w = (n * s for n, s in zip(self.places, self.conv_proj.stride, strict=True))
            raise ValueError(
                f"this MViT takes clips of {t} frames of {h}x{w}, not {x.shape[2]} of"
                f" {x.shape[3]}x{x.shape[4]}: set task.frames={t} task.size={h}"
            )
        tokens, thw = self.pos_encoding(patches.flatten(2).transpose(1, 2)), self.places
        for block in self.blocks:
            tokens, thw = block(tokens, thw)
        # the first token stands for the whole clip; the others are the map
        found: Tensor = self.norm(tokens)[:, 1:].transpose(1, 2).unflatten(2, thw)
        return found


def r3d10(widths: Sequence[int] = _SMALL["r3d10"]) -> VideoBackbone:
    """One basic block a stage: ten layers with the stem and a classifier.

    Args:
        widths: features of the four stages.
    """
    from torchvision.models.video.resnet import BasicBlock, Conv3DSimple

    first = widths[0]
    stem = nn.Sequential(
        nn.Conv3d(3, first, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
        nn.BatchNorm3d(first),
        nn.ReLU(inplace=True),
    )
    stages: list[nn.Module] = []
    before = first
    for k, width in enumerate(widths):
        stride = 1 if k == 0 else 2
        short = (
            None
            if k == 0
            else nn.Sequential(
                nn.Conv3d(before, width, 1, stride, bias=False), nn.BatchNorm3d(width)
            )
        )
        stages.append(nn.Sequential(BasicBlock(before, width, Conv3DSimple, stride, short)))
        before = width
    out = VideoBackbone(stem, stages)
    for module in out.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return out


def torchvision_resnet(name: str) -> VideoBackbone:
    from torchvision.models import video

    whole: Any = getattr(video, LARGE[name])()
    return VideoBackbone(whole.stem, [whole.layer1, whole.layer2, whole.layer3, whole.layer4])


def keep_last_size(backbone: VideoBackbone) -> VideoBackbone:
    """The last stage no longer halves height and width. Strides are not weights: the state dict
    stays as it is.
    """
    for module in backbone.layer4.modules():
        if isinstance(module, nn.Conv3d) and module.stride[1:] != (1, 1):
            module.stride = (module.stride[0], 1, 1)
    return backbone


def backbone(name: str, last_stride: int = 2) -> nn.Module:
    """By name, or "module:Class"; a wrong name is refused with the right ones."""
    if ":" in name:
        return own_backbone(name)
    name = short_name(name)
    if name in MVIT:
        return TransformerBackbone(name)
    if name not in BACKBONES:
        raise ValueError(
            f"there is no backbone {name!r}: {', '.join(BACKBONES)} are known, or module:Class with"
            " forward_features"
        )
    net = torchvision_resnet(name) if name in LARGE else r3d10(_SMALL[name])
    return keep_last_size(net) if last_stride == 1 else net


def short_name(name: str) -> str:
    """torchvision's own names mean the same networks."""
    return next((short for short, theirs in LARGE.items() if theirs == name), name)


def published_backbone(name: str) -> dict[str, Tensor]:
    """torchvision's weights of a backbone, trained on Kinetics-400; fetched on first use."""
    from torchvision.models import get_model_weights

    theirs = LARGE.get(short_name(name), name)
    if theirs not in (*LARGE.values(), *MVIT):
        raise ValueError(
            f"there are no published weights of {name}: task.pretrained=true goes with"
            f" {', '.join((*LARGE, *MVIT))}; any other file by its path"
        )
    kind: Any = get_model_weights(theirs)
    with fetching(name):
        found: dict[str, Tensor] = kind.DEFAULT.get_state_dict(progress=False, weights_only=True)
    return found


def own_backbone(name: str) -> nn.Module:
    net = load_reference(name)()
    if not isinstance(net, nn.Module) or not callable(getattr(net, "forward_features", None)):
        raise ValueError(f"{name} is no backbone: it has no forward_features")
    return net


def map_shape(net: nn.Module, frames: int, size: int) -> tuple[int, int, int, int]:
    """(width, t, h, w) of what a backbone makes of a clip: asked of the network itself, so that any
    backbone will do.
    """
    extract: Any = net.forward_features
    training = net.training
    with torch.no_grad():
        net.eval()
        out = extract(torch.zeros(1, 3, frames, size, size))
    net.train(training)
    if out.dim() != 5:
        raise ValueError(
            f"forward_features of {type(net).__name__} gives {tuple(out.shape)}: a map (B, width,"
            " t, h, w) is needed"
        )
    return out.shape[1], out.shape[2], out.shape[3], out.shape[4]


def frame_differences(x: Tensor) -> Tensor:
    """What changes from frame to frame of (B, 3, T, H, W), in [0, 1] as pixels are: .5 where
    nothing does. The first difference is there twice, so that there are as many as frames.
    """
    if x.shape[2] < 2:
        return torch.full_like(x, 0.5)
    change = x.diff(dim=2) / 2 + 0.5
    return torch.cat([change[:, :, :1], change], 2)


class SplitNet(nn.Module):
    """A backbone and a head under these two names: what begins with `backbone.` is what FedVSSL
    shares. motion: the backbone sees what changes from frame to frame instead of the frames.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, motion: bool = False) -> None:
        super().__init__()
        self.backbone, self.head, self.motion = backbone, head, motion

    def maps(self, x: Tensor) -> Tensor:
        extract: Any = self.backbone.forward_features
        found: Tensor = extract(frame_differences(x) if self.motion else x)
        return found

    def features(self, x: Tensor) -> Tensor:
        """Averaged over time and place: what a linear classifier sees."""
        return self.maps(x).mean((2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


def load_backbone(net: SplitNet, path: str) -> SplitNet:
    """Only the backbone of a saved model, whatever its head was."""
    prefix = "backbone."
    found = {
        n.removeprefix(prefix): t for n, t in read_weights(path).items() if n.startswith(prefix)
    }
    if not found:
        raise ValueError(f"{path} holds no backbone: no name in it begins with {prefix!r}")
    net.backbone.load_state_dict(check_fit(found, net.backbone, path))
    return net

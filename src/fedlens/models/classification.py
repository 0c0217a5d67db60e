"""Classifiers, all of one shape: `body` turns images into a feature vector, `head` is one linear
layer on top.

Pixels come in as [0, 1] and are normalised inside the body, so that whatever feeds a network (a
dataset, a generator, a user's file) needs to know nothing about it. The constants are not part of
the state dict.

Sizes for 10 classes: `cnn` 1,626,442 (issue 2's benchmark: two 3x3 convolutions without padding,
one pooling, 128 features), `niid` 62,006 (NIID-Bench: 6 and 16 channels, 5x5), `resnet8` 78,042
(three stages of one basic block), `resnet18` 11,173,962 with the CIFAR stem (3x3, no pooling) and
11,181,642 with the ImageNet stem. `timm:NAME` is any timm network. A `projection` of N puts two
more linear layers, the last one N wide, between body and head, as MOON's authors do (N = 256).
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.core.weights import fetching
from fedlens.models.norms import GROUPS, Norm, with_norm

Stem = Literal["cifar", "imagenet"]


class Normalise(nn.Module):
    """(x - mean) / std with one number per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        super().__init__()
        wide = [list(v) * channels if len(v) == 1 else list(v) for v in (mean, std)]
        if any(len(v) != channels for v in wide) or any(s <= 0 for s in wide[1]):
            raise ValueError(
                f"mean and std need one number per channel ({channels}) or just one, and std must"
                " be positive"
            )
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(wide[0]).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(wide[1]).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Classifier(nn.Module):
    """body + head. `features` is what layers adapt, compare or share.

    Args:
        body: turns images into feature vectors.
        width: of a feature vector.
        classes: how many.
    """

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def classifier(
    name: str,
    classes: int,
    *,
    channels: int = 3,
    size: int = 32,
    stem: Stem = "cifar",
    norm: Norm = "batch",
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.25,),
    projection: int = 0,
) -> Classifier:
    """A network by name; torch is seeded by the caller."""
    first = Normalise(mean, std, channels)
    if projection < 0:
        raise ValueError(f"projection is a width, or 0 for none, not {projection}")
    if name.startswith("timm:"):
        made = _timm(name.removeprefix("timm:"), classes, channels, size, first)
        with_norm(made, norm)
    elif name in NETWORKS:
        made = NETWORKS[name](first, classes, channels, size, stem, norm)
    else:
        raise ValueError(
            f"unknown classification model {name!r}: choose one of {', '.join(NETWORKS)} or"
            " timm:NAME"
        )
    return _projected(made, projection) if projection else made


def _projected(net: Classifier, width: int) -> Classifier:
    """What layers compare is then the projection, and the head stands on it."""
    f, classes = net.head.in_features, net.head.out_features
    return Classifier(
        nn.Sequential(net.body, nn.Linear(f, f), nn.ReLU(), nn.Linear(f, width)), width, classes
    )


def _cnn(
    first: nn.Module, classes: int, channels: int, size: int, stem: Stem, norm: Norm
) -> Classifier:
    side = (size - 4) // 2
    if side < 1:
        raise ValueError(f"cnn needs images of at least 6 pixels, not {size}")
    body = nn.Sequential(
        first,
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(),
    )
    return Classifier(body, 128, classes)


def _niid(
    first: nn.Module, classes: int, channels: int, size: int, stem: Stem, norm: Norm
) -> Classifier:
    side = ((size - 4) // 2 - 4) // 2
    if side < 1:
        raise ValueError(f"niid needs images of at least 16 pixels, not {size}")
    body = nn.Sequential(
        first,
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Classifier(body, 84, classes)


def _normalisation(norm: Norm) -> Callable[..., nn.Module]:
    """GroupNorm with two groups works for every width here and keeps no statistics of the
    clients.
    """
    return nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, GROUPS)


def _resnet8(
    first: nn.Module, classes: int, channels: int, size: int, stem: Stem, norm: Norm
) -> Classifier:
    from torchvision.models.resnet import BasicBlock

    layer = _normalisation(norm)

    def block(into: int, out: int, stride: int) -> nn.Module:
        short = (
            None
            if stride == 1 and into == out
            else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), layer(out))
        )
        made: nn.Module = BasicBlock(into, out, stride, short, norm_layer=layer)
        return made

    body = nn.Sequential(
        first, nn.Conv2d(channels, 16, 3, padding=1, bias=False), layer(16), nn.ReLU(),
        block(16, 16, 1), block(16, 32, 2), block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    return Classifier(body, 64, classes)


def _resnet18(
    first: nn.Module, classes: int, channels: int, size: int, stem: Stem, norm: Norm
) -> Classifier:
    from torchvision.models import resnet18

    net: Any = resnet18(norm_layer=_normalisation(norm))
    if stem == "cifar":
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    net.fc = nn.Identity()
    return Classifier(nn.Sequential(first, net), 512, classes)


def timm_with(name: str) -> Any:
    """The package timm, which has this network; a ValueError where it has not, or is not there."""
    try:
        import timm
    except ImportError:
        raise ValueError('timm networks need timm: pip install "fedlens[models]"') from None
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise ValueError(f"timm has no network {name!r}{hint}")
    return timm


def _timm(name: str, classes: int, channels: int, size: int, first: nn.Module) -> Classifier:
    timm, why = timm_with(name), ""
    for more in (
        {},
        {"img_size": size},
    ):  # transformers are made for one size of image and can be told another
        try:
            net: Any = timm.create_model(
                name, pretrained=False, num_classes=0, in_chans=channels, **more
            )
            with torch.no_grad():  # some networks widen behind what they call their features: look
                width = net.eval()(torch.zeros(1, channels, size, size)).shape[1]
            return Classifier(nn.Sequential(first, net.train()), int(width), classes)
        except (RuntimeError, AssertionError, TypeError) as e:
            why = why or str(e)
    raise ValueError(f"timm:{name} does not work on {channels} x {size} x {size} images: {why}")


def published_weights(name: str, channels: int, size: int) -> dict[str, Tensor]:
    """What timm or torchvision publish for a network of ours, fetched where they keep it."""
    with fetching(name):
        if name.startswith("timm:"):
            return _timm_weights(name.removeprefix("timm:"), channels, size)
        if name == "resnet18":
            from torchvision.models import resnet18

            found: dict[str, Tensor] = resnet18(weights="DEFAULT").state_dict()
            return found
    raise ValueError(f"nobody publishes weights of {name}: set task.pretrained=PATH")


def _timm_weights(name: str, channels: int, size: int) -> dict[str, Tensor]:
    import timm

    if not timm.is_model_pretrained(name):
        raise ValueError(f"timm has no weights for {name}: set task.pretrained=PATH")
    sized = {} if "vit" not in name else {"img_size": size}
    found: dict[str, Tensor] = timm.create_model(
        name, pretrained=True, in_chans=channels, **sized
    ).state_dict()
    return found


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def published_pixels(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that a network's published weights were trained with; one
    number for images that have not three channels.
    """
    mean, std = IMAGENET
    if name.startswith("timm:"):
        with contextlib.suppress(ImportError):  # said when the network is built
            import timm

            known = timm.get_pretrained_cfg(name.removeprefix("timm:"))
            if known is not None and known.mean and known.std:
                mean, std = tuple(known.mean), tuple(known.std)
    return (mean, std) if channels == 3 else ((sum(mean) / len(mean),), (sum(std) / len(std),))


NETWORKS: dict[str, Callable[[nn.Module, int, int, int, Stem, Norm], Classifier]] = {
    "cnn": _cnn,
    "niid": _niid,
    "resnet8": _resnet8,
    "resnet18": _resnet18,
}

"""Denoisers, which stand in for a prior: FFDNet from its own weights, the others from deepinv.

A denoiser is a callable (image in [0, 1] as (1, C, H, W), sigma in [0, 1]) -> image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.core.files import find_in_data_folder
from fedlens.data.paths import locate

DenoiserName = Literal["auto", "ffdnet", "drunet", "dncnn", "tv", "bm3d"]


class FFDNet(nn.Module):
    """FFDNet (Zhang, Zuo and Zhang, 2018) as its IPOL release lays it out: the image as four
    half-size images beside a constant noise map, a plain chain of 3x3 convolutions, and the noise
    as output. Layer counts and widths follow from the weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        convolutions = {int(k.split(".")[-2]): v for k, v in weights.items() if v.dim() == 4}
        body: list[nn.Module] = []
        last = max(convolutions)
        for k, w in sorted(convolutions.items()):
            body.append(nn.Conv2d(w.shape[1], w.shape[0], 3, padding=1, bias=False))
            if k not in (0, last):
                body.append(nn.BatchNorm2d(w.shape[0]))
            if k != last:
                body.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*body)
        self.body.load_state_dict({".".join(k.split(".")[-2:]): v for k, v in weights.items()})
        self.channels = convolutions[last].shape[0] // 4
        self.eval()

    def forward(self, x: Tensor, sigma: float) -> Tensor:
        height, width = x.shape[-2:]
        even = nn.functional.pad(x, (0, width % 2, 0, height % 2), mode="replicate")
        small = nn.functional.pixel_unshuffle(even, 2)
        level = small.new_full((x.shape[0], x.shape[1], *small.shape[-2:]), sigma)
        noise = nn.functional.pixel_shuffle(self.body(torch.cat((level, small), 1)), 2)
        return x - noise[..., :height, :width]


def load_denoiser(name: DenoiserName, weights: str | None, channels: int) -> Any:
    """A callable (image, sigma) -> image. Raises a clear error when something is missing."""
    if name == "auto":
        name = "drunet" if weights is None and find_ffdnet(channels) is None else "ffdnet"
    if name == "ffdnet":
        path = ffdnet_weights(weights, channels)
        net = FFDNet(torch.load(path, map_location="cpu", weights_only=True))
        if net.channels != channels:
            raise ValueError(
                f"{path.name} denoises images of {net.channels} channel(s), this scene has"
                f" {channels}"
            )
        return net
    try:
        from deepinv import models
    except ImportError as e:
        raise ValueError(
            f'denoiser={name} comes from deepinv: pip install "fedlens[deblur]"'
        ) from e
    if name == "tv":
        return models.TVDenoiser(n_it_max=100)
    if name == "bm3d":
        return models.BM3D()
    kind = models.DRUNet if name == "drunet" else models.DnCNN
    try:
        return kind(
            in_channels=channels,
            out_channels=channels,
            pretrained=str(named_weights(weights)) if weights else "download",
        ).eval()
    except OSError as e:
        raise ValueError(
            f"the weights of {kind.__name__} could not be had ({e}): give weights=PATH, or"
            " denoiser=tv"
        ) from e


def check_weights(name: DenoiserName, weights: str | None, channels: int) -> None:
    """Refuse weights that are not there, before the first round."""
    if name == "ffdnet" or (name == "auto" and weights):
        ffdnet_weights(weights, channels)
    elif weights:
        named_weights(weights)


def named_weights(weights: str) -> Path:
    path = locate(weights, "file of weights", "weights")
    if not path.is_file():
        raise ValueError(f"{path} is a folder, not a file of weights")
    return path


def ffdnet_weights(weights: str | None, channels: int) -> Path:
    """Those that were named, else those of $FEDLENS_DATA."""
    if weights:
        return named_weights(weights)
    found = find_ffdnet(channels)
    if found is None:
        raise ValueError(
            f"FFDNet's weights, {ffdnet_file(channels)}, are not here: name them with weights=PATH,"
            f" or set FEDLENS_DATA to a folder that holds weights/denoise/{ffdnet_file(channels)}"
        )
    return found


def find_ffdnet(channels: int) -> Path | None:
    return find_in_data_folder(f"weights/denoise/{ffdnet_file(channels)}")


def ffdnet_file(channels: int) -> str:
    """As its IPOL release calls it."""
    return f"ffdnet_ipol_net_{'gray' if channels == 1 else 'rgb'}.pth"

"""LPIPS (Zhang et al., 2018) with AlexNet, version 0.1: distance of deep features, weighted per
channel; smaller is closer.

Inputs are RGB in [0, 1] and are mapped to [-1, 1] here. (FedVSR's public script feeds 8-bit
integers in BGR order, where 2x - 1 wraps around; its printed LPIPS are not comparable.) Weights
come from local files, `alexnet_features.pth` and `lpips_v0.1_lin_alex.pth`, or else from
torchvision (a download) and torchmetrics (which ships the small linear part).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlens.core.files import find_in_data_folder, find_named
from fedlens.core.weights import read_weights

SHIFT, SPREAD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_WIDTHS = (64, 192, 384, 256, 256)


class Lpips(nn.Module):
    """Frames (N, 3, H, W) against frames: one distance each."""

    def __init__(self) -> None:
        super().__init__()
        c = _WIDTHS
        convs = [
            nn.Conv2d(3, c[0], 11, 4, 2),
            nn.Conv2d(c[0], c[1], 5, padding=2),
            nn.Conv2d(c[1], c[2], 3, padding=1),
            nn.Conv2d(c[2], c[3], 3, padding=1),
            nn.Conv2d(c[3], c[4], 3, padding=1),
        ]
        self.convs = nn.ModuleList(convs)
        self.lins = nn.ParameterList(torch.zeros(1, n, 1, 1) for n in c)
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1))
        self.register_buffer("spread", torch.tensor(SPREAD).view(1, 3, 1, 1))

    def features(self, x: Tensor) -> list[Tensor]:
        x = (2 * x - 1 - self.shift) / self.spread  # type: ignore[operator]
        out = []
        for k, conv in enumerate(self.convs):
            x = torch.relu(conv(nn.functional.max_pool2d(x, 3, 2) if k in (1, 2) else x))
            out.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return out

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), device=a.device)
        for x, y, weight in zip(self.features(a), self.features(b), self.lins, strict=True):
            total = total + ((x - y).square() * weight).sum(1).mean((-2, -1))
        return total


@lru_cache(maxsize=2)
def load_lpips(folder: str | None = None) -> Lpips:
    """With weights from `folder`, from $FEDLENS_DATA/weights/lpips, or from torchvision and
    torchmetrics.
    """
    place = find_named(folder) if folder else find_in_data_folder("weights/lpips")
    if place is not None and (place / "alexnet_features.pth").is_file():
        convs, lins = (
            read_weights(place / "alexnet_features.pth"),
            read_weights(place / "lpips_v0.1_lin_alex.pth"),
        )
    elif folder:
        raise FileNotFoundError(
            f"{folder} does not hold alexnet_features.pth and lpips_v0.1_lin_alex.pth"
        )
    else:
        convs, lins = _published()
    model = Lpips()
    with torch.no_grad():
        for k, layer in enumerate((0, 3, 6, 8, 10)):
            model.convs[k].weight.copy_(convs[f"features.{layer}.weight"])  # type: ignore[operator,union-attr]
            model.convs[k].bias.copy_(convs[f"features.{layer}.bias"])  # type: ignore[operator,union-attr]
            model.lins[k].copy_(lins[f"lin{k}.model.1.weight"])
    return model.eval().requires_grad_(False)


def _published() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    import torchmetrics.functional.image as shipped
    from torchvision.models import AlexNet_Weights

    convs = AlexNet_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    return convs, read_weights(Path(shipped.__file__).parent / "lpips_models" / "alex.pth")


def lpips(prediction: Tensor, target: Tensor, folder: str | None = None) -> Tensor:
    """Distance of every frame, rounded to 8 bits as all published figures are.

    Args:
        prediction: frames (N, 3, H, W) in [0, 1].
        target: the true ones, of the same shape.
        folder: where the weight files lie; by default below FEDLENS_DATA, or as torchvision and
            LPIPS publish them.
    """
    model = load_lpips(folder)
    pairs = [
        ((t.detach().float().clamp(0, 1) * 255).round() / 255).cpu() for t in (prediction, target)
    ]
    with torch.no_grad():
        return torch.cat([model(a[None], b[None]) for a, b in zip(*pairs, strict=True)])

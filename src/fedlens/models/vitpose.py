"""ViTPose (Xu et al., 2022) with absolute or convolutional positions, small ones of the same build
for CPUs, and SimpleBaseline (Xiao et al., 2018).

A plain vision transformer reads patches, two transposed convolutions and a 1x1 convolution turn its
last tokens into one heat map per joint: with patch p the heat map has 4/p of the input's height.
Parameter names are those of the official checkpoints, so they load strictly.

positions="absolute": a learned vector per patch, and a first slot (of a class token that is not
there) that is added to all. Another input size than the one trained for interpolates them
bicubically. positions="conv" (ResFormer, Tian et al., 2023; what RAF uses): GPE, a depthwise 3x3
convolution of a fixed sine/cosine map whose coordinates run from 0 to 2 pi at every resolution,
added to the tokens once; LPE, a depthwise 3x3 convolution of the values in every attention, one set
of filters for all heads, zero at first. Any height and width that the patch divides.

A file of a relative (an official ViTPose with absolute positions, MAE, DeiT, timm's plain vision
transformers) starts either kind: `translate` brings it to these names, interpolates the position
vectors or leaves them out.

Deviations: ResFormer's code assumes square grids and a class token, this one has neither. RAF's
wording suggests that GPE convolves features; ResFormer's code convolves the fixed map, and so does
this. The patch convolution is padded by patch / 8, which gives the official 2 for 16 and nothing
for small patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.weights import Translated, resize_grid
from fedlens.models.swin import Mlp

Positions = Literal["conv", "absolute"]

# width, depth, heads, channels of the head. ViTPose-S has 12 heads of 32, unlike other small
# transformers.
SIZES: dict[str, tuple[int, int, int, int]] = {
    "vitpose-s": (384, 12, 12, 256),
    "vitpose-b": (768, 12, 12, 256),
    "vit-small": (96, 4, 3, 64),
    "vit-tiny": (64, 3, 2, 32),
    "vit-nano": (32, 2, 1, 16),
}


class ViTAttention(nn.Module):
    def __init__(self, dim: int, heads: int, local: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.lpe: nn.Conv2d | None = None
        if local:
            width = dim // heads
            self.lpe = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        if self.lpe is not None:
            maps = v.transpose(2, 3).reshape(b * self.heads, c // self.heads, *grid)
            out = out + self.lpe(maps).reshape(b, self.heads, c // self.heads, n).transpose(2, 3)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, local: bool, drop: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), ViTAttention(dim, heads, local)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, 4 * dim)
        self.drop = drop

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self._sometimes(self.attn(self.norm1(x), grid))
        return x + self._sometimes(self.mlp(self.norm2(x)))

    def _sometimes(self, branch: Tensor) -> Tensor:
        """Stochastic depth: a sample skips the branch with probability `drop`, the others make up
        for it.
        """
        if not self.training or not self.drop:
            return branch
        keep = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(1 - self.drop)
        return branch * keep / (1 - self.drop)


class PatchEmbed(nn.Module):
    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch, padding=patch // 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """(N, 3, H, W) -> (N, dim, H / patch, W / patch)."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        patch: int,
        positions: Positions,
        size: tuple[int, int],
        drop: float,
    ) -> None:
        super().__init__()
        self.patch, self.grid = patch, (size[0] // patch, size[1] // patch)
        self.patch_embed = PatchEmbed(dim, patch)
        self.pos_embed: nn.Parameter | None = None
        self.gpe: nn.Conv2d | None = None
        if positions == "absolute":
            self.pos_embed = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1] + 1, dim))
        else:
            self.gpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        rates = [drop * k / max(1, depth - 1) for k in range(depth)]
        self.blocks = nn.ModuleList(
            ViTBlock(dim, heads, positions == "conv", rate) for rate in rates
        )
        self.last_norm = nn.LayerNorm(dim, eps=1e-6)
        self._start()

    def _start(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)
            elif isinstance(m, ViTAttention) and m.lpe is not None:
                nn.init.zeros_(m.lpe.weight)
                nn.init.zeros_(m.lpe.bias)  # type: ignore[arg-type]
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"an input of {height}x{width} cannot be cut into patches of"
                f" {self.patch}x{self.patch}"
            )
        maps = self.patch_embed(x)
        grid = (maps.shape[-2], maps.shape[-1])
        tokens = maps.flatten(2).transpose(1, 2) + self._where(grid, maps)
        for block in self.blocks:
            tokens = block(tokens, grid)
        return self.last_norm(tokens).transpose(1, 2).reshape(maps.shape)  # type: ignore[no-any-return]

    def _where(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        if self.gpe is not None:
            return self.gpe(waves(grid, like.shape[1]).to(like)).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        assert self.pos_embed is not None
        common, each = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        if grid != self.grid:
            maps = each.transpose(1, 2).reshape(1, -1, *self.grid)
            each = (
                F.interpolate(maps, size=grid, mode="bicubic", align_corners=False)
                .flatten(2)
                .transpose(1, 2)
            )
        return common + each


def waves(grid: tuple[int, int], dim: int) -> Tensor:
    """Sines and cosines of the row (first half of the channels) and of the column, coordinates 1..n
    scaled to 2 pi: (1, dim, h, w).
    """
    half = dim // 2
    rate = 10000 ** (2 * (torch.arange(half) // 2) / half)

    def along(n: int) -> Tensor:
        angle = (torch.arange(1, n + 1) / (n + 1e-6) * 2 * math.pi)[:, None] / rate
        return torch.where(torch.arange(half) % 2 == 0, angle.sin(), angle.cos()).T  # (half, n)

    rows = along(grid[0])[:, :, None].expand(half, *grid)
    columns = along(grid[1])[:, None, :].expand(half, *grid)
    return torch.cat([rows, columns])[None]


class HeatmapHead(nn.Module):
    """Transposed convolutions, each doubling the size, then one map per joint."""

    def __init__(self, dim: int, channels: int, joints: int, doublings: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for k in range(doublings):
            layers.append(
                nn.ConvTranspose2d(
                    dim if k == 0 else channels, channels, 4, stride=2, padding=1, bias=False
                )
            )
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        self.deconv_layers = nn.Sequential(*layers)
        self.final_layer = nn.Conv2d(channels if doublings else dim, joints, 1)
        for m in self.modules():
            if isinstance(m, (nn.ConvTranspose2d, nn.Conv2d)):
                nn.init.normal_(m.weight, std=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return self.final_layer(self.deconv_layers(x))  # type: ignore[no-any-return]


class _HeatmapModel(nn.Module):
    """`backbone` and `keypoint_head`, the names of official checkpoints; `features` and `head` are
    what tasks ask for.
    """

    backbone: nn.Module
    keypoint_head: HeatmapHead

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x)  # type: ignore[no-any-return]

    @property
    def head(self) -> HeatmapHead:
        return self.keypoint_head

    def forward(self, x: Tensor) -> Tensor:
        return self.keypoint_head(self.backbone(x))  # type: ignore[no-any-return]


class ViTPose(_HeatmapModel):
    """A plain vision transformer that draws heat maps.

    Args:
        model: vit-nano, vit-tiny, vit-small, vitpose-s or vitpose-b.
        joints: one heat map each.
        patch: side of a patch, in pixels.
        positions: "conv" takes any input size; "absolute" is the official model for `size`.
        size: (height, width) of the input.
        drop_path: stochastic depth of the last block, rising from zero (0.3 for MPII, 0.1 for COCO
            officially).
    """

    backbone: Transformer

    def __init__(
        self,
        model: str = "vitpose-s",
        joints: int = 16,
        patch: int = 16,
        positions: Positions = "conv",
        size: tuple[int, int] = (256, 192),
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if model not in SIZES:
            raise ValueError(f"no model {model!r}: there are {', '.join(SIZES)}")
        if size[0] % patch or size[1] % patch:
            raise ValueError(
                f"an input of {size[0]}x{size[1]} cannot be cut into patches of {patch}x{patch}"
            )
        dim, depth, heads, channels = SIZES[model]
        self.heads = heads
        self.backbone = Transformer(dim, depth, heads, patch, positions, size, drop_path)
        self.keypoint_head = HeatmapHead(dim, channels, joints, 2)

    def translate(self, weights: dict[str, Tensor]) -> Translated | None:
        """Weights of a relative under our names; None where they are ours already."""
        own = self.state_dict()
        plain = "blocks.0.attn.qkv.weight" in weights  # MAE, DeiT, timm
        if not plain and "backbone.blocks.0.attn.qkv.weight" not in weights:
            return None
        if all(n in weights for n in own if n.startswith("backbone.")):
            same = weights.get(POSITIONS, torch.empty(0)).shape == self._positions().shape
            if same or POSITIONS not in own:
                return None
        found: dict[str, Tensor] = {}
        dropped, changed = [], []
        for name, value in weights.items():
            ours = _own_name(name) if plain else name
            if ours == POSITIONS and POSITIONS in own:
                found[ours] = resize_positions(value, self.backbone.grid, "cls_token" in weights)
                changed.append(f"{name} fitted to {_grid(self.backbone.grid)}")
            elif ours in own:
                found[ours] = value
            else:
                dropped.append(name)
        width = found["backbone.blocks.0.attn.qkv.weight"].shape[1]
        # heads of DeiT and timm are 64 wide, ViTPose-S's are 32
        if "head.weight" in weights and width % 64 == 0 and width // 64 != self.heads:
            changed.append(f"read with {self.heads} heads where a DeiT has {width // 64}")
        fresh = ["backbone.gpe.*", "backbone.blocks.*.attn.lpe.*"]
        return Translated(found, dropped, changed, fresh)

    def _positions(self) -> Tensor:
        found = self.backbone.pos_embed
        return torch.empty(0) if found is None else found


POSITIONS = "backbone.pos_embed"


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _own_name(name: str) -> str:
    """Of a plain vision transformer: its last norm is called `norm`."""
    if name.startswith("norm."):
        name = f"last_{name}"
    return f"backbone.{name}"


def patch_grid(count: int) -> tuple[int, int]:
    """Rows and columns of so many patches: a square, or 4:3 as people are cropped."""
    side = math.isqrt(count)
    if side * side == count:
        return side, side
    unit = math.isqrt(count // 12)
    if 12 * unit * unit != count:
        raise ValueError(f"{count} position vectors are neither a square nor 4:3")
    return 4 * unit, 3 * unit


def resize_positions(value: Tensor, grid: tuple[int, int], class_token: bool = True) -> Tensor:
    """(1, 1 + n, dim) for another grid. The first slot is the class token's; files without one get
    zeros there. A plain transformer's patches never saw that slot, ours add it to all: so where the
    file has a class token, the slot is zero too."""
    dim, count = value.shape[-1], value.shape[1]
    try:
        rows, columns = patch_grid(count - 1)
        common, each = value[:, :1], value[:, 1:]
    except ValueError:
        rows, columns = patch_grid(count)
        common, each = value.new_zeros(1, 1, dim), value
    if class_token:
        common = torch.zeros_like(common)
    if (rows, columns) != grid:
        each = resize_grid(each, (rows, columns), grid, antialias=False)
    return torch.cat([common, each], 1)


def arguments_of(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What makes the ViTPose that these weights belong to, under the names that `Pose` has for it;
    nothing for other weights. Absolute positions show the input's size where `patch_grid` knows
    their grid; convolved ones fit any, and get the 16 x 12 patches of the published networks.
    """
    patches = weights.get("backbone.patch_embed.proj.weight")
    if patches is None or patches.dim() != 4:
        return {}
    depth = len({n.split(".")[2] for n in weights if n.startswith("backbone.blocks.")})
    names = [n for n, size in SIZES.items() if size[:2] == (patches.shape[0], depth)]
    if not names:
        return {}
    patch, places = patches.shape[-1], weights.get("backbone.pos_embed")
    positions = "conv" if places is None else "absolute"
    told = {"network": names[0], "patch": patch, "positions": positions}
    try:
        rows, columns = (16, 12) if places is None else patch_grid(places.shape[1] - 1)
    except ValueError:
        return told
    return told | {"size": (rows * patch, columns * patch)}


class SimpleBaseline(_HeatmapModel):
    """A ResNet of torchvision without its classifier, and transposed convolutions up to a quarter
    of the input: the convolutional comparison.

    Args:
        depth: of the ResNet: 18, 34, 50, 101 or 152.
        joints: one heat map each.
        stages: how many of the ResNet's four are kept; fewer for small inputs (stride 4, 8, 16,
            32).
        channels: of the transposed convolutions.
    """

    def __init__(
        self, depth: int = 50, joints: int = 16, stages: int = 4, channels: int = 256
    ) -> None:
        super().__init__()
        import torchvision

        if depth not in (18, 34, 50, 101, 152) or not 1 <= stages <= 4:
            raise ValueError(
                "SimpleBaseline has a depth of 18, 34, 50, 101 or 152 and 1 to 4 stages"
            )
        resnet: Any = getattr(torchvision.models, f"resnet{depth}")(weights=None)
        names = ["conv1", "bn1", "relu", "maxpool", *(f"layer{k + 1}" for k in range(stages))]
        self.backbone = nn.Sequential()
        for name in names:
            self.backbone.add_module(name, getattr(resnet, name))
        width = (64 if depth < 50 else 256) * 2 ** (stages - 1)
        self.keypoint_head = HeatmapHead(width, channels, joints, stages - 1)

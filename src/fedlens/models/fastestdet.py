"""FastestDet (dog-qiuqiu): a detector of 80 classes in 244 thousand parameters, milliseconds on a
CPU. Parameter names are the official ones, so its file loads strictly.

ShuffleNetV2 with maps at strides 8, 16 and 32, which meet at 16; a pyramid of 5x5 depthwise
convolutions; three small heads. Each cell of the 22x22 grid tells one box: objectness, the centre
(tanh, in cells from its own), width and height (sigmoid, of the image), classes (softmax). Its
score is objectness^0.6 * class^0.4. Pixels come as blue, green, red within [0, 1], stretched to
352x352.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 352
CLASSES = 80
PERSON = 0
OVERLAP = 0.45  # boxes of one class that share more are one object


def _convolution(
    into: int, out: int, side: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
) -> list[nn.Module]:
    layers: list[nn.Module] = [
        nn.Conv2d(into, out, side, stride, side // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    ]
    return [*layers, nn.ReLU(inplace=True)] if relu else layers


def _chain(*parts: Iterable[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(layer for part in parts for layer in part))


class ShuffleBlock(nn.Module):
    """stride 2 doubles the channels on two branches; stride 1 works on every second channel."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.stride, middle = stride, out // 2
        self.branch_main = _chain(
            _convolution(into, middle),
            _convolution(middle, middle, 3, stride, middle, relu=False),
            _convolution(middle, out - into),
        )
        if stride == 2:
            self.branch_proj = _chain(
                _convolution(into, into, 3, 2, into, relu=False), _convolution(into, into)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept, worked = (self.branch_proj(x), x) if self.stride == 2 else (x[:, ::2], x[:, 1::2])
        return torch.cat([kept, self.branch_main(worked)], 1)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_conv = _chain(_convolution(3, 24, 3, 2))
        self.stage2, self.stage3, self.stage4 = (
            nn.Sequential(
                ShuffleBlock(into, out, 2), *(ShuffleBlock(into, out, 1) for _ in range(more))
            )
            for into, out, more in ((24, 48, 3), (48, 96, 7), (96, 192, 3))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.max_pool2d(self.first_conv(x), 3, 2, 1)
        fine = self.stage2(x)
        middle = self.stage3(fine)
        return fine, middle, self.stage4(middle)


class OneByOne(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1x1 = _chain(_convolution(into, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1x1(x)  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """One, two and three 5x5 depthwise convolutions side by side."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.Conv1x1 = OneByOne(into, out)
        self.S1, self.S2, self.S3 = (
            _chain(*(_convolution(out, out, 5, groups=out) for _ in range(n))) for n in (1, 2, 3)
        )
        self.output = _chain(_convolution(3 * out, out, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv1x1(x)
        return F.relu(x + self.output(torch.cat([self.S1(x), self.S2(x), self.S3(x)], 1)))


class SmallHead(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv5x5 = _chain(
            _convolution(into, into, 5, groups=into), _convolution(into, out, relu=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv5x5(x)  # type: ignore[no-any-return]


class DetectHead(nn.Module):
    def __init__(self, into: int) -> None:
        super().__init__()
        self.conv1x1 = OneByOne(into, into)
        self.obj_layers, self.reg_layers = SmallHead(into, 1), SmallHead(into, 4)
        self.cls_layers = SmallHead(into, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1x1(x)
        there, classes = self.obj_layers(x).sigmoid(), self.cls_layers(x).softmax(1)
        return torch.cat([there, self.reg_layers(x), classes], 1)


class FastestDet(nn.Module):
    """(N, 3, 352, 352) -> (N, 85, 22, 22): objectness, four numbers of the box, 80 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ShuffleNet()
        self.SPP = Pyramid(48 + 96 + 192, 96)
        self.detect_head = DetectHead(96)

    def forward(self, x: Tensor) -> Tensor:
        fine, middle, coarse = self.backbone(x)
        fine = F.avg_pool2d(fine, 3, 2, 1)
        coarse = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        found: Tensor = self.detect_head(self.SPP(torch.cat([fine, middle, coarse], 1)))
        return found

    @torch.no_grad()
    def find(self, image: Tensor, wanted: int = PERSON, least: float = 0.65) -> Tensor:
        """Boxes of one class in an image (3, H, W) of red, green, blue as uint8: (n, 5) as left,
        top, right, bottom in pixels and score, the best first.
        """
        from torchvision.ops import nms

        pixels = F.interpolate(image[None].float(), size=(SIDE, SIDE), mode="bilinear")
        place = next(self.parameters())
        answer = self((pixels.round().flip(1) / 255).to(place))[0].float().cpu()
        boxes, scores, classes = read_grid(answer)
        kept = (scores > least) & (classes == wanted)
        boxes, scores = boxes[kept], scores[kept]
        best = nms(boxes, scores, OVERLAP)
        height, width = image.shape[-2:]
        boxes = boxes[best] * torch.tensor([width, height, width, height])
        return torch.cat([boxes, scores[best, None]], 1)


def read_grid(answer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(85, h, w) -> corners (h w, 4) as shares of the image, scores and classes (h w)."""
    h, w = answer.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    x, y = (answer[1].tanh() + columns) / w, (answer[2].tanh() + rows) / h
    half_width, half_height = answer[3].sigmoid() / 2, answer[4].sigmoid() / 2
    corners = [x - half_width, y - half_height, x + half_width, y + half_height]
    best, classes = answer[5:].max(0)
    scores = answer[0] ** 0.6 * best**0.4
    return torch.stack(corners, -1).reshape(-1, 4), scores.flatten(), classes.flatten()

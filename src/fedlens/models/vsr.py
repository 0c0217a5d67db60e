"""Networks for video super-resolution that train on a CPU: (B, T, 3, h, w) -> (B, T, 3, scale h,
scale w), in [0, 1].

LightVSR is recurrent in one direction: each frame sees its two neighbours and what is remembered of
the past. BidirectionalVSR has the plan of BasicVSR (Chan et al., 2021): features are propagated
backward, then forward, warped along a coarse optical flow that is learned with the rest; unlike
there, the flow network is a small one without published weights. Both predict the residual to
bicubic enlargement and start at exactly that, so that the first round cannot do harm. Their first
convolution is `conv_first`, the layer FedSR looks at.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.data.video.degrade import enlarge
from fedlens.models.clips import Configuration


class ResidualBlock(nn.Module):
    """Two convolutions and a detour."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(x), inplace=True))
        return x + out


def trunk(inputs: int, width: int, blocks: int) -> nn.Sequential:
    """What every time step goes through; the scaling of the blocks follows EDSR's practice of
    starting near the identity.
    """
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=True),
        *(ResidualBlock(width) for _ in range(blocks)),
    )
    with torch.no_grad():
        for block in body[2:]:
            block.second.weight.mul_(0.1)  # type: ignore[union-attr,operator]
    return body


class Upsampler(nn.Module):
    """Features to a high-resolution residual by pixel shuffle; starts at zero."""

    def __init__(self, width: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.last = nn.Conv2d(width, 3 * scale * scale, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        return F.pixel_shuffle(self.last(features), self.scale)


class LightVSR(nn.Module):
    """Recurrent in one direction, for CPUs.

    Args:
        scale: 2, 3 or 4.
        width: features of the trunk.
        blocks: of the trunk.
    """

    looks_ahead, frame_by_frame = 1, True
    channels_last = True
    bytes_per_pixel = 2000  # of a frame, while it is worked on

    def __init__(self, scale: int = 4, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        self.scale, self.width = scale, width
        self.conv_first = nn.Conv2d(9, width, 3, padding=1)
        self.trunk = trunk(2 * width, width, blocks)
        self.upsample = Upsampler(width, scale)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._frame_by_frame(x)
        b, t, _, h, w = x.shape
        before = x[:, [0, *range(t - 1)]]
        after = x[:, [*range(1, t), t - 1]]
        seen = torch.cat([before, x, after], 2).reshape(b * t, 9, h, w)
        shallow = F.leaky_relu(self.conv_first(seen), 0.1).reshape(b, t, self.width, h, w)
        state = shallow.new_zeros(b, self.width, h, w)
        states = []
        for k in range(t):
            state = self.trunk(torch.cat([shallow[:, k], state], 1))
            states.append(state)
        residual: Tensor = self.upsample(torch.stack(states, 1).flatten(0, 1))
        return enlarge(x, self.scale) + residual.reshape(b, t, 3, h * self.scale, w * self.scale)

    def _frame_by_frame(self, x: Tensor) -> Tensor:
        """The same, where nothing has to be kept for a backward pass: memory of one frame."""
        b, t, _, h, w = x.shape
        out = x.new_empty(b, t, 3, h * self.scale, w * self.scale)
        state = x.new_zeros(b, self.width, h, w)
        for k in range(t):
            seen = torch.cat([x[:, max(k - 1, 0)], x[:, k], x[:, min(k + 1, t - 1)]], 1)
            shallow = F.leaky_relu(self.conv_first(seen), 0.1, inplace=True)
            state = self.trunk(torch.cat([shallow, state], 1))
            out[:, k] = enlarge(x[:, k], self.scale) + self.upsample(state)
        return out

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        return recurrent_size("LightVSR", weights, "trunk")


class Flow(nn.Module):
    """Optical flow from one frame to another, coarse to fine over three levels."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        self.steps = nn.ModuleList(self._step(width) for _ in range(levels))
        for step in self.steps:
            nn.init.zeros_(step[-1].weight)  # type: ignore[index,arg-type]
            nn.init.zeros_(step[-1].bias)  # type: ignore[index,arg-type]

    @staticmethod
    def _step(width: int) -> nn.Sequential:
        first, second = nn.Conv2d(8, width, 5, padding=2), nn.Conv2d(width, width, 5, padding=2)
        return nn.Sequential(
            first, nn.ReLU(True), second, nn.ReLU(True), nn.Conv2d(width, 2, 3, padding=1)
        )

    def forward(self, here: Tensor, there: Tensor) -> Tensor:
        pyramid: list[tuple[Tensor, Tensor]] = [(here, there)]
        while len(pyramid) < len(self.steps) and min(pyramid[-1][0].shape[-2:]) >= 8:
            pyramid.append((F.avg_pool2d(pyramid[-1][0], 2), F.avg_pool2d(pyramid[-1][1], 2)))
        flow = here.new_zeros(here.shape[0], 2, *pyramid[-1][0].shape[-2:])
        for level, (a, b) in reversed(list(enumerate(pyramid))):
            if flow.shape[-2:] != a.shape[-2:]:
                flow = 2 * F.interpolate(
                    flow, size=a.shape[-2:], mode="bilinear", align_corners=False
                )
            flow = flow + self.steps[level](torch.cat([a, warp_inside(b, flow), flow], 1))
        return flow


def warp_inside(x: Tensor, flow: Tensor) -> Tensor:
    """x sampled at p + flow(p); beyond the border its edge."""
    h, w = x.shape[-2:]
    rows, columns = torch.meshgrid(
        torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij"
    )
    u = (columns + flow[:, 0]) * (2 / max(1, w - 1)) - 1
    v = (rows + flow[:, 1]) * (2 / max(1, h - 1)) - 1
    return F.grid_sample(
        x,
        torch.stack([u, v], -1).to(x.dtype),
        mode="bilinear",
        padding_mode="border",
        align_corners=True,
    )


class BidirectionalVSR(nn.Module):
    """BasicVSR's plan in small: recurrent in both directions, along a flow.

    Args:
        scale: 2, 3 or 4.
        width: features of each of the two trunks.
        blocks: of each trunk.
    """

    def __init__(self, scale: int = 4, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.scale, self.width = scale, width
        self.conv_first = nn.Conv2d(3, width, 3, padding=1)
        self.flow = Flow()
        self.backward_trunk = trunk(2 * width, width, blocks)
        self.forward_trunk = trunk(3 * width, width, blocks)
        self.upsample = Upsampler(width, scale)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _, h, w = x.shape
        shallow = F.leaky_relu(self.conv_first(x.flatten(0, 1)), 0.1).reshape(
            b, t, self.width, h, w
        )
        late, early = x[:, 1:].flatten(0, 1), x[:, :-1].flatten(0, 1)
        to_next = self.flow(early, late).reshape(b, t - 1, 2, h, w) if t > 1 else None
        to_last = self.flow(late, early).reshape(b, t - 1, 2, h, w) if t > 1 else None
        nothing = shallow.new_zeros(b, self.width, h, w)
        future: list[Tensor] = []
        state = nothing
        for k in reversed(range(t)):
            carried = (
                warp_inside(state, to_next[:, k]) if to_next is not None and k < t - 1 else nothing
            )
            state = self.backward_trunk(torch.cat([shallow[:, k], carried], 1))
            future.insert(0, state)
        state, states = nothing, []
        for k in range(t):
            carried = (
                warp_inside(state, to_last[:, k - 1]) if to_last is not None and k else nothing
            )
            state = self.forward_trunk(torch.cat([shallow[:, k], future[k], carried], 1))
            states.append(state)
        residual: Tensor = self.upsample(torch.stack(states, 1).flatten(0, 1))
        return enlarge(x, self.scale) + residual.reshape(b, t, 3, h * self.scale, w * self.scale)

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        return recurrent_size("BidirectionalVSR", weights, "backward_trunk")


def recurrent_size(name: str, weights: Mapping[str, Tensor], trunk: str) -> Configuration | None:
    """Of one of the two networks above, by its weights."""
    needed = ("conv_first.weight", f"{trunk}.0.weight", "upsample.last.weight")
    if not weights.keys() >= set(needed):
        return None
    width = weights["conv_first.weight"].shape[0]
    blocks = len({n.split(".")[1] for n in weights if n.startswith(f"{trunk}.")}) - 1
    scale = int((weights["upsample.last.weight"].shape[0] // 3) ** 0.5)
    words = f"{name}, x{scale}, {blocks} blocks, width {width}"
    return Configuration(words, scale, {"width": width, "blocks": blocks})


class Bicubic(nn.Module):
    """Nothing learned: what everything must beat."""

    def __init__(self, scale: int = 4) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return enlarge(x, self.scale)

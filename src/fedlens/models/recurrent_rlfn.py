"""RLFN that looks at time: what neighbouring frames show of a place joins its features before they
become a picture.

Frame t has the features f_t of RLFN's trunk. They are carried backward, then forward:

    b_t = B(f_t, A(b_{t+1}; t+1 -> t))            r_t = R(f_t, b_t, A(r_{t-1}; t-1 -> t))
    picture_t = shuffle(f_t + r_t)

A aligns without optical flow: a place looks for itself in the other frame among the shifts of at
most `radius` pixels, by the squared difference of small patches, and takes the mean of what lies
there with weights softmax(-|patch difference|^2 / tau). Nothing of this has to be learned but tau,
which few clips can teach. B and R also get the mean shift (its fraction says where between the
pixels the other frame saw the place, which is where more resolution comes from) and how far apart
the patches are. The last convolution of R starts at 0, so that a fresh network on published weights
is exactly RLFN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.weights import Translated
from fedlens.models.clips import Configuration
from fedlens.models.rlfn import RLFN
from fedlens.models.vsr import trunk

OWN = ("sharpness", "backward_trunk.", "forward_trunk.", "join.")  # what RLFN does not have
_PATCH = 5  # side of what is compared
_LEVEL = 64.0  # features are about this large; what is learned sees them near 1


class RecurrentRLFN(RLFN):
    """
    Args:
        scale: 2, 3 or 4.
        width: features of the trunk.
        blocks: of the trunk.
        middle: channels inside a block of the trunk, where they are others.
        carried: features that go from frame to frame.
        steps: residual blocks between two frames, each way.
        radius: the largest shift between two frames, in pixels.
    """

    frame_wise = frame_by_frame = False
    bytes_per_pixel = 9000

    def __init__(
        self,
        scale: int = 4,
        width: int = 46,
        blocks: int = 4,
        middle: int | None = 48,
        carried: int = 32,
        steps: int = 2,
        radius: int = 3,
    ) -> None:
        super().__init__(scale, width, blocks, middle)
        self.radius = radius
        self.sharpness = nn.Parameter(torch.tensor(5.0))  # log of 1 / tau
        self.backward_trunk = trunk(width + carried + 3, carried, steps)
        self.forward_trunk = trunk(width + 2 * carried + 3, carried, steps)
        self.join = nn.Conv2d(carried, width, 3, padding=1)
        nn.init.zeros_(self.join.weight)
        nn.init.zeros_(self.join.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        features = torch.stack([self.features(x[:, k]) for k in range(t)], 1)
        size = features.shape[-2:]
        frames = F.pad(x.flatten(0, 1), _more(x, size), mode="replicate").unflatten(0, (b, t))
        known = features / _LEVEL
        behind = self._carry(self.backward_trunk, [known], frames, backward=True)
        ahead = self._carry(self.forward_trunk, [known, behind], frames)
        large = [self.picture(features[:, k] + _LEVEL * self.join(ahead[:, k])) for k in range(t)]
        h, w = x.shape[-2] * self.scale, x.shape[-1] * self.scale
        return torch.stack(large, 1)[..., :h, :w]

    def _carry(
        self, step: nn.Module, known: list[Tensor], frames: Tensor, backward: bool = False
    ) -> Tensor:
        """The states of all frames, each made of what is known of its frame and of the state before
        it on the way, aligned."""
        t = frames.shape[1]
        order = list(reversed(range(t))) if backward else list(range(t))
        carried = self.join.in_channels
        states: dict[int, Tensor] = {}
        for last, k in zip([None, *order], order):
            if last is None:
                shape = (len(frames), carried + 3, *frames.shape[-2:])
                found = known[0].new_zeros(shape)
            else:
                found = align(
                    states[last], frames[:, last], frames[:, k], self.sharpness.exp(), self.radius
                )
            states[k] = step(torch.cat([*(f[:, k] for f in known), found], 1))
        return torch.stack([states[k] for k in range(t)], 1)

    def translate(self, weights: dict[str, Tensor]) -> Translated | None:
        """RLFN's own file starts the trunk."""
        if RLFN.configuration(weights) is None:
            return None
        return Translated(weights, [], [], [f"{name}*" for name in OWN])

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> Configuration | None:
        frame = {n: t for n, t in weights.items() if not n.startswith(OWN)}
        base = RLFN.configuration(frame)
        if base is None or len(frame) == len(weights) or "join.weight" not in weights:
            return None
        steps = len({n.split(".")[1] for n in weights if n.startswith("backward_trunk.")}) - 1
        size = {"middle": None, **(base.official or {})}
        size |= {"carried": weights["join.weight"].shape[1], "steps": steps}
        return Configuration(base.words.replace("RLFN", "RecurrentRLFN"), base.scale, size)

    @staticmethod
    def recognise(weights: Mapping[str, Tensor]) -> str | None:
        found = RecurrentRLFN.configuration(weights) or RLFN.configuration(weights)
        return found.words if found else None


def align(state: Tensor, there: Tensor, here: Tensor, sharpness: Tensor, radius: int) -> Tensor:
    """What `state`, of the frame `there`, holds for each place of the frame `here`; with the mean
    shift (rows, columns; 1 is the radius) and the least patch difference as three more channels.

    Args:
        state: (B, C, h, w).
        there: its frame (B, 3, h, w), in [0, 1].
        here: the frame to align to.
        sharpness: 1 / tau.
        radius: the largest shift, in pixels.
    """
    h, w = here.shape[-2:]
    side = 2 * radius + 1
    around = F.pad(there, (radius,) * 4, mode="replicate")
    shifts = [(i, j) for i in range(side) for j in range(side)]
    apart = torch.cat(
        [
            (around[..., i : i + h, j : j + w] - here).square().sum(1, keepdim=True)
            for i, j in shifts
        ],
        1,
    )
    apart = F.avg_pool2d(apart, _PATCH, 1, _PATCH // 2, count_include_pad=False)
    weights = (-sharpness * apart).softmax(1)
    held = F.pad(state, (radius,) * 4, mode="replicate")
    found = torch.zeros_like(state)
    for k, (i, j) in enumerate(shifts):
        found = found + weights[:, k : k + 1] * held[..., i : i + h, j : j + w]
    where = torch.tensor(shifts, dtype=state.dtype, device=state.device) / max(1, radius) - 1
    moved = torch.einsum("bkhw,kc->bchw", weights, where)
    least = apart.amin(1, keepdim=True).sqrt()
    return torch.cat([found, moved, least], 1)


def _more(x: Tensor, size: torch.Size) -> tuple[int, int, int, int]:
    return 0, size[1] - x.shape[-1], 0, size[0] - x.shape[-2]

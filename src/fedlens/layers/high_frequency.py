r"""HighFrequency (FedVSR, Eqs. 7-16): besides the pixels, a client matches the detail bands of a
3-D Haar transform of its clip.

One level over time, height and width splits a clip into eight bands; LLL is left out, the seven
others (letters = time, height, width) go through Charbonnier and one mean over everything: L_HiFr =
mean sqrt(d^2 + eps), Eq. 15. The total is L_VSR + weight * L_HiFr, Eq. 16, where weight is
lambda_HiFr / lambda_VSR.

The transform is linear, so the bands of the difference are taken once instead of those of both
clips, as sums and differences of neighbouring samples. The gradient of a mean of square roots costs
the same square roots as the loss, so both are computed in one pass while a piece of the clip is in
the cache, and going backward is one product with a number.

Where paper and code disagree, or say nothing:

- eps = 1e-9 is added un-squared, as in the public code; the paper's epsilon is then 3.2e-5.
- An odd length repeats its last sample (PyWavelets' "symmetric"): the missing partner adds no
  detail along that axis. The public code fails there. A single frame has detail in space only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.core.algorithm import Layer
from fedlens.core.client import Batch, Client, Output
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message

BANDS = ("LLH", "LHL", "LHH", "HLL", "HLH", "HHL", "HHH")
# samples at a time: 4 MiB and as much for the bands, so that they stay in the last-level cache
_PIECE = 1 << 20
HALF = 2**-1.5  # three orthonormal steps of 1 / sqrt 2


def high_frequency_loss(prediction: Tensor, target: Tensor, eps: float = 1e-9) -> Tensor:
    """L_HiFr of two clips (..., T, C, H, W). For use in anyone's training loop; differentiable
    once.
    """
    if prediction.shape != target.shape:
        raise ValueError(
            f"clips differ in shape: {tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    if prediction.dim() < 4:
        raise ValueError(
            f"a clip is (..., time, channels, height, width), this has {prediction.dim()}"
            " dimensions"
        )
    wide = prediction.dtype == target.dtype == torch.float64
    a, b = (even(t if wide else t.float()) for t in (prediction, target))
    loss: Tensor = _Charbonnier.apply(a, b, eps)  # type: ignore[no-untyped-call]
    return loss


def haar_details(clip: Tensor) -> dict[str, Tensor]:
    """The seven detail bands of a clip (..., T, C, H, W), by name; the readable form of what the
    loss does.
    """
    x = even(clip)
    pairs = x.reshape(-1, 2, *x.shape[-3:])
    shape = (*x.shape[:-4], x.shape[-4] // 2, x.shape[-3], x.shape[-2] // 2, x.shape[-1] // 2)
    return {
        name: (band * HALF).reshape(shape)
        for name, band in zip(BANDS, _split(pairs)[1:], strict=True)
    }


def even(clip: Tensor) -> Tensor:
    """Repeat the last frame, row or column where their number is odd."""
    for axis in (-4, -2, -1):
        if clip.shape[axis] % 2:
            clip = torch.cat([clip, clip.narrow(axis, clip.shape[axis] - 1, 1)], axis)
    return clip


def _split(x: Tensor) -> list[Tensor]:
    """(N, 2, C, H, W) into LLL and the seven bands, each (N, C, H/2, W/2), without the orthonormal
    factor.
    """
    bands = _pair(x[:, 0], x[:, 1])
    bands = [f for b in bands for f in _pair(b[:, :, 0::2], b[:, :, 1::2])]
    return [f for b in bands for f in _pair(b[..., 0::2], b[..., 1::2])]


def _pair(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a + b, a - b]


class _Charbonnier(torch.autograd.Function):
    """mean sqrt(d^2 + eps) over the detail bands of an even clip, and its gradient.

    Along the width, neighbours a and b are one complex number: (a + ib)(1 - i) = (a + b) - i(a - b)
    holds the low and the negated high band side by side, so that every operation runs over
    contiguous memory; Charbonnier does not see the sign. The way back, the transpose, is the
    product with 1 + i. The orthonormal factor stays outside: sqrt(d^2 / 8 + eps) = sqrt(d^2 + 8
    eps) / sqrt 8.
    """

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor, eps: float) -> Tensor:
        one, other = (t.reshape(-1, 2, *t.shape[-3:]) for t in (prediction, target))
        wanted = any(ctx.needs_input_grad[:2])
        gradient = torch.empty_like(one, memory_format=torch.contiguous_format) if wanted else None
        floor = one.new_tensor(8 * eps)
        total = 0.0
        scratch = _Scratch(one[:0])
        for low, high in _pieces(one):
            if high - low != scratch.n:
                scratch = _Scratch(one[low:high])
            bands = scratch.split(one[low:high], other[low:high])
            root = torch.addcmul(floor, bands, bands, out=scratch.gap.view_as(bands)).sqrt_()
            total += float(root.sum())
            if gradient is not None:
                scratch.join(bands.div_(root), gradient[low:high])
        total -= one.numel() // 8 * float(floor.sqrt())  # what LLL, set to zero, has added
        count = one.numel() // 8 * 7
        if gradient is not None:
            ctx.save_for_backward(gradient.view(prediction.shape))
            ctx.factor = HALF / count
        return one.new_tensor(total * HALF / count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient * (grads[0] * ctx.factor)
        return scaled, -scaled if ctx.needs_input_grad[1] else None, None


class _Scratch:
    """The steps there and back for a piece (n, 2, C, H, W), in memory that is used again for the
    next one: fresh pages cost as much as the arithmetic."""

    def __init__(self, piece: Tensor) -> None:
        self.n, _, c, h, w = piece.shape
        self.gap = torch.empty_like(piece, memory_format=torch.contiguous_format)
        self.halves = piece.new_empty(2, self.n, c, h, w)
        self.bands = piece.new_empty(2, 2, self.n, c, h // 2, w)

    def split(self, a: Tensor, b: Tensor) -> Tensor:
        """The bands of a - b: low and high over time, then over height, their width as told above;
        LLL is set to zero.
        """
        gap = torch.sub(a, b, out=self.gap)
        torch.add(gap[:, 0], gap[:, 1], out=self.halves[0])
        torch.sub(gap[:, 0], gap[:, 1], out=self.halves[1])
        even, odd = self.halves[..., 0::2, :], self.halves[..., 1::2, :]
        torch.add(even, odd, out=self.bands[:, 0])
        torch.sub(even, odd, out=self.bands[:, 1])
        self._pairs.mul_(1 - 1j)
        self.bands[0, 0, ..., 0::2] = 0
        return self.bands

    def join(self, bands: Tensor, out: Tensor) -> None:
        """The transpose of the split."""
        self._pairs.mul_(1 + 1j)
        rows = self.halves.view(2, *self.bands.shape[1:])
        torch.add(bands[:, 0], bands[:, 1], out=rows[0])
        torch.sub(bands[:, 0], bands[:, 1], out=rows[1])
        for k in range(2):
            torch.add(rows[k, 0], rows[k, 1], out=out[:, 0, :, k::2])
            torch.sub(rows[k, 0], rows[k, 1], out=out[:, 1, :, k::2])

    @property
    def _pairs(self) -> Tensor:
        return torch.view_as_complex(self.bands.view(*self.bands.shape[:-1], -1, 2))


def _pieces(pairs: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE // max(1, pairs[0].numel()))
    return ((low, min(low + step, len(pairs))) for low in range(0, len(pairs), step))


@dataclass
class HighFrequency(Layer):
    """
    Args:
        weight: lambda_HiFr / lambda_VSR, 1 in the paper.
        eps: Charbonnier's, un-squared.

    Batches hold the high-resolution clip as "y".
    """

    weight: NotNegative = 1.0
    eps: Positive = 1e-9
    by_example: ClassVar[bool] = True

    def client_step(self, message: Message, client: Client) -> Message:
        return self.inner.client_step(message, client.plus(self.term))

    def term(self, model: Any, batch: Batch, output: Output) -> Tensor:
        prediction = output.prediction
        if not isinstance(prediction, Tensor) or prediction.dim() != 5:
            raise ValueError(
                "HighFrequency compares clips (B, T, C, H, W); this model's output is something"
                " else"
            )
        return self.weight * high_frequency_loss(prediction, batch["y"], self.eps)

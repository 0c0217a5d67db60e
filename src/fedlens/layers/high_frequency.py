r"""HighFrequency (FedVSR, Eqs. 7-16): besides the pixels, a client matches the detail bands of a 3-D Haar transform of its clip.

One level over time, height and width splits a clip into eight bands; LLL is left out, the seven others (letters = time, height, width)
go through Charbonnier and one mean over everything: L_HiFr = mean sqrt(d^2 + eps), Eq. 15. The total is L_VSR + weight * L_HiFr, Eq. 16,
where weight is lambda_HiFr / lambda_VSR.

The transform is linear, so the bands of the difference are taken once instead of those of both clips, as sums and differences of
neighbouring samples. The gradient of a mean of square roots costs the same square roots as the loss, so both are computed in one pass
while a piece of the clip is in the cache, and going backward is one product.

Where paper and code disagree, or say nothing:
- eps = 1e-9 is added un-squared, as in the public code; the paper's epsilon is then 3.2e-5.
- An odd length repeats its last sample (PyWavelets' "symmetric"): the missing partner adds no detail along that axis. The public code
  fails there. A single frame has detail in space only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm import Layer
from fedlens.client import Batch, Client, Output
from fedlens.message import Message

BANDS = ("LLH", "LHL", "LHH", "HLL", "HLH", "HHL", "HHH")
PIECE = 1 << 18  # samples transformed at a time: 1 MiB, so that the bands stay in the cache
HALF = 2**-1.5  # three orthonormal steps of 1 / sqrt 2


def high_frequency_loss(prediction: Tensor, target: Tensor, eps: float = 1e-9) -> Tensor:
    """L_HiFr of two clips (..., T, C, H, W). For use in anyone's training loop; differentiable once."""
    if prediction.shape != target.shape:
        raise ValueError(f"clips differ in shape: {tuple(prediction.shape)} and {tuple(target.shape)}")
    if prediction.dim() < 4:
        raise ValueError(f"a clip is (..., time, channels, height, width), this has {prediction.dim()} dimensions")
    gap = prediction - target
    gap = even(gap if gap.dtype == torch.float64 else gap.float())
    loss: Tensor = _Charbonnier.apply(gap, eps)  # type: ignore[no-untyped-call]
    return loss


def haar_details(clip: Tensor) -> dict[str, Tensor]:
    """The seven detail bands of a clip (..., T, C, H, W), by name; the readable form of what the loss does."""
    x = even(clip)
    pairs = x.reshape(-1, 2, *x.shape[-3:])
    shape = (*x.shape[:-4], x.shape[-4] // 2, x.shape[-3], x.shape[-2] // 2, x.shape[-1] // 2)
    return {name: (band * HALF).reshape(shape) for name, band in zip(BANDS, _split(pairs)[1:], strict=True)}


def even(clip: Tensor) -> Tensor:
    """Repeat the last frame, row or column where their number is odd."""
    for axis in (-4, -2, -1):
        if clip.shape[axis] % 2:
            clip = torch.cat([clip, clip.narrow(axis, clip.shape[axis] - 1, 1)], axis)
    return clip


def _split(x: Tensor) -> list[Tensor]:
    """(N, 2, C, H, W) into LLL and the seven bands, each (N, C, H/2, W/2), without the orthonormal factor."""
    bands = _pair(x[:, 0], x[:, 1])
    bands = [f for b in bands for f in _pair(b[:, :, 0::2], b[:, :, 1::2])]
    return [f for b in bands for f in _pair(b[..., 0::2], b[..., 1::2])]


def _pair(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a + b, a - b]


class _Charbonnier(torch.autograd.Function):
    """mean sqrt(d^2 + eps) over the detail bands of an even clip, and its gradient.

    Along the width, neighbours a and b are one complex number: (a + ib)(1 - i) = (a + b) - i(a - b) holds the low and the negated high
    band side by side, so that every operation runs over contiguous memory; Charbonnier does not see the sign. The way back, the transpose,
    is the product with 1 + i. The orthonormal factor stays outside: sqrt(d^2 / 8 + eps) = sqrt(d^2 + 8 eps) / sqrt 8.
    """

    @staticmethod
    def forward(ctx: Any, gap: Tensor, eps: float) -> Tensor:
        pairs = gap.reshape(-1, 2, *gap.shape[-3:])
        gradient = torch.empty_like(pairs, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        total = 0.0
        for low, high in _pieces(pairs):
            bands = _bands(pairs[low:high])
            root = bands.square().add_(8 * eps).sqrt_()
            total += float(root.sum()) - float(root[0, ..., 0::2].sum())
            if gradient is not None:
                _transpose(bands.div_(root), gradient[low:high])
        count = pairs.numel() * 7 // 8
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(gap))
            ctx.factor = HALF / count
        return gap.new_tensor(total * HALF / count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grads[0] * ctx.factor), None


def _bands(x: Tensor) -> Tensor:
    """(N, 2, C, H, W) into (4, N, C, H/2, W): low and high over time and height, their width as told above; LLL is set to zero."""
    n, _, c, h, w = x.shape
    out = x.new_empty(2, 2, n, c, h // 2, w)
    for k, half in enumerate((x[:, 0] + x[:, 1], x[:, 0] - x[:, 1])):
        torch.add(half[:, :, 0::2], half[:, :, 1::2], out=out[k, 0])
        torch.sub(half[:, :, 0::2], half[:, :, 1::2], out=out[k, 1])
    torch.view_as_complex(out.view(*out.shape[:-1], -1, 2)).mul_(1 - 1j)
    out[0, 0, ..., 0::2] = 0
    return out.flatten(0, 1)


def _transpose(bands: Tensor, out: Tensor) -> None:
    """The way back."""
    torch.view_as_complex(bands.view(*bands.shape[:-1], -1, 2)).mul_(1 + 1j)
    over = bands.view(2, 2, *bands.shape[1:])
    for part, rows in enumerate((over[:, 0] + over[:, 1], over[:, 0] - over[:, 1])):
        torch.add(rows[0], rows[1], out=out[:, 0, :, part::2])
        torch.sub(rows[0], rows[1], out=out[:, 1, :, part::2])


def _pieces(pairs: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE // max(1, pairs[0].numel()))
    return ((low, min(low + step, len(pairs))) for low in range(0, len(pairs), step))


@dataclass
class HighFrequency(Layer):
    """weight: lambda_HiFr / lambda_VSR, 1 in the paper. eps: Charbonnier's, un-squared. Batches hold the high-resolution clip as "y"."""

    weight: float = 1.0
    eps: float = 1e-9

    def __post_init__(self) -> None:
        if self.weight < 0 or self.eps <= 0:
            raise ValueError(f"HighFrequency needs weight >= 0 and eps > 0, not {self.weight} and {self.eps}")

    def client_step(self, message: Message, client: Client) -> Message:
        return self.inner.client_step(message, client.plus(self.term))

    def term(self, model: Any, batch: Batch, output: Output) -> Tensor:
        prediction = output.prediction
        if not isinstance(prediction, Tensor) or prediction.dim() != 5:
            raise ValueError("HighFrequency compares clips (B, T, C, H, W); this model's output is something else")
        return self.weight * high_frequency_loss(prediction, batch["y"], self.eps)

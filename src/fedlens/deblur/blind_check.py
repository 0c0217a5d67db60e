r"""Whether a kernel that was found in a photo alone is probably wrong: what the client can tell
from that photo and that kernel k, without a sharp picture and without sending anything.

The photo y is deblurred with k, alone. Two things then give a wrong kernel away:

    beyond = share of the restored pixels that are darker than black or brighter than white
    echo   = mean of e(p) e(p + 1) over mean of e^2,   e = k * x - y

A kernel that is too long or points elsewhere is undone too strongly: ringing leaves the range that
light has. And what it cannot explain is a picture, so that e has neighbours that are alike, where
noise has none. Pixels near those that the photo itself cut off say nothing and do not count.

Limits from 21 photos of the data pack with 4 kernels each (experiments/feddeblur, Unknown
kernels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedlens.deblur.alone import restore_alone
from fedlens.deblur.blind import MOST_PIXELS, busiest_part
from fedlens.deblur.noise_level import is_clipped, noise_level
from fedlens.deblur.observation import Observation, without_rim

MOST_BEYOND = 0.01
MOST_ECHO = 0.1
PAST = 5.0  # grey levels outside [0, 255] that count as outside: noise is not ringing
CHECK_ROUNDS = 100


def doubt(pixels: Tensor, kernel: Tensor) -> str | None:
    """Why the kernel, found in a photo (C, H, W) in [0, 255], is probably wrong; None where nothing
    speaks against it."""
    y = busiest_part(pixels.float().mean(0), MOST_PIXELS)[None]
    beyond, echo = signs(y, kernel)
    if beyond > MOST_BEYOND:
        return (
            f"{100 * beyond:.0f} % of the photo, deblurred with it, is darker than black or"
            " brighter than white"
        )
    if echo > MOST_ECHO:
        return f"what it does not explain is no noise (neighbours correlate by {echo:.2f})"
    return None


def signs(y: Tensor, kernel: Tensor) -> tuple[float, float]:
    """beyond and echo, of (1, H, W) in [0, 255]."""
    rim = max(kernel.shape)
    pad = rim // 2
    size = (y.shape[-2] + 2 * pad, y.shape[-1] + 2 * pad)
    view = Observation(y, kernel, *size, pad, pad)
    whole = restore_alone(view, noise_level(y), CHECK_ROUNDS)
    x = without_rim(whole, pad)[0]
    cut = is_clipped(y)[None].float()
    counts = torch.nn.functional.max_pool2d(cut, 2 * rim + 1, 1, rim)[0] == 0
    if float(counts.float().mean()) < 0.1:  # a photo that is cut off nearly everywhere
        counts = torch.ones_like(counts)
    beyond = float(((x < -PAST) | (x > 255 + PAST))[counts].float().mean())
    e = view.through(torch.view_as_real(torch.fft.rfft2(whole)), view.otf(y.dtype))[0] - y[0]
    e = torch.where(counts, e, 0.0).double()
    alike = (e[1:] * e[:-1]).sum() + (e[:, 1:] * e[:, :-1]).sum()
    return beyond, float(alike / (2 * e.square().sum()).clamp_min(1e-12))

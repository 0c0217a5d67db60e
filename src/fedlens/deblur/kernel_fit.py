"""A kernel from a photo and a sharp picture of the same thing: non-negative least squares over the
pixels whose blur stays inside.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError


def estimate_kernel(
    blurred: Tensor, sharp: Tensor, size: int, whose: str = "a view", pixels: int = 20_000
) -> Tensor:
    """The kernel, size x size, that blurs `sharp` into `blurred` ((C, H, W) each, in register)
    best, light and offset left free. What is below a hundredth of its peak is noise and becomes
    zero. Pixels are drawn at random, more of them would not change much."""
    from scipy.optimize import nnls

    # a kernel stands at index size // 2, as everywhere here
    before, after = size // 2, size - 1 - size // 2
    height, width = blurred.shape[-2:]
    if min(height, width) < 2 * size:
        raise DataError(
            f"the view of {whose} ({height} x {width}) is too small to estimate a kernel of {size}"
            f" x {size} from"
        )
    y = blurred.double().mean(0).numpy()[after : height - before, after : width - before]
    flipped = np.flip(
        np.lib.stride_tricks.sliding_window_view(sharp.double().mean(0).numpy(), (size, size)),
        (-2, -1),
    )
    rng = np.random.default_rng(0)
    chosen = rng.choice(y.size, min(pixels, y.size), replace=False)
    rows, columns = np.unravel_index(chosen, y.shape)
    seen = flipped[rows, columns].reshape(len(chosen), -1)
    if float(seen.std(0).max()) < 1:
        raise DataError(
            f"the part of reference.png that {whose} sees is flat: no kernel can be estimated"
            " from it"
        )
    seen = seen - seen.mean(0)  # centred, so that a difference in brightness does not matter
    gram = seen.T @ seen
    gram[np.diag_indices_from(gram)] *= 1 + 1e-6
    root = np.linalg.cholesky(gram)  # |A k - y|^2 = |L^T k - L^-1 A^T y|^2 + what no k changes
    found, _ = nnls(root.T, np.linalg.solve(root, seen.T @ y[rows, columns]))
    found[found < 0.01 * found.max()] = 0
    if found.sum() <= 0:
        raise DataError(
            f"the view of {whose} has nothing in common with reference.png: no kernel can be"
            " estimated"
        )
    return torch.from_numpy(np.ascontiguousarray((found / found.sum()).reshape(size, size)))

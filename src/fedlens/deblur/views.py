"""Hand-held views of one scene: bring them into register and to the same tones, before any
federation begins.

This is preparation, not part of the protocol: the views are compared with the first one, so whoever
runs it sees both. Alignment is by the enhanced correlation coefficient (Evangelidis and Psarakis,
2008; OpenCV), tones by histogram matching (scikit-image). A kernel is estimated from a photo and a
sharp picture of the same thing: non-negative least squares over the pixels whose blur stays inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError

Motion = Literal["translation", "affine", "homography"]


def align_views(
    views: Sequence[Tensor], motion: Motion = "homography", levels: int = 4, tones: bool = True
) -> list[Tensor]:
    """Views (C, H, W) in [0, 255] warped onto the first one. What a view does not show is filled
    from the first one, so that no black wedges enter the restoration. Coarse to fine, `levels`
    halvings, since ECC only finds small motions."""
    first = views[0]
    out = [first]
    for k, view in enumerate(views[1:], 1):
        if view.shape != first.shape:
            raise DataError(
                f"view {k} is {tuple(view.shape)}, the first one {tuple(first.shape)}: views to be"
                " aligned must have one size"
            )
        moved, seen = _warp(view, _find_warp(first, view, motion, levels, k), motion)
        if tones:
            moved = match_tones(moved, first)
        out.append(torch.where(seen, moved, first))
    return out


def match_tones(view: Tensor, like: Tensor) -> Tensor:
    """Each channel gets the histogram of the other's."""
    from skimage.exposure import match_histograms

    return torch.from_numpy(
        match_histograms(view.numpy(), like.numpy(), channel_axis=0).astype(np.float32)
    )


def estimate_kernel(
    blurred: Tensor, sharp: Tensor, size: int, whose: str = "a view", pixels: int = 20_000
) -> Tensor:
    """The kernel, size x size, that blurs `sharp` into `blurred` ((C, H, W) each, in register)
    best, light and offset left free. What is below a hundredth of its peak is noise and becomes
    zero. Pixels are drawn at random, more of them would not change much."""
    from scipy.optimize import nnls

    # a kernel stands at index size // 2, as everywhere here
    before, after = (
        size // 2,
        size - 1 - size // 2,
    )
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


def _find_warp(first: Tensor, view: Tensor, motion: Motion, levels: int, k: int) -> Any:
    cv2 = _opencv()
    kinds = {
        "translation": cv2.MOTION_TRANSLATION,
        "affine": cv2.MOTION_AFFINE,
        "homography": cv2.MOTION_HOMOGRAPHY,
    }
    warp = np.eye(3, dtype=np.float32)
    still, moving = (x.mean(0).numpy().astype(np.float32) for x in (first, view))
    for level in reversed(range(levels)):
        small = [
            cv2.resize(x, None, fx=0.5**level, fy=0.5**level, interpolation=cv2.INTER_AREA)
            for x in (still, moving)
        ]
        scaled = warp.copy()  # translations shrink with the image, the perspective row grows
        scaled[:2, 2] *= 0.5**level
        scaled[2, :2] /= 0.5**level
        guess = scaled if motion == "homography" else np.ascontiguousarray(scaled[:2])
        stop = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 60, 1e-5)
        try:
            _, found = cv2.findTransformECC(small[0], small[1], guess, kinds[motion], stop, None, 5)
        except cv2.error as e:
            raise DataError(
                f"view {k} could not be aligned with the first one: they have too little in common"
            ) from e
        scaled = (
            found if motion == "homography" else np.vstack([found, [0, 0, 1]]).astype(np.float32)
        )
        warp = scaled.copy()
        warp[:2, 2] /= 0.5**level
        warp[2, :2] *= 0.5**level
    return warp


def _warp(view: Tensor, warp: Any, motion: Motion) -> tuple[Tensor, Tensor]:
    """The view on the first one's grid, and where it has anything to say."""
    cv2 = _opencv()
    height, width = view.shape[-2:]
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    planes = [cv2.warpPerspective(p.numpy(), warp, (width, height), flags=flags) for p in view]
    seen = cv2.warpPerspective(
        np.ones((height, width), np.float32),
        warp,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    )
    return torch.from_numpy(np.stack(planes)).clamp(0, 255), torch.from_numpy(seen > 0.999)


def _opencv() -> Any:
    try:
        import cv2
    except ImportError as e:
        raise DataError('aligning views needs OpenCV: pip install "fedlens[deblur]"') from e
    return cv2

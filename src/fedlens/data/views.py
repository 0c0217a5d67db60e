"""Hand-held views of one scene: bring them into register and to the same tones, before any federation begins.

This is preparation, not part of the protocol: the views are compared with the first one, so whoever runs it sees both. Alignment is by
the enhanced correlation coefficient (Evangelidis and Psarakis, 2008; OpenCV), tones by histogram matching (scikit-image).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError

Motion = Literal["translation", "affine", "homography"]


def register(views: Sequence[Tensor], motion: Motion = "homography", levels: int = 4, tones: bool = True) -> list[Tensor]:
    """Views (C, H, W) in [0, 255] warped onto the first one. What a view does not show is filled from the first one, so that no black
    wedges enter the restoration. Coarse to fine, `levels` halvings, since ECC only finds small motions."""
    first = views[0]
    out = [first]
    for k, view in enumerate(views[1:], 1):
        if view.shape != first.shape:
            raise DataError(f"view {k} is {tuple(view.shape)}, the first one {tuple(first.shape)}: views to be aligned must have one size")
        moved, seen = _warp(view, _find(first, view, motion, levels, k), motion)
        if tones:
            moved = match_tones(moved, first)
        out.append(torch.where(seen, moved, first))
    return out


def match_tones(view: Tensor, like: Tensor) -> Tensor:
    """Each channel gets the histogram of the other's."""
    from skimage.exposure import match_histograms

    return torch.from_numpy(match_histograms(view.numpy(), like.numpy(), channel_axis=0).astype(np.float32))


def _find(first: Tensor, view: Tensor, motion: Motion, levels: int, k: int) -> Any:
    cv2 = _opencv()
    kinds = {"translation": cv2.MOTION_TRANSLATION, "affine": cv2.MOTION_AFFINE, "homography": cv2.MOTION_HOMOGRAPHY}
    warp = np.eye(3, dtype=np.float32)
    still, moving = (x.mean(0).numpy().astype(np.float32) for x in (first, view))
    for level in reversed(range(levels)):
        small = [cv2.resize(x, None, fx=0.5**level, fy=0.5**level, interpolation=cv2.INTER_AREA) for x in (still, moving)]
        scaled = warp.copy()  # translations shrink with the image, the perspective row grows
        scaled[:2, 2] *= 0.5**level
        scaled[2, :2] /= 0.5**level
        guess = scaled if motion == "homography" else np.ascontiguousarray(scaled[:2])
        stop = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 60, 1e-5)
        try:
            _, found = cv2.findTransformECC(small[0], small[1], guess, kinds[motion], stop, None, 5)
        except cv2.error as e:
            raise DataError(f"view {k} could not be aligned with the first one: they have too little in common") from e
        scaled = found if motion == "homography" else np.vstack([found, [0, 0, 1]]).astype(np.float32)
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
    seen = cv2.warpPerspective(np.ones((height, width), np.float32), warp, (width, height), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    return torch.from_numpy(np.stack(planes)).clamp(0, 255), torch.from_numpy(seen > 0.999)


def _opencv() -> Any:
    try:
        import cv2
    except ImportError as e:
        raise DataError('aligning views needs OpenCV: pip install "fedlens[deblur]"') from e
    return cv2

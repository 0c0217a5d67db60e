r"""Hand-held views of one scene: brought onto the grid and to the tones of one of them, the anchor,
each pixel with the confidence that it shows what the anchor shows.

This is preparation, not part of the protocol: a view is compared with the anchor, so whoever runs
it sees both. Where the anchor is a picture that everybody may see (reference.png), every client
does it alone.

Blurred views are compared through each other's blur. With y_0 = h_0 * x and y_k = h_k * x, both h_k
* y_0 and h_0 * y_k are h_0 * h_k * x: whatever differs is noise or misregistration, and features
look alike in both. A homography comes from features (SIFT, RANSAC) and from correlation (ECC,
Evangelidis and Psarakis 2008), whichever explains more. What it leaves (parallax) is followed by a
dense flow (DIS) where that explains more again. Tones are a gain and an offset a channel, because
anything else is no blur of the scene any more.

If e is what still differs in a neighbourhood, beyond noise, the view is off by a variance v = e^2
there (scaled up by what the anchor's blur hid of it). A measurement with that much more noise would
count with c = sigma_k^2 / (sigma_k^2 + v); but this is no noise, it has the structure of the scene
and deblurring enlarges it, so it counts with c^2. Parallax, people who walked through, and a wrong
registration therefore fade out instead of leaving ghosts. Pixels outside the view or cut off at
black or white do not count at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError
from fedlens.deblur.blur import gaussian
from fedlens.deblur.noise_level import is_clipped, noise_level
from fedlens.deblur.spectrum import otf

Array = np.ndarray[Any, Any]

# neighbourhood, in pixels, over which misregistration is measured
NEARBY = 3.0
# a view whose details do not correlate with the anchor's by at least this shows something else
LEAST_LIKENESS = 0.3
# a neighbourhood that a flow makes longer or shorter by more than this share was made up
MOST_STRETCH = 0.2
# a pixel of the anchor that was cut off: something must hold it where nobody else saw it
CUT_OFF = 0.01


@dataclass(frozen=True)
class Registered:
    """A view on the anchor's grid.

    Args:
        pixels: (C, H, W), in the anchor's tones.
        kernel: turned and scaled with the view; empty where it was not known.
        confidence: (H, W) in [0, 1]: how much each pixel counts.
        likeness: correlation of its details with the anchor's, through each other's blur.
    """

    pixels: Tensor
    kernel: Tensor
    confidence: Tensor
    likeness: float

    @property
    def fits(self) -> bool:
        return self.likeness >= LEAST_LIKENESS


def as_anchor(pixels: Tensor, kernel: Tensor) -> Registered:
    """The anchor itself: every pixel counts, those that were cut off hardly."""
    confidence = torch.where(is_clipped(pixels), CUT_OFF, 1.0)
    return Registered(pixels, kernel, confidence, 1.0)


def register(
    view: Tensor,
    kernel: Tensor,
    anchor: Tensor,
    anchor_kernel: Tensor,
    find_kernel: Callable[[Tensor], Tensor] | None = None,
) -> Registered:
    """`view` on the anchor's grid; both (C, h, w) in [0, 255], of any size. A kernel that is not
    known is empty; `find_kernel` then finds it from the view as it lies on the grid. A view that
    fits nowhere comes back with confidence 0."""
    still, moving = grey(anchor), grey(view)
    soft_still, soft_moving = behind_blur(still, kernel), behind_blur(moving, anchor_kernel)
    warp = find_homography(soft_still, soft_moving)
    if warp is None:
        nowhere = torch.zeros(anchor.shape[-2:])
        return Registered(torch.zeros_like(anchor), kernel, nowhere, 0.0)
    where, whole = follow_flow(soft_still, soft_moving, homography_map(warp, still.shape))
    pixels = np.stack([sampled(p, where) for p in view.numpy()])
    shown = whole & inside(where, moving.shape) & (sampled(clipped_map(view), where) <= 0)
    if not kernel.numel() and find_kernel is not None:
        turned = find_kernel(torch.from_numpy(pixels))
    else:
        turned = turn_kernel(kernel, jacobian(warp, still.shape))
    return _compared(pixels, turned, shown, noise_level(view), anchor, anchor_kernel)


def _compared(
    pixels: Array,
    kernel: Tensor,
    shown: Array,
    noise: float,
    anchor: Tensor,
    anchor_kernel: Tensor,
) -> Registered:
    """Tones and confidence of a view that lies on the grid, through each other's blur."""
    a = np.stack([behind_blur(p, kernel) for p in anchor.numpy()])
    b = np.stack([behind_blur(p, anchor_kernel) for p in pixels])
    like = likeness(a.mean(0), b.mean(0), shown)
    gain, offset = match_tones(b, a, shown)
    pixels, b = pixels * gain + offset, b * gain + offset
    noise *= float(gain.mean())
    expected = noise**2 * energy(anchor_kernel) + noise_level(anchor) ** 2 * energy(kernel)
    beyond = np.maximum(0, local_mean(((a - b) ** 2).mean(0)) - expected)
    beyond *= sharpness_ratio(pixels.mean(0), b.mean(0))
    fits = shown & (like >= LEAST_LIKENESS)
    share = noise**2 / (noise**2 + beyond)
    confidence = np.where(fits, share**2, 0.0).astype(np.float32)
    return Registered(
        torch.from_numpy(pixels.astype(np.float32)), kernel, torch.from_numpy(confidence), like
    )


def expected_error(kernel: Tensor, noise: float, size: int = 64) -> float:
    """Mean squared error of the best linear restoration behind this kernel and noise, for a scene
    whose power falls with the square of the frequency: small for a view that was hardly blurred."""
    fits = kernel if max(kernel.shape) <= size else kernel[:size, :size]
    rows, columns = torch.fft.fftfreq(size), torch.fft.rfftfreq(size)
    square = rows[:, None] ** 2 + columns[None] ** 2
    power = (
        2500.0 / square.clamp_min(1 / size**2) / float((1 / square.clamp_min(1 / size**2)).mean())
    )
    passed = otf(fits, size, size, torch.float64).abs().square()
    return float((power / (1 + passed * power / noise**2)).mean())


# -- blur, tones, likeness -------------------------------------------------------------------------


def grey(pixels: Tensor) -> Array:
    return np.asarray(pixels.float().mean(0).numpy())


def behind_blur(plane: Array, kernel: Tensor) -> Array:
    """Convolved, the edge mirrored. A kernel that is not known is taken for a mild Gaussian."""
    cv2 = _opencv()
    k = (kernel if kernel.numel() else gaussian(9, 2.0)).numpy()
    middle = (k.shape[1] - 1 - k.shape[1] // 2, k.shape[0] - 1 - k.shape[0] // 2)
    flipped = np.ascontiguousarray(k[::-1, ::-1]).astype(np.float32)
    source = np.ascontiguousarray(plane, np.float32)
    return np.asarray(
        cv2.filter2D(source, -1, flipped, anchor=middle, borderType=cv2.BORDER_REFLECT)
    )


def energy(kernel: Tensor) -> float:
    """What is left of the variance of white noise behind the kernel."""
    return float((kernel if kernel.numel() else gaussian(9, 2.0)).double().square().sum())


def match_tones(source: Array, target: Array, where: Array) -> tuple[Array, Array]:
    """Gain and offset of each channel, (C, 1, 1), that bring source to target; pixels that differ
    most lose their say, three times over."""
    gain, offset = (
        np.ones((len(source), 1, 1), np.float32),
        np.zeros((len(source), 1, 1), np.float32),
    )
    if where.sum() < 16:
        return gain, offset
    for c, (s, t) in enumerate(zip(source, target, strict=True)):
        x, y = s[where].astype(np.float64), t[where].astype(np.float64)
        weight = np.ones_like(x)
        a, b = 1.0, 0.0
        for _ in range(4):
            mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
            spread = np.average((x - mean_x) ** 2, weights=weight)
            a = np.average((x - mean_x) * (y - mean_y), weights=weight) / max(spread, 1e-9)
            a = float(np.clip(a, 0.25, 4))
            b = mean_y - a * mean_x
            left = np.abs(y - a * x - b)
            weight = 1 / (1 + (left / max(1.0, 1.5 * float(np.median(left)))) ** 2)
        gain[c], offset[c] = a, b
    return gain, offset


def likeness(a: Array, b: Array, where: Array) -> float:
    """Correlation of what stands out from its surroundings, over the pixels that both show; 0 where
    these are less than a fifth of the anchor."""
    if where.mean() < 0.2:
        return 0.0
    x, y = ((p - local_mean(p, 4 * NEARBY))[where] for p in (a, b))
    below = float(np.sqrt((x**2).mean() * (y**2).mean()))
    return float((x * y).mean()) / below if below > 1e-6 else 0.0


def sharpness_ratio(sharp: Array, soft: Array) -> Array:
    """How much more local detail a view has than the same behind the other's blur: by so much a
    misregistration was hidden there."""
    ratio = _detail(sharp) / np.maximum(_detail(soft), 1e-3)
    return np.asarray(ratio.clip(1, 100))


def _detail(plane: Array) -> Array:
    down, right = np.gradient(plane)
    return local_mean(down**2 + right**2)


def local_mean(plane: Array, reach: float = NEARBY) -> Array:
    cv2 = _opencv()
    return np.asarray(cv2.GaussianBlur(np.ascontiguousarray(plane, np.float32), (0, 0), reach))


# -- where a pixel went ----------------------------------------------------------------------------


def find_homography(still: Array, moving: Array) -> Array | None:
    """From a pixel (x, y, 1) of `still` to where `moving` has it: by features or by correlation,
    whichever explains more; None where neither makes sense."""
    found = [_by_features(still, moving), _by_correlation(still, moving)]
    scored = [(_explained(still, moving, warp), warp) for warp in found if warp is not None]
    return max(scored, key=lambda s: s[0])[1] if scored else None


def _explained(still: Array, moving: Array, warp: Array) -> float:
    where = homography_map(warp, still.shape)
    return likeness(still, sampled(moving, where), inside(where, moving.shape))


def _by_features(still: Array, moving: Array) -> Array | None:
    cv2 = _opencv()
    sift = cv2.SIFT_create(nfeatures=4000, contrastThreshold=0.005)
    points, descriptions = zip(
        *(sift.detectAndCompute(_stretched(x), None) for x in (still, moving)), strict=True
    )
    if any(d is None or len(d) < 2 for d in descriptions):
        return None
    pairs = cv2.BFMatcher().knnMatch(*descriptions, k=2)
    good = [p[0] for p in pairs if len(p) == 2 and p[0].distance < 0.8 * p[1].distance]
    if len(good) < 12:
        return None
    here = np.array([points[0][m.queryIdx].pt for m in good], np.float32)
    there = np.array([points[1][m.trainIdx].pt for m in good], np.float32)
    cv2.setRNGSeed(0)
    warp, agree = cv2.findHomography(here, there, cv2.USAC_MAGSAC, 2.0, maxIters=5000)
    return warp if warp is not None and agree.sum() >= 10 and _sane(warp, still.shape) else None


def _stretched(plane: Array) -> Array:
    low, high = np.percentile(plane, (0.5, 99.5))
    return np.asarray(((plane - low) * (255 / max(high - low, 1e-6))).clip(0, 255).astype(np.uint8))


def _by_correlation(still: Array, moving: Array, levels: int = 4) -> Array | None:
    """ECC, coarse to fine, since it finds small motions only."""
    cv2 = _opencv()
    # views of two sizes begin with the one laid over the other
    warp = np.diag([moving.shape[1] / still.shape[1], moving.shape[0] / still.shape[0], 1.0])
    stop = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 60, 1e-5)
    for level in reversed(range(levels)):
        by = 0.5**level
        if min(still.shape) * by < 32:
            continue
        small = [
            cv2.resize(x, None, fx=by, fy=by, interpolation=cv2.INTER_AREA) for x in (still, moving)
        ]
        scale = np.diag([by, by, 1.0])
        guess = (scale @ warp @ np.linalg.inv(scale)).astype(np.float32)
        try:
            _, found = cv2.findTransformECC(
                small[0], small[1], guess, cv2.MOTION_HOMOGRAPHY, stop, None, 5
            )
        except cv2.error:  # it did not converge: these two have too little in common
            return None
        warp = np.linalg.inv(scale) @ found.astype(np.float64) @ scale
    return warp if _sane(warp, still.shape) else None


def _sane(warp: Array, size: tuple[int, ...]) -> bool:
    """Whether a camera could have moved so: nothing mirrored or behind it, no side enlarged or
    reduced more than three times, anywhere in the picture."""
    if not np.isfinite(warp).all():
        return False
    height, width = size
    for x, y in ((0, 0), (width, 0), (0, height), (width, height), (width / 2, height / 2)):
        if (warp @ [x, y, 1])[2] <= 1e-3 * abs(warp[2, 2]):
            return False
        sides = np.linalg.svd(jacobian_at(warp, x, y), compute_uv=False)
        if np.linalg.det(jacobian_at(warp, x, y)) <= 0 or sides[0] > 3 or sides[1] < 1 / 3:
            return False
    return True


def jacobian_at(warp: Array, x: float, y: float) -> Array:
    """How a homography stretches and turns a small neighbourhood."""
    u, v, w = warp @ [x, y, 1]
    top = warp[:2, :2] / w
    return np.asarray(top - np.outer([u, v], warp[2, :2]) / w**2)


def jacobian(warp: Array, size: tuple[int, ...]) -> Array:
    return jacobian_at(warp, size[1] / 2, size[0] / 2)


def homography_map(warp: Array, size: tuple[int, ...]) -> Array:
    """(2, H, W): x and y, in the view, of every pixel of the anchor."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float64)
    u, v, w = np.tensordot(warp, np.stack([x, y, np.ones_like(x)]), 1)
    return np.asarray((np.stack([u, v]) / w).astype(np.float32))


def follow_flow(still: Array, moving: Array, where: Array) -> tuple[Array, Array]:
    """Corrected by a dense flow, if the two pictures are more alike for it; and where the result is
    still a picture of the scene. A flow can paint anything with anything: where it stretches its
    neighbourhood by more than MOST_STRETCH, the view was repainted, not moved, and its kernel is no
    longer the one that is known."""
    cv2 = _opencv()
    everywhere = np.ones(still.shape, bool)
    if min(still.shape) < 32:
        return where, everywhere
    first = sampled(moving, where)
    seen = inside(where, moving.shape)
    gain, offset = match_tones(first[None], still[None], seen)
    pair = [_stretched(still), _stretched(first * gain[0] + offset[0])]
    flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(*pair, None)
    flow = np.stack([local_mean(cv2.medianBlur(flow[..., i], 5)) for i in (0, 1)])
    y, x = np.mgrid[0 : still.shape[0], 0 : still.shape[1]].astype(np.float32)
    moved = np.stack([sampled(axis, np.stack([x, y]) + flow) for axis in where])
    stretch = np.abs(np.stack([np.stack(np.gradient(f)) for f in flow])).max((0, 1))
    whole = stretch <= MOST_STRETCH
    better = likeness(still, sampled(moving, moved), whole & inside(moved, moving.shape))
    if better <= likeness(still, first, seen) + 0.01:
        return where, everywhere
    return moved, whole


def sampled(plane: Array, where: Array) -> Array:
    cv2 = _opencv()
    source = np.ascontiguousarray(plane, np.float32)
    return np.asarray(
        cv2.remap(source, where[0], where[1], cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    )


def inside(where: Array, size: tuple[int, ...]) -> Array:
    x, y = where
    return np.asarray((x >= 0) & (y >= 0) & (x <= size[1] - 1) & (y <= size[0] - 1))


def clipped_map(view: Tensor) -> Array:
    return np.asarray(is_clipped(view).float().numpy())


def turn_kernel(kernel: Tensor, by: Array) -> Tensor:
    """The kernel of a view that was resampled by x -> J x: h'(q) = h(J q) |det J|. Its centre stays
    where it is, and what is missing of its sum by rounding is put back."""
    cv2 = _opencv()
    if not kernel.numel():
        return kernel
    rows, columns = kernel.shape
    reach = np.abs(np.linalg.inv(by)) @ [columns / 2, rows / 2]
    wide, tall = (2 * int(np.ceil(r)) + 1 for r in reach)
    y, x = np.mgrid[0:tall, 0:wide].astype(np.float64)
    spots = np.tensordot(by, np.stack([x - wide // 2, y - tall // 2]), 1)
    where = (spots + np.array([columns // 2, rows // 2])[:, None, None]).astype(np.float32)
    source = np.ascontiguousarray(kernel.numpy(), np.float32)
    turned = cv2.remap(source, where[0], where[1], cv2.INTER_LINEAR, borderValue=0)
    turned = np.maximum(turned, 0).astype(np.float64)
    return torch.from_numpy(turned * (float(kernel.sum()) / turned.sum()))


def _opencv() -> Any:
    try:
        import cv2
    except ImportError as e:
        raise DataError('aligning views needs OpenCV: pip install "fedlens[deblur]"') from e
    return cv2

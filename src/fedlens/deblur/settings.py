"""Published (eta, rho) of FedDeblur and of what it is compared with: what a key that is left at
None becomes.

Intensities are [0, 255]. The tables are for a few federations each; in between, the nearest one
counts, and eta follows the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from fedlens.deblur.observation import SceneFacts

# (eta, rho) by number of clients, noise of one grey level.
GREY = {
    1: (0.1, 1e-4),
    2: (0.05, 1e-4),
    3: (0.05, 0.01),
    4: (0.05, 0.03),
    5: (0.035, 0.005),
    6: (0.03, 0.003),
    7: (0.03, 0.005),
    8: (0.025, 0.003),
    9: (0.025, 0.0025),
    10: (0.025, 5e-4),
}
COLOUR = {3: (0.075, 0.02), 5: (0.05, 0.005), 10: (0.035, 0.001)}
# grey, colour
PARTIAL = {
    "motion": ((0.015, 0.005), (0.02, 0.005)),
    "synthesis": ((0.01, 0.002), (0.01, 5e-4)),
}
# How eta follows the noise, from the published values at n = 10: noise -> eta / eta(noise 1).
_NOISE = ((0.0, 0.002), (0.5, 0.3), (1.0, 1.0), (2.0, 3.0), (3.0, 4.0))
# (sigma, rho) for a denoiser: published for DRUNet and Eq. 5; and our own for partial views and z =
# x, found with FFDNet on images that are in no table (experiments/feddeblur/README.md).
DENOISE = {
    "complete": {3: (5.0, 0.0075), 5: (10.0, 0.001), 10: (5.0, 0.001)},
    "motion": {9: (25.0, 0.02)},
    "synthesis": {9: (30.0, 0.015)},
}
SPLIT = {"motion": (7.0, 0.005), "synthesis": (7.0, 0.005)}
# n rho of photos that are fitted in the image, not in the spectrum (SceneFacts.coverage)
OF_PHOTOS = 0.05
# rho of over-relaxed runs with complete views, whatever n: the published ones differ by a factor of
# 300 without a rule, and this one takes the fewest rounds (experiments/feddeblur, Acceleration)
RELAXED = 0.00125
# (eta, rho) of LocDeblur and FedAvgDeblur, |.|^2 / 2 form, grey, noise 1, as published for n = 10
# and for partial motion.
ALONE = {"complete": (0.01, 0.0015), "partial": (2.0, 8.0)}
SHARED = {"complete": (0.01, 0.015), "partial": (3.0, 0.01)}


def published(
    prior: str,
    views: str,
    colour: bool,
    n: int,
    noise: float | None,
    rho: float | None = None,
    split: bool = False,
    coverage: float | None = None,
) -> tuple[float, float]:
    """(eta, rho). For a denoiser the table has (sigma, rho), which is eta = n rho sigma^2, or rho
    sigma^2 where it is split off. `coverage`: see SceneFacts.
    """
    kind = views if views == "complete" or views in PARTIAL else "motion"
    level = 1.0 if noise is None else float(noise)
    if prior == "pnp":
        level = max(level, 0.3)  # a denoiser that is told of no noise does nothing
        if split:
            sigma, preset = SPLIT[kind if kind in SPLIT else "motion"]
            # another rho is another way to the same optimum
            return preset * (level * sigma) ** 2, preset
        sigma, preset = _nearest(DENOISE[kind], n)
        return n * (rho or preset) * (level * sigma) ** 2, preset
    if kind != "complete":
        eta, preset = PARTIAL[kind][1 if colour else 0]
    elif coverage is not None:
        # the misfit is 1/n of a sum of which only so many count
        eta = _complete(colour, max(1, round(coverage)))[0] * max(coverage, 1) / n
        preset = OF_PHOTOS / n
    else:
        eta, preset = _complete(colour, n)
    return eta * _between(_NOISE, level), preset


def _complete(colour: bool, n: int) -> tuple[float, float]:
    if not colour:
        return _nearest(GREY, n)
    return COLOUR[n] if n in COLOUR else (1.4 * _nearest(GREY, n)[0], _nearest(GREY, n)[1])


def published_alone(prior: str, shared: bool, facts: SceneFacts) -> tuple[float, float]:
    """(eta, rho) of LocDeblur or, with `shared`, of FedAvgDeblur."""
    eta, rho = (SHARED if shared else ALONE)["partial" if facts.partial else "complete"]
    if prior == "pnp":
        rho = 0.01
        return rho * 5.0**2, rho
    return eta * max(0.05, 1.0 if facts.noise is None else facts.noise), rho


def _nearest(table: Mapping[int, tuple[float, float]], n: int) -> tuple[float, float]:
    return table[min(table, key=lambda k: (abs(k - n), k))]


def _between(table: tuple[tuple[float, float], ...], at: float) -> float:
    """Linear between the published points, proportional beyond the last."""
    for (low, a), (high, b) in pairwise(table):
        if at <= high:
            return a + (b - a) * max(0.0, at - low) / (high - low)
    return table[-1][1] * at / table[-1][0]

"""What somebody has who does not take part: the best of the photos, and that photo deblurred by
itself. A scene restored together is held against both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.deblur import spectrum
from fedlens.deblur.feddeblur import relative_change
from fedlens.deblur.fits import fit_of
from fedlens.deblur.observation import Observation, without_rim
from fedlens.deblur.priors import TotalVariation
from fedlens.deblur.settings import published
from fedlens.deblur.views import expected_error

ROUNDS, RELAX = 150, 1.6  # to its end, for all practical purposes: a weak opponent proves nothing


@dataclass(frozen=True)
class BestView:
    """
    Args:
        client: whose it is.
        photo: (C, H, W) as it was taken, on the scene's grid, without the rim.
        restored: the same, deblurred with nobody's help.
    """

    client: int
    photo: Tensor
    restored: Tensor


def best_view(views: Sequence[Observation], pad: int, noise: float) -> BestView | None:
    """Of the views that show the whole scene, the one that its blur and its confidence hurt least;
    None where there is none."""
    hurt = {
        k: _hurt(v, max(noise, 0.3)) / float(v.weight().mean())
        for k, v in enumerate(views)
        if _is_whole(v, pad) and float(v.weight().mean()) > 0
    }
    if not hurt:
        return None
    k = min(hurt, key=lambda k: hurt[k])
    view = views[k]
    photo = without_rim(view.embed(view.pixels), pad)
    return BestView(k, photo, without_rim(restore_alone(view, noise), pad))


def restore_alone(view: Observation, noise: float, rounds: int = ROUNDS) -> Tensor:
    """FedDeblur with total variation and one client: both halves in one loop."""
    prior = TotalVariation()
    colour = view.pixels.shape[0] > 1
    coverage = 1.0 if view.partial else None
    eta, rho = published("tv", "complete", colour, 1, noise, coverage=coverage)
    fit = fit_of(view, 1, rho, torch.float32, RELAX)
    image = torch.full((view.pixels.shape[0], view.height, view.width), 127.5)
    inverse = spectrum.twice(1 / (1 + prior.gram(view.height, view.width, torch.float32)))
    x, kept = spectrum.forward(image), None
    q = prior.prox(prior.transform(image), eta / rho)
    for _ in range(rounds):
        w, kept = fit.step(x, kept)
        x = spectrum.forward(prior.adjoint(q)).add_(w).mul_(inverse)
        new = spectrum.backward(x, view.width)
        q = prior.next_q(new, q, eta / rho)
        change = relative_change(new, image)
        image = new
        if change < 1e-5:
            break
    return image


def _hurt(view: Observation, noise: float) -> float:
    """By its blur; of a grid, on average."""
    if view.grid is None:
        return expected_error(view.kernel, noise)
    errors = [expected_error(k, noise) for row in view.grid for k in row]
    return sum(errors) / len(errors)


def _is_whole(view: Observation, pad: int) -> bool:
    shape = tuple(view.pixels.shape[-2:])
    return shape in ((view.height, view.width), (view.height - 2 * pad, view.width - 2 * pad))

"""Priors: transforms are what their adjoints and spectra say, proxes minimise what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlens.deblur.priors import (
    Prior,
    PriorName,
    Ridge,
    TotalVariation,
    Wavelet,
    make_prior,
)

SPLIT = pytest.mark.parametrize(
    "prior", [TotalVariation(), Wavelet(), Wavelet(levels=1)], ids=["tv", "wavelet", "one level"]
)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@SPLIT
@pytest.mark.parametrize("size", [(8, 12), (9, 11)])
def test_adjoint_and_spectrum(prior: Prior, size: tuple[int, int]) -> None:
    """<W x, q> = <x, W^T q>, and W^T W x by its spectrum."""
    x = rand(3, *size)
    a = prior.transform(x)
    q = rand(*a.shape, seed=1)
    assert float((a * q).sum()) == pytest.approx(float((x * prior.adjoint(q)).sum()))
    by_spectrum = torch.fft.irfft2(torch.fft.rfft2(x) * prior.gram(*size, torch.float64), s=size)
    torch.testing.assert_close(prior.adjoint(prior.transform(x)), by_spectrum)


def test_differences_look_back_with_wrap() -> None:
    x = torch.tensor([[[1.0, 4.0, 9.0], [2.0, 2.0, 2.0]]])
    want = torch.tensor(
        [[[[-8.0, 3.0, 5.0], [0.0, 0.0, 0.0]]], [[[-1.0, 2.0, 7.0], [1.0, -2.0, -7.0]]]]
    )
    assert torch.equal(TotalVariation().transform(x), want)


def test_shrinking_is_joint_over_directions_and_channels() -> None:
    """Two channels with differences (3, 0) and (0, 4): one magnitude 5, so t = 1 scales all by 4/5.
    A pixel below t vanishes.
    """
    a = torch.zeros(2, 2, 1, 2, dtype=torch.float64)
    a[0, 0, 0, 0], a[1, 1, 0, 0] = 3.0, 4.0
    a[0, 0, 0, 1] = 0.6
    z = TotalVariation().prox(a.clone(), 1.0)
    assert z[0, 0, 0, 0] == pytest.approx(2.4) and z[1, 1, 0, 0] == pytest.approx(3.2)
    assert float(z[..., 1].abs().max()) < 1e-15
    assert torch.equal(TotalVariation().prox(a.clone(), 0.0), a)


@pytest.mark.parametrize(
    "prior", [TotalVariation(), Wavelet(levels=1), Ridge()], ids=["tv", "wavelet", "ridge"]
)
def test_no_direction_leads_down_from_a_prox(prior: Prior) -> None:
    """t R(z) + |z - a|^2 / 2 is larger at every nearby point."""
    a = rand(4, 2, 3, 3) * 2 if prior.split else rand(2, 3, 3)

    def cost(z: torch.Tensor) -> float:
        if isinstance(prior, TotalVariation):
            size = z.square().sum((0, 1)).sqrt().sum()
        elif isinstance(prior, Wavelet):
            size = z[1:].abs().sum()
        else:
            size = z.square().sum() / 2
        return float(0.7 * size + (z - a).square().sum() / 2)

    z = prior.prox(a.clone(), 0.7)
    for seed in range(40):
        for step in (1e-1, 1e-3):
            assert cost(z + step * rand(*z.shape, seed=seed)) > cost(z)


@SPLIT
def test_what_a_prox_takes_away(prior: Prior) -> None:
    x = rand(2, 8, 8)
    a = prior.transform(x)
    d = rand(*a.shape, seed=2)
    torch.testing.assert_close(
        prior.add_rest(d.clone(), a.clone(), 0.5), d + a - prior.prox(a.clone(), 0.5)
    )


@pytest.mark.parametrize("name", ["tv", "wavelet", "ridge", "box"])
def test_what_the_next_x_step_is_given(name: PriorName) -> None:
    """mu' = q - W x, z' = prox(W x - mu'), and q' = z' + mu', with or without the shortcut."""
    prior = make_prior(name)
    x = 100 + 50 * rand(2, 8, 8)
    w = prior.transform(x)
    q = w + 9 * rand(*w.shape, seed=2)
    mu = q - w
    torch.testing.assert_close(prior.next_q(x, q.clone(), 0.5), prior.prox(w - mu, 0.5) + mu)


def test_total_variation_of_a_square() -> None:
    """A k x k square of height 7 on a torus: 4k edge pixels' worth of jumps, where the corner at
    the top left counts sqrt(2), the one at the bottom right none twice: 7 (2 (k - 1) + sqrt 2 + 2
    k)."""
    x = torch.zeros(1, 10, 10)
    x[:, 2:6, 3:7] = 7.0
    assert TotalVariation().value(x) == pytest.approx(7 * (2 * 3 + 2**0.5 + 2 * 4))


def test_box_and_ridge() -> None:
    assert torch.equal(
        make_prior("box").prox(torch.tensor([[[-3.0, 9.0, 300.0]]]), 1.0),
        torch.tensor([[[0.0, 9.0, 255.0]]]),
    )
    np.testing.assert_allclose(Ridge().prox(torch.tensor([[[3.0]]]), 2.0).numpy(), 1.0)

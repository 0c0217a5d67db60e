"""The comparisons: they solve the problems they are said to solve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scenes import SIZE, gradient, misfit_gradient, objective, small_federation, views

from fedlens import Federation, Message, run
from fedlens.deblur import CenDeblur, FedAvgDeblur, FedDeblur, FedGDDeblur, LocDeblur
from fedlens.deblur.task import Deblurring
from fedlens.engines.simulator import Simulator

BOTH = pytest.mark.parametrize("partial", [False, True], ids=["complete", "partial"])


def solve(kind: type[FedDeblur], federation: Federation, rounds: int, **keys: Any) -> Message:
    algorithm = kind(
        Deblurring(), **{"eta": 2.0, "rho": 0.3, "double": True, "tol": 0.0, **keys}
    ).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        return run(algorithm, engine, rounds)


@BOTH
def test_the_central_solver_ends_at_feddeblurs_optimum(partial: bool) -> None:
    """Algorithm 2 and Algorithm 1 are different iterations for one problem."""
    federation = small_federation(partial)
    ours = solve(FedDeblur, federation, 400).trees["image"]["scene"].numpy()
    central = solve(CenDeblur, federation, 300).trees["image"]["scene"].numpy()
    assert objective(federation, central, 2.0) == pytest.approx(
        objective(federation, ours, 2.0), rel=1e-4
    )


@BOTH
def test_no_prior_gets_in_the_way_of_the_central_solver(partial: bool) -> None:
    """Ridge (z = x, as for a denoiser): gradient of the misfit + eta x = 0."""
    federation = small_federation(partial)
    x = solve(CenDeblur, federation, 300, prior="ridge", eta=0.5).trees["image"]["scene"].numpy()
    np.testing.assert_allclose(sum(misfit_gradient(views(federation), x)), -0.5 * x, atol=1e-4)


def test_one_client_alone_is_the_central_problem_at_half_scale() -> None:
    """LocDeblur minimises |h * x - y|^2 / 2 + eta R, CenDeblur with n = 1 |h * x - y|^2 + eta R:
    with eta and rho halved every iterate is the same. FedAvgDeblur of one client begins elsewhere
    and goes to the same place."""
    federation = small_federation(False, clients=1)
    central = solve(CenDeblur, federation, 25, eta=2.0, rho=0.3).trees["image"]["scene"]
    alone = solve(LocDeblur, federation, 25, eta=1.0, rho=0.15).trees["image"]["scene"]
    torch.testing.assert_close(alone, central, atol=1e-9, rtol=0)
    ends = [
        solve(kind, federation, 150, eta=1.0, rho=0.15).trees["image"]["scene"].numpy()
        for kind in (LocDeblur, FedAvgDeblur)
    ]
    assert objective(federation, ends[1], 2.0) == pytest.approx(
        objective(federation, ends[0], 2.0), rel=1e-3
    )


def test_pixels_are_averaged_over_those_who_saw_them() -> None:
    """After one round of LocDeblur every pixel is the mean of the local results of the clients that
    observed it, and nobody else's.
    """
    federation = small_federation(True)
    algorithm = LocDeblur(eta=2.0, rho=0.3, double=True).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 1)
        local = [engine.inline.memory.load(k).draft["scene"]["x"] for k in range(3)]  # type: ignore[union-attr]
    masks = [held["scene"].mask(torch.float64) for held in federation.holdings]
    count = sum(masks)
    want = sum(m * x for m, x in zip(masks, local, strict=True)) / count.clamp_min(1)
    seen = count > 0
    torch.testing.assert_close(state.trees["image"]["scene"][seen], want[seen])
    assert int((~seen).sum()) > 0 and bool((state.trees["image"]["scene"][~seen] == 127.5).all())


@BOTH
def test_a_gradient_step_is_that_of_the_smoothed_objective(partial: bool) -> None:
    """x - step * gradient, the gradient by autograd from the objective written out."""
    federation = small_federation(partial)
    x = solve(FedGDDeblur, federation, 1, step=0.1, start="random").trees["image"]["scene"]
    start = (
        FedGDDeblur(eta=2.0, rho=0.3, double=True, start="random")
        .given(federation.facts)
        .init()
        .trees["image"]["scene"]
    )
    leaf = start.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for v in views(federation):
        blurred = torch.fft.ifft2(torch.fft.fft2(leaf) * torch.from_numpy(v["H"])).real
        total = (
            total + (torch.from_numpy(v["m"]) * (blurred - torch.from_numpy(v["y"])) ** 2).sum() / 3
        )
    d = torch.stack([leaf - leaf.roll(1, -1), leaf - leaf.roll(1, -2)])
    (total + 2.0 * (d.square().sum((0, 1)) + 1.0).sqrt().sum()).backward()
    torch.testing.assert_close(x, start - 0.1 * leaf.grad, atol=1e-8, rtol=0)


def test_gradient_descent_goes_down_and_stays_behind() -> None:
    federation = small_federation(False)
    ours = objective(
        federation, solve(FedDeblur, federation, 60).trees["image"]["scene"].numpy(), 2.0
    )
    slow = objective(
        federation,
        solve(FedGDDeblur, federation, 60, step=0.4).trees["image"]["scene"].numpy(),
        2.0,
    )
    first = objective(federation, np.full((1, *SIZE), 127.5), 2.0)
    assert ours < slow < first


@pytest.mark.parametrize("kind", [CenDeblur, LocDeblur, FedAvgDeblur, FedGDDeblur])
@pytest.mark.parametrize("prior", ["wavelet", "pnp"])
@BOTH
def test_every_comparison_runs_with_every_kind_of_prior(
    kind: type[FedDeblur], prior: str, partial: bool
) -> None:
    """The denoiser is deepinv's total variation: no weights needed."""
    federation = small_federation(partial, channels=3)
    federation = replace(
        federation,
        holdings=[
            {n: replace(v, pixels=v.pixels.float()) for n, v in h.items()}
            for h in federation.holdings
        ],
    )
    keys = (
        {"denoiser": "tv", "eta": None, "rho": None}
        if prior == "pnp"
        else {"eta": 0.05, "rho": 0.1}
    )
    if prior == "pnp":
        pytest.importorskip("deepinv")
    state = solve(kind, federation, 3, prior=prior, double=False, **keys)
    image = state.trees["image"]["scene"]
    assert image.shape == (3, *SIZE) and bool(torch.isfinite(image).all())
    assert float(gradient(image.numpy()).std()) > 1  # not the flat start

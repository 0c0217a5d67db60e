"""FedDeblur against Algorithm 1 line by line, its optimality conditions, another solver, and what
an eavesdropper would see.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scenes import (
    SIZE,
    algorithm_1,
    divergence,
    gradient,
    make,
    misfit_gradient,
    objective,
    primal_dual,
    small_federation,
    solve,
    views,
)
from tables import from_table

from fedlens import Federation, Message, StackError, run, stack
from fedlens.deblur import FedDeblur
from fedlens.deblur.fits import is_small_view
from fedlens.deblur.observation import Observation
from fedlens.deblur.spectrum import backward
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx

ROUNDS = 1000
BOTH = pytest.mark.parametrize("partial", [False, True], ids=["complete", "partial"])


@BOTH
@pytest.mark.parametrize("channels", [1, 3])
def test_every_round_is_that_of_algorithm_1(partial: bool, channels: int) -> None:
    """The spectral short cuts change nothing: after 7 rounds x, and what every client sent, agree
    to rounding.
    """
    federation = small_federation(partial, channels=channels)
    _, engine = solve(federation, 7)
    expected = algorithm_1(federation, 2.0, 0.3, 7, np.full((channels, *SIZE), 127.5))
    sent = [Message.from_bytes(b).trees["w"]["scene"] for b in engine.traffic[1:]]
    for got, want in zip(sent, expected["w"], strict=True):
        np.testing.assert_allclose(backward(got, SIZE[1]).numpy(), want, rtol=0, atol=1e-9)
    down = Message.from_bytes(engine.traffic[0]).trees["x"]["scene"]
    np.testing.assert_allclose(backward(down, SIZE[1]).numpy(), expected["x"], rtol=0, atol=1e-9)


@BOTH
def test_the_fixed_point_satisfies_the_kkt_conditions_and_another_solver_agrees(
    partial: bool,
) -> None:
    """At the fixed point (appendix E): x_k = x; lambda_k = -grad f_k(x); and sum lambda_k = -D^T mu
    where |mu| <= eta at every pixel, with mu = -eta Dx / |Dx| wherever Dx is not zero. All checked
    with numpy's full spectra, not with our own operators."""
    eta, rho = 2.0, 0.3
    federation = small_federation(partial)
    algorithm = make(federation, eta=eta, rho=rho)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, ROUNDS)
        memory = [engine.inline.memory.load(k).settle(ROUNDS - 1)["scene"] for k in range(3)]
    x = state.trees["image"]["scene"].numpy()
    slopes = misfit_gradient(views(federation), x)
    for kept, slope in zip(memory, slopes, strict=True):
        dual = rho * backward(kept["u"], SIZE[1]).numpy()
        np.testing.assert_allclose(dual, -slope, atol=1e-4)
        if partial:
            np.testing.assert_allclose(backward(kept["x"], SIZE[1]).numpy(), x, atol=1e-3)
    mu = rho * (state.trees["q"]["scene"].numpy() - gradient(x))
    np.testing.assert_allclose(divergence(mu), sum(slopes), atol=1e-4)
    size, slope = np.sqrt((mu**2).sum((0, 1))), gradient(x)
    steep = np.sqrt((slope**2).sum((0, 1)))
    assert size.max() <= eta * (1 + 1e-6)
    edges = steep > 1e-3
    # the check below is about something, and so is the one above
    assert 20 < edges.sum() < edges.size
    np.testing.assert_allclose(
        mu[:, 0][:, edges], -eta * slope[:, 0][:, edges] / steep[edges], atol=1e-4
    )
    other = primal_dual(federation, eta, 600)
    assert objective(federation, x, eta) <= objective(federation, other, eta) * (1 + 1e-9)
    if not partial:  # where nobody looks, many images are equally good
        np.testing.assert_allclose(x, other, atol=0.3)


@BOTH
def test_only_w_travels(partial: bool) -> None:
    """Every byte of every round: a reply is one tree "w" and two bookkeeping scalars, its length
    leaves room for nothing else, and neither y, h, m, x_k nor lambda_k is in it, as bytes of either
    precision or as values."""
    federation = small_federation(partial)
    federation = replace(
        federation,
        holdings=[
            {n: replace(v, pixels=v.pixels.float()) for n, v in h.items()}
            for h in federation.holdings
        ],
    )
    algorithm = make(federation, double=False)
    engine = Loopback(algorithm, federation)
    numbers = SIZE[0] * (SIZE[1] // 2 + 1) * 2
    rounds = []

    def look(_: Any, r: Any) -> None:
        rounds.append(r.number)
        for k, sent in enumerate(engine.traffic[1:]):
            reply = Message.from_bytes(sent)
            assert {t: list(a) for t, a in reply.trees.items()} == {"w": ["scene"]}
            assert not reply.scalars and not reply.weights
            header = int.from_bytes(sent[:8], "little")
            assert len(sent) == 8 + header + 4 * numbers
            assert set(json.loads(sent[8 : 8 + header])) == {"__metadata__", "w/scene"}
            seen = federation.holdings[k]["scene"]
            w = backward(reply.trees["w"]["scene"], SIZE[1])
            draft = engine.worker.memory.load(k).draft["scene"]
            own_x = (w - backward(draft["u"], SIZE[1])).contiguous()
            mask = seen.mask() if seen.partial else torch.ones(1, *SIZE)
            private = {
                "y": seen.pixels,
                "full y": seen.embed(seen.pixels),
                "h": seen.kernel,
                "m": mask,
                "x_k": own_x,
                "u": draft["u"],
            }
            for what, secret in private.items():
                for kind in (torch.float32, torch.float64):
                    assert secret.to(kind).numpy().tobytes() not in sent, what
            for what in ("full y", "x_k"):
                assert float((seen.cut(w) - seen.cut(private[what])).abs().mean()) > 0.02, (
                    what,
                    r.number,
                )
            if r.number == 0:
                # x_k^0 = y_k would have made this 0
                assert float((seen.cut(w) - seen.pixels).abs().mean()) > 5

    run(algorithm, engine, 15, after_round=look)
    assert rounds == list(range(15))


def test_the_prior_is_the_servers_business() -> None:
    """The same message draws the same reply whatever the prior: bit for bit."""
    federation = small_federation(True)
    sent = []
    for prior in ("tv", "wavelet", "ridge", "box"):
        _, engine = solve(federation, 1, prior=prior)
        sent.append(engine.traffic)
    assert all(s[1:] == sent[0][1:] for s in sent)
    _, tv = solve(federation, 2, prior="tv")
    _, ridge = solve(federation, 2, prior="ridge")
    assert tv.traffic[0] != ridge.traffic[0]


@BOTH
def test_a_denoiser_may_be_split_off(partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A "denoiser" that divides by 1 + sigma^2 is the prox of |x|^2 / 2. Acting on w (Eq. 5,
    sigma^2 = eta / (n rho)) or entering by z = x (sigma^2 = eta / rho), it leads to the ridge's
    optimum, which has the closed form of the test below for complete views."""

    def shrink(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return x / (1 + (255 * sigma) ** 2)

    monkeypatch.setattr("fedlens.deblur.priors.load_denoiser", lambda *_: shrink)
    federation = small_federation(partial)
    middle = [
        {n: replace(v, pixels=100 + v.pixels / 5) for n, v in h.items()}
        for h in federation.holdings
    ]
    # far from 0 and 255, where a denoiser's result is clamped
    federation = replace(federation, holdings=middle)
    ends = {}
    for name, keys in {
        "Eq. 5": {"split": False},
        "z = x": {"split": True},
        "ridge": {"prior": "ridge"},
    }.items():
        state, _ = solve(federation, 600, **{"prior": "pnp", "eta": 0.02, "rho": 0.1, **keys})
        ends[name] = state.trees["image"]["scene"]
    for name in ("Eq. 5", "z = x"):
        torch.testing.assert_close(ends[name], ends["ridge"], atol=0.02, rtol=0)


def test_ridge_has_a_closed_form() -> None:
    """eta |x|^2 / 2: x = (2/n sum |H|^2 + eta)^-1 2/n sum conj(H) Y."""
    federation = small_federation(False)
    state, _ = solve(federation, 400, prior="ridge", eta=0.5)
    known = views(federation)
    top = sum(2 / 3 * v["H"].conj() * np.fft.fft2(v["y"]) for v in known)
    below = sum(2 / 3 * np.abs(v["H"]) ** 2 for v in known) + 0.5
    np.testing.assert_allclose(
        state.trees["image"]["scene"].numpy(), np.fft.ifft2(top / below).real, atol=1e-6
    )


def test_an_image_in_view_of_everyone_comes_out_sharper_than_any_observation() -> None:
    federation = small_federation(False)
    state, _ = solve(federation, 200, eta=0.5)
    truth = federation.test["scene"]
    error = float((state.trees["image"]["scene"] - truth).square().mean())
    assert error < 0.2 * min(
        float((h["scene"].pixels - truth).square().mean()) for h in federation.holdings
    )


def test_it_stops_by_itself_and_measures_what_the_paper_plots() -> None:
    federation = small_federation(True)
    algorithm = make(federation, tol=1e-4, measure_every=1)
    seen: list[dict[str, float]] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(
            algorithm,
            engine,
            5000,
            test=federation.test,
            evaluate_every=1,
            after_round=lambda p, r: seen.append({**r.state.scalars, **r.metrics}),
        )
    assert 10 < len(seen) < 5000 and state.scalars["change_x"] < 1e-4 <= seen[-2]["change_x"]
    x = state.trees["image"]["scene"].numpy()
    assert seen[-1]["objective"] == pytest.approx(objective(federation, x, 2.0), rel=1e-3)
    assert seen[-1]["consensus"] < 0.05 * seen[0]["consensus"] and seen[-1]["change_w"] < 1e-2
    assert seen[-1]["psnr"] > seen[0]["psnr"] + 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rho": 0.0}, "rho must be a number above 0 or none, not 0.0"),
        ({"eta": -1.0}, "eta must be a number of at least 0 or none, not -1.0"),
        ({"rho": float("nan")}, "rho must be a number above 0 or none, not nan"),
        ({"sigma": 5.0}, "prior=pnp"),
        ({"decay": 0.9}, "prior=pnp"),
        ({"decay": 1.1}, "decay must be a number above 0 and at most 1, not 1.1"),
        ({"masks": True, "recall": True}, "recall"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_table("algorithm", "FedDeblur", **keys)


def test_it_says_what_it_is_missing_and_does_not_train() -> None:
    with pytest.raises(ValueError, match="given"):
        FedDeblur().init()
    with pytest.raises(StackError, match="does not train"):
        stack(FedDeblur(), FedProx(0.1))


@pytest.mark.parametrize("partial", [False, True])
def test_over_relaxation_ends_at_the_same_image(partial: bool) -> None:
    """Another way to the same minimiser, in fewer rounds for complete views."""
    federation = small_federation(partial)
    plain, _ = solve(federation, 600)
    quick, _ = solve(federation, 600, relax=1.6)
    end = plain.trees["image"]["scene"]
    torch.testing.assert_close(quick.trees["image"]["scene"], end, atol=0.1, rtol=0)
    if not partial:
        few, _ = solve(federation, 25)
        fewer, _ = solve(federation, 25, relax=1.6)
        apart = [float(torch.dist(s.trees["image"]["scene"], end)) for s in (few, fewer)]
        assert apart[1] < apart[0]


def test_a_run_ends_when_the_image_stands_still() -> None:
    """tol alone runs on: partial views swing back and forth."""
    federation = small_federation(True)
    state, _ = solve(federation, 400, still=0.05)
    assert state.round + 1 < 400 and (state.round + 1) % 20 == 0
    assert state.scalars["moved"] < 0.05
    end, _ = solve(federation, 400)
    gap = state.trees["image"]["scene"] - end.trees["image"]["scene"]
    assert float(gap.square().mean().sqrt()) < 1


def test_a_pixel_counts_as_much_as_its_confidence_says() -> None:
    """Zero is outside the view: the same as a smaller view."""
    federation = small_federation(True)
    cut, kept = [], []
    for held in federation.holdings:
        seen = held["scene"]
        inside = torch.ones(seen.pixels.shape[-2:])
        inside[:2] = 0
        kept.append({"scene": replace(seen, confidence=inside)})
        smaller = replace(seen, pixels=seen.pixels[:, 2:].contiguous(), top=seen.top + 2)
        cut.append({"scene": smaller})
    images = [
        solve(Federation(h, facts=federation.facts), 40)[0].trees["image"]["scene"]
        for h in (kept, cut)
    ]
    torch.testing.assert_close(images[0], images[1])
    with pytest.raises(ValueError, match="needs a place"):
        Observation(torch.ones(1, 4, 4), torch.ones(1, 1), 4, 4, confidence=torch.ones(4, 4))


def test_a_crop_lowers_the_same_objective() -> None:
    """Views of 20 x 18 of 96 x 80, one at the scene's edge, so that its margin goes round it:
    another iteration, the same objective, here a little lower after as many rounds."""
    federation = small_federation(True, size=(96, 80))
    holdings = []
    for k, held in enumerate(federation.holdings):
        seen = held["scene"]
        pixels = seen.pixels[:, :20, :18].contiguous()
        holdings.append({"scene": replace(seen, pixels=pixels, top=30 * k, left=2)})
    small = Federation(holdings, facts=federation.facts)
    assert all(is_small_view(h["scene"]) for h in holdings)
    whole, _ = solve(small, 500)
    cropped, _ = solve(small, 500, crop=True, measure_every=5)
    a, b = (objective(small, s.trees["image"]["scene"].numpy(), 2.0) for s in (whole, cropped))
    assert abs(a - b) < 0.01 * a and b <= a

"""Median, trimmed mean, Krum, Bulyan, geometric median, norm clipping: by hand, and against numpy's
and Flower's on random weights.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Rounds, fedavg, federation, targets
from torch import Tensor

from fedlens import Layer, StackError, stack
from fedlens.layers import (
    Bulyan,
    FedAvgM,
    FedCDA,
    FedNova,
    GeometricMedian,
    Krum,
    LossAware,
    Median,
    MultiKrum,
    NormClip,
    TrimmedMean,
)  # fmt: skip
from fedlens.layers.robust.median import comparators, median


def merged(layer: Layer | None, *clients: Any, size: int = 1) -> list[float]:
    """One round with learning rate 1: every client's update is its target."""
    game = Rounds(stack(fedavg(size), *([layer] if layer else [])), federation(*clients))
    game.play()
    return game.w


# -- by hand ---------------------------------------------------------------------------------------


def test_median_by_hand() -> None:
    """Odd: the middle one. Even: the mean of the two middle ones. Sample counts are ignored."""
    assert merged(Median(), 1.0, 100.0, 3.0) == [3.0]
    assert merged(Median(), 1.0, 100.0, 3.0, 5.0) == [4.0]
    assert merged(Median(), targets(1.0, 1.0, 1.0, 1.0), 2.0, 3.0) == [2.0]


def test_trimmed_mean_by_hand() -> None:
    """Five clients, a share of 0.2 is one at each end: (2 + 3 + 4) / 3."""
    assert merged(TrimmedMean(0.2), 1.0, 2.0, 3.0, 4.0, 1000.0) == pytest.approx([3.0])


def test_krum_by_hand() -> None:
    """Updates 0, 1, 3, 100 and f = 1: the n - f - 2 = 1 nearest neighbour counts. Scores 1, 1, 4,
    9409: 0 and 1 tie, the first one wins. With f = 0 two neighbours count: 0: 1 + 9, 1: 1 + 4, 3: 4
    + 9, so 1 wins."""
    assert merged(Krum(1), 0.0, 1.0, 3.0, 100.0) == [0.0]
    assert merged(Krum(0), 0.0, 1.0, 3.0, 100.0) == [1.0]


def test_multi_krum_by_hand() -> None:
    """f = 0 as above: scores 10, 5, 13, 97^2 + 99^2. The best two are 1 (3 samples) and 0 (1
    sample): mean 3/4.
    """
    assert merged(
        MultiKrum(liars=0, keep=2), 0.0, targets(1.0, 1.0, 1.0), 3.0, 100.0
    ) == pytest.approx([0.75])


def test_bulyan_by_hand() -> None:
    """n = 7, f = 1: five are chosen by Krum, then in every coordinate the 7 - 4 = 3 nearest their
    median. Updates 0, 1, 2, 3, 4, 5, 1000. Krum sums the n - f - 2 = 4 nearest squares: 0: 1+4+9+16
    = 30, 1: 1+1+4+9 = 15, 2: 1+1+4+4 = 10, and 3: 10. The first, 2, goes. Left 0 1 3 4 5 1000,
    three nearest: 0: 1+9+16 = 26, 1: 1+4+9 = 14, 3: 1+4+4 = 9, 4: 1+1+9 = 11, 5: 1+4+16 = 21. 3
    goes. Left 0 1 4 5 1000, two nearest: 17, 10, 10, 17: 1 goes. Left 0 4 5 1000, one nearest: 16,
    1, 1: 4 goes. Left 0 5 1000: 25, 25: 0 goes. Chosen 0 1 2 3 4, median 2, nearest three 1 2 3:
    mean 2."""
    assert merged(Bulyan(1), 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1000.0) == pytest.approx([2.0])


def test_bulyan_takes_the_median_of_a_round_that_is_too_small() -> None:
    """Six replies are fewer than 4 + 3."""
    assert merged(Bulyan(1), 0.0, 1.0, 2.0, 3.0, 4.0, 1000.0) == [2.5]


def test_geometric_median_by_hand() -> None:
    """Three points of an equilateral triangle: its centre. Three points on a line: the middle one,
    like the median. A triangle with an angle above 120 degrees: the corner that has it (Fermat's
    point)."""
    top = math.sqrt(3)
    assert merged(GeometricMedian(), [0.0, 0.0], [2.0, 0.0], [1.0, top], size=2) == pytest.approx(
        [1, top / 3], abs=1e-5
    )
    assert merged(GeometricMedian(), [0.0, 0.0], [1.0, 0.0], [50.0, 0.0], size=2) == pytest.approx(
        [1, 0], abs=1e-3
    )
    assert merged(
        GeometricMedian(), [-10.0, 0.0], [10.0, 0.0], [0.0, 1.0], size=2
    ) == pytest.approx([0, 1], abs=1e-3)


def test_geometric_median_with_samples() -> None:
    """A client with more samples than all others together is the weighted geometric median."""
    crowd = targets(*[[3.0, 4.0]] * 5)
    assert merged(
        GeometricMedian("examples"), crowd, [0.0, 0.0], [9.0, 0.0], size=2
    ) == pytest.approx([3, 4], abs=1e-3)


def test_geometric_median_is_that_of_scipy_with_and_without_a_liar() -> None:
    """The sum of distances of seven points in five dimensions, minimised by scipy from their
    median; then with one of them at 1e8 and beyond. |p - z| is |p| - <p, z> / |p| there: the liar
    only pulls with force 1 in its direction, and the point stays as near as the theory has it,
    2 (n - f) / (n - 2f) = 12/5 times the largest honest distance from the honest mean."""
    from scipy.optimize import minimize

    points = torch.randn(7, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for liar in (None, 1e8, -1e12):
        if liar is not None:
            points[3] = liar
        honest = points[[0, 1, 2, 4, 5, 6]]

        def objective(z: Any, honest: Tensor = honest, liar: float | None = liar) -> float:
            point = torch.tensor(z)
            far = points[3] / points[3].norm()
            last = (points[3] - point).norm() if liar is None else -far @ point
            return float((honest - point).norm(dim=1).sum() + last)

        best = minimize(
            objective,
            points.median(0).values.numpy(),
            method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 20_000, "maxfev": 20_000},
        )
        deltas = [{"w": p} for p in points]
        found = GeometricMedian().merge(deltas, [1.0] * 7)["w"]
        assert torch.allclose(found, torch.tensor(best.x), atol=1e-4)
        centre = honest.mean(0)
        reach = float((honest - centre).norm(dim=1).max())
        assert float((found - centre).norm()) <= 12 / 5 * reach
        pulls = (points - found) / (points - found).norm(dim=1, keepdim=True)
        assert float(pulls.sum(0).norm()) < 1e-5  # unit vectors to all points add up to nothing


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_geometric_median_has_no_scale_of_its_own(scale: float) -> None:
    top = math.sqrt(3)
    corners = [[0.0, 0.0], [2.0, 0.0], [1.0, top]]
    deltas = [{"w": scale * torch.tensor(c, dtype=torch.float64)} for c in corners]
    found = GeometricMedian().merge(deltas, [1.0] * 3)["w"] / scale
    assert found.tolist() == pytest.approx([1, top / 3], abs=1e-5)


def test_norm_clip_by_hand() -> None:
    """(3, 4) has length 5 and becomes (0.6, 0.8) with bound 1; (0.3, 0.4) stays: mean (0.45, 0.6).
    On the clients the same.
    """
    for where in ("server", "client"):
        layer = NormClip(1.0, where)  # type: ignore[arg-type]
        assert merged(layer, [3.0, 4.0], [0.3, 0.4], size=2) == pytest.approx([0.45, 0.6])


def test_norm_clip_at_the_rounds_median() -> None:
    """Lengths 1, 2, 9: the bound is 2, the mean (1 + 2 + 2) / 3."""
    assert merged(NormClip(), 1.0, 2.0, 9.0) == pytest.approx([5 / 3])


def test_norm_clip_in_front_of_a_median() -> None:
    """Along two axes: (3, 0), (0, 1), (0, 2) clipped to 1: (1, 0), (0, 1), (0, 1), median (0, 1).
    Without clipping (0, 1) as well, but for (3, 3), (0, 1), (4, 0): median (3, 1) without, (0.707,
    0.707) with: coordinates 0.707 0 1 and 0.707 1 0."""
    game = Rounds(
        stack(fedavg(2), Median(), NormClip(1.0)), federation([3.0, 3.0], [0.0, 1.0], [4.0, 0.0])
    )
    game.play()
    assert game.w == pytest.approx([math.sqrt(0.5)] * 2)


# -- against others --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 16, 33])
def test_median_against_numpy(n: int) -> None:
    rng = torch.Generator().manual_seed(n)
    trees = [
        {"a": torch.randn(50_001, generator=rng), "b": torch.randint(-9, 9, (3, 5), generator=rng)}
        for _ in range(n)
    ]
    out = median(trees)
    for name in ("a", "b"):
        expected = np.median(np.stack([t[name].numpy() for t in trees]), axis=0)
        np.testing.assert_allclose(out[name].numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", range(1, 12))
def test_the_sorting_network_sorts(n: int) -> None:
    """The zero-one principle: a network that sorts every sequence of zeros and ones sorts
    everything.
    """
    rows = [torch.tensor([(k >> i) & 1 for k in range(2**n)]) for i in range(n)]
    for i, j in comparators(n):
        rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])
    assert all(bool((a <= b).all()) for a, b in itertools.pairwise(rows))


def flower(results: list[tuple[np.ndarray, int]], strategy: Any, rounds: int = 1) -> np.ndarray:
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    out = None
    for number in range(1, rounds + 1):
        fit = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([w]), n, {}))
            for w, n in results
        ]
        out, _ = strategy.aggregate_fit(number, fit, [])
    assert out is not None
    return parameters_to_ndarrays(out)[0]


def strategies() -> dict[str, tuple[Layer | None, Any]]:
    from flwr.server import strategy as s

    return {
        "fedavg": (None, s.FedAvg(inplace=False)),
        "median": (Median(), s.FedMedian()),
        "trimmed": (TrimmedMean(0.2), s.FedTrimmedAvg(beta=0.2)),
        "krum": (Krum(2), s.Krum(num_malicious_clients=2)),
        "multi-krum": (
            MultiKrum(liars=2, keep=4),
            s.Krum(num_malicious_clients=2, num_clients_to_keep=4),
        ),
        "bulyan": (Bulyan(2), s.Bulyan(num_malicious_clients=2, to_keep=0)),
    }


@pytest.mark.parametrize("name", ["fedavg", "median", "trimmed", "krum", "multi-krum", "bulyan"])
@pytest.mark.parametrize("seed", [0, 1])
def test_against_flower(name: str, seed: int) -> None:
    pytest.importorskip("flwr")
    rng = np.random.default_rng(seed)
    rows = [(rng.normal(size=40), int(rng.integers(1, 9))) for _ in range(11)]
    rows[3] = (rows[3][0] * 50, 5)  # a liar
    layer, strategy = strategies()[name]
    ours = merged(layer, *[targets(*[w.tolist()] * n) for w, n in rows], size=40)
    np.testing.assert_allclose(ours, flower(rows, strategy), rtol=1e-9, atol=1e-10)


# -- stacks that cannot work -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((Median(), Krum()), "Krum and Median both decide how replies become one"),
        ((LossAware(), TrimmedMean()), "TrimmedMean and LossAware both decide"),
        ((Median(), FedCDA()), "FedCDA and Median both decide"),
        (
            (Median(), FedAvgM()),
            "FedAvgM works on the merged update, Median on single ones: put FedAvgM before Median",
        ),
        ((Median(), FedNova()), "put FedNova before Median"),
        ((NormClip(), Median()), "put Median before NormClip"),
    ],
)
def test_refused(layers: tuple[Layer, ...], why: str) -> None:
    with pytest.raises(StackError, match=why):
        stack(fedavg(), *layers)


def test_bad_arguments_are_refused() -> None:
    for make in (
        lambda: TrimmedMean(0.5),
        lambda: Krum(-1),
        lambda: Krum(1, 0),
        lambda: Bulyan(-1),
        lambda: NormClip(0.0, "client"),
        lambda: NormClip(-1.0),
    ):
        with pytest.raises(ValueError, match=r"must be|at least|bound"):
            make()

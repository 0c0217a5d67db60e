from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from by_hand import Rounds, fedavg, federation
from toy import GroupToy, Toy, toy_federation

from fedlens import Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import StackError
from fedlens.engines.loopback import Loopback
from fedlens.layers import (
    DPSGD,
    FedAvgM,
    FedNova,
    FedProx,
    LossAware,
    Median,
    MixedWeights,
    NormClip,
    PrivateMean,
    Scaffold,
    UploadFailures,
)
from fedlens.trust.accounting import private_part
from fedlens.trust.secure_sum import SecureSum

QUIET = 1e-9  # noise that is there and does not show


def test_clipped_uniform_and_over_the_cohort_by_hand() -> None:
    """Updates of 3 and -.05, clip .1: (.1 - .05) / 2 = .025. If only the first of the two answers,
    its .1 is still divided by two: from .025 on, by .05."""
    game = Rounds(stack(fedavg(), PrivateMean(noise=QUIET, clip=0.1)), federation(3.0, -0.05))
    game.play()
    assert game.w == pytest.approx([0.025])
    game.play(0)
    assert game.w == pytest.approx([0.075])


def test_nothing_but_the_update_leaves() -> None:
    algorithm = stack(fedavg(), PrivateMean(clip=0.1, quantile=0.5))
    engine = Loopback(algorithm, federation(3.0, -0.05))
    run(algorithm, engine, 1)
    _, *up = [Message.from_bytes(b) for b in engine.traffic]
    assert len(up) == 2
    for reply in up:
        assert reply.trees.keys() == {"delta", "below"} and not reply.scalars
        assert reply.weights == {"delta": {"mean": 1.0}, "below": {"mean": 1.0}}
        assert float(reply.trees["delta"]["w"].norm()) <= 0.1 * (1 + 1e-9)


@pytest.mark.parametrize("start", [0.1, 500.0])
@pytest.mark.parametrize(("quantile", "where"), [(0.5, "server"), (0.8, "clients")])
def test_the_clip_finds_the_quantile_from_both_sides(
    start: float, quantile: float, where: Any
) -> None:
    """50 clients whose updates are 1, 2 .. 50 long. A wrong sign would lead to 0 or to infinity."""
    layer = PrivateMean(clip=start, quantile=quantile, rate=1.0, where=where)
    algorithm = stack(fedavg(server_lr=1e-9), layer)
    game = Rounds(algorithm, federation(*(float(k + 1) for k in range(50))))
    seen = []
    for _ in range(26):
        game.play()
        seen.append(game.state.scalars["clip"])
    assert sum(seen[-8:]) / 8 == pytest.approx(50 * quantile, rel=0.12)


def deviation(algorithm: Any, clients: int, size: int) -> float:
    """Of the mean of updates that are all zero: of the noise alone."""
    game = Rounds(algorithm, federation(*([[0.0] * size] * clients)))
    game.play()
    return float(torch.tensor(game.w).std())


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (PrivateMean(noise=2.0, clip=0.5), 2.0 * 0.5 / 8),
        # 8 answer, 5 shares are counted on: more noise than promised
        (PrivateMean(noise=2.0, clip=0.5, where="clients"), 2.0 * 0.5 * math.sqrt(8 / 5) / 8),
        (PrivateMean(noise=2.0, clip=0.5, where="clients", least=8), 2.0 * 0.5 / 8),
        # with the count, s = 2: updates get (1/4 - 1/16)^(-1/2)
        (PrivateMean(noise=2.0, clip=0.5, quantile=0.5), (3 / 16) ** -0.5 * 0.5 / 8),
    ],
    ids=["server", "clients", "all must", "adaptive"],
)
def test_the_noise_of_the_mean(layer: PrivateMean, expected: float) -> None:
    """Of 40,000 numbers a standard error is .35 %."""
    found = deviation(stack(fedavg(40_000), layer), 8, 40_000)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dropouts", ["skip", "recover"])
def test_in_a_secure_sum_nobody_holds_one_without_noise(dropouts: Any) -> None:
    """The same deviation under masks; no moments are summed, so that no bounds are learned."""
    layer = PrivateMean(noise=2.0, clip=0.5, where="clients", quantile=0.5)
    algorithm = stack(fedavg(4000, batch=4), layer, SecureSum(dropouts=dropouts))
    assert private_part(algorithm) is not None
    state = run(algorithm, Loopback(algorithm, federation(*([[0.0] * 4000] * 8))), 2)
    expected = (3 / 16) ** -0.5 * 0.5 * math.sqrt(8 / 5) / 8
    # two rounds; the clip of the second differs a little
    found = float(state.trees["model"]["w"].std()) / math.sqrt(2)
    assert found == pytest.approx(expected, rel=0.15)
    assert json.loads(state.texts["secure"])["bounds"] == {}


def test_shares_of_noise_need_a_secure_sum() -> None:
    algorithm = stack(fedavg(), PrivateMean(where="clients"))
    with pytest.raises(StackError, match="secure=true"):
        private_part(algorithm)


def test_noise_of_a_real_server_is_not_the_seeds() -> None:
    def once(real: bool) -> list[float]:
        algorithm = stack(fedavg(5), PrivateMean())
        algorithm = algorithm.deployed() if real else algorithm
        game = Rounds(algorithm, federation([0.0] * 5, [1.0] * 5))
        game.play()
        return game.w

    assert once(False) == once(False)
    assert once(True) != once(True)


def test_what_it_costs() -> None:
    known = stack(fedavg(), PrivateMean(noise=3.0)).mechanism(10, 100, 20)
    secret = stack(fedavg(), PrivateMean(noise=3.0, secret_cohort=True)).mechanism(10, 100, 20)
    assert known is not None and secret is not None
    assert (known.sampling, known.rate, known.steps, known.unit) == ("none", 1.0, 1, "client")
    assert (secret.sampling, secret.rate) == ("fixed", 0.2)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((MixedWeights(), PrivateMean()), "PrivateMean and MixedWeights both decide"),
        ((Median(), PrivateMean()), "both decide how replies become one"),
        ((DPSGD(), PrivateMean()), "keep one of them"),
        ((PrivateMean(), LossAware()), "LossAware"),
        ((PrivateMean(), FedAvgM()), "FedAvgM"),
        ((PrivateMean(), NormClip()), "NormClip changes single updates after PrivateMean"),
        (
            (PrivateMean(where="clients"), NormClip(0.1, where="client")),
            "NormClip changes single updates after PrivateMean",
        ),
        ((FedNova(), PrivateMean()), "FedNova's server half reads numbers"),
    ],
)
def test_what_would_show_a_client_is_refused(layers: Any, why: str) -> None:
    with pytest.raises(StackError, match=why):
        stack(FedAvg(GroupToy()), *layers)


def test_statistics_and_other_trees_are_refused() -> None:
    with pytest.raises(StackError, match=r"running_mean.*task\.norm=group"):
        stack(FedAvg(Toy()), PrivateMean())
    with pytest.raises(StackError, match="would hold 'control'"):
        stack(FedAvg(GroupToy()), Scaffold(), PrivateMean()).init()


def test_what_changes_training_or_the_mean_goes_with_it() -> None:
    algorithm = stack(FedAvg(GroupToy(), batch=8), FedProx(0.1), FedAvgM(), PrivateMean())
    state = run(algorithm, Loopback(algorithm, toy_federation(3)), 2)
    assert math.isfinite(float(state.trees["model"]["head.weight"].sum()))
    stack(FedAvg(GroupToy()), NormClip(0.1, where="client"), PrivateMean(), UploadFailures())


def test_a_late_reply_was_clipped_for_another_rounds_noise() -> None:
    algorithm = stack(FedAvg(GroupToy(), batch=8), PrivateMean(quantile=0.5))
    with pytest.raises(ValueError, match=r"set federation\.late=0"):
        run(algorithm, Loopback(algorithm, toy_federation(3)), 2, late=1)


def test_more_shares_than_clients_are_refused_before_any_work() -> None:
    PrivateMean(where="clients", least=5).check_cohort(5)
    with pytest.raises(ValueError, match=r"least=6 shares .* but 5 clients"):
        PrivateMean(where="clients", least=6).check_cohort(5)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_hand import Rounds, fedavg, federation, targets
from toy import Toy, toy_federation

from fedlens import StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.engines.loopback import Loopback
from fedlens.layers import FedAdagrad, FedAdam, FedAvgM, FedDyn, FedYogi

FAR = 1e7  # with learning rate 1e-7 a client's update is 1 in every round, wherever the model is


def path(layer: Any, rounds: int) -> list[float]:
    game = Rounds(stack(fedavg(lr=1e-7), layer), federation(FAR))
    out = []
    for _ in range(rounds):
        game.play()
        out += game.w
    return out


def test_fedavgm_by_hand() -> None:
    """d = 1: m = 1, 1.5, 1.75 with beta 0.5; x = lr * (1, 2.5, 4.25) with lr 2."""
    assert path(FedAvgM(lr=2.0, beta=0.5), 3) == pytest.approx([2, 5, 8.5])


def test_fedadam_by_hand() -> None:
    """d = 1, beta_1 = 0.5, beta_2 = 0.75, tau = 0.5, lr = 1. Round 1: m = 0.5, v = 0.75 * 0.25 +
    0.25 = 0.4375, step 0.5 / (0.66144 + 0.5) = 0.43050.
    Round 2: m = 0.75, v = 0.75 * 0.4375 + 0.25 = 0.578125, step 0.75 / (0.76035 + 0.5) = 0.59507; x
    = 1.02557."""
    assert path(FedAdam(1.0, 0.5, 0.75, 0.5), 2) == pytest.approx([0.43050, 1.02557], abs=2e-5)


def test_fedadam_as_flower_by_hand() -> None:
    """v starts at 0: v = 0.25, sqrt 0.5, step 0.5 / (0.5 + 0.5) = 0.5, times sqrt(1 - 0.75^2) / (1
    - 0.5^2) = 0.66144 / 0.75 = 0.88192: x = 0.44096."""
    assert path(FedAdam(1.0, 0.5, 0.75, 0.5, bias="flower"), 1) == pytest.approx(
        [0.44096], abs=1e-5
    )


def test_fedyogi_by_hand() -> None:
    """Same numbers. v = 0.25 - 0.25 * 1 * sign(0.25 - 1) = 0.5, step 0.5 / (0.70711 + 0.5) =
    0.41421.
    Round 2: v = 0.5 + 0.25 = 0.75, m = 0.75, step 0.75 / (0.86603 + 0.5) = 0.54904; x = 0.96325."""
    assert path(FedYogi(1.0, 0.5, 0.75, 0.5), 2) == pytest.approx([0.41421, 0.96325], abs=2e-5)


def test_fedadagrad_by_hand() -> None:
    """v = 0.25 + 1 = 1.25, step 1 / (1.11803 + 0.5) = 0.61803; v = 2.25, step 1 / 2 = 0.5: x =
    1.11803.
    """
    assert path(FedAdagrad(lr=1.0, tau=0.5), 2) == pytest.approx([0.61803, 1.11803], abs=2e-5)


def flower(name: str) -> tuple[Any, Any]:
    from flwr.common import ndarrays_to_parameters
    from flwr.server import strategy as s

    start = ndarrays_to_parameters([np.zeros(30)])
    adaptive = {"eta": 0.3, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01}
    ours = {"lr": 0.3, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01, "bias": "flower"}
    if name == "fedavgm":
        return FedAvgM(0.7, 0.6), s.FedAvgM(
            initial_parameters=start, server_learning_rate=0.7, server_momentum=0.6
        )
    if name == "fedadam":
        return FedAdam(**ours), s.FedAdam(initial_parameters=start, **adaptive)  # type: ignore[arg-type]
    if name == "fedyogi":
        return FedYogi(**ours), s.FedYogi(initial_parameters=start, **adaptive)  # type: ignore[arg-type]
    return FedAdagrad(lr=0.3, tau=0.01, bias="flower"), s.FedAdagrad(
        initial_parameters=start, eta=0.3, tau=0.01
    )


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_against_flower(name: str) -> None:
    """Four rounds in which clients always send the same models (learning rate 1 lands on the
    target).
    """
    pytest.importorskip("flwr")
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=30), int(rng.integers(1, 9))) for _ in range(5)]
    layer, strategy = flower(name)
    game = Rounds(
        stack(fedavg(30), layer), federation(*[targets(*[w.tolist()] * n) for w, n in rows])
    )
    for number in range(1, 5):
        fit = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([w]), n, {})) for w, n in rows
        ]
        theirs, _ = strategy.aggregate_fit(number, fit, [])
        game.play()
        np.testing.assert_allclose(game.w, parameters_to_ndarrays(theirs)[0], rtol=1e-9, atol=1e-10)


def test_buffers_take_the_plain_mean() -> None:
    """The running variance of BatchNorm stays positive and equals FedAvg's, whatever the optimiser
    does with the weights.
    """
    fed = toy_federation(4)
    plain, adam = (stack(FedAvg(Toy(), batch=8), *extra) for extra in ((), (FedAdam(lr=0.5),)))
    a, b = (run(x, Loopback(x, fed), 1).trees["model"] for x in (plain, adam))
    assert bool((a["backbone.1.running_var"] == b["backbone.1.running_var"]).all())
    assert bool((a["backbone.0.weight"] != b["backbone.0.weight"]).any())


def test_one_optimiser_is_enough() -> None:
    with pytest.raises(StackError, match="FedAdam and FedAvgM both optimise on the server"):
        stack(fedavg(), FedAvgM(), FedAdam())
    with pytest.raises(StackError, match="FedDyn has a server step of its own"):
        stack(fedavg(), FedDyn(), FedAdam())

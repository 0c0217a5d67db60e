from __future__ import annotations

import pytest
import torch
from by_hand import Rounds, fedavg, federation
from torch import nn

from fedlens import Batch, Federation, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.rounds import sample
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.layers import FedDyn, Median


def test_two_rounds_by_hand() -> None:
    """Targets 1 and 3, lr 0.1, alpha 0.5, two steps.
    Round 1, g = h = 0: client 0: -1, w = 0.1; -0.9 + 0.05 = -0.85, w = 0.185. Client 1: 0.3, then
    -2.7 + 0.15 = -2.55, w = 0.555. Mean 0.37; h = -0.5 * 0.37 = -0.185; x = 0.37 + 0.185 / 0.5 =
    0.74. g = -0.0925 and -0.2775.
    Round 2: client 0: -0.26 + 0.0925 = -0.1675, w = 0.75675; -0.24325 + 0.0925 + 0.008375 =
    -0.142375, w = 0.7709875. Client 1: -2.26 + 0.2775 = -1.9825, w = 0.93825; -2.06175 + 0.2775 +
    0.099125 = -1.685125, w = 1.1067625.
    Mean update 0.198875; h = -0.185 - 0.0994375 = -0.2844375; x = 0.938875 + 0.568875 = 1.50775."""
    game = Rounds(stack(fedavg(lr=0.1, epochs=2), FedDyn(0.5)), federation(1.0, 3.0))
    game.play()
    assert game.w == pytest.approx([0.74])
    state = game.play()
    assert game.w == pytest.approx([1.50775]) and state.trees["h"]["w"].tolist() == pytest.approx(
        [-0.2844375]
    )


def test_only_the_heard_move_h() -> None:
    """Client 1 alone, one step: y = 0.3; h = -0.5 * 1/2 * 0.3 = -0.075; x = 0.3 + 0.15."""
    game = Rounds(stack(fedavg(lr=0.1), FedDyn(0.5)), federation(1.0, 3.0))
    game.play(1)
    assert game.w == pytest.approx([0.45])


class Regression(LearningTask):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        return (output.prediction - batch["y"]).square().mean()

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {}


def test_against_the_equations_written_out() -> None:
    """Five rounds, 2 of 4 clients, three full-batch steps: Algorithm 1 of the paper in float64."""
    rng = torch.Generator().manual_seed(1)
    data = [
        Tensors(
            {
                "x": torch.randn(n, 3, generator=rng).double(),
                "y": torch.randn(n, 1, generator=rng).double(),
            }
        )
        for n in (5, 9, 7, 12)
    ]
    lr, alpha, steps, rounds = 0.1, 0.3, 3, 5
    algorithm = stack(
        FedAvg(Regression(), lr=lr, batch=100, epochs=steps, device="cpu"), FedDyn(alpha)
    )
    start = algorithm.init().trees["model"]
    end = run(algorithm, Loopback(algorithm, Federation(data)), rounds, cohort=2)

    names = list(start)
    x = [start[n].clone() for n in names]
    h = [torch.zeros_like(t) for t in x]
    own = {i: [torch.zeros_like(t) for t in x] for i in range(4)}
    for number in range(rounds):
        asked = sample(range(4), 2, 0, number)
        local = []
        for i in asked:
            theta = [t.clone() for t in x]
            for _ in range(steps):
                leaves = [t.clone().requires_grad_() for t in theta]
                a, b, u, v = leaves
                out = torch.tanh(data[i].columns["x"] @ a.T + b) @ u.T + v
                grads = torch.autograd.grad((out - data[i].columns["y"]).square().mean(), leaves)
                theta = [
                    t - lr * (g - gi + alpha * (t - xg))
                    for t, g, gi, xg in zip(theta, grads, own[i], x)
                ]
            own[i] = [gi - alpha * (t - xg) for gi, t, xg in zip(own[i], theta, x)]
            local.append(theta)
        h = [hk - alpha / 4 * sum(t[k] - x[k] for t in local) for k, hk in enumerate(h)]
        x = [sum(t[k] for t in local) / len(local) - h[k] / alpha for k in range(len(x))]
    for n, a, b in zip(names, x, h):
        torch.testing.assert_close(end.trees["model"][n], a, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(end.trees["h"][n], b, rtol=1e-11, atol=1e-12)


def test_refused() -> None:
    with pytest.raises(StackError, match="server_lr must be 1"):
        stack(fedavg(server_lr=0.5), FedDyn())
    with pytest.raises(ValueError, match=r"alpha is .*, but it must be above 0"):
        FedDyn(0.0)
    with pytest.raises(StackError, match="put FedDyn before Median"):
        stack(fedavg(), Median(), FedDyn())

from __future__ import annotations

import pytest
import torch
from by_hand import Rounds, fedavg, federation, targets
from torch import nn

from fedlens import Batch, Federation, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.rounds import sample
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.layers import FedNova, FedProx, Scaffold


def test_option_ii_by_hand() -> None:
    """Targets 1 and 3, lr 0.1, two steps, so sum(lr) = 0.2.
    Round 1, c = c_i = 0: client 0 goes 0, 0.1, 0.19, client 1 goes 0, 0.3, 0.57; x = 0.38; c_0 =
    -0.19/0.2 = -0.95, c_1 = -2.85, c = -1.9. Round 2: client 0 is corrected by c - c_0 = -0.95:
    gradients -1.57 and -1.413, y = 0.6783; client 1 by 0.95: -1.67 and -1.503, y = 0.6973; x =
    0.6878. c_0 = -0.95 + 1.9 - 0.2983/0.2 = -0.5415, c_1 = -2.85 + 1.9 - 0.3173/0.2 = -2.5365, c =
    -1.539."""
    game = Rounds(stack(fedavg(lr=0.1, epochs=2), Scaffold("II")), federation(1.0, 3.0))
    state = game.play()
    assert game.w == pytest.approx([0.38]) and state.trees["control"][
        "w"
    ].tolist() == pytest.approx([-1.9])
    state = game.play()
    assert game.w == pytest.approx([0.6878]) and state.trees["control"][
        "w"
    ].tolist() == pytest.approx([-1.539])


def test_option_i_by_hand() -> None:
    """The same clients. Round 1 as above, but c_i is the gradient at x = 0: -1 and -3, c = -2.
    Round 2 from 0.38: client 0 is corrected by -1: gradients -1.62 and -1.458, y = 0.6878; client 1
    by +1: the same numbers. x = 0.6878, c_i = -0.62 and -2.62, c = -1.62."""
    game = Rounds(stack(fedavg(lr=0.1, epochs=2), Scaffold("I")), federation(1.0, 3.0))
    game.play()
    state = game.play()
    assert game.w == pytest.approx([0.6878]) and state.trees["control"][
        "w"
    ].tolist() == pytest.approx([-1.62])


def test_the_model_counts_samples_and_the_control_counts_clients() -> None:
    """lr 0.1, one step, client 0 holds one target 1, client 1 three times target 3: x = (0.1 + 3 *
    0.3) / 4 = 0.25, c = (-1 - 3) / 2 = -2."""
    game = Rounds(
        stack(fedavg(lr=0.1), Scaffold("II")), federation(targets(1.0), targets(3.0, 3.0, 3.0))
    )
    state = game.play()
    assert game.w == pytest.approx([0.25]) and state.trees["control"][
        "w"
    ].tolist() == pytest.approx([-2.0])


def test_part_of_the_clients_moves_part_of_the_control() -> None:
    """Of two clients only client 1 answers: x = 0.3, c = 1/2 * -3."""
    game = Rounds(stack(fedavg(lr=0.1), Scaffold("II")), federation(1.0, 3.0))
    state = game.play(1)
    assert game.w == pytest.approx([0.3]) and state.trees["control"]["w"].tolist() == pytest.approx(
        [-1.5]
    )


def test_the_control_is_the_mean_local_update() -> None:
    """With momentum 0.9 and two steps from 0: w = 0.1, then v = 0.9 * -1 - 0.9 = -1.8, w = 0.28; c
    = -0.28/0.2 = -1.4. Weight decay 0.5: -1 and 0.5 * 0.1 - 0.9 = -0.85, w = 0.185, c = -0.925; so
    does FedProx with mu = 0.5, inside or outside. Option I sets the gradient at 0 in all of them:
    -1."""
    for algorithm, control in (
        (stack(fedavg(lr=0.1, epochs=2, momentum=0.9), Scaffold()), -1.4),
        (stack(fedavg(lr=0.1, epochs=2, weight_decay=0.5), Scaffold()), -0.925),
        (stack(fedavg(lr=0.1, epochs=2), FedProx(0.5), Scaffold()), -0.925),
        (stack(fedavg(lr=0.1, epochs=2), Scaffold(), FedProx(0.5)), -0.925),
        (stack(fedavg(lr=0.1, epochs=2, momentum=0.9), Scaffold("I")), -1.0),
    ):
        state = Rounds(algorithm, federation(1.0)).play()
        assert state.trees["control"]["w"].tolist() == pytest.approx([control])


def test_the_correction_is_outside_of_momentum_and_clipping() -> None:
    """Targets 1 and 3, lr 0.1, clip 0.5, momentum 0.9, one step: both go to 0.05; c = c_i = -0.5,
    no correction in round 2. With option I c_i = -1 and -3, c = -2: in round 2 client 0 steps by
    0.05 and is taken -0.1 * (-2 + 1) = 0.1 further, client 1 by 0.05 - 0.1: x = 0.05 + 0.05."""
    for option, control in (("II", -0.5), ("I", -1.95)):
        algorithm = stack(fedavg(lr=0.1, momentum=0.9, clip=0.5), Scaffold(option))
        game = Rounds(algorithm, federation(1.0, 3.0))
        game.play()
        state = game.play()
        assert game.w == pytest.approx([0.1])
        assert state.trees["control"]["w"].tolist() == pytest.approx([control])
    deltas = [r.trees["delta"]["w"].item() for r in game.replies]
    assert deltas == pytest.approx([0.15, -0.05])


def test_fednova_is_refused() -> None:
    with pytest.raises(StackError, match="FedNova rescales"):
        stack(fedavg(), FedNova(), Scaffold())


class Regression(LearningTask):
    """A small network in float64 with a bias and a nonlinearity, so that gradients are not
    constant.
    """

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        return (output.prediction - batch["y"]).square().mean()

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {}


def test_against_the_equations_written_out() -> None:
    """Five rounds, 2 of 4 clients of unequal size, three full-batch steps: Algorithm 1 of the
    paper, line by line, with autograd's gradients."""
    rng = torch.Generator().manual_seed(0)
    data = [
        Tensors(
            {
                "x": torch.randn(n, 3, generator=rng).double(),
                "y": torch.randn(n, 1, generator=rng).double(),
            }
        )
        for n in (5, 9, 7, 12)
    ]
    lr, steps, rounds = 0.2, 3, 5
    algorithm = stack(
        FedAvg(Regression(), lr=lr, batch=100, epochs=steps, device="cpu"), Scaffold("II")
    )
    start = algorithm.init().trees["model"]
    end = run(algorithm, Loopback(algorithm, Federation(data)), rounds, cohort=2)

    names = list(start)
    x = [start[n].clone() for n in names]
    c = [torch.zeros_like(t) for t in x]
    own = {i: [torch.zeros_like(t) for t in x] for i in range(4)}

    def gradient(weights: list[torch.Tensor], d: Tensors) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in weights]
        a, b, u, v = leaves
        out = torch.tanh(d.columns["x"] @ a.T + b) @ u.T + v
        return list(torch.autograd.grad((out - d.columns["y"]).square().mean(), leaves))

    for number in range(rounds):
        asked = sample(range(4), 2, 0, number)
        dx, dc, total = (
            [torch.zeros_like(t) for t in x],
            [torch.zeros_like(t) for t in x],
            sum(len(data[i]) for i in asked),
        )
        for i in asked:
            y = [t.clone() for t in x]
            for _ in range(steps):
                y = [
                    t - lr * (g - ci + cg)
                    for t, g, ci, cg in zip(y, gradient(y, data[i]), own[i], c)
                ]
            new = [ci - cg + (a - b) / (steps * lr) for ci, cg, a, b in zip(own[i], c, x, y)]
            dx = [d + len(data[i]) / total * (b - a) for d, a, b in zip(dx, x, y)]
            dc = [d + (n - o) / len(asked) for d, n, o in zip(dc, new, own[i])]
            own[i] = new
        x = [a + d for a, d in zip(x, dx)]
        c = [a + len(asked) / 4 * d for a, d in zip(c, dc)]
    for n, a, b in zip(names, x, c):
        torch.testing.assert_close(end.trees["model"][n], a, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(end.trees["control"][n], b, rtol=1e-10, atol=1e-12)

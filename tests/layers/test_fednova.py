from __future__ import annotations

import pytest
from by_hand import Rounds, fedavg, federation, targets

from fedlens import StackError, stack
from fedlens.layers import FedDyn, FedNova, FedProx, Scaffold
from fedlens.layers.fednova import response


def test_unequal_steps_by_hand() -> None:
    """lr 0.1, batches of 2. Client 0: two samples at 1, one step, update 0.1. Client 1: four
    samples at 3, two steps, update 0.57, per step 0.285. p = (1/3, 2/3), tau_eff = 5/3: x = 5/3
    (0.1 + 2 * 0.285) / 3 = 0.37222. FedAvg would give (0.1 + 2 * 0.57) / 3 = 0.41333."""
    holdings = federation(targets(1.0, 1.0), targets(3.0, 3.0, 3.0, 3.0))
    game = Rounds(stack(fedavg(lr=0.1, batch=2), FedNova()), holdings)
    state = game.play()
    assert game.w == pytest.approx([5 / 3 * 0.67 / 3]) and state.scalars[
        "effective_steps"
    ] == pytest.approx(5 / 3)
    plain = Rounds(fedavg(lr=0.1, batch=2), holdings)
    plain.play()
    assert plain.w == pytest.approx([0.41333], abs=1e-5)


def test_equal_steps_are_fedavg() -> None:
    a, b = (
        Rounds(stack(fedavg(lr=0.1, epochs=3, momentum=0.9), *extra), federation(1.0, 3.0, 7.0))
        for extra in ((), (FedNova(),))
    )
    a.play()
    b.play()
    assert a.w == pytest.approx(b.w)


def test_size_of_local_work_by_hand() -> None:
    """Two steps. Plain: 1 + 1. Momentum 0.9: velocities 1 and 1.9, sum 2.9. FedProx with lr mu =
    0.1: 1, then 1 * 0.9 + 1 = 1.9. Both: velocities 1 and 0.9 + 1 - 0.1 = 1.8, sum 2.8."""
    assert response(2, 0.1, 0.0, 0.0) == 2
    assert response(2, 0.1, 0.9, 0.0) == pytest.approx(2.9)
    assert response(2, 0.1, 0.0, 1.0) == pytest.approx(1.9)
    assert response(2, 0.1, 0.9, 1.0) == pytest.approx(2.8)


def test_the_closed_forms_of_the_paper() -> None:
    """Momentum: (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho). Proximal: (1 - (1 - lr mu)^tau)
    / (lr mu).
    """
    tau, rho, q = 17, 0.9, 0.05 * 0.4
    assert response(tau, 0.05, rho, 0.0) == pytest.approx(
        (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    )
    assert response(tau, 0.05, 0.0, 0.4) == pytest.approx((1 - (1 - q) ** tau) / q)


@pytest.mark.parametrize(
    ("layers", "options", "why"),
    [
        ((FedNova(),), {"optimizer": "adam"}, "FedNova holds for SGD"),
        ((FedNova(), FedProx()), {}, "put FedProx before FedNova"),
        (
            (Scaffold(), FedNova()),
            {},
            "FedNova rescales the updates that Scaffold's memory is made of",
        ),
        ((FedNova(), FedDyn()), {}, "FedNova rescales them"),
    ],
)
def test_refused(layers: tuple[FedNova, ...], options: dict[str, str], why: str) -> None:
    with pytest.raises(StackError, match=why):
        stack(fedavg(**options), *layers)

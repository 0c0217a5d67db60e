"""Epsilons against closed forms, against dp-accounting itself and against another accountant."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from prv_grid import FILE, prv_epsilon

from fedlens.core.privacy import Mechanism
from fedlens.trust import accounting
from fedlens.trust.accounting import (
    Account,
    BudgetSpent,
    Journal,
    affordable,
    epsilon_of,
    noise_for,
    planned,
    statement_of,
)

dp_accounting = pytest.importorskip("dp_accounting")


def mechanism(**more: Any) -> Mechanism:
    usual: dict[str, Any] = {
        "unit": "example",
        "noise": 1.0,
        "rate": 0.02,
        "sampling": "poisson",
        "steps": 1,
        "delta": 1e-5,
    }
    return Mechanism(**{**usual, **more})


def exact_delta(epsilon: float, noise: float) -> float:
    """Of one Gaussian mechanism (Balle and Wang, 2018, theorem 5)."""
    phi = NormalDist().cdf
    a, b = 1 / (2 * noise), epsilon * noise
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (3.0, 9), (10.0, 50)])
def test_without_sampling_it_is_the_analytic_gaussian(noise: float, rounds: int) -> None:
    """T sums of multiplier z are one of z / sqrt T: the exact delta at our epsilon is the wanted
    one, never above it."""
    cost = mechanism(noise=noise, rate=1.0, sampling="none", unit="client")
    epsilon = epsilon_of([(cost, rounds)], 1e-5)
    found = exact_delta(epsilon, noise / math.sqrt(rounds))
    assert found <= 1e-5 and found == pytest.approx(1e-5, rel=0.05)


def rows() -> list[tuple[float, float, int, float, float]]:
    return [tuple(row) for row in json.loads(Path(FILE).read_text())["rows"]]


@pytest.mark.parametrize(("noise", "rate", "steps", "low", "high"), rows())
def test_the_second_accountant_agrees(
    noise: float, rate: float, steps: int, low: float, high: float
) -> None:
    """PRV gives bounds below and above; PLD's upper bound lies between them, or a hair above, and
    RDP's never below the lower one."""
    cost = [(mechanism(noise=noise, rate=rate, steps=steps), 1)]
    pld, rdp = epsilon_of(cost, 1e-5), epsilon_of(cost, 1e-5, "rdp")
    assert low <= pld <= high + 0.01 * high + 0.01
    assert pld <= rdp * (1 + 1e-3) + 1e-3


def test_the_grid_is_what_the_second_accountant_says() -> None:
    pytest.importorskip("prv_accountant")
    noise, rate, steps, low, high = rows()[len(rows()) // 2]
    assert prv_epsilon(noise, rate, steps) == pytest.approx((low, high), rel=1e-6)


def test_it_is_dp_accountings_own_figure() -> None:
    """To the last digit with the same steps and orders; with the library's ten times finer steps
    it is hardly less."""
    event = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.1))
    cost = [(mechanism(noise=1.1, steps=20), 30)]

    def theirs(accountant: Any) -> float:
        accountant.compose(event, 600)
        return float(accountant.get_epsilon(1e-5))

    rdp = dp_accounting.rdp.RdpAccountant(accounting.ORDERS)
    assert epsilon_of(cost, 1e-5, "rdp") == theirs(rdp)
    kind = dp_accounting.pld.PLDAccountant
    pld = kind(value_discretization_interval=accounting.DISCRETE)
    assert epsilon_of(cost, 1e-5) == pytest.approx(theirs(pld), rel=1e-6)
    fine = theirs(kind())
    assert fine <= epsilon_of(cost, 1e-5) * (1 + 1e-6) and epsilon_of(cost, 1e-5) < 1.002 * fine


def test_a_published_figure() -> None:
    """Abadi et al. (2016), section 5: q = .01, sigma = 4, 10,000 steps, delta 1e-5: 1.26 by the
    moments accountant. What is known today may only be below."""
    cost = [(mechanism(noise=4.0, rate=0.01, steps=10_000), 1)]
    rdp = epsilon_of(cost, 1e-5, "rdp")
    assert epsilon_of(cost, 1e-5) <= rdp <= 1.26
    assert rdp > 0.8


def test_a_cohort_of_fixed_size_is_about_replacing() -> None:
    """Twice the sensitivity: at q = 1 it is the unsampled sum with half the noise; a smaller q
    costs less, and more than Poisson sampling of the same share, which is about adding one."""
    fixed = [mechanism(noise=2.0, rate=q, sampling="fixed", unit="client") for q in (0.1, 0.01)]
    large, small = (epsilon_of([(m, 100)], 1e-5) for m in fixed)
    whole = mechanism(noise=1.0, rate=1.0, sampling="none", unit="client")
    assert small < large < epsilon_of([(whole, 100)], 1e-5)
    poisson = mechanism(noise=2.0, rate=0.1, unit="client")
    assert epsilon_of([(poisson, 100)], 1e-5) < large
    assert "replace one" in statement_of(fixed[0], 100).sentence()
    assert "RDP" in statement_of(fixed[0], 100).accountant


def test_composition_does_not_depend_on_the_order() -> None:
    a, b = mechanism(noise=1.0), mechanism(noise=2.0, rate=0.05)
    assert epsilon_of([(a, 50), (b, 70)], 1e-5) == epsilon_of([(b, 70), (a, 50)], 1e-5)
    assert epsilon_of([(a, 50)], 1e-5) < epsilon_of([(a, 50), (b, 70)], 1e-5)
    assert epsilon_of([], 1e-5) == 0


@pytest.mark.parametrize("wanted", [0.5, 8.0])
def test_noise_for_an_epsilon_is_enough_and_hardly_more(wanted: float) -> None:
    cost = mechanism(steps=50)
    noise = noise_for(wanted, cost, 20)
    found = epsilon_of([(mechanism(noise=noise, steps=50), 20)], 1e-5)
    assert wanted * 0.98 < found <= wanted


def test_a_statement_says_everything() -> None:
    told = statement_of(mechanism(seeded=False), 100).sentence()
    for word in ("epsilon", "delta 1e-05", "add or remove one", "Poisson", "q = 0.02", "PLD"):
        assert word in told
    assert "operating system" in told
    assert "protects nobody" in statement_of(mechanism(), 100).sentence()


# -- accounts --------------------------------------------------------------------------------------


class Noisy:
    """Stands in for a stack with a layer that has noise."""

    protects, hides_singles, where = "example", False, "site"

    def __init__(self, **more: Any) -> None:
        self.more = more

    def parts(self) -> list[Any]:
        return [self]

    def mechanism(self, examples: int, population: int, cohort: int) -> Mechanism:
        return mechanism(rate=10 / examples, steps=examples // 10, **self.more)


def account(sizes: dict[int, int], **more: Any) -> Account:
    stack: Any = Noisy(**more)
    return Account(stack, len(sizes), len(sizes), sizes.get)


def test_a_run_costs_what_its_costliest_site_spent() -> None:
    """Examples of different sites are different ones: the smaller site has the larger q."""
    here = account({0: 100, 1: 1000})
    for _ in range(5):
        here.charge([0, 1])
    here.charge([1])
    spent = here.by_client()
    assert spent[0] == epsilon_of([(mechanism(rate=0.1, steps=10), 5)], 1e-5)
    assert spent[1] == epsilon_of([(mechanism(rate=0.01, steps=100), 6)], 1e-5)
    assert here.epsilon() == max(spent.values()) == spent[0]
    assert planned(here, 6).epsilon() > spent[0]


def test_the_costliest_is_found_by_the_accountant_that_is_quoted() -> None:
    """RDP finds client 1 dearer (49.5 against 48.9), PLD client 0 (45 against 40)."""
    here = account({0: 10, 1: 20}, noise=0.7)
    for _ in range(19):
        here.charge([0, 1])
    here.charge([1])
    spent = here.by_client()
    worst = here.costliest()
    assert worst is not None and worst[0].rate == 1.0
    assert here.epsilon() == max(spent.values()) == spent[0] > spent[1] + 3
    limited = account({0: 10, 1: 20}, noise=0.7, max_epsilon=(spent[0] + spent[1]) / 2)
    limited.asked = Counter({0: 18, 1: 19})
    with pytest.raises(BudgetSpent):
        limited.charge([0, 1])


def test_an_account_refuses_before_it_is_overdrawn() -> None:
    limit = epsilon_of([(mechanism(rate=0.1, steps=10), 4)], 1e-5) + 1e-9
    here = account({0: 100}, max_epsilon=limit)
    for _ in range(4):
        here.charge([0])
    with pytest.raises(BudgetSpent, match=r"another round would cost epsilon .* max_epsilon"):
        here.charge([0])
    assert here.asked == Counter({0: 4}) and here.epsilon() <= limit
    cost = here.mechanism(0)
    assert cost is not None and affordable(cost, 99) == 4


def test_a_kill_gives_nothing_back(tmp_path: Path) -> None:
    """Round 1 was asked twice, and the last line is torn. Where noise is drawn anew each time both
    count; where it follows from the seed, the same bytes were made again."""
    path = tmp_path / "privacy.jsonl"
    journal = Journal(path, seeded=False)
    for number in (0, 1, 1):
        journal.write(number, [0], {0: 100})
    path.write_text(path.read_text() + '{"round": 2, "as')
    for seeded, spent in ((False, 3), (True, 2)):
        again, here = Journal(path, seeded), account({0: 100})
        again.replay(here)
        assert here.asked[0] == here.rounds == spent
        assert again.knows(1) == seeded and not again.knows(2)
    journal.write(2, [0], {0: 50, 1: 7})
    again = Journal(path, False)
    again.replay(here, done=3)
    assert here.asked[0] == 4 and again.sizes == {0: {50, 100}}
    with pytest.raises(ValueError, match="says nothing of round 3"):
        again.replay(here, done=4)


def test_under_masks_a_cohort_is_no_secret() -> None:
    stack: Any = Noisy(unit="client", noise=5.0)
    stack.hides_singles = True
    cost = Account(stack, 100, 10, lambda _: 100).mechanism(0)
    assert cost is not None and (cost.sampling, cost.rate) == ("none", 1.0)
    assert accounting.private_part(stack) is stack

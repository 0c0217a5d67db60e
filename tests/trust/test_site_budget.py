"""A site's own budget: charged in its ledger before a byte leaves, over all jobs, and enforced
whatever the server says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import GroupToy
from trust.test_guard import Place

from fedlens import stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Algorithm
from fedlens.core.privacy import Mechanism
from fedlens.layers import DPSGD, PrivateMean
from fedlens.trust.accounting import epsilon_of

pytest.importorskip("dp_accounting")


def noisy() -> Algorithm:
    return stack(FedAvg(GroupToy(), batch=8), DPSGD(max_epsilon=100.0))


def spent(rounds: int) -> float:
    """20 examples, batches of 8, three steps a round."""
    return epsilon_of([(Mechanism("example", 1.0, 8 / 20, "poisson", 3, 1e-5), rounds)], 1e-5)


def policy(rounds: int) -> str:
    return f"max_epsilon = {(spent(rounds) + spent(rounds + 1)) / 2}\n"


def ask(place: Any, round: int) -> tuple[str, bool]:
    """What is said beside the reply, and whether there was one."""
    fields, pieces = place.ask(round)
    return str(fields.get("detail", "")), bool(pieces)


def test_a_site_stops_at_its_own_epsilon(tmp_path: Path) -> None:
    """Two rounds fit. The third is refused, as is any after it, and costs nothing."""
    place = Place(tmp_path, noisy().deployed(), policy(2))
    assert [ask(place, n) for n in range(4)] == [
        ("", True),
        ("", True),
        ("max_epsilon", False),
        ("max_epsilon", False),
    ]
    assert any("epsilon would be" in text for text in place.said)
    charged = [line["privacy"] for line in place.lines if "privacy" in line]
    assert [(c["unit"], c["noise"], c["steps"], c["rate"]) for c in charged] == [
        ("example", 1.0, 3, 0.4)
    ] * 2
    assert not place.verify().faults


def test_a_kill_or_a_round_asked_again_gives_nothing_back(tmp_path: Path) -> None:
    """The server asks for round 0 twice, because the first reply got lost: each time noise is
    drawn anew, so each time it costs. A new process reads the ledger."""
    from fedlens.engines.flower import site

    place = Place(tmp_path, noisy().deployed(), policy(2))
    assert ask(place, 0)[1] and ask(place, 0)[1]
    site._guards.clear()
    assert ask(place, 0) == ("max_epsilon", False)


def test_noise_of_a_seed_is_no_noise(tmp_path: Path) -> None:
    place = Place(tmp_path, noisy(), policy(2))
    assert ask(place, 0) == ("max_epsilon", False)
    assert any("no noise of this site's own" in text for text in place.said)


def test_without_noise_nothing_leaves(tmp_path: Path) -> None:
    place = Place(tmp_path, FedAvg(GroupToy(), batch=8), policy(2))
    assert ask(place, 0) == ("max_epsilon", False)


def test_no_metric_leaves_beside_an_epsilon(tmp_path: Path) -> None:
    place = Place(tmp_path, noisy().deployed(), policy(2))
    fields, pieces = place.ask(0, evaluate=True)
    assert (fields["lost"], fields["detail"], pieces) == ("policy", "max_epsilon", [])
    assert ask(place, 0) == ("", True)


def test_noise_that_the_server_adds_is_no_noise_of_the_sites(tmp_path: Path) -> None:
    """What leaves has none, and the server sees it so."""
    mean = stack(FedAvg(GroupToy(), batch=8), PrivateMean(noise=100.0, max_epsilon=1.0))
    place = Place(tmp_path, mean.deployed(), policy(2))
    assert ask(place, 0) == ("max_epsilon", False)
    assert any("the server adds the noise" in text for text in place.said)

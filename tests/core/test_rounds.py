"""Who is asked in a round."""

from __future__ import annotations

import pytest
from toy import Toy, toy_federation

from fedlens import run
from fedlens.algorithms import FedAvg
from fedlens.core.rounds import sample
from fedlens.engines.loopback import Loopback


def test_a_cohort_is_a_pure_function_of_seed_and_round() -> None:
    ids = [2, 3, 5, 7, 11]
    asked = [sample(ids, 3, 0, number) for number in range(8)]
    assert (
        asked == [sample(ids, 3, 0, number) for number in range(8)]
        and len({tuple(a) for a in asked}) > 1
    )
    assert all(a == sorted(set(a)) and len(a) == 3 and set(a) <= set(ids) for a in asked)
    assert sample(ids[::-1], None, 0, 0) == sample(ids[::-1], 5, 0, 0) == ids


@pytest.mark.parametrize("cohort", [0, -1, 7, 99])
def test_a_cohort_of_nobody_or_of_more_than_there_are_is_refused(cohort: int) -> None:
    algorithm = FedAvg(Toy())
    with pytest.raises(
        ValueError, match=f"a cohort is between 1 and the number of clients, 6, not {cohort}"
    ):
        run(algorithm, Loopback(algorithm, toy_federation(6)), 1, cohort=cohort)

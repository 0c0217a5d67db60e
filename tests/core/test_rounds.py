"""Who is asked in a round, and whose metrics count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from toy import Toy, toy_federation

from fedlens import Message, Round, run
from fedlens.algorithms import FedAvg
from fedlens.core.replies import Arrival, Heard
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


class Measured(Loopback):
    """Clients' metrics are these, by client."""

    metrics: Mapping[int, Mapping[str, float]]

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        for item in super().exchange(message, ids, heard):
            if message.header.evaluate and isinstance(item, Message | Heard):
                item = replace(item, scalars={"examples": 5.0, **self.metrics[item.sender]})
            yield item


def measured(*metrics: Mapping[str, float]) -> Round:
    """The only round of a run whose clients measure this."""
    seen: list[Round] = []
    algorithm = FedAvg(Toy(), batch=8)
    engine = Measured(algorithm, toy_federation(len(metrics)))
    engine.metrics = dict(enumerate(metrics))
    note = lambda _, r: seen.append(r)  # noqa: E731
    run(algorithm, engine, 1, evaluate_every=1, personal=True, after_round=note)
    return seen[0]


@pytest.mark.parametrize("name", ["accuracy_worst", "accuracy_spread"])
def test_a_metric_cannot_pass_for_the_worst_of_another(name: str) -> None:
    """Of 0.25, 0.5 and 0.75: mean 0.5, worst 0.25, deviation (1/24)^1/2. Client 1 adds a number
    that is called as the server calls one of these: it is named, and nothing of it counts."""
    honest = [{"accuracy": a} for a in (0.25, 0.5, 0.75)]
    found = measured(honest[0], {"accuracy": 1.0, name: 1.0}, *honest[1:])
    assert found.metrics == {
        "client_accuracy": 0.5,
        "client_accuracy_spread": pytest.approx(24**-0.5),
        "client_accuracy_worst": 0.25,
    }
    assert [(x.sender, x.refused) for x in found.unevaluated] == [(1, True)]
    assert repr(name) in found.unevaluated[0].reason


def test_nor_can_another_make_one_up_of_it() -> None:
    """What clients call "accuracy_worst" themselves is not overwritten by one client's "accuracy".
    Where as many have both, the worst of all clients is what it is called."""
    found = measured({"accuracy_worst": 0.5}, {"accuracy": 0.0}, {"accuracy_worst": 0.5})
    assert found.metrics["client_accuracy_worst"] == 0.5
    assert "client_accuracy" not in found.metrics
    assert [x.sender for x in found.unevaluated] == [1]
    both = {"accuracy": 0.5, "accuracy_worst": 0.125}
    found = measured(both, both)
    assert found.metrics["client_accuracy_worst"] == 0.5 and not found.unevaluated


def test_metrics_that_only_some_have_count() -> None:
    """Per-class figures exist where every class is held."""
    found = measured({"accuracy": 0.5}, {"accuracy": 0.5, "accuracy_worst_class": 0.25})
    assert found.metrics["client_accuracy_worst_class"] == 0.25 and not found.unevaluated

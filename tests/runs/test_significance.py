from __future__ import annotations

import itertools

import pytest

from fedlens.runs.significance import (
    compare_to_best,
    holm,
    in_sentences,
    seeds_needed,
    signed_rank,
)
from fedlens.runs.table import best_algorithms


def test_the_signed_rank_test_by_counting() -> None:
    """Six differences of one sign: two of the 2^6 sign patterns are as extreme, 2 / 64. With ranks
    1..5 and the smallest against the others, W = 1: patterns with a sum of at most 1 or at least 14
    are {}, {1} and their opposites, 4 / 32."""
    assert signed_rank([1, 2, 3, 4, 5, 6]) == pytest.approx(2 / 64)
    assert signed_rank([-1, 2, 3, 4, 5]) == pytest.approx(4 / 32)
    ranks, seen = [1, 2, 3, 4, 5, 6, 7], 1 + 5
    sums = [
        sum(r for r, up in zip(ranks, signs, strict=True) if up)
        for signs in itertools.product((0, 1), repeat=7)
    ]
    extreme = sum(min(s, 28 - s) <= seen for s in sums)
    assert signed_rank([-1, 2, 3, 4, -5, 6, 7]) == pytest.approx(extreme / 2**7)
    assert signed_rank([0, 0, 0]) == 1.0


def test_holm_by_hand() -> None:
    """0.01 times 3, 0.02 times 2 (0.04), 0.5 once; 0.02 among 0.01, 0.011: 0.03, 0.03, 0.03."""
    assert holm({"a": 0.02, "b": 0.5, "c": 0.01}) == pytest.approx({"c": 0.03, "a": 0.04, "b": 0.5})
    assert holm({"a": 0.01, "b": 0.011, "c": 0.02}) == pytest.approx(
        {"a": 0.03, "b": 0.03, "c": 0.03}
    )


def test_how_many_seeds_it_takes() -> None:
    """One rival: 2 / 2^6 = 0.031. Two: 2 * 2 / 2^7 = 0.031 (with six 0.063)."""
    assert [seeds_needed(k) for k in (1, 2, 3)] == [6, 7, 7]


BASE = [0.50, 0.52, 0.48, 0.51, 0.49, 0.53, 0.47]


def test_wins_ties_and_what_cannot_be_told() -> None:
    ahead = [b + d for b, d in zip(BASE, (0.01, 0.02, 0.03, 0.015, 0.025, 0.035, 0.04))]
    close = [b + d for b, d in zip(ahead, (0.01, -0.012, 0.013, -0.014, 0.015, -0.03, 0.011))]
    found = compare_to_best({"fedavg": BASE, "ditto": ahead, "moon": close}, "accuracy")
    assert found is not None and found["best"] == "ditto"
    verdicts = {n: row["verdict"] for n, row in found["rivals"].items()}
    assert verdicts == {"fedavg": "behind", "moon": "tie"}
    lines = in_sentences(found)
    assert lines[0].startswith("ditto is ahead of fedavg (+0.0250 accuracy, p = 0.031)")
    assert lines[1].startswith("ditto and moon tie (+0.00")
    few = compare_to_best({"fedavg": BASE[:3], "ditto": ahead[:3]}, "accuracy")
    assert in_sentences(few)[0] == "3 seeds cannot tell ditto from fedavg: it takes 6 at least"
    assert compare_to_best({"fedavg": [0.5], "ditto": [0.6]}, "accuracy") is None
    same = compare_to_best({"a": BASE[:3], "b": BASE[:3]}, "loss")
    assert same is not None and same["rivals"]["b"]["verdict"] == "tie"


def test_what_is_better_when_smaller() -> None:
    lower = [b - 0.01 * k for k, b in enumerate(BASE, 1)]
    found = compare_to_best({"a": BASE, "b": lower}, "loss")
    assert found is not None and found["best"] == "b"


def test_ties_share_the_bold_type() -> None:
    rows = {
        n: {"metrics": {"accuracy": {"mean": m, "values": []}}}
        for n, m in {"a": 0.5, "b": 0.6, "c": 0.59}.items()
    }
    rivals = {"a": {"verdict": "behind"}, "c": {"verdict": "tie"}}
    table = {
        "algorithms": rows,
        "test": {"metric": "accuracy", "best": "b", "rivals": rivals},
    }
    assert best_algorithms(table, "accuracy", True) == {"b", "c"}
    assert best_algorithms({"algorithms": rows}, "accuracy", True) == {"b"}

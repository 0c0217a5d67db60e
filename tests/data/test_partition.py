"""Partitioners: what must hold for any labels (hypothesis), and what can be said of particular
ones.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.data.partition import (
    classes_per_client,
    dirichlet,
    iid,
    natural,
    one_group,
    quantity,
    shards,
    split_by_rule,
    strengths,
    top_up,
)
from fedlens.data.source import DataError

RULES = ("iid", "dirichlet", "shards", "classes", "one_group", "quantity", "natural")
labels_and_clients = st.integers(2, 8).flatmap(
    lambda classes: st.tuples(
        st.lists(st.integers(0, classes - 1), min_size=40, max_size=120).map(
            lambda rest: [*range(classes), *rest]
        ),
        st.integers(classes, 10),
    )
)


@settings(deadline=None, max_examples=40)
@given(
    labels_and_clients,
    st.sampled_from(RULES),
    st.floats(0.02, 5),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_everybody_gets_something_and_everything_goes_to_one(
    given_, rule, alpha, per_client, seed
) -> None:  # type: ignore[no-untyped-def]
    """Disjoint, complete, nobody empty: for every rule and any labels; natural groups are given so
    that there are enough of them.
    """
    labels, clients = given_
    groups = [k % (clients + 3) for k in range(len(labels))] if rule == "natural" else None
    per_client = min(per_client, len(set(labels)))
    parts, _ = split_by_rule(
        rule, labels, clients, seed, alpha=alpha, per_client=per_client, groups=groups
    )
    assert len(parts) == clients and all(len(p) for p in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@settings(deadline=None, max_examples=20)
@given(labels_and_clients, st.sampled_from(RULES), st.integers(0, 99))
def test_the_same_seed_gives_the_same_split(given_, rule, seed) -> None:  # type: ignore[no-untyped-def]
    labels, clients = given_
    groups = [k % (clients + 3) for k in range(len(labels))] if rule == "natural" else None
    a, b = (split_by_rule(rule, labels, clients, seed, groups=groups)[0] for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b))


@settings(deadline=None, max_examples=20)
@given(labels_and_clients, st.integers(0, 99))
def test_groups_are_never_cut_or_mixed(given_, seed) -> None:  # type: ignore[no-untyped-def]
    labels, clients = given_
    y, rng = np.array(labels), np.random.default_rng(seed)
    assert all(len(set(y[p])) == 1 for p in one_group(y, clients, rng))
    groups = np.array([k % (clients + 3) for k in range(len(labels))])
    assert sum(len(set(groups[p])) for p in natural(groups, clients, rng)) == clients + 3


BALANCED = np.repeat(np.arange(10), 100)


def test_iid_sizes_differ_by_one() -> None:
    assert sorted(len(p) for p in iid(103, 10, np.random.default_rng(0))) == [10] * 7 + [11] * 3


def test_dirichlet_goes_from_skewed_to_even() -> None:
    """Shares of a client's largest class: near 1 for alpha 0.01, near 1/10 for alpha 1000."""

    def largest(alpha: float) -> float:
        parts = dirichlet(BALANCED, 10, alpha, np.random.default_rng(0), least=1)
        return float(
            np.mean([np.bincount(BALANCED[p], minlength=10).max() / len(p) for p in parts])
        )

    assert largest(0.01) > 0.6 > largest(0.5) > largest(1000)
    assert largest(1000) == pytest.approx(0.1, abs=0.02)


def test_dirichlet_stops_feeding_the_full() -> None:
    """Who holds N / n = 100 samples gets no more: one more class of 100 is the most anybody can
    have on top of 99.
    """
    parts = dirichlet(BALANCED, 10, 0.05, np.random.default_rng(3), least=10)
    assert max(len(p) for p in parts) <= 199 and min(len(p) for p in parts) >= 10


def test_dirichlet_gives_up_on_the_impossible_and_says_so() -> None:
    """Two classes over 8 clients with alpha 0.001: hardly anybody gets anything by itself. It ends,
    nobody is empty, and the notes name them."""
    parts, notes = split_by_rule("dirichlet", np.repeat([0, 1], 60), 8, 0, alpha=0.001)
    assert (
        min(len(p) for p in parts) >= 10
        and notes
        and "topped up to 10 from the largest" in notes[0]
    )


def test_shards_by_hand() -> None:
    """Four classes of 10, 10 clients with 2 shards each: 20 shards of 2, every one within a class,
    so at most 2 classes each, 4 samples.
    """
    y = np.repeat(np.arange(4), 10)
    parts = shards(y, 10, 2, np.random.default_rng(0))
    assert all(len(p) == 4 and len(set(y[p])) <= 2 for p in parts)


def test_classes_per_client_is_exact_and_even() -> None:
    """Ten classes, 20 clients with 3 each: 60 seats, 6 clients per class, 16 or 17 samples of each
    of the three.
    """
    parts = classes_per_client(BALANCED, 20, 3, np.random.default_rng(0))
    counts = np.array([np.bincount(BALANCED[p], minlength=10) for p in parts])
    assert ((counts > 0).sum(1) == 3).all() and ((counts > 0).sum(0) == 6).all()
    assert set(counts[counts > 0]) <= {16, 17}


def test_quantity_skew_keeps_the_classes_even() -> None:
    parts = quantity(len(BALANCED), 5, 0.5, np.random.default_rng(1), least=10)
    sizes = [len(p) for p in parts]
    assert max(sizes) > 3 * min(sizes)
    big = parts[int(np.argmax(sizes))]
    assert np.bincount(BALANCED[big], minlength=10).min() > 0.05 * len(big)


def test_natural_balances_sizes() -> None:
    """Groups of 6, 5, 4, 3, 2 to two clients, largest first to whoever holds least: 6 + 3 + 2 and 5
    + 4.
    """
    groups = np.repeat(["a", "b", "c", "d", "e"], [6, 5, 4, 3, 2])
    assert sorted(len(p) for p in natural(groups, 2, np.random.default_rng(0))) == [9, 11]


def test_top_up_by_hand() -> None:
    """Sizes 0, 5, 1 with at least 2: two from the five (then 3, 2), one more from whoever has
    most.
    """
    parts, notes = top_up([np.array([], dtype=int), np.arange(5), np.array([5])], 2)
    assert [len(p) for p in parts] == [2, 2, 2] and len(notes) == 2
    assert sorted(np.concatenate(parts)) == list(range(6))


def test_strengths_by_hand() -> None:
    assert strengths(5, 8.0) == [0, 2, 4, 6, 8] and strengths(1, 8.0) == [0]


@pytest.mark.parametrize(
    ("rule", "clients", "options", "why"),
    [
        ("iid", 0, {}, "at least one client"),
        ("iid", 2000, {}, "1000 samples cannot serve 2000 clients"),
        ("dirichlet", 5, {"alpha": 0.0}, "alpha must be positive"),
        ("shards", 600, {"per_client": 2}, "cannot be cut into 600 x 2 shards"),
        ("classes", 5, {"per_client": 11}, "between 1 and the number of classes"),
        ("classes", 3, {"per_client": 2}, "cannot cover 10 classes"),
        ("one_group", 5, {}, "at least 10 clients for 10 groups"),
        ("natural", 11, {}, "10 groups cannot serve 11 clients"),
        ("dirichlett", 5, {}, "unknown partition 'dirichlett'"),
    ],
)
def test_bad_input_is_one_sentence(rule, clients, options, why) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=why):
        split_by_rule(rule, BALANCED, clients, 0, **options)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core.message import Message
from fedlens.core.replies import CHUNK, Fold, Lost, Replies, Weightless, gather, refuse


def reply(sender: int, value: float, weight: float = 1.0) -> Message:
    return Message(
        {"delta": {"w": torch.full((3,), value)}},
        {"loss": value},
        {"delta": {"mean": weight}},
        sender,
    )


def test_weighted_mean_by_hand() -> None:
    """Values 1, 2, 4 with weights 1, 1, 2: (1 + 2 + 8) / 4 = 2.75, total weight 4."""
    replies, _ = gather([reply(5, 2.0), reply(9, 4.0, 2.0), reply(1, 1.0)], [1, 5, 9])
    assert torch.equal(replies.mean("delta")["w"], torch.full((3,), 2.75))
    assert replies.weight("delta") == 4
    assert replies.senders == [1, 5, 9] and replies.values("loss") == [1, 2, 4]


def test_each_tree_has_its_own_weights() -> None:
    """delta by 1 and 3: (10 + 3 * 20) / 4 = 17.5; control alike: (1 + 2) / 2 = 1.5."""
    a = Message(
        {"delta": {"w": torch.tensor(10.0)}, "control": {"c": torch.tensor(1.0)}},
        {},
        {"delta": {"mean": 1}},
        0,
    )
    b = Message(
        {"delta": {"w": torch.tensor(20.0)}, "control": {"c": torch.tensor(2.0)}},
        {},
        {"delta": {"mean": 3}},
        1,
    )
    replies, _ = gather([a, b], [0, 1])
    assert replies.mean("delta")["w"] == 17.5 and replies.mean("control")["c"] == 1.5


def test_two_means_are_blended_by_hand() -> None:
    """Values 1 and 3: alike 2, by weights 3 and 1 it is (3 + 3) / 4 = 1.5; half of each 1.75, a
    quarter of the second 1.875. Folded in a worker or from single replies."""
    pair = [
        Message({"delta": {"w": torch.full((3,), v)}}, sender=p) for p, v in enumerate((1.0, 3.0))
    ]
    pair = [m.weigh("delta", uniform=1.0, loss=w) for m, w in zip(pair, (3.0, 1.0), strict=True)]
    fold = Fold()
    for m in pair:
        fold.add(m.sender, m)
    for replies in (gather(pair, range(2))[0], gather([fold.nodes], range(2))[0]):
        for share, value in ((0.0, 2.0), (0.25, 1.875), (0.5, 1.75), (1.0, 1.5)):
            assert torch.equal(
                replies.blend("delta", "uniform", "loss", share)["w"], torch.full((3,), value)
            )


def test_a_client_that_weighs_nothing_moves_nothing() -> None:
    """Weights 0, 2, 0 of values 7, 5, 9 give 5; all zero is an error."""
    replies, _ = gather([reply(0, 7.0, 0.0), reply(1, 5.0, 2.0), reply(2, 9.0, 0.0)], range(3))
    assert torch.equal(replies.mean("delta")["w"], torch.full((3,), 5.0))
    with pytest.raises(Weightless, match="sum to zero"):
        gather([reply(0, 7.0, 0.0)], [0])[0].mean("delta")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31), st.floats(0, 0.6))
def test_the_bits_do_not_depend_on_who_sums(n: int, workers: int, seed: int, absent: float) -> None:
    """Any split over any number of workers, in any order, with any replies missing, gives the bits
    of the single replies.
    """
    rng = torch.Generator().manual_seed(seed)
    there = [p for p in range(n) if float(torch.rand((), generator=rng)) >= absent] or [0]
    messages = {p: reply_of(p, rng) for p in there}
    alone, _ = gather(messages.values(), range(n))
    folds = [Fold() for _ in range(workers)]
    for k in torch.randperm(len(there), generator=rng).tolist():
        folds[int(torch.randint(workers, (), generator=rng))].add(there[k], messages[there[k]])
    scalars = [Message(scalars=m.scalars, sender=m.sender) for m in messages.values()]
    together, _ = gather([*(f.nodes for f in folds), *scalars], range(n))
    for name in ("uniform", "loss"):
        assert torch.equal(alone.mean("delta", name)["w"], together.mean("delta", name)["w"])
        assert alone.weight("delta", name) == together.weight("delta", name)


def reply_of(p: int, rng: torch.Generator) -> Message:
    m = Message({"delta": {"w": torch.randn(50, generator=rng)}}, {"loss": 1.0}, sender=p)
    return m.weigh("delta", uniform=1.0, loss=float(torch.rand((), generator=rng)) + 0.1)


@pytest.mark.parametrize("size", [1, 7, 31, 33, 1000, 1003, CHUNK - 1, CHUNK + 5, 2 * CHUNK + 17])
def test_chunks_whole_arrays_and_threads_round_alike(size: int) -> None:
    """Joining must round alike in vector code and in the tail, or a chunk's end would show in the
    bits.
    """
    rng = torch.Generator().manual_seed(size)
    messages = [
        Message({"delta": {"w": torch.randn(size, generator=rng)}}, sender=p).weigh(
            "delta", 0.3 + p
        )
        for p in range(5)
    ]
    chunked, fold = gather(messages, range(5))[0].mean("delta")["w"], Fold()
    torch.set_num_threads(2)
    for m in messages:
        fold.add(m.sender, m)
    torch.set_num_threads(1)
    total = fold.total()["delta", "mean"]
    assert torch.equal(chunked, total.tree["w"])


def test_replies_are_never_written_to() -> None:
    messages = [reply(p, 1.0 + p) for p in range(4)]
    fold = Fold()
    for m in messages:
        fold.add(m.sender, m)
    fold.total()
    assert [float(m.trees["delta"]["w"][0]) for m in messages] == [1, 2, 3, 4]


def test_replies_from_a_wire_are_folded_where_they_lie() -> None:
    """Four owned replies: three joins, no array beside the four, the same bits as with borrowed
    ones. Two named weights need two places.
    """

    def reply(k: int, **weights: float) -> Message:
        return Message({"delta": {"w": torch.arange(5.0) + k}}, sender=k).weigh("delta", **weights)

    for weights in ({"mean": 2.0}, {"uniform": 1.0, "loss": 3.0}):
        owned, lent = Fold(), Fold()
        replies = [reply(k, **weights) for k in range(4)]
        places = {r.trees["delta"]["w"].data_ptr() for r in replies}
        for k, r in enumerate(replies):
            lent.add(k, reply(k, **weights))
            owned.add(k, r, own=True)
        for name in weights:
            total = owned.total()["delta", name].tree["w"]
            assert torch.equal(total, lent.total()["delta", name].tree["w"])
            assert (total.data_ptr() in places) == (len(weights) == 1)


def test_a_fold_holds_a_logarithmic_number_of_partial_sums() -> None:
    fold, most = Fold(), 0
    for p in range(500):
        fold.add(p, reply(p, 1.0))
        most = max(most, len(fold.nodes))
    assert most <= math.ceil(math.log2(500))
    assert fold.total()["delta", "mean"].weight == 500


def test_integer_arrays_are_averaged_as_float64() -> None:
    """Counters 5 and 6 average to 5.5, exactly."""
    two = [Message({"delta": {"n": torch.tensor(k)}}, sender=k) for k in (5, 6)]
    mean = gather(two, [5, 6])[0].mean("delta")["n"]
    assert mean.dtype == torch.float64 and mean == 5.5


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Message({"delta": {"w": torch.tensor([1.0, float("nan"), 0])}}), "NaN"),
        (Message({"delta": {"w": torch.tensor([1.0, float("inf"), 0])}}), "NaN"),
        (Message({"delta": {"w": torch.zeros(4)}}), "shape"),
        (Message({"delta": {"v": torch.zeros(3)}}), "names"),
        (Message({"other": {"w": torch.zeros(3)}}), "unexpected"),
        (Message(), "missing"),
        (Message({"delta": {"w": torch.zeros(3)}}, {"loss": float("nan")}), "loss"),
        (Message({"delta": {"w": torch.zeros(3)}}, {"loss": "low"}), "loss"),  # type: ignore[dict-item]
        (Message({"delta": {"w": torch.zeros(3)}}, {}, {"delta": {"mean": -1.0}}), "weight"),
        (
            Message({"delta": {"w": torch.zeros(3)}}, {}, {"delta": {"mean": torch.tensor(1.0)}}),
            "weight",
        ),  # type: ignore[dict-item]
        (
            Message({"delta": {"w": torch.zeros(3).double()}}),
            "w is torch.float64, expected torch.float32",
        ),
        (Message({"delta": {"w": torch.zeros(3).half()}}), "w is torch.float16"),
        (Message({"delta": {"w": torch.zeros(3, dtype=torch.uint16)}}), "w is torch.uint16"),
        (Message({"delta": {"w": torch.zeros(3).numpy()}}), "not a tensor"),  # type: ignore[dict-item]
        (Message({"delta": {"w": torch.zeros(3).requires_grad_()}}), "gradient"),
    ],
)
def test_malformed_replies_are_refused_with_a_reason(bad: Message, why: str) -> None:
    assert why in (refuse(bad, {"delta": {"w": torch.zeros(3)}}) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_reply_beyond_all_measure_is_refused(dtype: torch.dtype) -> None:
    """1e15 in length, whatever the number of entries: 4 of 4e14 have length 8e14, 4 of 6e14 1.2e15.
    What is large is not called infinite."""
    for value, why in ((4e14, None), (6e14, "longer than 1e+15"), (3e38, "longer than 1e+15")):
        sent = {"delta": {"w": torch.full((4,), value, dtype=dtype)}}
        found = refuse(Message(sent), sent)
        assert found is None if why is None else why in (found or "")


def test_integers_of_any_width_and_their_means_are_expected_alike() -> None:
    expected = {"delta": {"n": torch.tensor(3)}}
    assert all(
        refuse(Message({"delta": {"n": torch.tensor(2).to(kind)}}), expected) is None
        for kind in (torch.int32, torch.float64)
    )


def test_a_reply_counts_only_in_the_sums_it_has_a_weight_for() -> None:
    """Values 1, 2, 6; the second is weighed under another name: the mean is (1 + 6) / 2, from
    single replies and from a fold.
    """
    three = [reply(0, 1.0), reply(1, 2.0).weigh("delta", foo=1.0), reply(2, 6.0)]
    fold = Fold()
    for m in three:
        fold.add(m.sender, m)
    for replies in (gather(three, range(3))[0], Replies(sums=fold.total())):
        assert (
            torch.equal(replies.mean("delta")["w"], torch.full((3,), 3.5))
            and replies.weight("delta") == 2
        )
        assert torch.equal(replies.mean("delta", "foo")["w"], torch.full((3,), 2.0))


def test_single_replies_cannot_be_had_from_sums() -> None:
    fold = Fold()
    fold.add(0, reply(0, 1.0))
    replies, lost = gather([fold.nodes, Message(scalars={}, sender=0), Lost(3, "gone")], [0, 3])
    assert [x.sender for x in lost] == [3]
    with pytest.raises(ValueError, match="only their sums"):
        list(replies)


def test_put_hides_the_tree_it_replaces() -> None:
    replies, _ = gather([reply(0, 1.0), reply(1, 3.0)], [0, 1])
    changed = replies.put(delta={"w": torch.zeros(3)})
    assert isinstance(changed, Replies) and torch.equal(changed.mean("delta")["w"], torch.zeros(3))
    assert all(not m.trees for m in changed)

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedlens.core.message import BadMessage, Header, Message

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def example() -> Message:
    model = {f"a.{k}": torch.arange(6).reshape(2, 3).to(t) for k, t in enumerate(TYPES)}
    model |= {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
    }
    return Message(
        {"model": model, "delta": {"w/x": torch.ones(3)}},
        {"loss": 0.1, "round": 3},
        {"delta": {"mean": 2.5}},
        sender=4,
    )


def test_bytes_and_back_keep_everything() -> None:
    m = example()
    for copy in (True, False):
        back = Message.from_bytes(m.to_bytes(), copy=copy)
        assert (back.scalars, back.weights, back.sender) == (m.scalars, m.weights, m.sender)
        for tree, arrays in m.trees.items():
            assert list(back.trees[tree]) == list(arrays)
            for name, t in arrays.items():
                assert back.trees[tree][name].dtype == t.dtype
                assert torch.equal(back.trees[tree][name], t)


def test_the_byte_form_is_safetensors_both_ways() -> None:
    """The safetensors package reads what we write, and we read what it writes."""
    m = example()
    theirs = load(bytes(m.to_bytes()))
    assert torch.equal(theirs["model/strided"], m.trees["model"]["strided"])
    assert theirs.keys() == {f"{tree}/{n}" for tree, arrays in m.trees.items() for n in arrays}
    meta = {
        "message": json.dumps(
            {
                "scalars": {"loss": 1.0},
                "weights": {},
                "sender": 2,
                "trees": {"t": ["x"]},
                "header": {"round": 4},
            }
        )
    }
    back = Message.from_bytes(save({"t/x": torch.arange(5)}, metadata=meta), sealed=False)
    assert torch.equal(back.trees["t"]["x"], torch.arange(5)) and back.sender == 2
    assert back.header == Header(round=4)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_pieces_are_the_same_bytes(size: int) -> None:
    m = example()
    pieces = list(m.pieces(size))
    assert b"".join(pieces) == bytes(m.to_bytes())
    assert {len(p) for p in pieces[:-1]} <= {size} and 0 < len(pieces[-1]) <= size


def test_a_view_shares_memory_and_a_copy_does_not() -> None:
    data = Message({"t": {"x": torch.zeros(4)}}).to_bytes()
    view, copied = Message.from_bytes(data), Message.from_bytes(data, copy=True)
    data[-4:] = struct.pack("<f", 5.0)
    assert view.trees["t"]["x"][3] == 5 and copied.trees["t"]["x"][3] == 0


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_bytes_without_a_digest_are_refused_or_read_but_never_anything_else(
    where: int, junk: bytes
) -> None:
    data = Message({"t": {"x": torch.arange(10.0)}}, {"loss": 1.0}).to_bytes(sealed=False)
    data[where : where + len(junk)] = junk
    try:
        m = Message.from_bytes(bytes(data), sealed=False)
    except BadMessage:
        return
    assert isinstance(m, Message)


def test_every_single_flipped_bit_is_refused() -> None:
    """Of the length, the digest itself, names, weights, sender and arrays alike."""
    data = bytes(example().to_bytes())
    assert Message.from_bytes(data).sender == 4
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(BadMessage):
            Message.from_bytes(flipped)


def test_the_digest_is_the_sha256_of_all_other_bytes() -> None:
    """It stands in 64 digits after the length (8 bytes) and '{"__metadata__":{"digest":"' (27)."""
    for data in (bytes(example().to_bytes()), b"".join(example().pieces(100))):
        whole = hashlib.sha256(data[:35] + data[99:]).hexdigest()
        assert data[8:35] == b'{"__metadata__":{"digest":"' and data[35:99].decode() == whole
    blank = example().to_bytes(sealed=False)
    assert blank[35:99] == b"0" * 64
    with pytest.raises(BadMessage, match="digest"):
        Message.from_bytes(blank)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("sender", float("inf")), ("sender", 1.5), ("sender", True), ("sender", 10**30),
        ("sender", -2), ("sender", None), ("sender", "3"), ("scalars", {"loss": "1"}),
        ("scalars", {"loss": [1]}), ("scalars", {"loss": True}), ("scalars", [1]),
        ("weights", {"t": {"mean": None}}), ("weights", {"t": 3}), ("weights", 5),
        ("header", {"round": 1.0}), ("header", {"round": True}), ("header", {"evaluate": 1}),
        ("header", {"turn": 1}), ("header", 3), ("trees", {"t": ["x", "x"]}), ("trees", {"t": []}),
        ("scalars", {"loss": 10**400}), ("header", {"round": 10**30}),
        ("header", {"max_weight": float("nan")}), ("header", {"max_weight": 3}),
        ("trees", {"t": ["y"]}), ("trees", {"t": {"x": 1}, "u": ["x"]}), ("more", 1),
    ],
)  # fmt: skip
def test_a_message_with_a_wrong_part_is_refused(part: str, value: Any) -> None:
    """Each is valid JSON in valid safetensors, and would fail later or mean something else."""
    meta = {"scalars": {}, "weights": {}, "sender": 0, "trees": {"t": ["x"]}, "header": {}}
    text = {"message": json.dumps({**meta, part: value})}
    with pytest.raises(BadMessage):
        Message.from_bytes(save({"t/x": torch.arange(5)}, metadata=text), sealed=False)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1, -10], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [10.0], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [10], "data_offsets": [-40, 0]},
        {"dtype": "F32", "shape": [10], "data_offsets": [4, 44]},
        {"dtype": "F32", "shape": [10], "data_offsets": [0, 40, 80]},
        {"dtype": "F99", "shape": [10], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]},
        {"dtype": "F32", "shape": [10, *[1] * 99], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [2] * 10**6, "data_offsets": [0, 40]},
        {"dtype": ["F32"], "shape": 10, "data_offsets": 0},
        DEEP,
    ],
    ids=range(13),
)
def test_an_array_that_cannot_be_is_refused(entry: Any) -> None:
    meta = {"scalars": {}, "weights": {}, "sender": 0, "trees": {"t": ["x"]}, "header": {}}
    table = {"__metadata__": {"message": json.dumps(meta)}, "t/x": "HERE"}
    body = entry if isinstance(entry, str) else json.dumps(entry)
    text = json.dumps(table).replace('"HERE"', body).encode()
    with pytest.raises(BadMessage):
        Message.from_bytes(len(text).to_bytes(8, "little") + text + bytes(40), sealed=False)


@pytest.mark.parametrize("cut", [0, 4, 8, 30, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    data = bytes(Message({"t": {"x": torch.arange(10.0)}}).to_bytes())
    with pytest.raises(BadMessage):
        Message.from_bytes(data[:cut], sealed=False)


def test_arrays_that_share_their_bytes_are_refused() -> None:
    """Small on the wire, large once it is copied."""
    meta = {"scalars": {}, "weights": {}, "sender": 0, "trees": {"t": ["x", "y"]}, "header": {}}
    entry = {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}
    table = {"__metadata__": {"message": json.dumps(meta)}, "t/x": entry, "t/y": entry}
    text = json.dumps(table).encode()
    with pytest.raises(BadMessage, match="overlap"):
        Message.from_bytes(len(text).to_bytes(8, "little") + text + bytes(40), sealed=False)


def test_a_message_does_not_change() -> None:
    m = Message().put(a={"x": torch.ones(1)}).note(loss=1.0).weigh("a", 3)
    n = m.put(b={}).note(loss=2.0).weigh("a", uniform=1, loss=0.5).drop("a")
    assert list(m.trees) == ["a"] and m.scalars["loss"] == 1 and m.weights == {"a": {"mean": 3}}
    assert list(n.trees) == ["b"] and n.scalars["loss"] == 2 and n.weights == {}


def test_what_is_derived_is_computed_once_and_forgotten_by_a_changed_copy() -> None:
    calls: list[int] = []
    m = Message()
    for _ in range(2):
        m.derived("k", lambda: calls.append(1))
    m.note(x=1).derived("k", lambda: calls.append(1))
    assert len(calls) == 2

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlens.core.memory import Draft, Memory, Record
from fedlens.core.message import BadMessage

ONE, TWO = {"c": torch.tensor(1.0)}, {"c": torch.tensor(2.0)}


def test_a_draft_becomes_memory_only_if_its_round_was_heard() -> None:
    record = Record({"control": ONE}, {"control": TWO}, round=5)
    assert record.settle(heard=5)["control"] is TWO
    assert record.settle(heard=4)["control"] is ONE
    assert record.settle(heard=-1)["control"] is ONE
    assert Record().settle(-1) == {}


def test_reads_fall_through_and_writes_stay_in_the_draft() -> None:
    kept = {"a": ONE, "b": ONE}
    draft = Draft(kept)
    draft["a"] = TWO
    del draft["b"]
    assert draft["a"] is TWO and "b" not in draft and list(draft) == ["a"] and len(draft) == 1
    assert kept == {"a": ONE, "b": ONE}
    assert Record(kept, draft.written, 3).settle(3) == {"a": TWO}
    with pytest.raises(PermissionError):
        Draft(kept, read_only=True)["a"] = TWO


@pytest.mark.parametrize("durable", [True, False])
def test_beyond_the_budget_memory_is_on_disk(tmp_path: Path, durable: bool) -> None:
    """Each record holds 400 bytes; a budget of 1000 keeps two of them."""
    memory = Memory(tmp_path / "m", budget=1000, durable=durable)
    for i in range(5):
        memory.save(i, Record({"w": {"x": torch.full((100,), float(i))}}, round=i))
    assert len(memory.resident) == 2 and memory.bytes == 800
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == (5 if durable else 3)
    for i in range(5):
        record = memory.load(i)
        assert record.round == i and torch.equal(
            record.kept["w"]["x"], torch.full((100,), float(i))
        )
    assert memory.flush() == set(range(5)) and memory.flush() == set()
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 5


def test_a_stateless_client_leaves_no_trace(tmp_path: Path) -> None:
    memory = Memory(tmp_path, durable=True)
    memory.save(3, Record({}, {}, 7))
    assert not list(tmp_path.iterdir())


def test_restoring_replaces_everything(tmp_path: Path) -> None:
    old, new = Memory(tmp_path / "a", durable=True), Memory(tmp_path / "b", durable=True)
    old.save(1, Record({"w": ONE}))
    new.save(2, Record({"w": TWO}))
    new.restore({1: old.path(1)})
    assert new.load(1).kept["w"]["c"] == 1 and new.load(2).kept == {}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "4.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadMessage, match=r"4\.safetensors"):
        Memory(tmp_path).load(4)

"""Checkpoints: whole or not at all, only what changed, and any damage is found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import same_bits

from fedlens import Message, Progress
from fedlens.core.memory import Memory, Record, read_record
from fedlens.runs.checkpoint import Checkpoint, CheckpointError, _seal


def state(value: float) -> Message:
    return Message(
        {"model": {"w": torch.full((4,), value), "n": torch.tensor(3)}},
        {"round": value, "mix": 0.25},
    )


def memory_of(folder: Path, client: int, value: float) -> Path:
    memory = Memory(folder, durable=True)
    memory.save(client, Record({"control": {"w": torch.full((2,), value)}}, {}, 0))
    return memory.path(client)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """After round 1 clients 0 and 1 have memory; after round 2 only client 1's has changed."""
    keeper = Checkpoint(tmp_path / "checkpoint")
    files = {i: memory_of(tmp_path / "memory", i, float(i)) for i in (0, 1)}
    keeper.save(Progress(state(1), 1, {0: 0, 1: 0}), files)
    keeper.save(Progress(state(2), 2, {0: 0, 1: 1}), {1: memory_of(tmp_path / "memory", 1, 9.0)})
    return tmp_path / "checkpoint"


def test_what_was_saved_comes_back(two: Path) -> None:
    found = Checkpoint(two).load()
    assert found
    progress, files = found
    assert (progress.done, progress.heard) == (2, {0: 0, 1: 1})
    assert same_bits(progress.state, state(2)) and progress.state.scalars == state(2).scalars
    values = {i: float(read_record(p).kept["control"]["w"][0]) for i, p in files.items()}
    assert values == {0: 0.0, 1: 9.0}


def test_only_clients_that_changed_are_written(two: Path) -> None:
    names = sorted(p.name for p in two.glob("client-*"))
    assert names == [
        "client-0-000001.safetensors",
        "client-1-000001.safetensors",
        "client-1-000002.safetensors",
    ]


def test_a_later_change_of_the_live_memory_leaves_the_checkpoint_alone(
    tmp_path: Path, two: Path
) -> None:
    memory_of(tmp_path / "memory", 1, 77.0)
    found = Checkpoint(two).load()
    assert found and found[0].done == 2
    assert float(read_record(found[1][1]).kept["control"]["w"][0]) == 9.0


def test_two_are_kept_and_the_rest_goes(tmp_path: Path, two: Path) -> None:
    keeper = Checkpoint(two)
    keeper.load()
    (two / "state-000007.safetensors.part").write_bytes(b"half")
    keeper.save(Progress(state(3), 3, {}), {0: memory_of(tmp_path / "memory", 0, 5.0)})
    assert sorted(p.name for p in two.iterdir()) == [
        "client-0-000001.safetensors",
        "client-0-000003.safetensors",
        "client-1-000002.safetensors",
        "manifest-000002.json",
        "manifest-000003.json",
        "state-000002.safetensors",
        "state-000003.safetensors",
    ]


def newest_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if "000002" in p.name)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "longer"])
def test_any_damage_to_the_newest_is_noticed_and_the_one_before_is_used(
    two: Path, damage: str
) -> None:
    """Every file of the newest checkpoint, and for flips every 7th byte of it."""
    whole = {p: p.read_bytes() for p in two.iterdir()}
    for path in newest_files(two):
        data = whole[path]
        for at in range(0, len(data), 7) if damage == "flip" else [len(data) // 2]:
            flipped = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            changed = {
                "flip": flipped,
                "cut": data[:at],
                "empty": b"",
                "longer": data + b"\0",
                "gone": None,
            }[damage]
            for p, content in whole.items():
                p.write_bytes(content)
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            told: list[str] = []
            found = Checkpoint(two, told.append).load()
            assert found
            # whitespace in the manifest may change without changing what it says
            if found[0].done == 2:
                assert path.suffix == ".json" and json.loads(changed or b"0") == json.loads(data)
                continue
            assert found[0].done == 1 and same_bits(found[0].state, state(1))
            assert float(read_record(found[1][1]).kept["control"]["w"][0]) == 1.0
            assert (
                path.suffix == ".json" and damage == "gone"
            ) or "manifest-000002.json is damaged" in told[0]


def test_without_a_whole_one_there_is_a_sentence(two: Path) -> None:
    for path in two.glob("state-*"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="start over with --fresh"):
        Checkpoint(two).load()


def test_states_whose_manifests_are_gone_are_not_taken_for_nothing(two: Path) -> None:
    for path in two.glob("manifest-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"manifests in .* are gone.*start over with --fresh"):
        Checkpoint(two).load()
    # now it looks as if the first one had been cut off before its manifest was there
    (two / "state-000002.safetensors").unlink()
    assert Checkpoint(two).load() is None


def test_a_folder_without_any_has_none(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "nothing").load() is None


def test_a_manifest_cannot_point_outside(two: Path) -> None:
    body = newest_manifest(two)
    body["sha256"]["../secret"] = "0"
    assert "outside the folder" in refused(two, body)


def newest_manifest(two: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((two / "manifest-000002.json").read_bytes())
    body.pop("seal")
    return body


def refused(two: Path, body: dict[str, Any]) -> str:
    """Seals a manifest that somebody changed, and says why the one before it is used."""
    (two / "manifest-000002.json").write_text(json.dumps({**body, "seal": _seal(body)}))
    told: list[str] = []
    found = Checkpoint(two, told.append).load()
    assert found and found[0].done == 1
    return told[0]


@pytest.mark.parametrize("part", ["state", "clients"])
def test_what_a_manifest_names_and_does_not_list_is_never_read(two: Path, part: str) -> None:
    """The seal is no secret: whoever can write the folder can make it. A file of somebody else's,
    named in place of ours, is not opened."""
    outside = two.parent / "secret.safetensors"
    outside.write_bytes((two / "state-000001.safetensors").read_bytes())
    body = newest_manifest(two)
    body[part] = f"../{outside.name}" if part == "state" else {"0": f"../{outside.name}"}
    assert "it names ../secret.safetensors, which it does not list" in refused(two, body)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("done", float("inf")), ("done", None), ("clients", [1]), ("clients", {"x": 1}),
        ("heard", "[[0, Infinity]]"), ("heard", "[" * 100_000), ("sha256", 3), ("state", ["a"]),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_sealed_manifest_that_makes_no_sense_is_damaged(two: Path, part: str, value: Any) -> None:
    assert "manifest-000002.json is damaged" in refused(two, newest_manifest(two) | {part: value})


def relabel(manifest: Path, format: int) -> None:
    """A manifest as another version of FedLens would have written it."""
    body = json.loads(manifest.read_bytes())
    body.pop("seal")
    body["format"] = format
    manifest.write_text(json.dumps({**body, "seal": _seal(body)}))


def test_what_another_version_wrote_is_refused_and_left_as_it_is(two: Path) -> None:
    for manifest in two.glob("manifest-*"):
        relabel(manifest, 1)
    before = {p: p.read_bytes() for p in two.iterdir()}
    said = r"another version of FedLens \(format 1, this one reads 3\): start over with --fresh"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(two).load()
    assert {p: p.read_bytes() for p in two.iterdir()} == before

"""Files: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedlens.core.files import atomic_files, atomic_path, name_in_errors, write_atomically


@pytest.mark.parametrize("data", [b"new \xc3\xa9", bytearray(b"new \xc3\xa9"), "new é"])
@pytest.mark.parametrize("sync", [True, False])
def test_what_was_there_before_is_replaced(
    tmp_path: Path, data: bytes | bytearray | str, sync: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    write_atomically(path, data, sync=sync)
    assert path.read_bytes() == b"new \xc3\xa9" and list(tmp_path.iterdir()) == [path]


def test_a_power_cut_after_the_write_finds_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the file is on the disk before its name is, and the name before we go on."""
    synced: list[str] = []

    def note(opened: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{opened}"))

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(tmp_path / "a.txt", "new")
    assert [Path(p).name.startswith(".a.part") for p in synced] == [True, False]
    assert synced[1] == str(tmp_path)
    write_atomically(tmp_path / "a.txt", "newer", sync=False)
    assert len(synced) == 2


def test_a_write_that_cannot_finish_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(path, 3)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    (tmp_path / f".a.part{os.getpid()}.json").symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:
        write_atomically(path, "new")
    assert failed.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_names_its_file() -> None:
    with (
        pytest.raises(OSError) as failed,
        name_in_errors(Path("run/metrics.jsonl")),
        Path("/dev/full").open("w") as f,
    ):
        f.write("a line")
    assert failed.value.filename == "run/metrics.jsonl"


def test_a_path_to_write_to_keeps_the_suffix_and_is_not_there_before_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "film.mp4"
    with atomic_path(path) as part:
        part.write_bytes(b"frames")
        assert part.suffix == ".mp4" and part.parent == tmp_path and not path.exists()
    assert path.read_bytes() == b"frames" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_path_whose_block_fails_is_gone(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_path(tmp_path / "a") as part:
        part.write_bytes(b"half")
        raise error
    assert not list(tmp_path.iterdir())


def test_several_files_move_together_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "old.png").touch()
    (tmp_path / "notes").write_text("mine")
    with atomic_files(tmp_path) as part:
        (part / "model").write_text("new")
        (part / "pictures").mkdir()
        (part / "pictures" / "new.png").touch()
        assert not (tmp_path / "model").exists()
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert found == ["model", "notes", "pictures", "pictures/new.png"]


def test_several_files_whose_block_fails_are_gone(tmp_path: Path) -> None:
    with pytest.raises(ValueError), atomic_files(tmp_path) as part:
        (part / "model").write_text("half")
        raise ValueError
    assert not list(tmp_path.iterdir())

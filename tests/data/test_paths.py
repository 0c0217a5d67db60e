"""What the user named is found as given or below FEDLENS_DATA and nowhere else; files come in one
order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.core.files import find_in_data_folder, find_named
from fedlens.data import paths
from fedlens.data.source import DataError


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and FEDLENS_DATA beside it with a folder `set`."""
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_as_given_before_the_data_folder(data_folder: Path) -> None:
    assert paths.locate("set", "folder", "data.root") == data_folder / "set"
    assert paths.locate("$FEDLENS_DATA/set", "folder", "data.root") == data_folder / "set"
    Path("set").mkdir()
    assert paths.locate("set", "folder", "data.root") == Path("set")
    assert find_in_data_folder("set") == data_folder / "set"


def test_nothing_beside_the_project_is_looked_at(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that the developers have: ../shared/data beside the working directory."""
    touch(data_folder.parent / "shared" / "data" / "set" / "a.png")
    monkeypatch.delenv("FEDLENS_DATA")
    assert find_named("set") is None and find_in_data_folder("set") is None
    with pytest.raises(
        DataError, match=r"set data\.root, or the environment variable FEDLENS_DATA"
    ):
        paths.locate("set", "folder", "data.root")


def test_errors_say_where_it_was_looked_for_and_what_to_set(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"at gone, nor at .*/data/gone .*FEDLENS_DATA.*data\.root"):
        paths.locate("gone", "folder", "data.root")
    with pytest.raises(DataError, match=r"no folder at /gone: set data\.root"):
        paths.locate("/gone", "folder", "data.root")
    with pytest.raises(DataError, match=r"say where the folder is: set data\.root"):
        paths.locate("", "folder", "data.root")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(DataError, match=r"data\.root is \$NOT_SET/a: the environment variable"):
        paths.locate("$NOT_SET/a", "folder", "data.root")


def test_clips_are_videos_and_folders_of_frames(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "clip10" / "1.png", tmp_path / "a" / "clip2" / "1.WEBP")
    touch(tmp_path / "b.mp4", tmp_path / "notes.txt", tmp_path / "a" / "clip2" / "deeper" / "x.png")
    found = paths.clips_below(tmp_path)
    assert [p.name for p in found] == ["clip2", "clip10", "b.mp4"]
    assert [p.name for p in paths.clips_in(tmp_path / "a")] == ["clip10", "clip2"]
    assert paths.clips_at(tmp_path / "b.mp4") == [tmp_path / "b.mp4"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        paths.clips_below(tmp_path / "empty")


def test_frames_count_and_images_do_not(tmp_path: Path) -> None:
    touch(*(tmp_path / f"f{k}.png" for k in (1, 2, 10)), tmp_path / "deeper" / "f0.JPG")
    assert [p.name for p in paths.frame_files(tmp_path)] == ["f1.png", "f2.png", "f10.png"]
    below = [p.relative_to(tmp_path).as_posix() for p in paths.images_below(tmp_path)]
    assert below == ["deeper/f0.JPG", "f1.png", "f10.png", "f2.png"]
    assert paths.images_at(tmp_path / "f1.png") == [tmp_path / "f1.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there are no images in"):
        paths.images_at(tmp_path / "empty")
    with pytest.raises(DataError, match="there is no"):
        paths.images_at(tmp_path / "gone")

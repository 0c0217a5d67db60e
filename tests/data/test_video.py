from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.source import DataError
from fedlens.data.video import ArrayFrames, Cache, Cached, FileFrames, FolderFrames, Frames, find_clips, open_frames, writer

av = pytest.importorskip("av")


def ramp(n: int = 40, h: int = 48, w: int = 64) -> torch.Tensor:
    """Frame k is grey level 5 k, with a square that moves."""
    x = (torch.arange(n) * 5).byte().view(n, 1, 1, 1).expand(n, 3, h, w).clone()
    for k in range(n):
        x[k, :, 8:24, k % 32 : k % 32 + 16] = 250
    return x


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "ramp.mp4"
    frames = ArrayFrames(ramp(), rate=Fraction(25))
    with writer(path, frames, frames.size, quality=4) as write:
        write(frames.read(0, 25))
        write(frames.read(25, 40))
    return path


def save(folder: Path, arrays: list[np.ndarray], mode: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, a in enumerate(arrays):
        Image.fromarray(a, mode).save(folder / f"f{k}.png")
    return folder


def test_written_file_is_read_back_frame_by_frame(film: Path) -> None:
    """The level tells the frame: 5 apart, so an off-by-one would show."""
    frames = open_frames(film)
    assert len(frames) == 40 and frames.size == (48, 64) and frames.rate == 25
    for low, high in [(0, 40), (17, 20), (3, 5), (38, 40), (20, 30), (30, 31)]:
        levels = frames.read(low, high)[:, :, 40:].float().mean((1, 2, 3))
        np.testing.assert_allclose(levels.numpy(), 5 * np.arange(low, high), atol=1.6)
    with pytest.raises(DataError, match="frames 0 to 39"):
        frames.read(39, 41)


def test_a_copy_in_another_process_opens_its_own_file(film: Path) -> None:
    frames = open_frames(film)
    frames.read(0, 3)
    again = pickle.loads(pickle.dumps(frames))
    assert torch.equal(again.read(3, 5), frames.read(3, 5))


def test_truncated_file(film: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.mp4"
    short.write_bytes(film.read_bytes()[:-2000])
    with pytest.raises(DataError, match="truncated"):
        FileFrames(short)
    (tmp_path / "text.mp4").write_text("not a film")
    with pytest.raises(DataError, match=r"text\.mp4 cannot be read as a video"):
        open_frames(tmp_path / "text.mp4")


def test_folder_in_natural_order_grey_and_alpha(tmp_path: Path) -> None:
    grey = [np.full((6, 8), k, np.uint8) for k in range(12)]
    frames = FolderFrames(save(tmp_path / "grey", grey))
    assert frames.read(0, 12)[:, 0, 0, 0].tolist() == list(range(12))  # f10 comes after f9
    alpha = np.dstack([np.full((6, 8, 3), 7, np.uint8), np.zeros((6, 8), np.uint8)])
    assert FolderFrames(save(tmp_path / "alpha", [alpha])).read(0, 1).unique().tolist() == [7]


def test_frames_of_different_sizes(tmp_path: Path) -> None:
    frames = FolderFrames(save(tmp_path / "odd", [np.zeros((6, 8, 3), np.uint8), np.zeros((6, 9, 3), np.uint8)]))
    with pytest.raises(DataError, match="9x6 pixels, but the clip began with 8x6"):
        frames.read(0, 2)


def test_find_clips(tmp_path: Path, film: Path) -> None:
    save(tmp_path / "a" / "clip2", [np.zeros((4, 4, 3), np.uint8)])
    save(tmp_path / "a" / "clip10", [np.zeros((4, 4, 3), np.uint8)])
    (tmp_path / "b.mp4").write_bytes(film.read_bytes())
    assert [p.name for p in find_clips(tmp_path)] == ["clip2", "clip10", "b.mp4"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        find_clips(tmp_path / "empty")
    with pytest.raises(DataError, match="there is nothing at"):
        open_frames(tmp_path / "nowhere.mp4")


class Counting(Frames):
    """Frames that count how often they are decoded."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array, self.name, self.size, self.reads, self.block = array, "counted", (array.shape[2], array.shape[3]), 0, 4

    def __len__(self) -> int:
        return len(self.array)

    def read(self, low: int, high: int) -> torch.Tensor:
        self.reads += high - low
        return self.array[low:high]


def test_cache_decodes_once_and_stays_within_its_budget() -> None:
    inner = Counting(ramp(16))
    bytes_of_block = 4 * 3 * 48 * 64
    cache = Cache(budget=2 * bytes_of_block)
    frames = Cached(inner, cache, "k")
    assert torch.equal(frames.read(1, 7), inner.array[1:7]) and inner.reads == 8
    assert torch.equal(frames.crop(2, 6, (4, 5, 10, 12)), inner.array[2:6, :, 4:14, 5:17]) and inner.reads == 8
    frames.read(12, 16)
    assert cache.held == 2 * bytes_of_block and inner.reads == 12
    frames.read(4, 5)  # used more recently than the first block, so still here
    assert inner.reads == 12


def test_cache_on_disk(tmp_path: Path) -> None:
    inner = Counting(ramp(9))
    frames = Cached(inner, Cache(folder=tmp_path), "k")
    assert torch.equal(frames.crop(3, 9, (0, 8, 20, 20)), inner.array[3:9, :, :20, 8:28])
    assert torch.equal(Cached(inner, Cache(folder=tmp_path), "k").read(0, 9), inner.array) and inner.reads == 9


def test_real_files_by_random_access(data_pack: Path) -> None:
    """MP4 with B-frames and sound, and an AVI of packed MPEG-4 whose time stamps do not say the order of frames."""
    names = ["R6llTwEh07w.mp4", "SchoolRulesHowTheyHelpUs_wave_f_nm_np1_ba_med_0.avi", "v_SoccerJuggling_g23_c01.avi"]
    for name, sound in zip(names, (True, False, False), strict=True):
        frames = FileFrames(data_pack / "video_samples" / name)
        whole = frames.read(0, len(frames))
        middle = len(frames) // 2
        for low, high in [(middle, middle + 3), (2, 6), (len(frames) - 2, len(frames))]:
            assert torch.equal(frames.read(low, high), whole[low:high]), name
        assert frames.sound is sound

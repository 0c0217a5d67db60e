from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.frame_cache import Cache, Cached, key_of, open_all
from fedlens.data.frames import ArrayFrames, FolderFrames, Frames
from fedlens.data.source import DataError
from fedlens.data.video import FileFrames, find_clips, open_frames
from fedlens.data.video_writer import writer

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


def converted(source: Path, target: Path, *how: str, before: tuple[str, ...] = ()) -> Path:
    """By the ffmpeg program, so that it is not our own code on both sides."""
    program = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    subprocess.run([program, "-v", "error", "-y", *before, "-i", str(source), *how, str(target)], check=True)
    return target


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


def _tell_sum(frames: Frames, pipe: Any) -> None:
    pipe.send(int(frames.read(10, 20).long().sum()))


def test_a_fork_opens_its_own_file(film: Path) -> None:
    """A forked decoder has lost its threads and would be waited for without end; and two processes would share one place in the file."""
    frames = open_frames(film)
    expected = int(frames.read(0, 40)[10:20].long().sum())
    frames.read(0, 10)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_tell_sum, args=(frames, theirs), daemon=True)
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv() == expected == int(frames.read(10, 20).long().sum())
    child.join(10)


def test_truncated_file(film: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.mp4"
    short.write_bytes(film.read_bytes()[:-2000])
    with pytest.raises(DataError, match="truncated"):
        FileFrames(short)
    whole = converted(film, tmp_path / "whole.mkv", "-c", "copy")  # 40 frames at 25 a second; Matroska counts seconds, not frames
    assert len(FileFrames(whole)) == 40
    (tmp_path / "half.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(DataError, match=r"truncated: its header promises 1\.6 seconds, 0\.\d are there"):
        FileFrames(tmp_path / "half.mkv")
    (tmp_path / "text.mp4").write_text("not a film")
    with pytest.raises(DataError, match=r"text\.mp4 cannot be read as a video"):
        open_frames(tmp_path / "text.mp4")


def test_folder_in_natural_order_grey_and_alpha(tmp_path: Path) -> None:
    grey = [np.full((6, 8), k, np.uint8) for k in range(12)]
    frames = FolderFrames(save(tmp_path / "grey", grey))
    assert frames.read(0, 12)[:, 0, 0, 0].tolist() == list(range(12))  # f10 comes after f9
    alpha = np.dstack([np.full((6, 8, 3), 7, np.uint8), np.zeros((6, 8), np.uint8)])
    assert FolderFrames(save(tmp_path / "alpha", [alpha])).read(0, 1).unique().tolist() == [7]
    deep = np.array([[0, 255, 256, 40000]], np.uint16)  # 16 bits become 8 by dropping the lower ones
    assert FolderFrames(save(tmp_path / "deep", [deep])).read(0, 1)[0, 2, 0].tolist() == [0, 0, 1, 156]


def test_frames_of_different_sizes(tmp_path: Path) -> None:
    """Refused when the folder is opened, by headers alone: the pixels of f1 are cut off, which only decoding would notice."""
    folder = save(tmp_path / "odd", [np.zeros((6, 8, 3), np.uint8), np.zeros((6, 9, 3), np.uint8)])
    (folder / "f1.png").write_bytes((folder / "f1.png").read_bytes()[:44])
    with pytest.raises(DataError, match=r"/odd has frames of different sizes: f1\.png has 9x6 pixels, but the clip began with 8x6"):
        FolderFrames(folder)
    frames = FolderFrames(save(tmp_path / "even", [np.zeros((6, 8, 3), np.uint8)] * 2))
    save(tmp_path / "even", [np.zeros((6, 9, 3), np.uint8)])
    with pytest.raises(DataError, match=r"f0\.png has 9x6 pixels"):
        frames.read(0, 2)


def test_an_upright_telephone(film: Path, tmp_path: Path) -> None:
    """The file says that players shall turn it; ffmpeg does so when it makes pictures, which must be ours. Pixels twice as wide as high
    are then twice as high as wide, and a copy keeps that."""
    wide = converted(film, tmp_path / "wide.mp4", "-c", "copy", "-bsf:v", "h264_metadata=sample_aspect_ratio=2/1")
    for angle in (90, 180, 270):
        turned = converted(wide, tmp_path / f"{angle}.mp4", "-c", "copy", before=("-display_rotation", str(angle)))
        (tmp_path / f"{angle}").mkdir()
        converted(turned, tmp_path / f"{angle}" / "%d.png")
        ours, theirs = FileFrames(turned), FolderFrames(tmp_path / f"{angle}")
        assert ours.size == theirs.size == ((48, 64) if angle == 180 else (64, 48))
        assert (ours.read(5, 9).float() - theirs.read(5, 9).float()).abs().mean() < 2
        with writer(tmp_path / "copy.mp4", ours, ours.size) as write:
            write(ours.read(0, 40))
        copy = FileFrames(tmp_path / "copy.mp4")
        assert copy.turns == 0 and copy.size == ours.size and copy.aspect == ours.aspect == (2 if angle == 180 else Fraction(1, 2))


def test_a_copy_keeps_an_uneven_pace(film: Path, tmp_path: Path) -> None:
    """Frames 10 to 19 are left out and 20 to 39 come at half the speed: 0 ... 9, then 20, 22, ... 58, in units of 40 ms."""
    pace = "select='lt(n,10)+gte(n,20)',setpts='if(lt(N,10),N,N*2)/25/TB'"
    frames = FileFrames(converted(film, tmp_path / "uneven.mp4", "-vf", pace, "-fps_mode", "vfr"))
    with writer(tmp_path / "copy.mp4", frames, frames.size) as write:
        write(frames.read(0, 15))
        write(frames.read(15, 30))
    copy = FileFrames(tmp_path / "copy.mp4")
    expected = [*range(10), *range(20, 60, 2)]
    assert [round(float(t * f.base * 25), 2) for f in (frames, copy) for t in f.times] == expected * 2


def test_colours_are_told_with_the_file(tmp_path: Path) -> None:
    """Green 200 by BT.709 is 16 + 0.7152 * 200 * 219 / 255 = 138.8, by the older BT.601 it would be 16 + 0.587 * 171.8 = 116.8.
    The file says which it is, so that a player does not guess from the size."""
    green = ArrayFrames(torch.tensor([0, 200, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32))
    with writer(tmp_path / "green.mp4", green, green.size, quality=4) as write:
        write(green.array)
    with av.open(str(tmp_path / "green.mp4")) as container:
        frame = next(container.decode(video=0))
        assert frame.colorspace == 1 and frame.to_ndarray()[16, 16] == pytest.approx(138.8, abs=1)
    assert open_frames(tmp_path / "green.mp4").read(0, 1)[0, :, 16, 16].tolist() == pytest.approx([0, 200, 0], abs=3)


@pytest.mark.parametrize("name", ["film.webm", "film.mpg", "film.png"])
def test_names_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    frames = ArrayFrames(ramp(2))
    with (
        pytest.raises(DataError, match=rf"2 frames cannot become .*{name}: give a folder, or a name that ends in \.mp4"),
        writer(tmp_path / name, frames, frames.size),
    ):
        pass


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


def test_cache_on_disk_knows_a_rewritten_clip(tmp_path: Path, film: Path) -> None:
    """Bitmaps of one size have as many bytes, so it is the time of writing that tells, also that of a single frame in a folder."""
    folder, kept = tmp_path / "clip", tmp_path / "cache"
    folder.mkdir()
    for k in range(3):
        Image.new("RGB", (8, 6), (k, k, k)).save(folder / f"{k}.bmp")

    def levels() -> list[int]:
        (clip,) = open_all([folder], Cache(folder=kept))
        return clip.read(0, 3)[:, 0, 0, 0].tolist()

    assert levels() == levels() == [0, 1, 2] and len(list(kept.iterdir())) == 1
    written = (folder / "1.bmp").stat()
    Image.new("RGB", (8, 6), (9, 9, 9)).save(folder / "1.bmp")
    os.utime(folder / "1.bmp", ns=(written.st_atime_ns, written.st_mtime_ns + 1))
    assert (folder / "1.bmp").stat().st_size == written.st_size
    assert levels() == [0, 9, 2] and len(list(kept.iterdir())) == 2
    copy = tmp_path / "film.mp4"
    copy.write_bytes(film.read_bytes())
    before = key_of(copy)
    assert key_of(copy) == before != key_of(copy, side=16)
    os.utime(copy, ns=(0, copy.stat().st_mtime_ns + 1))
    assert key_of(copy) != before


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

from __future__ import annotations

import gc
import multiprocessing
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from films import converted, save

from fedlens.data.source import DataError
from fedlens.data.video.files import FileFrames, _OpenFile, _SeekMissed, open_frames, reduced
from fedlens.data.video.frames import Frames

av = pytest.importorskip("av")


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
    gc.collect()
    pipe.send(int(frames.read(10, 20).long().sum()))


def test_a_fork_opens_its_own_file(film: Path) -> None:
    """A forked decoder has lost its threads and would be waited for without end; and two processes
    would share one place in the file.
    """
    frames = open_frames(film)
    expected = int(frames.read(0, 40)[10:20].long().sum())
    frames.read(0, 10)
    dropped: list[Any] = [open_frames(film)]
    dropped[0].read(0, 10)
    dropped.append(dropped)  # garbage that only a collection finds; the child must not
    del dropped
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
    # 40 frames at 25 a second; Matroska counts seconds, not frames
    whole = converted(film, tmp_path / "whole.mkv", "-c", "copy")
    assert len(FileFrames(whole)) == 40
    (tmp_path / "half.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(
        DataError, match=r"truncated: its header promises 1\.6 seconds, 0\.\d are there"
    ):
        FileFrames(tmp_path / "half.mkv")
    # as films cut from a broadcast may be
    late = converted(film, tmp_path / "late.mkv", "-c", "copy", "-output_ts_offset", "3")
    assert len(FileFrames(late)) == 40
    (tmp_path / "half.mkv").write_bytes(late.read_bytes()[: late.stat().st_size // 2])
    with pytest.raises(
        DataError, match=r"truncated: its header promises 4\.6 seconds, 3\.\d are there"
    ):
        FileFrames(tmp_path / "half.mkv")
    (tmp_path / "text.mp4").write_text("not a film")
    with pytest.raises(DataError, match=r"text\.mp4 cannot be read as a video"):
        open_frames(tmp_path / "text.mp4")


def test_avi_counts_ticks(film: Path, tmp_path: Path) -> None:
    """H.264 copied into an AVI: two ticks a frame. The film is 40 frames at 25 a second, whatever
    holds them.
    """
    copied = FileFrames(converted(film, tmp_path / "copied.avi", "-c", "copy"))
    original = FileFrames(film)
    assert (len(copied), copied.rate) == (len(original), original.rate) == (40, 25)
    assert torch.equal(copied.read(7, 12), original.read(7, 12))
    whole = copied.path.read_bytes()
    (tmp_path / "short.avi").write_bytes(whole[: whole.find(b"idx1") * 4 // 5])
    with pytest.raises(DataError, match=r"truncated: its header promises 40 frames, \d+ are there"):
        FileFrames(tmp_path / "short.avi")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("film.mpg", ("-c:v", "mpeg1video")),
        ("film2.mpg", ("-c:v", "mpeg2video", "-bf", "2")),
        ("film.ts", ("-c:v", "mpeg2video")),
        ("one_key.ts", ("-c:v", "libx264")),
        ("film.mkv", ("-c:v", "libx264", "-g", "8")),
        ("open.mp4", ("-c:v", "libx264", "-x264-params", "open-gop=1:keyint=8:bframes=3")),
        ("hidden.webm", ("-c:v", "libvpx", "-auto-alt-ref", "1", "-lag-in-frames", "16")),
    ],
)
def test_a_window_is_what_decoding_from_the_start_gives(
    film: Path, tmp_path: Path, name: str, how: tuple[str, ...]
) -> None:
    """Twice the film, 80 frames: seeks in .mpg and .ts land late, or with other times than those of
    the listing.
    """
    path = converted(film, tmp_path / name, *how, before=("-stream_loop", "1"))
    whole = FileFrames(path).read(0, 80)
    levels = whole[:, :, 40:].float().mean((1, 2, 3))
    np.testing.assert_allclose(levels.numpy(), np.tile(5 * np.arange(40), 2), atol=6)
    frames = FileFrames(path)
    for low in [*np.random.default_rng(0).integers(0, 72, 30).tolist(), 44, 12, 0]:
        assert torch.equal(frames.read(low, low + 8), whole[low : low + 8]), low


def open_file(times: list[int | None], place: int = 0) -> _OpenFile:
    """A decoder that gives these times, of a file that lists 0, 10, ... 90."""
    pictures = (SimpleNamespace(pts=t) for t in times)
    return _OpenFile(Path("film.mkv"), None, pictures, range(0, 100, 10), place, counted=False)


def test_packets_without_a_picture() -> None:
    """The last frame stays on for two packets, not for three; what comes later is never shown in
    their place.
    """
    two, three = open_file([0, 10, 40, 50]), open_file([0, 10, 50])
    assert [two.frame(k).pts for k in range(6)] == [0, 10, 10, 10, 40, 50] and two.frame(6) is None
    assert [three.frame(k).pts for k in range(4)] == [0, 10, 10, 10]
    with pytest.raises(
        DataError, match="no picture for frame 4, though 10 frames are listed: it is damaged"
    ):
        three.frame(4)


def test_a_seek_that_lands_late_or_where_nothing_has_a_time() -> None:
    for times in ([30, 40], [None, None]):
        with pytest.raises(_SeekMissed):
            open_file(times, place=2).frame(2)
    from_start = open_file([None, None, None])
    assert [from_start.frame(1), from_start.frame(2)] == [
        SimpleNamespace(pts=None)
    ] * 2 and from_start.frame(3) is None


def test_reading_on_opens_the_file_once(
    film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, opened = FileFrames(converted(film, tmp_path / "film.mpg")), []
    open_at = frames._open_at
    monkeypatch.setattr(frames, "_open_at", lambda low: opened.append(low) or open_at(low))
    for low in range(0, 40, 8):
        frames.read(low, low + 8)
    assert opened == [0]


@pytest.mark.parametrize(("height", "matrix"), [(720, "bt709"), (718, "smpte170m")])
@pytest.mark.parametrize("scale", ["tv", "pc"])
def test_colours_that_the_file_does_not_tell(
    tmp_path: Path, height: int, matrix: str, scale: str
) -> None:
    """HD is BT.709 and what is smaller is BT.601, as players take it; also when frames are shrunk
    as they are read.
    """
    save(tmp_path / "flat", [np.full((height, 64, 3), (192, 32, 64), np.uint8)])
    filters = (
        f"scale=out_color_matrix={matrix}:out_range={scale},"
        "format=yuv420p,setparams=colorspace=unknown"
    )
    path = converted(
        tmp_path / "flat" / "f0.png",
        tmp_path / "flat.mp4",
        "-vf",
        filters,
        "-color_range",
        scale,
        "-crf",
        "4",
    )
    with av.open(str(path)) as container:
        assert next(container.decode(video=0)).colorspace == 2
    for side in (None, 32):
        pixel = FileFrames(path, side).read(0, 1)[0, :, 16, 16]
        np.testing.assert_allclose(pixel.numpy(), [192, 32, 64], atol=3)


def test_sizes_after_shrinking() -> None:
    assert [
        reduced((240, 320), 120),
        reduced((320, 240), 120),
        reduced((100, 200), 120),
        reduced((240, 320), None),
    ] == [
        (120, 160),
        (160, 120),
        (100, 200),
        (240, 320),
    ]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nothing at"):
        open_frames(tmp_path / "nowhere.mp4")


def test_real_files_by_random_access(data_pack: Path) -> None:
    """MP4 with B-frames and sound, and an AVI of packed MPEG-4 whose time stamps do not say the
    order of frames.
    """
    names = [
        "R6llTwEh07w.mp4",
        "SchoolRulesHowTheyHelpUs_wave_f_nm_np1_ba_med_0.avi",
        "v_SoccerJuggling_g23_c01.avi",
    ]
    for name, sound in zip(names, (True, False, False), strict=True):
        frames = FileFrames(data_pack / "video_samples" / name)
        whole = frames.read(0, len(frames))
        middle = len(frames) // 2
        for low, high in [(middle, middle + 3), (2, 6), (len(frames) - 2, len(frames))]:
            assert torch.equal(frames.read(low, high), whole[low:high]), name
        assert frames.sound is sound

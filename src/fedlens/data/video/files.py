"""Video files, by PyAV; and what lies at a path, be it a video file or a folder of pictures."""

from __future__ import annotations

import gc
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.data.paths import is_image
from fedlens.data.source import DataError
from fedlens.data.video.frames import (
    ArrayFrames,
    FolderFrames,
    Frames,
    read_picture,
)

SPARE = 2  # frames in a row that may have no picture
HD = 720  # from this height on, players take colours of which the file says nothing for BT.709
UNKNOWN_COLOURS = 2  # ffmpeg's number for colours of which the file says nothing
LATE = 0.5  # seconds that a file without a count of frames may end before its header says
# open files of a parent process: closing them would wait for threads that a fork leaves behind
FORKED: list[Any] = []
# nor may the child collect those that the parent had already dropped
os.register_at_fork(after_in_child=gc.freeze)


def load_av() -> Any:
    try:
        import av
    except ImportError as e:
        raise DataError('reading video files needs PyAV: pip install "fedlens[video]"') from e
    return av


class FileFrames(Frames):
    """A video file, by PyAV. Which frames there are is read from the packets, without decoding;
    reading on where the last read ended costs no seek, reading back in a file without an index
    (.avi, .mpg, .ts) decodes from its start. The open file belongs to a process: a copy that is
    sent elsewhere opens its own. Frames of a telephone held upright are turned as a player would.
    Damage inside a packet shows only when it is decoded: `read` then raises, or gives what the
    decoder guesses. side: frames are shrunk to this short side as they are decoded. threads: AUTO
    lets the decoder have several, NONE keeps it in the caller's. bits: of a colour, in the file.
    deep: set it, and `read` gives levels up to 65535 (uint16) instead of 255."""

    block = 16
    deep = False

    def __init__(self, path: Path, side: int | None = None, threads: str = "AUTO") -> None:
        self.path, self.name, self.threads = path, path.stem, threads
        self._open: _OpenFile | None = None
        self._owner = os.getpid()
        av = load_av()
        try:
            with av.open(str(path), metadata_errors="ignore") as container:
                if not container.streams.video:
                    raise DataError(f"{path} has no video stream")
                stream = container.streams.video[0]
                if stream.codec_context is None:  # damaged where the codec is named
                    raise DataError(f"{path} is in a codec that nobody here knows")
                kind = stream.codec_context.format
                self.bits = max((c.bits for c in kind.components), default=8) if kind else 8
                promised, seconds = stream.frames, (container.duration or 0) / 1e6
                self.turns = quarter_turns(av, path) if "mov" in container.format.name else 0
                # as it comes from the decoder
                self.whole = reduced(
                    (stream.codec_context.height, stream.codec_context.width), side
                )
                self.size = self.whole[::-1] if self.turns % 2 else self.whole
                self.rate = Fraction(stream.average_rate) if stream.average_rate else None
                aspect = stream.sample_aspect_ratio or Fraction(1)
                self.aspect, self.base = 1 / aspect if self.turns % 2 else aspect, stream.time_base
                # its time stamps say nothing about the order of frames
                self.counted = container.format.name == "avi"
                # Programme and transport streams have no index: a seek lands anywhere, and times
                # after it may not be those of the listing.
                self.indexed = (
                    not self.counted
                    and not container.format.flags & av.format.Flags.ts_discont.value
                )
                times, lasted = frame_times(container, stream)
        except (av.FFmpegError, OSError) as e:
            raise DataError(
                f"{path} cannot be read as a video ({e.strerror or e}); it may be truncated"
            ) from e
        if not times or any(t is None for t in times):
            raise DataError(f"{path} has no frames with a time stamp")
        # AVI counts ticks of its clock, not frames: H.264 that was copied into one has several a
        # frame, a pause has ticks without frames. What ffmpeg takes for its average rate changes
        # from one version to the next, so the clock decides.
        ticks = median_gap(times) if self.counted else 1
        if self.counted:
            self.rate = 1 / (self.base * ticks)
        reached = max(times) + ticks if self.counted else len(times)
        if promised and reached < promised - ticks:
            raise DataError(
                f"{path} is truncated: its header promises {promised // ticks} frames, {len(times)}"
                " are there"
            )
        if not promised and lasted < seconds - LATE:
            raise DataError(
                f"{path} is truncated: its header promises {seconds:.1f} seconds, {lasted:.1f} are"
                " there"
            )
        self.times: list[int] = sorted(times)

    @property
    def sound(self) -> bool:
        with load_av().open(str(self.path), metadata_errors="ignore") as container:
            return bool(container.streams.audio)

    def __len__(self) -> int:
        return len(self.times)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        out = np.empty((high - low, *self.size, 3), np.uint16 if self.deep else np.uint8)
        av, got = load_av(), 0
        # one for all: a frame's own would be set up anew for every frame
        shape = av.video.reformatter.VideoReformatter()
        try:
            for frame in self._from(low, high - low):
                height, width = self.whole
                picture = shape.reformat(
                    frame,
                    width,
                    height,
                    "rgb48le" if self.deep else "rgb24",
                    src_colorspace=colours(frame),
                    interpolation="AREA",
                )
                out[got] = np.rot90(picture.to_ndarray(), self.turns)
                got += 1
        except av.FFmpegError as e:
            raise DataError(
                f"{self.path} cannot be decoded after frame {low + got} ({e.strerror or e}); it may"
                " be truncated"
            ) from e
        if got == high - low:
            return torch.from_numpy(out).permute(0, 3, 1, 2)
        if len(self) - low - got > SPARE:
            raise DataError(
                f"{self.path} ends after frame {low + got}, though {len(self)} are listed: it is"
                " truncated"
            )
        # Packed MPEG-4 ends with placeholders that hold no picture: the last frame stays on.
        out[got:] = out[got - 1] if got else self.read(low - 1, low)[0].permute(1, 2, 0).numpy()
        return torch.from_numpy(out).permute(0, 3, 1, 2)

    def _from(self, low: int, count: int) -> Iterator[Any]:
        reach = self.block if self.indexed else len(self)
        if self._owner != os.getpid():
            FORKED.append(self._open)
            self._open, self._owner = None, os.getpid()
        if self._open is None or not 0 <= low - self._open.place <= reach:
            self._open = self._open_at(low)
        for number in range(low, low + count):
            frame = self._frame(number)
            if frame is None:
                self.close()
                return
            yield frame

    def _frame(self, number: int) -> Any:
        back = self.block
        while True:
            try:
                assert self._open is not None
                return self._open.frame(number)
            except _SeekMissed:
                self._open = self._open_at(max(0, number - back))
                back *= 4

    def _open_at(self, low: int) -> _OpenFile:
        self.close()
        container = load_av().open(str(self.path), metadata_errors="ignore")
        stream = container.streams.video[0]
        stream.thread_type = self.threads
        sought = bool(low) and self.indexed
        if sought:
            container.seek(self.times[low], stream=stream, backward=True)
        times = range(len(self)) if self.counted else self.times
        return _OpenFile(
            self.path,
            container,
            container.decode(stream),
            times,
            low if sought else 0,
            self.counted,
        )

    def close(self) -> None:
        if self._open:
            self._open.container.close()
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


class _SeekMissed(Exception):
    """After a seek, what the decoder gives lies behind the wanted frame, or has no time."""


class _OpenFile:
    """An open file from some place on: gives the frames whose turn it is, by their times.

    Args:
        times: of all frames, in order; their numbers if the times of the file say nothing
            (`counted`).
        place: number of the frame that comes next; unless it is 0 at first, there was a seek.
    """

    def __init__(
        self,
        path: Path,
        container: Any,
        decoder: Iterator[Any],
        times: Sequence[int],
        place: int,
        counted: bool,
    ) -> None:
        self.path, self.container, self.decoder, self.times = path, container, decoder, times
        self.place, self.sought, self.counted = place, place > 0, counted
        self.decoded = 0
        self.last: tuple[int, Any] | None = None  # time and picture
        self.ahead: tuple[int, Any] | None = None  # came from the decoder before its turn

    def frame(self, number: int) -> Any:
        """None at the end of the file."""
        due = self.times[number]
        while self.ahead or self._decode():
            assert self.ahead is not None
            self.place = number + 1
            if self.ahead[0] > due:
                return self._held(number)
            self.last, self.ahead = self.ahead, None
            if self.last[0] == due:
                return self.last[1]
        return None

    def _decode(self) -> bool:
        picture = next(self.decoder, None)
        if picture is None:
            return False
        if not self.counted and picture.pts is not None:
            time = picture.pts
        elif self.sought:
            raise _SeekMissed
        else:
            time = self.times[min(self.decoded, len(self.times) - 1)]
        self.ahead = (time, picture)
        self.decoded += 1
        return True

    def _held(self, number: int) -> Any:
        """A packet may hold no picture of its own (a frame "as before", or one that is never
        shown): the last frame stays on.
        """
        if self.last is None and self.sought:
            raise _SeekMissed
        shown = self.last or self.ahead
        assert shown is not None
        if abs(number - bisect_right(self.times, shown[0]) + 1) > SPARE:
            raise DataError(
                f"{self.path} has no picture for frame {number}, though {len(self.times)} frames"
                " are listed: it is damaged"
            )
        return shown[1]


def frame_times(container: Any, stream: Any) -> tuple[list[Any], float]:
    """When each frame is shown, and how many seconds there are in all streams. Packets are let go
    at once: together they are the file. Matroska counts seconds from zero, the others from where
    the film begins."""
    times, end = [], 0.0
    for packet in container.demux():
        if packet.pts is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index == stream.index and packet.size and not packet.is_discard:
            times.append(packet.pts if packet.pts is not None else packet.dts)
    began = 0 if "matroska" in container.format.name else container.start_time or 0
    return times, end - began / 1e6


def median_gap(times: Sequence[int]) -> int:
    """Ticks between two frames, where most frames follow each other without a pause."""
    gaps = [later - earlier for earlier, later in pairwise(sorted(times))]
    return max(1, int(median_low(gaps))) if gaps else 1


def colours(frame: Any) -> str | None:
    """What the numbers of a frame mean, where it does not say so itself: ffmpeg would take BT.601
    at any size.
    """
    return (
        "ITU709"
        if frame.colorspace == UNKNOWN_COLOURS and frame.height >= HD and not frame.format.is_rgb
        else None
    )


def quarter_turns(av: Any, path: Path) -> int:
    """How often a player turns the frames to the left. That is told with the frames, so one is
    decoded.
    """
    with av.open(str(path), metadata_errors="ignore") as container:
        first = next(container.decode(container.streams.video[0]), None)
        return round(first.rotation / 90) % 4 if first is not None else 0


def reduced(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    """(height, width) with this short side, in proportion; never larger than it was."""
    if side is None or min(size) <= side:
        return size
    return (
        (side, round(size[1] * side / size[0]))
        if size[0] <= size[1]
        else (round(size[0] * side / size[1]), side)
    )


def open_frames(path: Path) -> Frames:
    """A folder of pictures or a video file."""
    if path.is_dir():
        return FolderFrames(path)
    if not path.exists():
        raise DataError(f"there is nothing at {path}")
    if is_image(path):
        return ArrayFrames(
            torch.from_numpy(read_picture(path).copy()).permute(2, 0, 1)[None], path.stem
        )
    return FileFrames(path)

"""Frames become a video file, with sound, times, pixel shape and colours as they were; or a folder
of pictures.

A film is encoded in segments, which lie in a folder beside it until the last one is there and they
are joined, packet by packet. So a film that is interrupted can go on: whoever writes it names a
`plan`, and what was written under the same plan counts as done.
"""

from __future__ import annotations

import io
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedlens.core.files import atomic_path, write_atomically
from fedlens.data.paths import is_image, is_video
from fedlens.data.source import DataError
from fedlens.data.video.files import FileFrames, load_av
from fedlens.data.video.frames import FolderFrames, Frames

# the videos that H.264 goes into, and ffmpeg's names for them
WRITTEN = {".mp4": "mp4", ".mkv": "matroska", ".mov": "mov", ".m4v": "ipod", ".avi": "avi"}
BT709 = 1  # ffmpeg's number for the colours of HD
SEGMENT = 64  # frames, at least; an interrupted film loses no more than a few of these


class Writer:
    """Takes frames in order: uint8 (n, 3, H, W), or levels up to 65535 where the film is deep.
    done: how many an earlier attempt with the same plan has left, which need not come again.
    """

    done = 0

    def __call__(self, part: Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """All frames are there."""


@contextmanager
def writer(
    target: Path,
    like: Frames,
    size: tuple[int, int],
    quality: int = 16,
    plan: str = "",
    deep: bool = False,
) -> Iterator[Writer]:
    """A video file (H.264, with the sound of `like` if that is a file) where the target has a video
    suffix, else a folder of PNGs. A file appears under its name only when it is complete. plan: see
    above; without one nothing is kept of an attempt that failed. deep: 10 bits a colour."""
    other_video = is_video(target) and target.suffix.lower() not in WRITTEN
    other_file = not is_video(target) and target.exists() and not target.is_dir()
    several = is_image(target) and len(like) > 1
    if several or other_video or (other_file and not is_image(target)):
        raise DataError(
            f"{len(like)} frames cannot become {target}: give a folder, or a name that ends in"
            f" {', '.join(WRITTEN)}"
        )
    if is_image(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        found: Writer = _PictureWriter(target)
    elif is_video(target):
        found = _FilmWriter(target, like, size, quality, plan, deep)
    else:
        found = _FolderWriter(target, like, plan)
    try:
        yield found
        found.close()
    except BaseException:
        if isinstance(found, _FilmWriter) and not plan:
            shutil.rmtree(found.parts, ignore_errors=True)
        raise


class _PictureWriter(Writer):
    def __init__(self, target: Path) -> None:
        self.target = target

    def __call__(self, part: Tensor) -> None:
        _save_picture(part[0], self.target)


class _FolderWriter(Writer):
    """The plan lies in the folder as long as frames are missing."""

    def __init__(self, folder: Path, like: Frames, plan: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            _distinct(like.files)
            if isinstance(like, FolderFrames)
            else [f"{k:08d}" for k in range(len(like))]
        )
        self.files = [folder / f"{name}.png" for name in names]
        self.note = folder / ".plan"
        if plan and _reads(self.note, plan):
            self.done = next((k for k, f in enumerate(self.files) if not f.exists()), len(names))
        elif plan:
            for file in self.files:
                file.unlink(missing_ok=True)
            write_atomically(self.note, plan)
        self.next = self.done

    def __call__(self, part: Tensor) -> None:
        for frame in part:
            with atomic_path(self.files[self.next]) as place:
                _save_picture(frame, place)
            self.next += 1

    def close(self) -> None:
        self.note.unlink(missing_ok=True)


def _reads(note: Path, plan: str) -> bool:
    return note.is_file() and note.read_text(errors="replace") == plan


def _distinct(files: list[Path]) -> list[str]:
    """Names without suffix; where that would make a.png and a.jpg one, with it: a and a.jpg. Should
    that be taken too, all keep theirs.
    """
    stems = Counter(f.stem for f in files)
    names = [f.name if stems[f.stem] > 1 and f.suffix != ".png" else f.stem for f in files]
    return names if len({*names}) == len(names) else [f.name for f in files]


def _save_picture(frame: Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()).save(path)


def _even(film: FileFrames) -> bool:
    """Whether a constant rate shows every frame within half a frame of its time. The times of an
    AVI say nothing.
    """
    if film.counted or not film.rate:
        return True
    ticks = float(1 / (film.rate * film.base))
    return all(
        abs(time - film.times[0] - k * ticks) <= ticks / 2 for k, time in enumerate(film.times)
    )


class _FilmWriter(Writer):
    """Segments in a hidden folder beside the film; inside one, frame k has the time k."""

    def __init__(
        self,
        target: Path,
        like: Frames,
        size: tuple[int, int],
        quality: int,
        plan: str,
        deep: bool,
    ) -> None:
        self.av = load_av()
        self.target, self.size, self.quality, self.deep = target, size, quality, deep
        self.film = like if isinstance(like, FileFrames) else None
        self.rate = like.rate or Fraction(25)
        self.avi = target.suffix.lower() == ".avi"  # has a rate, but no times
        if self.avi and self.film and not _even(self.film):
            raise DataError(
                f"the frames of {self.film.path} come at an uneven pace, which an .avi cannot keep:"
                " end the name in .mkv or .mp4"
            )
        self.sound = bool(self.film and self.film.sound)
        if self.film and self.sound:
            _try_sound(self.film.path, WRITTEN[target.suffix.lower()])
        self.parts = target.with_name(f".{target.name}.parts")
        if not (plan and _reads(self.parts / "plan", plan)):
            shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True, exist_ok=True)
        write_atomically(self.parts / "plan", plan)
        self.done = sum(length for _, length in self._segments())
        self.waiting: list[Tensor] = []

    def _segments(self) -> list[tuple[Path, int]]:
        """Each with its number of frames, up to the first gap; their names say what they hold."""
        found: list[tuple[Path, int]] = []
        begin = 0
        for file in sorted(self.parts.glob("[0-9]*-[0-9]*.*")):
            first, length = (int(n) for n in file.stem.split("-"))
            if first != begin:
                break
            found.append((file, length))
            begin += length
        return found

    def __call__(self, part: Tensor) -> None:
        self.waiting.append(part)
        if sum(map(len, self.waiting)) >= SEGMENT:
            self._flush()

    def _flush(self) -> None:
        length = sum(map(len, self.waiting))
        if not length:
            return
        suffix = ".avi" if self.avi else ".mp4"
        place = self.parts / f"{self.done:08d}-{length:04d}{suffix}"
        with atomic_path(place) as path, self.av.open(str(path), "w") as out:
            stream = self._stream(out)
            shape = self.av.video.reformatter.VideoReformatter()
            for k, frame in enumerate(frame for part in self.waiting for frame in part):
                picture = shape.reformat(
                    self._picture(frame), format=stream.pix_fmt, dst_colorspace="ITU709"
                )
                picture.pts, picture.time_base = k, 1 / self.rate
                out.mux(stream.encode(picture))
            out.mux(stream.encode(None))
        self.done += length
        self.waiting.clear()

    def _stream(self, out: Any) -> Any:
        stream = out.add_stream("libx264", rate=self.rate)
        height, width = self.size
        # 4:2:0 needs even sides; x3 of an odd clip has odd ones and keeps full chroma instead.
        kind = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
        stream.pix_fmt = f"{kind}10le" if self.deep else kind
        stream.height, stream.width = height, width
        stream.options = {"crf": str(self.quality), "preset": "medium"}
        if self.avi:
            # they are stored out of order, and it takes times to put them back
            stream.codec_context.max_b_frames = 0
        # written down: players guess it from the size, and the size has changed
        stream.codec_context.colorspace = BT709
        if self.film:
            stream.codec_context.sample_aspect_ratio = self.film.aspect
        return stream

    def _picture(self, frame: Tensor) -> Any:
        array: Any = frame.permute(1, 2, 0).contiguous().numpy()
        if self.deep:
            return self.av.VideoFrame.from_ndarray(array.astype(np.uint16), format="rgb48le")
        return self.av.VideoFrame.from_ndarray(array, format="rgb24")

    def close(self) -> None:
        self._flush()
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.target) as path, self.av.open(str(path), "w") as out:
            self._join(out)
        shutil.rmtree(self.parts, ignore_errors=True)

    def _join(self, out: Any) -> None:
        """Packets keep the order in which their segment holds them. A packet's place in time is a
        frame's number, which may lie before its segment (frames are stored out of order), and
        becomes that frame's own time, because telephones film at an uneven pace."""
        film = self.film
        timed = film if film and not film.counted and not self.avi else None
        base = timed.base if timed else 1 / self.rate
        time = partial(_time, timed.times) if timed else int
        stream, sound, first = None, None, 0
        for file, length in self._segments():
            with self.av.open(str(file)) as segment:
                given = segment.streams.video[0]
                if stream is None:
                    stream = out.add_stream_from_template(given)
                    stream.time_base = base
                    sound = _Sound(out, film.path) if film and self.sound else None
                for packet in segment.demux(given):
                    if packet.dts is None:
                        continue
                    step = packet.time_base * self.rate
                    shown, stored = (
                        first + round(ticks * step)
                        for ticks in (packet.dts if packet.pts is None else packet.pts, packet.dts)
                    )
                    packet.pts, packet.dts = time(shown), time(stored)
                    packet.duration = time(shown + 1) - time(shown)
                    packet.time_base, packet.stream = base, stream
                    out.mux(packet)
                first += length
            if sound and timed:
                sound.copy(out, float(timed.times[first - 1] * base))
        if sound:
            sound.copy(out)
            sound.close()


def _time(times: Sequence[int], number: int) -> int:
    """Of a frame; before the first one and after the last at the pace there."""
    last = len(times) - 1
    if 0 <= number <= last:
        return times[number]
    edge, other = (0, min(1, last)) if number < 0 else (last, max(0, last - 1))
    return times[edge] + (number - edge) * max(1, abs(times[edge] - times[other]))


def _try_sound(path: Path, kind: str) -> None:
    """Some pairs of sound and file fail only when the file is closed, which is after all the work:
    so one packet goes first, alone.
    """
    av = load_av()
    with av.open(str(path), metadata_errors="ignore") as source:
        track = source.streams.audio[0]
        try:
            with av.open(io.BytesIO(), "w", format=kind) as out:
                copied = out.add_stream_from_template(track)
                for packet in islice((p for p in source.demux(track) if p.dts is not None), 1):
                    packet.stream = copied
                    out.mux(packet)
        except (ValueError, av.FFmpegError) as e:
            raise DataError(
                f"{track.codec_context.name} sound of {path} cannot go into this kind of file: end"
                " the name in .mkv"
            ) from e


class _Sound:
    """The sound track of a file, packet by packet into another one, unchanged."""

    def __init__(self, out: Any, path: Path) -> None:
        _try_sound(path, out.format.name)
        self.source = load_av().open(str(path), metadata_errors="ignore")
        track = self.source.streams.audio[0]
        self.copied = out.add_stream_from_template(track)
        self.packets = (p for p in self.source.demux(track) if p.dts is not None)
        self.next = next(self.packets, None)

    def copy(self, out: Any, until: float = math.inf) -> None:
        """Up to this second, so that in the file sound lies beside its pictures."""
        while self.next is not None and float(self.next.dts * self.next.time_base) <= until:
            self.next.stream = self.copied
            out.mux(self.next)
            self.next = next(self.packets, None)

    def close(self) -> None:
        self.source.close()

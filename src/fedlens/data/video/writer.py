"""Frames become a video file, with sound, times, pixel shape and colours as they were; or a folder
of pictures.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens.core.files import atomic_path
from fedlens.data.paths import is_image, is_video
from fedlens.data.source import DataError
from fedlens.data.video.files import FileFrames, load_av
from fedlens.data.video.frames import FolderFrames, Frames

WRITTEN = (".mp4", ".mkv", ".mov", ".m4v", ".avi")  # the videos that H.264 goes into
BT709 = 1  # ffmpeg's number for the colours of HD
Write = Callable[[Tensor], None]  # takes uint8 (n, 3, H, W)


@contextmanager
def writer(target: Path, like: Frames, size: tuple[int, int], quality: int = 16) -> Iterator[Write]:
    """A video file (H.264, with the sound of `like` if that is a file) where the target has a video
    suffix, else a folder of PNGs. A file appears under its name only when it is complete."""
    if is_image(target) and len(like) == 1:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield lambda part: _save_picture(part[0], target)
        return
    other_video = is_video(target) and target.suffix.lower() not in WRITTEN
    other_file = not is_video(target) and target.exists() and not target.is_dir()
    if is_image(target) or other_video or other_file:
        raise DataError(
            f"{len(like)} frames cannot become {target}: give a folder, or a name that ends in"
            f" {', '.join(WRITTEN)}"
        )
    if not is_video(target):
        yield _folder_writer(target, like)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as part, _file_writer(part, like, size, quality) as write:
        yield write


def _folder_writer(folder: Path, like: Frames) -> Write:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        _distinct(like.files)
        if isinstance(like, FolderFrames)
        else [f"{k:08d}" for k in range(len(like))]
    )
    left = iter(names)

    def write(part: Tensor) -> None:
        for frame in part:
            _save_picture(frame, folder / f"{next(left)}.png")

    return write


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


@contextmanager
def _file_writer(path: Path, like: Frames, size: tuple[int, int], quality: int) -> Iterator[Write]:
    av = load_av()
    height, width = size
    film = like if isinstance(like, FileFrames) else None
    avi = path.suffix.lower() == ".avi"  # has a rate, but no times
    if avi and film and not _even(film):
        raise DataError(
            f"the frames of {film.path} come at an uneven pace, which an .avi cannot keep: end the"
            " name in .mkv or .mp4"
        )
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=like.rate or Fraction(25))
        # 4:2:0 needs even sides; x3 of an odd clip has odd ones and keeps full chroma instead.
        stream.pix_fmt = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
        stream.height, stream.width = height, width
        stream.options = {"crf": str(quality), "preset": "medium"}
        if avi:
            # they are stored out of order, and it takes times to put them back
            stream.codec_context.max_b_frames = 0
        # written down: players guess it from the size, and the size has changed
        stream.codec_context.colorspace = BT709
        if film:
            stream.codec_context.sample_aspect_ratio = film.aspect
        # Every frame at its own time, because telephones film at an uneven pace.
        timed = film if film and not film.counted and not avi else None
        if timed:
            stream.codec_context.time_base = timed.base
        sound = _Sound(out, film.path) if film and film.sound else None
        shape = av.video.reformatter.VideoReformatter()
        done = 0

        def write(part: Tensor) -> None:
            nonlocal done
            for frame in part:
                picture = av.VideoFrame.from_ndarray(
                    frame.permute(1, 2, 0).contiguous().numpy(), format="rgb24"
                )
                picture = shape.reformat(picture, format=stream.pix_fmt, dst_colorspace="ITU709")
                if timed:
                    picture.pts, picture.time_base = timed.times[done], timed.base
                out.mux(stream.encode(picture))
                done += 1
            if sound and timed:
                sound.copy(out, float(timed.times[done - 1] * timed.base))

        try:
            yield write
            out.mux(stream.encode(None))
            if sound:
                sound.copy(out)
        finally:
            if sound:
                sound.close()


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

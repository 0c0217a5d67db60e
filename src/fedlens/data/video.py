"""Frames, wherever they lie: a folder of pictures, a video file, an array. Read in stretches, so that memory stays bounded.

`Frames.read(low, high)` gives uint8 (n, 3, H, W). Grey pictures become RGB and an alpha channel is dropped. `Cache` keeps what was
decoded, up to a number of bytes, or on disk as raw frames from which a crop reads only its own rows.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.data.source import DataError

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
VIDEOS = {".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".y4m"}
WRITTEN = (".mp4", ".mkv", ".mov", ".m4v", ".avi")  # what H.264 goes into
SPARE = 2  # frames that may be missing at the end of a file
BT709 = 1  # ffmpeg's number for the colours of HD
LATE = 0.5  # seconds that a file without a count of frames may end before its header says
Box = tuple[int, int, int, int]  # top, left, height, width
FORKED: list[Any] = []  # open files of a parent process: closing them would wait for threads that a fork leaves behind


class Frames(ABC):
    """A clip. `size` is (height, width), `rate` frames a second where that is known."""

    name: str
    size: tuple[int, int]
    rate: Fraction | None = None
    block: int = 1  # frames that are cheapest to decode together

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, low: int, high: int) -> Tensor:
        """Frames low ... high - 1 as uint8 (n, 3, H, W)."""

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        top, left, height, width = box
        return self.read(low, high)[..., top : top + height, left : left + width]

    def _check(self, low: int, high: int) -> None:
        if not 0 <= low < high <= len(self):
            raise DataError(f"{self.name} has frames 0 to {len(self) - 1}; {low} to {high - 1} were asked for")


class ArrayFrames(Frames):
    """Frames that are in memory already: uint8 (n, 3, H, W)."""

    def __init__(self, array: Tensor, name: str = "clip", rate: Fraction | None = None) -> None:
        if array.dim() != 4 or array.shape[1] != 3 or array.dtype != torch.uint8:
            raise DataError(f"{name}: frames are uint8 (n, 3, H, W), not {array.dtype} {tuple(array.shape)}")
        self.array, self.name, self.rate = array, name, rate
        self.size = (array.shape[2], array.shape[3])

    def __len__(self) -> int:
        return len(self.array)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        return self.array[low:high]


class FolderFrames(Frames):
    """One picture per frame, in natural order of their names. All must have one size, which their headers tell. size: as it was found when
    the folder was opened before; it is then not looked through again."""

    def __init__(self, folder: Path, size: tuple[int, int] | None = None) -> None:
        self.folder, self.name = folder, folder.name
        self.files = pictures_in(folder)
        if not self.files:
            raise DataError(f"{folder} holds no pictures ({', '.join(sorted(PICTURES))})")
        self.size = size or _picture(self.files[0]).shape[:2]
        for file in self.files[1:] if size is None else ():
            self._same(file, _header(file))

    def __len__(self) -> int:
        return len(self.files)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        out = np.empty((high - low, *self.size, 3), np.uint8)
        for k, file in enumerate(self.files[low:high]):
            picture = _picture(file)
            self._same(file, picture.shape[:2])  # it may have been replaced since
            out[k] = picture
        return torch.from_numpy(out).permute(0, 3, 1, 2)

    def _same(self, file: Path, size: tuple[int, int]) -> None:
        if size != self.size:
            (h, w), (a, b) = self.size, size
            raise DataError(f"{self.folder} has frames of different sizes: {file.name} has {b}x{a} pixels, but the clip began with {w}x{h}")


def pictures_in(folder: Path) -> list[Path]:
    return sorted((f for f in folder.iterdir() if f.suffix.lower() in PICTURES), key=natural)


def natural(path: Path) -> list[Any]:
    """frame9 comes before frame10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name) if part]


def _picture(file: Path) -> np.ndarray[Any, Any]:
    with _opened(file) as picture:
        if picture.mode.startswith("I"):  # 16-bit grey: Pillow would cut everything above 255 off
            return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[..., None], 3, 2)
        return np.asarray(picture.convert("RGB"))


def _header(file: Path) -> tuple[int, int]:
    """(height, width), without decoding."""
    with _opened(file) as picture:
        return picture.height, picture.width


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as picture:
            yield picture
    except (UnidentifiedImageError, OSError) as e:
        raise DataError(f"{file} cannot be read as a picture: {e}") from e


def load_av() -> Any:
    try:
        import av
    except ImportError as e:
        raise DataError('reading video files needs PyAV: pip install "fedlens[video]"') from e
    return av


class FileFrames(Frames):
    """A video file, by PyAV. Which frames there are is read from the packets, without decoding; reading on where the last read ended
    costs no seek. The open file belongs to a process: a copy that is sent elsewhere opens its own. Frames of a telephone held upright are
    turned as a player would. Damage inside a packet shows only when it is decoded: `read` then raises, or gives what the decoder guesses.
    side: frames are shrunk to this short side as they are decoded. threads: AUTO lets the decoder have several, NONE keeps it in the
    caller's."""

    block = 16

    def __init__(self, path: Path, side: int | None = None, threads: str = "AUTO") -> None:
        self.path, self.name, self.threads = path, path.stem, threads
        self._open: tuple[Any, Iterator[Any], int] | None = None  # container, decoder, number of the frame that comes next
        self._owner = os.getpid()
        av = load_av()
        try:
            with av.open(str(path), metadata_errors="ignore") as container:
                if not container.streams.video:
                    raise DataError(f"{path} has no video stream")
                stream = container.streams.video[0]
                promised, seconds = stream.frames, (container.duration or 0) / 1e6
                self.turns = quarter_turns(av, path) if "mov" in container.format.name else 0
                self.whole = reduced((stream.codec_context.height, stream.codec_context.width), side)  # as it comes from the decoder
                self.size = self.whole[::-1] if self.turns % 2 else self.whole
                self.rate = Fraction(stream.average_rate) if stream.average_rate else None
                aspect = stream.sample_aspect_ratio or Fraction(1)
                self.aspect, self.base = 1 / aspect if self.turns % 2 else aspect, stream.time_base
                self.counted = container.format.name == "avi"  # its time stamps say nothing about the order of frames
                times, lasted = stamps(container, stream)
        except (av.FFmpegError, OSError) as e:
            raise DataError(f"{path} cannot be read as a video ({e.strerror or e}); it may be truncated") from e
        if not times or any(t is None for t in times):
            raise DataError(f"{path} has no frames with a time stamp")
        if promised and len(times) < promised - 1:
            raise DataError(f"{path} is truncated: its header promises {promised} frames, {len(times)} are there")
        if not promised and lasted < seconds - LATE:
            raise DataError(f"{path} is truncated: its header promises {seconds:.1f} seconds, {lasted:.1f} are there")
        self.times: list[int] = sorted(times)

    @property
    def sound(self) -> bool:
        with load_av().open(str(self.path), metadata_errors="ignore") as container:
            return bool(container.streams.audio)

    def __len__(self) -> int:
        return len(self.times)

    def read(self, low: int, high: int) -> Tensor:
        self._check(low, high)
        out = np.empty((high - low, *self.size, 3), np.uint8)
        av, got = load_av(), 0
        shape = av.video.reformatter.VideoReformatter()  # one for all: a frame's own would be set up anew for every frame
        try:
            for frame in self._from(low, high - low):
                height, width = self.whole
                out[got] = np.rot90(shape.reformat(frame, width, height, "rgb24", interpolation="AREA").to_ndarray(), self.turns)
                got += 1
        except av.FFmpegError as e:
            raise DataError(f"{self.path} cannot be decoded after frame {low + got} ({e.strerror or e}); it may be truncated") from e
        if got == high - low:
            return torch.from_numpy(out).permute(0, 3, 1, 2)
        if len(self) - low - got > SPARE:
            raise DataError(f"{self.path} ends after frame {low + got}, though {len(self)} are listed: it is truncated")
        # Packed MPEG-4 ends with placeholders that hold no picture: the last frame stays on.
        out[got:] = out[got - 1] if got else self.read(low - 1, low)[0].permute(1, 2, 0).numpy()
        return torch.from_numpy(out).permute(0, 3, 1, 2)

    def _from(self, low: int, count: int) -> Iterator[Any]:
        reach = len(self) if self.counted else self.block
        if self._owner != os.getpid():
            FORKED.append(self._open)
            self._open, self._owner = None, os.getpid()
        if self._open is None or not 0 <= low - self._open[2] <= reach:
            self._seek(low)
        assert self._open is not None
        container, decoder, place = self._open
        for frame in decoder:
            early = place < low if self.counted else place <= low and frame.pts is not None and frame.pts < self.times[low]
            place = place + 1 if self.counted else max(place, low) + (not early)
            self._open = (container, decoder, place)
            if not early:
                yield frame
            if place == low + count:
                return
        self.close()

    def _seek(self, low: int) -> None:
        self.close()
        container = load_av().open(str(self.path), metadata_errors="ignore")
        stream = container.streams.video[0]
        stream.thread_type = self.threads
        if low and not self.counted:
            container.seek(self.times[low], stream=stream, backward=True)
        self._open = (container, container.decode(stream), 0 if self.counted else low)

    def close(self) -> None:
        if self._open:
            self._open[0].close()
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


def stamps(container: Any, stream: Any) -> tuple[list[Any], float]:
    """When each frame is shown, and how many seconds there are in all streams. Packets are let go at once: together they are the file."""
    times, end = [], 0.0
    for packet in container.demux():
        if packet.pts is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index == stream.index and packet.size and not packet.is_discard:
            times.append(packet.pts if packet.pts is not None else packet.dts)
    return times, end - (container.start_time or 0) / 1e6


def quarter_turns(av: Any, path: Path) -> int:
    """How often a player turns the frames to the left. That is told with the frames, so one is decoded."""
    with av.open(str(path), metadata_errors="ignore") as container:
        first = next(container.decode(container.streams.video[0]), None)
        return round(first.rotation / 90) % 4 if first is not None else 0


def reduced(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    """(height, width) with this short side, in proportion; never larger than it was."""
    if side is None or min(size) <= side:
        return size
    return (side, round(size[1] * side / size[0])) if size[0] <= size[1] else (round(size[0] * side / size[1]), side)


def open_frames(path: Path) -> Frames:
    """A folder of pictures or a video file."""
    if path.is_dir():
        return FolderFrames(path)
    if not path.exists():
        raise DataError(f"there is nothing at {path}")
    if path.suffix.lower() in PICTURES:
        return ArrayFrames(torch.from_numpy(_picture(path).copy()).permute(2, 0, 1)[None], path.stem)
    return FileFrames(path)


def find_clips(root: Path) -> list[Path]:
    """Every video file, and every folder that holds pictures itself, below a folder; in natural order."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    found: list[Path] = []
    for folder, children, files in _walk(root):
        kinds = {Path(f).suffix.lower() for f in files}
        if kinds & PICTURES:
            found.append(folder)
            children.clear()
        found += [folder / f for f in files if Path(f).suffix.lower() in VIDEOS]
    if not found:
        raise DataError(f"{root} holds neither video files nor folders of pictures")
    return sorted(found, key=lambda p: [part for piece in p.parts for part in natural(Path(piece))])


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, children, files in os.walk(root, followlinks=True):
        children.sort()
        yield Path(folder), children, sorted(files)


class Cache:
    """Decoded blocks of many clips: the least recently used go first when `budget` bytes are full. With a `folder`, every clip is
    decoded once and for all into a raw file there, of which a crop reads only its own rows; what lies there of a clip that was rewritten
    since is not used again, nor deleted. A copy in another process starts empty."""

    def __init__(self, budget: int = 1 << 30, folder: Path | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self.held = 0

    def block(self, key: str, frames: Frames, number: int) -> Tensor:
        place = (key, number)
        if place in self.blocks:
            self.blocks.move_to_end(place)
            return self.blocks[place]
        low = number * frames.block
        block = frames.read(low, min(low + frames.block, len(frames)))
        self.blocks[place] = block
        self.held += block.numel()
        while self.held > self.budget and len(self.blocks) > 1:
            self.held -= self.blocks.popitem(last=False)[1].numel()
        return block

    def raw(self, key: str, frames: Frames) -> Any:
        """The clip as a memory-mapped (n, H, W, 3); written first if it is not there. Writing ends with a rename, so it is there whole."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}.npy"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")
            out = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=(len(frames), *frames.size, 3))  # type: ignore[no-untyped-call]
            for low in range(0, len(frames), 16):
                high = min(low + 16, len(frames))
                out[low:high] = frames.read(low, high).permute(0, 2, 3, 1).numpy()
            out.flush()
            part.rename(path)
        return np.load(path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "blocks": OrderedDict(), "held": 0}


def key_of(path: Path, side: int | None = None) -> str:
    """What a clip is called in a cache: by its place, its short side, and the bytes and the time of writing of its files, so that one that
    was rewritten is decoded anew."""
    files = [(f.name, f.stat()) for f in (pictures_in(path) if path.is_dir() else [path])]
    told = f"{path.resolve()} {side} {[(name, now.st_size, now.st_mtime_ns) for name, now in files]}"
    return hashlib.sha256(told.encode()).hexdigest()[:24]


class Cached(Frames):
    """A clip seen through a cache."""

    def __init__(self, frames: Frames, cache: Cache, key: str) -> None:
        self.frames, self.cache, self.key = frames, cache, key
        self.name, self.size, self.rate, self.block = frames.name, frames.size, frames.rate, frames.block

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, low: int, high: int) -> Tensor:
        return self.crop(low, high, (0, 0, *self.size))

    def crop(self, low: int, high: int, box: Box) -> Tensor:
        self._check(low, high)
        top, left, height, width = box
        if self.cache.folder is not None:
            piece = self.cache.raw(self.key, self.frames)[low:high, top : top + height, left : left + width]
            return torch.from_numpy(np.array(piece)).permute(0, 3, 1, 2)
        parts: list[Tensor] = []
        for number in range(low // self.block, (high - 1) // self.block + 1):
            block, first = self.cache.block(self.key, self.frames, number), number * self.block
            parts.append(block[max(0, low - first) : high - first, :, top : top + height, left : left + width])
        return torch.cat(parts)


def open_all(paths: Sequence[Path], cache: Cache) -> list[Frames]:
    return [Cached(open_frames(p), cache, key_of(p)) for p in paths]


# -- writing ---------------------------------------------------------------------------------------------------------------------------

Write = Callable[[Tensor], None]  # takes uint8 (n, 3, H, W)


@contextmanager
def writer(target: Path, like: Frames, size: tuple[int, int], quality: int = 16) -> Iterator[Write]:
    """A video file (H.264, with the sound of `like` if that is a file) where the target has a video suffix, else a folder of PNGs. A file
    appears under its name only when it is complete."""
    suffix = target.suffix.lower()
    if suffix in PICTURES and len(like) == 1:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield lambda part: _save_picture(part[0], target)
        return
    if suffix in PICTURES or suffix in VIDEOS - {*WRITTEN} or (suffix not in VIDEOS and target.exists() and not target.is_dir()):
        raise DataError(f"{len(like)} frames cannot become {target}: give a folder, or a name that ends in {', '.join(WRITTEN)}")
    if suffix not in VIDEOS:
        yield _folder_writer(target, like)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        with _file_writer(part, like, size, quality) as write:
            yield write
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _folder_writer(folder: Path, like: Frames) -> Write:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f.stem for f in like.files] if isinstance(like, FolderFrames) else [f"{k:08d}" for k in range(len(like))]
    left = iter(names)

    def write(part: Tensor) -> None:
        for frame in part:
            _save_picture(frame, folder / f"{next(left)}.png")

    return write


def _save_picture(frame: Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()).save(path)


@contextmanager
def _file_writer(path: Path, like: Frames, size: tuple[int, int], quality: int) -> Iterator[Write]:
    av = load_av()
    height, width = size
    film = like if isinstance(like, FileFrames) else None
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=like.rate or Fraction(25))
        # 4:2:0 needs even sides; x3 of an odd clip has odd ones and keeps full chroma instead.
        stream.pix_fmt = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
        stream.height, stream.width = height, width
        stream.options = {"crf": str(quality), "preset": "medium"}
        stream.codec_context.colorspace = BT709  # written down: players guess it from the size, and the size has changed
        if film:
            stream.codec_context.sample_aspect_ratio = film.aspect
        # Every frame at its own time, because telephones film at an uneven pace; an AVI has no times.
        timed = film if film and not film.counted and path.suffix.lower() != ".avi" else None
        if timed:
            stream.codec_context.time_base = timed.base
        sound = _Sound(out, film.path) if film and film.sound else None
        shape = av.video.reformatter.VideoReformatter()
        done = 0

        def write(part: Tensor) -> None:
            nonlocal done
            for frame in part:
                picture = av.VideoFrame.from_ndarray(frame.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
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


class _Sound:
    """The sound track of a file, packet by packet into another one, unchanged."""

    def __init__(self, out: Any, path: Path) -> None:
        self.source = load_av().open(str(path), metadata_errors="ignore")
        track = self.source.streams.audio[0]
        try:
            self.copied = out.add_stream_from_template(track)
        except ValueError as e:
            self.close()
            raise DataError(f"{track.codec_context.name} sound of {path} cannot go into this kind of file: end the name in .mkv") from e
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

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from films import converted, ramp
from PIL import Image

from fedlens.data.source import DataError
from fedlens.data.video.files import FileFrames, open_frames
from fedlens.data.video.frames import ArrayFrames, FolderFrames, read_picture
from fedlens.data.video.writer import writer

av = pytest.importorskip("av")
PictureType = pytest.importorskip("av.video.frame").PictureType


def test_an_upright_telephone(film: Path, tmp_path: Path) -> None:
    """The file says that players shall turn it; ffmpeg does so when it makes pictures, which must
    be ours. Pixels twice as wide as high are then twice as high as wide, and a copy keeps that."""
    wide = converted(
        film, tmp_path / "wide.mp4", "-c", "copy", "-bsf:v", "h264_metadata=sample_aspect_ratio=2/1"
    )
    for angle in (90, 180, 270):
        turned = converted(
            wide, tmp_path / f"{angle}.mp4", "-c", "copy", before=("-display_rotation", str(angle))
        )
        (tmp_path / f"{angle}").mkdir()
        converted(turned, tmp_path / f"{angle}" / "%d.png")
        ours, theirs = FileFrames(turned), FolderFrames(tmp_path / f"{angle}")
        assert ours.size == theirs.size == ((48, 64) if angle == 180 else (64, 48))
        assert (ours.read(5, 9).float() - theirs.read(5, 9).float()).abs().mean() < 2
        with writer(tmp_path / "copy.mp4", ours, ours.size) as write:
            write(ours.read(0, 40))
        copy = FileFrames(tmp_path / "copy.mp4")
        assert (
            copy.turns == 0
            and copy.size == ours.size
            and copy.aspect == ours.aspect == (2 if angle == 180 else Fraction(1, 2))
        )


def test_a_copy_keeps_an_uneven_pace(film: Path, tmp_path: Path) -> None:
    """Frames 10 to 19 are left out and 20 to 39 come at half the speed: 0 ... 9, then 20, 22, ...
    58, in units of 40 ms.
    """
    pace = "select='lt(n,10)+gte(n,20)',setpts='if(lt(N,10),N,N*2)/25/TB'"
    frames = FileFrames(converted(film, tmp_path / "uneven.mp4", "-vf", pace, "-fps_mode", "vfr"))
    with writer(tmp_path / "copy.mp4", frames, frames.size) as write:
        write(frames.read(0, 15))
        write(frames.read(15, 30))
    copy = FileFrames(tmp_path / "copy.mp4")
    expected = [*range(10), *range(20, 60, 2)]
    assert [
        round(float(t * f.base * 25), 2) for f in (frames, copy) for t in f.times
    ] == expected * 2
    refused = pytest.raises(
        DataError,
        match=(
            r"uneven\.mp4 come at an uneven pace, which an \.avi cannot keep: end the name in \.mkv"
            r" or \.mp4"
        ),
    )
    with refused, writer(tmp_path / "copy.avi", frames, frames.size):
        pytest.fail("frames would be made")
    assert not list(tmp_path.glob("*.avi"))


@pytest.mark.parametrize("rate", ["25", "30000/1001"])
@pytest.mark.parametrize("source", ["film.mkv", "film.mp4", "film.ts", "film.avi"])
def test_avi_holds_frames_in_the_order_in_which_they_are_shown(
    film: Path, tmp_path: Path, source: str, rate: str
) -> None:
    """The times of Matroska are rounded to milliseconds: that is no uneven pace."""
    frames = FileFrames(converted(film, tmp_path / source, before=("-r", rate)))
    with writer(tmp_path / "copy.avi", frames, frames.size) as write:
        write(frames.read(0, 40))
    copy = FileFrames(tmp_path / "copy.avi")
    assert len(copy) == 40 and float(copy.rate or 0) == pytest.approx(
        float(Fraction(rate)), rel=1e-3
    )
    assert (copy.read(0, 40).float() - frames.read(0, 40).float()).abs().mean() < 3
    with av.open(str(tmp_path / "copy.avi")) as container:
        assert PictureType.B not in {frame.pict_type for frame in container.decode(video=0)}


def test_colours_are_told_with_the_file(tmp_path: Path) -> None:
    """Green 200 by BT.709 is 16 + 0.7152 * 200 * 219 / 255 = 138.8, by the older BT.601 it would be
    16 + 0.587 * 171.8 = 116.8. The file says which it is, so that a player does not guess from the
    size."""
    green = ArrayFrames(
        torch.tensor([0, 200, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    )
    with writer(tmp_path / "green.mp4", green, green.size, quality=4) as write:
        write(green.array)
    with av.open(str(tmp_path / "green.mp4")) as container:
        frame = next(container.decode(video=0))
        assert frame.colorspace == 1 and frame.to_ndarray()[16, 16] == pytest.approx(138.8, abs=1)
    assert open_frames(tmp_path / "green.mp4").read(0, 1)[0, :, 16, 16].tolist() == pytest.approx(
        [0, 200, 0], abs=3
    )


@pytest.mark.parametrize("name", ["film.webm", "film.mpg", "film.png"])
def test_names_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    frames = ArrayFrames(ramp(2))
    with (
        pytest.raises(
            DataError,
            match=rf"2 frames cannot become .*{name}: give a folder, or a name that ends in \.mp4",
        ),
        writer(tmp_path / name, frames, frames.size),
    ):
        pass


@pytest.mark.parametrize(
    ("codec", "source", "target"),
    [("pcm_s16le", "a.avi", "b.mp4"), ("aac", "a.ts", "b.avi"), ("mp2", "a.mpg", "b.m4v")],
)
def test_sound_that_the_file_cannot_hold(
    film: Path, tmp_path: Path, codec: str, source: str, target: str
) -> None:
    """Refused before the first frame is made, although the muxer would notice at the last; Matroska
    takes it.
    """
    tone = ("-f", "lavfi", "-t", "1.6", "-i", "sine", "-ac", "2", "-ar", "44100", "-c:a", codec)
    frames = FileFrames(converted(film, tmp_path / source, *tone))
    refused = pytest.raises(
        DataError,
        match=(
            rf"{codec} sound of .*{source} cannot go into this kind of file: end the name in \.mkv"
        ),
    )
    with refused, writer(tmp_path / target, frames, frames.size):
        pytest.fail("frames would be made")
    assert {p.name for p in tmp_path.iterdir()} == {source}
    with writer(tmp_path / "b.mkv", frames, frames.size) as write:
        write(frames.read(0, len(frames)))
    with av.open(str(tmp_path / "b.mkv")) as container:
        assert container.streams.audio[0].codec_context.name.startswith(codec[:3])


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (["a.png", "b.bmp"], ["a.png", "b.png"]),
        (["a.bmp", "a.png", "b.bmp"], ["a.bmp.png", "a.png", "b.png"]),
        (["a.bmp", "a.bmp.png", "a.png"], ["a.bmp.png", "a.bmp.png.png", "a.png.png"]),
    ],
)
def test_pictures_that_differ_in_their_suffix_alone(
    tmp_path: Path, names: list[str], written: list[str]
) -> None:
    (tmp_path / "in").mkdir()
    for k, name in enumerate(names):
        Image.new("RGB", (8, 8), (k, k, k)).save(tmp_path / "in" / name)
    frames = FolderFrames(tmp_path / "in")
    assert [f.name for f in frames.files] == names
    with writer(tmp_path / "out", frames, frames.size) as write:
        write(frames.read(0, len(names)))
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == written
    assert [read_picture(tmp_path / "out" / name)[0, 0, 0] for name in written] == list(
        range(len(names))
    )

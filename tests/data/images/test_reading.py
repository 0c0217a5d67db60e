"""Images as tensors."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.images.folders import ImageFolder
from fedlens.data.images.labelled import Reader, load_image
from fedlens.data.images.reading import converted, opened, read_image, resize, upright_size
from fedlens.data.pose.people import People, Person
from fedlens.data.pose.people import open_image as people_image
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.data.source import DataError
from fedlens.data.video.frames import FolderFrames, read_picture


def write_claim(path: Path, side: int) -> None:
    """A PNG of a few bytes that says it has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def test_a_picture_too_large_to_be_one_is_skipped_and_counted(tmp_path: Path) -> None:
    """PIL warns from 89 million pixels on and refuses twice as many; warnings are errors here."""
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "good.png")
    write_claim(tmp_path / "huge.png", 30000)
    write_claim(tmp_path / "large.png", 10000)
    reader = Reader()
    assert len(reader.read([(tmp_path / f"{n}.png", 0) for n in ("good", "huge", "large")])) == 1
    names = [Path(s.split(":")[0]).name for s in reader.skipped]
    assert names == ["huge.png", "large.png"]
    assert "900000000 pixels" in reader.skipped[0]
    with pytest.raises(DataError, match=r"huge.png is not an image that can be read"):
        read_image(tmp_path / "huge.png")


def test_sixteen_bit_levels_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    """level / 257: 65535 is white, 257 k is k."""
    deep = np.array([[0, 257, 40000, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(deep).save(tmp_path / "deep.tif")
    Image.fromarray(deep.astype(np.int32)).save(tmp_path / "long.tif")
    for name in ("deep.png", "deep.tif", "long.tif"):
        for mode, channels in (("RGB", 3), ("L", 1)):
            assert (
                load_image(tmp_path / name, None, mode).tolist() == [[[0, 1, 156, 255]]] * channels
            ), name
    with opened(tmp_path / "deep.png") as picture:
        assert np.asarray(converted(picture, "L")).tolist() == [[0, 1, 156, 255]]


def test_floating_point_pixels_are_refused_with_the_reason(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / name / "x.tif")
    with pytest.raises(
        DataError, match="its pixels are floating-point numbers: save it with 8 or 16 bits"
    ):
        ImageFolder(root=str(tmp_path)).federation(1, 0)


def test_sixteen_bits_and_resizing(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 65535, np.uint16)).save(tmp_path / "deep.png")
    assert float(read_image(tmp_path / "deep.png").max()) == pytest.approx(255)
    rng = np.random.default_rng(0)
    big = rng.integers(0, 256, (40, 40)).astype(np.float32)
    want = np.asarray(Image.fromarray(big).resize((20, 20), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(
        resize(torch.from_numpy(big)[None], 20)[0].numpy(), want.clip(0, 255)
    )


def on_its_side(path: Path, number: int) -> None:
    """16 rows of 24 pixels, bright in the first corner, and a note how to hold them."""
    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[:8, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = number
    Image.fromarray(pixels).save(path, exif=exif)


# where the bright one comes to lie
CORNERS = {
    1: (0, 0),
    2: (0, -1),
    3: (-1, -1),
    4: (-1, 0),
    5: (0, 0),
    6: (0, -1),
    7: (-1, -1),
    8: (-1, 0),
}


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
@pytest.mark.parametrize("number", CORNERS)
def test_photos_are_turned_as_their_exif_says_whatever_reads_them(
    tmp_path: Path, number: int, suffix: str
) -> None:
    file = tmp_path / f"a{suffix}"
    on_its_side(file, number)
    size = (24, 16) if number >= 5 else (16, 24)
    y, x = CORNERS[number]
    with opened(file) as picture:
        assert upright_size(picture) == size[::-1]
    people = np.asarray(people_image(file, upright=True)).transpose(2, 0, 1)
    for pixels in (
        read_image(file).numpy(),
        load_image(file, None).numpy(),
        read_picture(file).transpose(2, 0, 1),
        people,
    ):
        assert pixels.shape[1:] == size
        assert (
            pixels[0, y, x] > 200
            and sum(int(pixels[0, a, b] > 200) for a in (0, -1) for b in (0, -1)) == 1
        )


def test_published_annotations_count_stored_pixels(tmp_path: Path) -> None:
    on_its_side(tmp_path / "a.jpg", 6)
    joints = np.zeros((14, 3))
    person = Person(tmp_path / "a.jpg", joints, (11.5, 7.5), (24, 16), 1.0)
    stored = People([person], SKELETONS["lsp"], (16, 24)).batch(torch.tensor([0]))["x"][0, 0]
    assert stored[2, 2] > 1 > 0 > stored[2, -3]
    turned = replace(person, centre=(7.5, 11.5), box=(16, 24), upright=True)
    upright = People([turned], SKELETONS["lsp"], (24, 16)).batch(torch.tensor([0]))["x"][0, 0]
    assert upright[2, -3] > 1 > 0 > upright[2, 2]


def test_a_folder_of_turned_frames_has_one_size(tmp_path: Path) -> None:
    for k in range(2):
        on_its_side(tmp_path / f"{k}.jpg", 6)
    frames = FolderFrames(tmp_path)
    assert frames.size == (24, 16) and frames.read(0, 2).shape == (2, 3, 24, 16)


def test_broken_exif_leaves_the_pixels_as_they_are(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(
        tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xffjunk"
    )
    assert read_image(tmp_path / "a.jpg").shape == (3, 16, 24)


def test_a_png_broken_in_its_middle_is_said_to_be(tmp_path: Path) -> None:
    """PIL finds out when it decodes, and calls it a syntax error."""
    file = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)).save(
        file
    )
    raw = file.read_bytes()
    second = raw.index(b"IDAT", raw.index(b"IDAT") + 4)
    file.write_bytes(raw[:second] + b"\x00\x01\x02\x03" + raw[second + 4 :])
    for read in (read_image, read_picture, people_image):
        with pytest.raises(DataError, match=r"a.png .* read"):
            read(file)
    with pytest.raises(OSError, match="broken PNG"):
        load_image(file, None)

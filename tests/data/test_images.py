"""Images as tensors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.folders import ImageFolder
from fedlens.data.images import converted, opened, read_image, resize
from fedlens.data.labelled import Reader, load_image
from fedlens.data.source import DataError


def write_claim(path: Path, side: int) -> None:
    """A PNG of a few bytes that says it has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))


def test_a_picture_too_large_to_be_one_is_skipped_and_counted(tmp_path: Path) -> None:
    """PIL warns from 89 million pixels on and refuses twice as many; warnings are errors here."""
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "good.png")
    write_claim(tmp_path / "huge.png", 30000)
    write_claim(tmp_path / "large.png", 10000)
    reader = Reader()
    assert len(reader.read([(tmp_path / f"{n}.png", 0) for n in ("good", "huge", "large")])) == 1
    assert [s.split(":")[0] for s in reader.skipped] == ["huge.png", "large.png"]
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
            assert load_image(tmp_path / name, None, mode).tolist() == [[[0, 1, 156, 255]]] * channels, name
    with opened(tmp_path / "deep.png") as picture:
        assert np.asarray(converted(picture, "L")).tolist() == [[0, 1, 156, 255]]


def test_floating_point_pixels_are_refused_with_the_reason(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / name / "x.tif")
    with pytest.raises(DataError, match="its pixels are floating-point numbers: save it with 8 or 16 bits"):
        ImageFolder(root=str(tmp_path)).federation(1, 0)


def test_sixteen_bits_and_resizing(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 65535, np.uint16)).save(tmp_path / "deep.png")
    assert float(read_image(tmp_path / "deep.png").max()) == pytest.approx(255)
    rng = np.random.default_rng(0)
    big = rng.integers(0, 256, (40, 40)).astype(np.float32)
    want = np.asarray(Image.fromarray(big).resize((20, 20), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(resize(torch.from_numpy(big)[None], 20)[0].numpy(), want.clip(0, 255))

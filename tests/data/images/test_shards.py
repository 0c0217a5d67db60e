"""Tar shards as webdataset writes them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedlens.data import WebDataset
from fedlens.data.source import DataError


def picture(level: int, size: int = 6) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (level, 10, 20)).save(out, "PNG")
    return out.getvalue()


def write_shard(path: Path, files: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def examples(first: int, count: int, classes: int = 2) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for k in range(first, first + count):
        files |= {f"{k:04}.png": picture(k), f"{k:04}.cls": str(k % classes).encode()}
    return files


def test_every_image_keeps_its_label(tmp_path: Path) -> None:
    """A pixel says which example it is: of 0 to 7 the class is the rest by two, 100 to 103 are the
    test shard."""
    write_shard(tmp_path / "train-000.tar", examples(0, 4))
    write_shard(tmp_path / "train-001.tar.gz", examples(4, 4), "w:gz")
    write_shard(tmp_path / "val-000.tar", examples(100, 4))
    federation = WebDataset(root=str(tmp_path), partition="natural", least=0).federation(2, 0)
    found = []
    for held in federation.holdings:
        batch = held.batch(torch.arange(len(held)))
        red = (batch["x"][:, 0, 0, 0] * 255).round().long()
        assert torch.equal(red % 2, batch["y"])
        found.append(sorted(red.tolist()))
    assert sorted(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a shard is never cut in two
    assert federation.test is not None and len(federation.test) == 4
    assert federation.facts.classes == ("0", "1")


def test_names_and_json_and_folders(tmp_path: Path) -> None:
    files = {
        "a/1.left.png": picture(1),
        "a/1.json": json.dumps({"label": "sky", "who": 3}).encode(),
        "a/2.png": picture(2),
        "a/2.txt": b"leaf\n",
        "a/._2.png": b"a file manager's",
        "b/1.png": picture(3),
        "b/1.cls": b"sky",
    }
    write_shard(tmp_path / "train" / "one.tar", files)
    write_shard(tmp_path / "test" / "two.tar", {"1.png": picture(4), "1.cls": b"leaf"})
    found = WebDataset(root=str(tmp_path), least=0).read(0)
    assert list(found.classes) == ["leaf", "sky"] and found.train.labels.tolist() == [1, 0, 1]
    assert found.test is not None and found.test.labels.tolist() == [0]


def test_a_broken_image_is_left_out_and_named(tmp_path: Path) -> None:
    files = examples(0, 6)
    files["0003.png"] = files["0003.png"][:40]
    write_shard(tmp_path / "a.tar", files)
    found = WebDataset(root=str(tmp_path)).read(0)
    assert len(found.train) == 5 and found.skipped[0].startswith("a.tar/0003.png: ")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"1.png": picture(1)}, r"a\.tar, entry 1: no label; one of 1\.cls"),
        ({"1.cls": b"1"}, r"a\.tar, entry 1: no image among 1\.cls"),
        ({"1.png": picture(1), "1.cls": b"\xff\xfe"}, r"a\.tar, entry 1\.cls cannot be read"),
        ({"1.png": picture(1), "1.cls": b" "}, r"entry 1\.cls is not the number or name"),
        ({"1.png": picture(1), "1.json": b"{}"}, r"entry 1\.json cannot be read: it has none of"),
        ({"1.png": picture(1), "1.json": b"{"}, r"entry 1\.json cannot be read"),
        ({**examples(0, 2), "9.png": picture(1, 9), "9.cls": b"1"}, r"a\.tar/9\.png is 9x9, other"),
    ],
)
def test_what_is_wrong_is_named_with_its_shard(
    tmp_path: Path, files: dict[str, bytes], says: str
) -> None:
    write_shard(tmp_path / "a.tar", files)
    with pytest.raises(DataError, match=says):
        WebDataset(root=str(tmp_path)).read(0)


def test_a_shard_that_is_cut_off_or_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", examples(0, 40))
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: len(whole) // 2 + 700])
    with pytest.raises(DataError, match=r"a\.tar cannot be read as a tar file after 00\d\d\."):
        WebDataset(root=str(tmp_path)).read(0)
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match=r"a\.tar cannot be read as a tar file after its beginning"):
        WebDataset(root=str(tmp_path)).read(0)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(DataError, match="holds no shards"):
        WebDataset(root=str(tmp_path)).read(0)

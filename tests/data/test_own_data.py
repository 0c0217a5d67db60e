"""A user's own data from the command line, in every form that can be named: whole it is read, and
what is broken is said in one line that names the file and the entry, with exit code 2.
"""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.cli.main import invoke
from fedlens.data.images.folders import HuggingFace

Write = Callable[[Path], list[str]]
CLASSES = ("no", "yes")


def pixels(k: int, side: int = 16) -> np.ndarray:
    return np.full((side, side, 3), 20 * (k % 12), np.uint8)


def folder(root: Path) -> list[str]:
    for k in range(24):
        place = root / "photos" / CLASSES[k % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(k)).save(place / f"{k}.png")
    return ["data.name=ImageFolder", f"root={root / 'photos'}"]


def table(root: Path) -> list[str]:
    folder(root)
    rows = [f"photos/{CLASSES[k % 2]}/{k}.png,{CLASSES[k % 2]}" for k in range(24)]
    (root / "table.csv").write_text("\n".join(["path,label", *rows]))
    return ["data.name=Csv", f"file={root / 'table.csv'}"]


def as_a_spreadsheet_writes_it(root: Path) -> list[str]:
    words = table(root)
    text = (root / "table.csv").read_text().replace(",", ";")
    (root / "table.csv").write_text(text, encoding="utf-8-sig")
    return words


def arrays(root: Path, **changed: Any) -> list[str]:
    x, y = np.stack([pixels(k) for k in range(24)]), np.arange(24) % 2
    np.savez(root / "a.npz", **({"train_images": x, "train_labels": y} | changed))
    return ["data.name=Npz", f"file={root / 'a.npz'}"]


def hub(root: Path, **changed: Any) -> list[str]:
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    columns = {
        "image": [Image.fromarray(pixels(k)) for k in range(24)],
        "label": [CLASSES[k % 2] for k in range(24)],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.Dataset.from_dict(columns | changed).save_to_disk(str(root / "saved"))
    return ["data.name=HuggingFace", f"root={root / 'saved'}"]


def shards(root: Path, last: bytes = b"yes") -> list[str]:
    with tarfile.open(root / "a.tar", "w") as archive:
        for k in range(24):
            out = io.BytesIO()
            Image.fromarray(pixels(k)).save(out, "PNG")
            label = CLASSES[k % 2].encode() if k < 23 else last
            for suffix, content in (("png", out.getvalue()), ("cls", label)):
                info = tarfile.TarInfo(f"{k:03}.{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return ["data.name=WebDataset", f"root={root / 'a.tar'}"]


def coco(root: Path, **changed: Any) -> list[str]:
    images, people = [], []
    (root / "images").mkdir()
    for k in range(8):
        Image.fromarray(pixels(k, 64)).save(root / "images" / f"{k}.jpg")
        images.append({"id": k, "file_name": f"{k}.jpg", "width": 64, "height": 64})
        joints = [v for j in range(17) for v in (10 + j, 20 + 2 * j, 2)]
        people.append({"id": 50 + k, "image_id": k, "keypoints": joints, "bbox": [5, 5, 40, 50]})
    people[3] |= changed
    people[3] = {k: v for k, v in people[3].items() if v is not None}
    for name in ("train.json", "val.json"):
        whole = {"images": images, "annotations": people}
        (root / name).write_text(json.dumps(whole))
    words = ["train=train.json", "val=val.json", "train_images=images", "val_images=images"]
    return ["data.name=CocoPose", f"folder={root}", *words]


def ask(words: list[str]) -> int:
    recipe = "raf" if "data.name=CocoPose" in words else "classification"
    more = [] if recipe == "raf" else ["holdout=0"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return invoke(["run", recipe, *words, *more, "clients=2", "--dry-run"])


@pytest.mark.parametrize("write", [folder, table, as_a_spreadsheet_writes_it, arrays, hub, shards])
def test_whole_data_is_read_and_tells_its_classes(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 images of two classes, a fifth of each cut off for testing: 19 of them, or 20."""
    assert ask(write(tmp_path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "classes=2" in said
    assert "19 in all" in said or "20 in all" in said
    assert ("names=('no', 'yes')" in said) == (write is not arrays)


def test_whole_keypoints_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask([*coco(tmp_path), "joints=coco"]) == 0
    assert "8 in all" in capsys.readouterr().out


def cut_image(root: Path) -> list[str]:
    words = folder(root)
    for k in range(24):
        (root / "photos" / CLASSES[k % 2] / f"{k}.png").write_bytes(b"\x89PNG")
    return words


def larger_image(root: Path) -> list[str]:
    words = folder(root)
    Image.fromarray(pixels(9, 20)).save(root / "photos" / "yes" / "9.png")
    return words


def no_label(root: Path) -> list[str]:
    words = table(root)
    lines = (root / "table.csv").read_text().splitlines()
    (root / "table.csv").write_text("\n".join([*lines[:7], "photos/no/0.png,", *lines[7:]]))
    return words


def no_column(root: Path) -> list[str]:
    words = table(root)
    text = (root / "table.csv").read_text().replace("path,label", "path,kind")
    (root / "table.csv").write_text(text)
    return words


def in_another_encoding(root: Path) -> list[str]:
    words = table(root)
    content = (root / "table.csv").read_bytes()
    (root / "table.csv").write_bytes(content + b"\nphotos/no/0.png,\xe9t\xe9")
    return words


def cut_hub(root: Path) -> list[str]:
    words = hub(root)
    for file in (root / "saved").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    return words


BROKEN: list[tuple[Write, str]] = [
    (cut_image, "no readable image (24 skipped, first: no/0.png"),
    (larger_image, "photos/yes/9.png is 20x20, others are 16x16: set size=N"),
    (no_label, "table.csv, line 8: there is no label"),
    (in_another_encoding, "table.csv, line 26: this is not UTF-8"),
    (no_column, "table.csv has no column 'label'; it has path, kind"),
    (lambda p: arrays(p, train_labels=np.arange(20)), "a.npz: train_labels must hold one class"),
    (lambda p: arrays(p, train_labels=np.arange(24) - 3), "a.npz: train_labels[0] is -3"),
    (lambda p: arrays(p, train_labels=np.arange(24) % 2 + 0.5), "a.npz: train_labels[0] is 0.5"),
    (lambda p: arrays(p, train_labels=np.array(["no", "yes"] * 12)), "train_labels[0] is no, not"),
    (lambda p: arrays(p, train_labels=np.full(24, np.inf)), "a.npz: train_labels[0] is inf, not"),
    (
        lambda p: arrays(p, train_images=np.zeros((0, 16, 16), np.uint8), train_labels=np.zeros(0)),
        "a.npz: train_images is empty",
    ),
    (lambda p: arrays(p, test_images=np.zeros((4, 16, 16, 3), np.uint8)), "no test_labels"),
    (lambda p: hub(p, label=["no", "yes"] * 11 + ["no", None]), "saved, row 23: the label None"),
    (lambda p: hub(p, image=list(range(24))), "saved has no readable image (row 0: "),
    (cut_hub, "saved cannot be read as a HuggingFace data set"),
    (lambda p: shards(p, b""), "a.tar, entry 023.cls is not the number or name of a class"),
]


@pytest.mark.parametrize(("write", "says"), BROKEN, ids=[says[:40] for _, says in BROKEN])
def test_what_is_broken_is_named(
    tmp_path: Path, write: Write, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(write(tmp_path)) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_an_image_that_is_no_file_is_named_by_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by its address in memory, which PIL knows it by."""
    broken = [{"bytes": b"no image", "path": None}, None]
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    images = [Image.fromarray(pixels(k)) for k in range(22)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    columns = {"image": [*images, *broken], "label": [CLASSES[k % 2] for k in range(24)]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    assert ask(["data.name=HuggingFace", f"root={tmp_path / 'saved'}"]) == 0
    said = capsys.readouterr().out
    assert "row 22: cannot identify image file; row 23: there is no image" in said


def test_a_part_that_is_called_test_and_is_all_there_is_is_trained_on(tmp_path: Path) -> None:
    """A fifth of it is cut off to test on, not all of it used for both."""
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    columns = {
        "image": [Image.fromarray(pixels(k)) for k in range(20)],
        "label": [CLASSES[k % 2] for k in range(20)],
    }
    whole = datasets.DatasetDict({"test": datasets.Dataset.from_dict(columns)})
    whole.save_to_disk(str(tmp_path / "saved"))
    found = HuggingFace(root=str(tmp_path / "saved")).federation(2, 0)
    assert sum(len(h) for h in found.holdings) == 16 and len(found.test) == 4


AROUND = "people without a box have the one around their joints"
# and how many are dealt out: of seven, two clients get three each
COUNTED: list[tuple[dict[str, Any], str, int]] = [
    ({"bbox": None}, AROUND, 8),
    ({"bbox": [5, 5, 0, 50]}, AROUND, 8),
    ({"image_id": 99}, "people in images that the file does not list were left out", 6),
    ({"keypoints": [1, 2, 2]}, "people whose keypoints are not 17 times x, y and visibility", 6),
    ({"keypoints": "none"}, "people whose keypoints are not 17 times x, y and visibility", 6),
]


@pytest.mark.parametrize(("changed", "says", "left"), COUNTED)
def test_a_person_that_cannot_be_used_is_named(
    tmp_path: Path,
    changed: dict[str, Any],
    says: str,
    left: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One bad entry among many costs that entry, not the run: file, entry and count are said."""
    assert ask([*coco(tmp_path, **changed), "joints=coco"]) == 0
    found = capsys.readouterr()
    said = " ".join((found.out + found.err).split())
    assert f"train.json: 1 {says}" in said and "(first: annotations[3], id 53)" in said
    assert f"{left} in all" in said

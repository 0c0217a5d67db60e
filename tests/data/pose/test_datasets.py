"""Crops are checked with painted pixels: what lies under a joint before must lie under it
afterwards.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.pose.coco import CocoPose
from fedlens.data.pose.datasets import Lspet, Mpii
from fedlens.data.pose.people import (
    People,
    Person,
    PoseAugmentation,
    fit_box,
    transform_joints,
)
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.data.source import DataError


def painted(size: tuple[int, int] = (120, 90)) -> Person:
    """Fourteen joints on a grid, each in the middle of a bright blob on black; joint k is the
    k-th.
    """
    image = np.zeros((*size, 3), np.float64)
    joints = np.ones((14, 3))
    rows, columns = np.mgrid[: size[0], : size[1]]
    for k in range(14):
        x, y = 15.0 + 20 * (k % 4), 20.0 + 25 * (k // 4)
        joints[k, :2] = x, y
        image += 255 * np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * 2.5**2))[..., None]
    return Person(
        image.clip(0, 255).astype(np.uint8),
        joints,
        ((size[1] - 1) / 2, (size[0] - 1) / 2),
        (size[1], size[0]),
        30.0,
    )


def brightest(x: torch.Tensor, around: torch.Tensor, reach: int = 4) -> tuple[float, float]:
    """Centre of mass of the brightness in a window."""
    h, w = x.shape[-2:]
    cx, cy = (round(v) for v in around.tolist())
    left, right, top, bottom = (
        max(0, cx - reach),
        min(w, cx + reach + 1),
        max(0, cy - reach),
        min(h, cy + reach + 1),
    )
    patch = (x[:, top:bottom, left:right].mean(0) + 2.2).clamp_min(0)
    patch = (patch - patch.max() / 4).clamp_min(0)
    rows, columns = torch.meshgrid(
        torch.arange(top, bottom), torch.arange(left, right), indexing="ij"
    )
    return float((patch * columns).sum() / patch.sum()), float((patch * rows).sum() / patch.sum())


@pytest.mark.parametrize("size", [(120, 88), (64, 48), (48, 36)])
def test_a_plain_crop_and_back(size: tuple[int, int]) -> None:
    people = People([painted()], SKELETONS["lsp"], size)
    batch = people.batch(torch.tensor([0]))
    assert batch["x"].shape == (1, 3, *size)
    assert torch.allclose(
        transform_joints(batch["warp"], batch["y"][..., :2]), batch["truth"][..., :2], atol=1e-3
    )
    for joint in batch["y"][0]:
        x, y = brightest(batch["x"][0], joint[:2])
        assert abs(x - joint[0]) < 0.35 and abs(y - joint[1]) < 0.35


def test_augmented_crops_move_pixels_and_joints_alike() -> None:
    """Turned, scaled and mirrored: every joint that is still inside sits on the blob of its own, or
    in the mirror of its partner. Here all blobs look alike, so the names are checked through the
    warp: un-warping y gives the truth of the mirrored names."""
    people = People(
        [painted()], SKELETONS["lsp"], (128, 96), PoseAugmentation(flip=0.5, scale=0.3, rotation=30)
    )
    rng = torch.Generator().manual_seed(0)
    mirror, seen = SKELETONS["lsp"].mirror, set()
    for _ in range(12):
        batch = people.batch(torch.tensor([0]), rng)
        flipped = bool(torch.linalg.det(batch["warp"][0, :, :2]) < 0)
        seen.add(flipped)
        back = transform_joints(batch["warp"], batch["y"][..., :2])[0]
        truth = batch["truth"][0, :, :2]
        assert torch.allclose(back, truth[mirror] if flipped else truth, atol=1e-2)
        for joint in batch["y"][0]:
            if 8 < joint[0] < 88 and 8 < joint[1] < 120:
                x, y = brightest(batch["x"][0], joint[:2])
                assert abs(x - joint[0]) < 0.6 and abs(y - joint[1]) < 0.6
    assert seen == {True, False}


def test_rotation_is_one_of_the_image_even_where_the_box_is_stretched() -> None:
    """A square box stretched to 3:4 and turned by some angle: the linear part of the warp, in image
    pixels per pixel of x, must be a rotation times scale times the stretch: un-stretched, its
    columns are orthogonal and of equal length."""
    person = painted()
    square = Person(person.image, person.joints, person.centre, (100.0, 100.0), 30.0)
    people = People(
        [square],
        SKELETONS["lsp"],
        (64, 48),
        PoseAugmentation(flip=0, scale=0.2, rotation=40, rotate_often=1),
    )
    a = people.batch(torch.tensor([0]), torch.Generator().manual_seed(3))["warp"][0, :, :2]
    a = a / torch.tensor([100 / 48, 100 / 64])
    assert float(a[:, 0] @ a[:, 1]) == pytest.approx(0, abs=0.02)
    assert float(a[:, 0].norm()) == pytest.approx(float(a[:, 1].norm()), rel=0.02)
    assert abs(float(a[1, 0])) > 0.05


def test_captured_low_and_interpolated_high() -> None:
    low = People([painted()], SKELETONS["lsp"], (64, 48))
    for how in ("bilinear", "bicubic", "area"):
        view = low.at((128, 96), (32, 24), how)  # type: ignore[arg-type]
        batch = view.batch(torch.tensor([0]))
        plain = low.at((32, 24)).batch(torch.tensor([0]))
        assert batch["x"].shape == (1, 3, 128, 96)
        assert torch.allclose(batch["y"][..., :2], 4 * plain["y"][..., :2] + 1.5, atol=1e-3)
        assert torch.allclose(
            transform_joints(batch["warp"], batch["y"][..., :2]), batch["truth"][..., :2], atol=1e-3
        )


def test_boxes_are_widened_never_cut() -> None:
    assert fit_box((30, 10), (64, 48), 1.0) == (30, 40)
    assert fit_box((10, 40), (64, 48), 1.25) == (37.5, 50)


def test_clients_have_resolutions_of_their_own() -> None:
    federation = StickFigures(people=50, tests=7, hold_out=0.2).federation(5, seed=1)
    small, middle, large = (32, 24), (48, 36), (64, 48)
    assert federation.facts.resolutions == (large, middle, small, large, middle)
    assert [len(p) for p in federation.holdings] == [8] * 5
    assert len(federation.held_out) == 5 and len(federation.held_out[0]) == 2
    for people, (h, w) in zip(federation.holdings, [(64, 48), (48, 36), (32, 24)]):
        assert people.batch(torch.arange(3))["x"].shape == (3, 3, h, w)
    owners = [
        id(p.image)
        for people in (*federation.holdings, *federation.held_out)
        for p in people.people
    ]
    assert len(set(owners)) == 50
    again = StickFigures(people=50, tests=7, hold_out=0.2).federation(5, seed=1)
    assert torch.equal(
        again.holdings[2].batch(torch.arange(8))["x"],
        federation.holdings[2].batch(torch.arange(8))["x"],
    )


def test_few_bytes_mean_reading_again_not_other_pixels() -> None:
    people = StickFigures(people=6, tests=1).federation(1, 0).holdings[0]
    frugal = People(people.people, people.skeleton, people.size, budget=0)
    assert torch.equal(frugal.batch(torch.arange(6))["x"], people.batch(torch.arange(6))["x"])
    assert not frugal._kept and len(people._kept) == 6


def lspet(folder: Path, rows: list[dict[str, object]]) -> Lspet:
    (folder / "images").mkdir(exist_ok=True)
    names = SKELETONS["lsp"].joints
    with open(folder / "joints.csv", "w", newline="") as file:
        writer = csv.DictWriter(
            file, ["image", "width", "height", "split", *(f"{n}_{k}" for n in names for k in "xyv")]
        )
        writer.writeheader()
        for row in rows:
            spots = {
                f"{n}_{k}": v
                for i, n in enumerate(names)
                for k, v in zip("xyv", (10 + i, 12 + 2 * i, 1))
            }
            writer.writerow({**spots, **row})
            Image.new("RGB", (60, 50)).save(folder / "images" / str(row["image"]))
    return Lspet(folder=str(folder))


def test_bad_annotations_are_handled_and_said(tmp_path: Path) -> None:
    blind = {f"{n}_v": 0 for n in SKELETONS["lsp"].joints}
    common = {"width": 60, "height": 50, "split": "train"}
    source = lspet(
        tmp_path,
        [
            {"image": "a.jpg", **common},
            {"image": "b.jpg", **common, "neck_x": 500},
            {"image": "c.jpg", **common, **blind},
        ],
    )
    federation = source.federation(1, 0)
    assert len(federation.holdings[0]) == 2
    assert list(federation.facts.notes) == [
        "1 joints outside their image count as invisible",
        "1 people without a visible joint were left out",
    ]
    assert federation.test is None
    with pytest.raises(DataError, match="3 clients with 1 people each need more than the 2"):
        source.federation(3, 0)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        Lspet(folder=str(tmp_path / "nowhere")).federation(1, 0)
    with pytest.raises(DataError, match=r"neither joints\.csv nor joints\.mat"):
        Lspet(folder=str(tmp_path)).federation(1, 0)
    with pytest.raises(DataError, match="same shape"):
        StickFigures(sizes=((64, 48), (32, 32))).federation(2, 0)
    with pytest.raises(DataError, match=r"no mpii_train\.json"):
        Mpii(folder=str(tmp_path)).federation(1, 0)
    (tmp_path / "person_keypoints_train2017.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        CocoPose(folder=str(tmp_path)).federation(1, 0)
    source = lspet(tmp_path, [{"image": "a.jpg", "width": 60, "height": 50, "split": "train"}])
    (tmp_path / "images" / "a.jpg").write_text("not a picture")
    with pytest.raises(DataError, match="not an image that can be read"):
        source.federation(1, 0).holdings[0].batch(torch.tensor([0]))
    (tmp_path / "joints.csv").write_text("image,width\na.jpg,3\n")
    with pytest.raises(DataError, match="line 2"):
        source.federation(1, 0)


def test_lspet_csv_and_mat_agree(data_pack: Path, tmp_path: Path) -> None:
    whole = Lspet(folder=str(data_pack / "lspet"))
    federation = whole.federation(3, 0)
    assert (
        federation.facts.details["people"] == [266] * 3
        and federation.test is not None
        and len(federation.test) == 200
    )
    pytest.importorskip("scipy")
    (tmp_path / "joints.mat").symlink_to(data_pack / "lspet" / "joints.mat")
    (tmp_path / "images").symlink_to(data_pack / "lspet" / "images")
    train, test = Lspet(folder=str(tmp_path)).read([])
    known, tested = whole.read([])
    assert len(train) == len(known) == 800
    by_name = {p.image.name: p.joints for p in (*known, *tested)}  # type: ignore[union-attr]
    assert all(np.allclose(p.joints, by_name[p.image.name], atol=0.01) for p in (*train, *test))  # type: ignore[union-attr]


def test_mpii_by_hand(data_pack: Path) -> None:
    """The sample's first person: centre (966, 340), scale 4.718488. Centre one-based and 15 *
    4.718488 lower: (965, 409.77732); box 200 * 1.25 * 4.718488 = 1179.622. Without head boxes the
    head segment counts: (982.7591, 235.9694) to (962.2409, 80.0306) is 157.283 long."""
    source = Mpii(
        folder=str(data_pack / "pose_samples" / "mpii"),
        train="test_mpii.json",
        val="test_mpii.json",
    )
    federation = source.federation(1, 0)
    assert federation.test is not None
    entries = json.loads((data_pack / "pose_samples" / "mpii" / "test_mpii.json").read_text())
    where = next(k for k, e in enumerate(entries) if e["image"] == "005808361.jpg")
    person = federation.test.people[where]
    assert person.centre == pytest.approx((965, 409.77732)) and person.box == pytest.approx(
        (1179.622, 1179.622)
    )
    assert person.reference == pytest.approx(157.283, abs=1e-3)
    assert "head segment" in federation.facts.notes[0]
    assert federation.test.batch(torch.arange(2))["x"].shape == (2, 3, 256, 192)


def test_mpii_head_boxes(data_pack: Path, tmp_path: Path) -> None:
    """0.6 times the diagonal: a box of 30 x 40 gives 30; joints the .mat calls missing do not
    count.
    """
    io = pytest.importorskip("scipy.io")
    samples = data_pack / "pose_samples" / "mpii"
    for file in samples.iterdir():
        (tmp_path / file.name).symlink_to(file)
    n = len(json.loads((samples / "test_mpii.json").read_text()))
    boxes = np.zeros((2, 2, n))
    boxes[1] = np.array([30.0, 40.0])[:, None]
    missing = np.zeros((16, n))
    missing[3] = 1
    io.savemat(tmp_path / "mpii_gt_val.mat", {"headboxes_src": boxes, "jnt_missing": missing})
    source = Mpii(folder=str(tmp_path), train="test_mpii.json", val="test_mpii.json")
    test = source.federation(1, 0).test
    assert test is not None
    assert test.people[0].reference == pytest.approx(30)
    assert not test.people[0].joints[3, 2]
    io.savemat(
        tmp_path / "mpii_gt_val.mat",
        {"headboxes_src": boxes[:, :, :1], "jnt_missing": missing[:, :1]},
    )
    with pytest.raises(DataError, match="1 head boxes for the"):
        source.federation(1, 0)


def test_coco(data_pack: Path) -> None:
    source = CocoPose(
        folder=str(data_pack / "pose_samples" / "coco"),
        train="test_coco.json",
        val="test_coco.json",
        train_images="",
        val_images="",
    )
    test = source.federation(1, 0).test
    assert test is not None
    batch = test.batch(torch.arange(len(test)))
    assert batch["y"].shape[1:] == (17, 3)
    assert torch.allclose(
        transform_joints(batch["warp"], batch["y"][..., :2]), batch["truth"][..., :2], atol=1e-2
    )
    person = next(p for p in test.people if p.image_id == 785)
    """bbox 280.79, 44.73, 218.7, 346.68: narrower than 3:4, so 260.01 x 346.68, times 1.25."""
    assert person.box == pytest.approx((325.0125, 433.35)) and person.area == pytest.approx(
        27789.11055
    )

"""Annotation files as people have them: every variant ends in people and notes, or in one message
that names the file and the entry.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data.pose.coco import CocoPose
from fedlens.data.pose.skeletons import SKELETONS, PoseFacts, find_skeleton, partners
from fedlens.data.source import DataError
from fedlens.tasks.pose import Pose

NAN = float("nan")


def paws() -> dict[str, Any]:
    """Two dogs of four joints in two images."""
    category = {
        "id": 7,
        "name": "dog",
        "keypoints": ["nose", "left_ear", "right_ear", "tail"],
        "skeleton": [[1, 2], [1, 3], [1, 4]],
    }
    images = [{"id": k, "file_name": f"{k}.png", "width": 60, "height": 50} for k in (1, 2)]
    annotations = [
        {
            "id": 10 + k,
            "image_id": k,
            "category_id": 7,
            "bbox": [5, 6, 40, 30],
            "area": 900,
            "keypoints": [20, 12, 2, 12, 10, 2, 28, 10, 1, 40, 30, 2],
        }
        for k in (1, 2)
    ]
    return {"images": images, "annotations": annotations, "categories": [category]}


def write(folder: Path, table: Any) -> CocoPose:
    (folder / "pictures").mkdir(exist_ok=True)
    for k in (1, 2):
        Image.new("RGB", (60, 50), (40 * k, 80, 90)).save(folder / "pictures" / f"{k}.png")
    text = table if isinstance(table, str) else json.dumps(table)
    (folder / "dogs.json").write_text(text)
    return CocoPose(
        folder=str(folder), sizes=((32, 24),), train="dogs.json", val="", train_images="pictures"
    )


def source(**given: Any) -> Callable[..., CocoPose]:
    def make(folder: Path, table: Any) -> CocoPose:
        made = write(folder, table)
        for key, value in given.items():
            setattr(made, key, value)
        return made

    return make


def test_joints_of_ones_own_reach_the_task(tmp_path: Path) -> None:
    federation = write(tmp_path, paws()).federation(1, 0)
    facts = federation.facts
    assert isinstance(facts, PoseFacts)
    assert facts.skeleton["joints"] == ["nose", "left_ear", "right_ear", "tail"]
    assert facts.skeleton["flips"] == [[1, 2]]
    assert facts.skeleton["bones"] == [[0, 1], [0, 2], [0, 3]]
    assert [n for n in facts.notes if "0.05 for all 4 joints" in n]
    task = Pose(
        **Pose.arguments_from_facts(facts), network="vit-nano", size=(32, 24), flip_test=False
    )
    task.fits(facts)
    assert task.model()(torch.zeros(1, 3, 32, 24)).shape == (1, 4, 8 * 4, 6 * 4)
    batch = federation.holdings[0].batch(torch.arange(2))
    assert batch["y"].shape == (2, 4, 3)
    with pytest.raises(ValueError, match=r"the data has 4 joints \(dog\), the skeleton 'lsp'"):
        Pose("lsp").fits(facts)
    pytest.importorskip("pycocotools")
    found = {
        "predicted": batch["truth"][..., :2].numpy(),
        "peaks": np.ones((2, 4)),
        "truth": batch["truth"].numpy(),
        "reference": batch["reference"].numpy(),
        "area": batch["area"].numpy(),
        "image": batch["image"].numpy(),
    }
    judged = task.judge(found)
    assert judged["ap"] == pytest.approx(100) and judged["pck"] == 100
    """All joints off by d: the similarity is exp(-d^2 / (2 area (2 * 0.05)^2)), with d^2 = 18 and
    an area of 900 exp(-1): below .5, so that nothing counts. With sigmas of .1 it is exp(-1/4) =
    .7788: right at the thresholds .50 to .75, six of ten."""
    found["predicted"] = found["predicted"] + 3.0
    assert task.judge(found)["ap"] == 0
    wide = {**Pose.arguments_from_facts(facts)["joints"], "sigmas": [0.1] * 4}
    assert Pose(wide, network="vit-nano").judge(found)["ap"] == pytest.approx(60)


def change(edit: Callable[[dict[str, Any]], Any]) -> Any:
    table = copy.deepcopy(paws())
    made = edit(table)
    return table if made is None else made


def of_first(**values: Any) -> Any:
    return change(lambda t: t["annotations"][0].update(values))


def without(key: str, table: str = "annotations") -> Any:
    return change(lambda t: [entry.pop(key) for entry in t[table]] and None)


def bare() -> list[dict[str, Any]]:
    """Annotations alone, which name their image."""
    found: list[dict[str, Any]] = paws()["annotations"]
    for entry in found:
        entry["file_name"] = f"{entry.pop('image_id')}.png"
    return found


USABLE: dict[str, tuple[Any, int, str]] = {
    "as COCO": (paws(), 2, ""),
    "no area": (without("area"), 2, "2 people without an area have that of their box"),
    "no box": (without("bbox"), 2, r"2 people without a box .* \(first: annotations\[0\], id 11\)"),
    "box of NaN": (of_first(bbox=[NAN, 1, 2, 3]), 2, "1 people without a box"),
    "box without height": (of_first(bbox=[1, 1, 2, 0]), 2, "1 people without a box"),
    "box of three": (of_first(bbox=[1, 1, 2]), 2, "1 people without a box"),
    "no width": (without("width", "images"), 2, ""),
    "unknown image": (of_first(image_id=99), 1, "1 people in images that the file does not list"),
    "image of a list": (of_first(image_id=[1]), 1, "1 people in images that the file does not"),
    "no file there": (
        change(lambda t: t["images"][0].update(file_name="none.png")),
        1,
        r"1 people whose image is missing or broken were left out \(first: none.png\)",
    ),
    "image without a name": (
        change(lambda t: t["images"][0].pop("file_name") and None),
        1,
        r"1 images without an id or a file name were left out \(first: images\[0\]\)",
    ),
    "bare list": (bare(), 2, "no two of the 4 joints"),
    "short": (of_first(keypoints=[1, 2, 2]), 1, "keypoints are not 4 times x, y and visibility"),
    "no list": (of_first(keypoints="1234"), 1, "keypoints are not 4 times x, y and visibility"),
    "words": (of_first(keypoints=["a"] * 12), 1, "keypoints are not 4 times x, y and visibility"),
    "nothing": (of_first(keypoints=None), 1, "keypoints are not 4 times x, y and visibility"),
    "NaN": (
        of_first(keypoints=[NAN, 12, 2, 12, 10, 2, 28, 10, 1, 40, 30, 2]),
        2,
        "1 joints without finite coordinates count as invisible",
    ),
    "null": (
        of_first(keypoints=[None, 12, 2, 12, 10, 2, 28, 10, 1, 40, 30, 2]),
        2,
        "1 joints without finite coordinates count as invisible",
    ),
    "outside": (
        of_first(keypoints=[20, 12, 2, 12, 10, 2, 28, 10, 1, 400, 30, 2]),
        2,
        "1 joints outside their image count as invisible",
    ),
    "nested": (of_first(keypoints=[[20, 12, 2], [12, 10, 2], [28, 10, 1], [4, 3, 2]]), 2, ""),
    "pairs": (of_first(keypoints=[[20, 12], [12, 10], [28, 10], [4, 3]]), 2, ""),
    "all unseen": (of_first(keypoints=[0] * 12), 1, "1 people without a visible joint"),
    "a number": (change(lambda t: t["annotations"].append(5)), 2, "that are no tables were left"),
    "crowd": (of_first(iscrowd=1), 1, ""),
    "names as ids": (
        change(
            lambda t: (
                [
                    (i.update(id=f"a{i['id']}"), a.update(image_id=f"a{a['image_id']}"))
                    for i, a in zip(t["images"], t["annotations"])
                ]
                and None
            )
        ),
        2,
        "",
    ),
    "no categories": (change(lambda t: t.pop("categories") and None), 2, "no two of the 4 joints"),
    "no skeleton": (without("skeleton", "categories"), 2, ""),
    "counted from 0": (
        change(lambda t: t["categories"][0].update(skeleton=[[0, 1], [0, 3]])),
        2,
        "",
    ),
}


@pytest.mark.parametrize("variant", USABLE)
def test_variants_that_can_be_used(tmp_path: Path, variant: str) -> None:
    table, people, note = USABLE[variant]
    federation = write(tmp_path, table).federation(1, 0)
    assert len(federation.holdings[0]) == people
    batch = federation.holdings[0].batch(torch.arange(people))
    assert torch.isfinite(batch["y"]).all() and (batch["area"] > 0).all()
    quiet = [n for n in federation.facts.notes if "sigmas" not in n]
    assert any(re.search(note, n) for n in quiet) if note else not quiet


def other_category(table: dict[str, Any]) -> None:
    table["categories"].append({"id": 8, "name": "cat", "keypoints": ["nose"]})


REFUSED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "no JSON": ("{", r"dogs.json is not JSON", {}),
    "empty": ("", r"dogs.json is not JSON", {}),
    "a number": ("5", r"dogs.json is neither COCO's .* nor a list of annotations", {}),
    "no annotations": ({"images": []}, "dogs.json is neither COCO's", {}),
    "images of a word": ({**paws(), "images": "ab"}, "dogs.json: images is no list", {}),
    "boxes alone": (without("keypoints"), r"no keypoints in its 2 annotations.*boxes=FILE", {}),
    "nobody": (
        change(lambda t: [a.update(image_id=99) for a in t["annotations"]] and None),
        r"none of the 2 annotations of dogs.json can be used: dogs.json: 2 people in images that",
        {},
    ),
    "two categories": (change(other_category), "set data.category to one of dog, cat", {}),
    "no such category": (paws(), "no category 'horse': there is dog", {"category": "horse"}),
    "bone too far": (
        change(lambda t: t["categories"][0].update(skeleton=[[1, 9]])),
        r"dogs.json, category 'dog': bones of a skeleton: \[0, 8\] names a joint",
        {},
    ),
    "bone of three": (
        change(lambda t: t["categories"][0].update(skeleton=[[1, 2, 3]])),
        "dogs.json, category 'dog': bones of a skeleton are pairs",
        {},
    ),
    "sigmas too few": (paws(), "data.sigmas .* one positive number a joint", {"sigmas": (1.0,)}),
    "flip of a stranger": (paws(), "no joint is called 'toe'", {"flips": (("nose", "toe"),)}),
}  # fmt: skip


@pytest.mark.parametrize("variant", REFUSED)
def test_variants_that_cannot_be_used(tmp_path: Path, variant: str) -> None:
    table, why, given = REFUSED[variant]
    with pytest.raises(DataError, match=why):
        source(**given)(tmp_path, table).federation(1, 0)


def test_a_category_is_chosen_and_partners_are_named(tmp_path: Path) -> None:
    made = source(category="dog", flips=(("nose", "tail"),), sigmas=(0.1, 0.2, 0.2, 0.3))
    facts = made(tmp_path, change(other_category)).federation(1, 0).facts
    assert isinstance(facts, PoseFacts)
    assert facts.skeleton["flips"] == [[0, 3]]
    assert facts.skeleton["sigmas"] == [0.1, 0.2, 0.2, 0.3]
    assert not facts.notes


def test_partners_by_name() -> None:
    """Hands have none, faces and animals do, in whatever spelling."""
    assert partners(["wrist", "thumb1", "thumb2"]) == ()
    assert partners(["LeftEye", "nose", "RightEye"]) == ((0, 2),)
    assert partners(["L_F_Paw", "R_F_Paw", "L_B_Paw", "R_B_Paw"]) == ((0, 1), (2, 3))
    assert partners(["Front Left Paw", "Front Right Paw"]) == ((0, 1),)
    assert partners(["eye_l", "eye_r", "left"]) == ((0, 1),)
    for name in ("mpii", "lsp", "coco"):
        skeleton = SKELETONS[name]
        pairs = {frozenset(p) for p in skeleton.flips}
        assert {frozenset(p) for p in partners(skeleton.joints)} == pairs
        assert find_skeleton(skeleton.table()) == skeleton


@pytest.mark.parametrize(
    ("joints", "why"),
    [
        ("dog", "no skeleton 'dog'"),
        ({}, "needs the names of its joints"),
        ({"joints": ["a"], "size": 3}, "a skeleton has no 'size'"),
        ({"joints": ["a", "b"], "flips": [[0, 1], [1, 0]]}, "a joint has one partner"),
        ({"joints": ["a", "b"], "bones": [[0, 2]]}, "names a joint that is not there"),
        ({"joints": ["a", "b"], "sigmas": [0.1]}, "one positive number a joint"),
    ],
)
def test_skeletons_that_cannot_be_meant(joints: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Pose(joints)

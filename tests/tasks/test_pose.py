"""Heat maps by hand, decoding against known sub-pixel centres, the whole task on stick figures."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens import Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.data.pose.coco import CocoPose
from fedlens.data.pose.people import People, Person
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.engines.simulator import Simulator
from fedlens.layers import MultiResolution
from fedlens.tasks.apply.tracking import Tracker, box_overlap
from fedlens.tasks.heatmaps import decode_heatmaps, draw_targets
from fedlens.tasks.pose import Pose


def test_what_one_pose_for_everybody_scores_by_hand() -> None:
    """Two people in equal boxes, of 14 joints; their first joints are 8 pixels apart, the others at
    the same place. The mean is 4 pixels off for the first joint of both: outside 0.2 * 10, so
    26 of 28 joints are right; inside 0.2 * 25, all are."""
    joints = np.full((2, 14, 3), 24.0)
    joints[..., 2] = 1
    joints[0, 0, 0] += 8
    image = np.zeros((64, 48, 3), np.uint8)
    for reference, right in ((10.0, 26 / 28), (25.0, 1.0)):
        people = [Person(image, j, (24.0, 32.0), (48.0, 64.0), reference) for j in joints]
        data = People(people, SKELETONS["lsp"], (64, 48))
        found = Pose(network="vit-nano", patch=4, size=(64, 48), joints="lsp").references(0, data)
        assert found == {"one pose for everybody": {"pck": pytest.approx(100 * right)}}


def test_targets_by_hand() -> None:
    """Input 64x48, map 16x12. UDP: x = 47 / 11 * 5 is pixel 5 exactly. MSRA: stride 4, x = 21 ->
    floor(21 / 4 + 1/2) = 5. sigma 2 at height 64 is 1/2 at 16: one pixel beside the centre the
    value is exp(-1 / (2 / 4)) = exp(-2); two pixels beside it, beyond three sigmas, 0."""
    udp, weight = draw_targets(
        torch.tensor([[[47 / 11 * 5, 63 / 15 * 7, 1.0]]]), (64, 48), (16, 12), "udp", 2.0, True
    )
    msra, _ = draw_targets(
        torch.tensor([[[21.0, 28.5, 1.0]]]), (64, 48), (16, 12), "msra", 2.0, True
    )
    for maps in (udp[0, 0], msra[0, 0]):
        assert maps[7, 5].item() == pytest.approx(1)
        assert maps[7, 6].item() == pytest.approx(math.exp(-2), rel=1e-4) and maps[
            6, 4
        ].item() == pytest.approx(math.exp(-4), rel=1e-4)
        assert maps[7, 7].item() == 0
    assert weight.item() == 1
    fixed, _ = draw_targets(
        torch.tensor([[[21.0, 28.5, 1.0]]]), (64, 48), (16, 12), "msra", 2.0, False
    )
    assert fixed[0, 0, 7, 6].item() == pytest.approx(math.exp(-1 / 8))


def test_joints_outside_or_unseen_do_not_count() -> None:
    """Map 64x48 as large as its input, sigma 2: rounded, a centre counts from 7 pixels before the
    first one to 6 after the last.
    """
    joints = torch.tensor([[[-8.4, 5, 1], [-8.5, 5, 1], [20, 5, 0], [53.4, 69, 1], [53.5, 5, 1]]])
    _, weight = draw_targets(joints, (64, 48), (64, 48), "udp", 2.0, True)
    assert weight.tolist() == [[1, 0, 0, 1, 0]]
    task = Pose("lsp")
    y = torch.zeros(1, 14, 3)
    y[0, 0] = torch.tensor([10.0, 10, 1])
    """One of 14 joints counts; a map off by 0.1 everywhere costs 0.01 / 14."""
    maps, _ = draw_targets(y, (64, 48), (64, 48), "udp", 2.0, True)
    loss = task.loss(Output(maps + 0.1), {"x": torch.zeros(1, 3, 64, 48), "y": y})
    assert loss.item() == pytest.approx(0.01 / 14, rel=1e-4)


@pytest.mark.parametrize("targets", ["udp", "msra"])
def test_encode_and_decode(targets: Any) -> None:
    """UDP with DARK finds a centre between pixels to a hundredth; argmax is off by at most half a
    pixel of the map, the quarter by at most a quarter. MSRA rounds the centre."""
    rng = torch.Generator().manual_seed(0)
    joints = torch.cat(
        [
            torch.rand(8, 14, 2, generator=rng) * torch.tensor([150.0, 210]) + 20,
            torch.ones(8, 14, 1),
        ],
        -1,
    )
    maps, _ = draw_targets(joints, (256, 192), (64, 48), targets, 2.0, True)
    worst = {}
    for how in ("argmax", "quarter", "dark"):
        found, peaks = Pose("lsp", patch=16, size=(256, 192), targets=targets, decode=how).locate(
            maps, (256, 192)
        )  # type: ignore[arg-type]
        worst[how] = float((found - joints[..., :2]).abs().max())
        assert peaks.min() > 0.8
    if targets == "udp":
        stride = 255 / 63
        assert (
            worst["dark"] < 0.05
            and worst["quarter"] < 0.26 * stride
            and worst["argmax"] < 0.51 * stride
        )
    else:
        assert worst["dark"] <= worst["argmax"] + 0.05 <= 2.1


def test_a_map_without_a_peak_points_nowhere() -> None:
    for how in ("argmax", "quarter", "dark"):
        found, peaks = Pose("lsp", decode=how).locate(torch.zeros(1, 14, 16, 12), (64, 48))  # type: ignore[arg-type]
        assert (found == -1).all() and not peaks.any()


@pytest.mark.parametrize(
    ("coding", "weights", "sums"),
    [
        (
            "udp",
            [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 0.0055, 0.0133, 0.0769, 0.3176, 15.0443, 20.541, 25.0746, 15.0443, 4.8399,
             0.4152, 0.064, 0.03, 0, 0, 0],
        ),
        (
            "msra",
            [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0.0556, 0.2757, 0.9535, 15.0447, 19.4644, 25.0813, 10.0366, 2.5794,
             0.0556, 0, 0, 0, 0, 0],
        ),
    ],
)  # fmt: skip
def test_targets_as_published(coding: Any, weights: list[int], sums: list[float]) -> None:
    """Weights and sums of the maps that ViTPose's TopDownGenerateTarget (commit c050ed2; its
    functions _udp_generate_target and _msra_generate_target, sigma 2, image 192x256, map 48x64)
    makes of these joints, run beside ours; pixel by pixel the two were within 4e-7.
    """
    x = [-40, -34.3, -33.9, -32, -30, -28, -24, -20, 0, 5.3, 100, 191, 200, 210, 215, 217, 218,
         220, 230]  # fmt: skip
    joints = torch.tensor([[[v, 101.7, 1.0] for v in x]])
    maps, weight = draw_targets(joints, (256, 192), (64, 48), coding, 2.0, True)
    assert weight[0].int().tolist() == weights
    assert maps[0].sum((1, 2)).tolist() == pytest.approx(sums, abs=1e-3)


def noisy_maps(height: int, width: int, noise: float) -> Tensor:
    """Six Gaussians, four of them at a border, under noise that numpy's generator gives."""
    rng = np.random.default_rng(5)
    spots = [
        (width * 0.4, height * 0.45), (width * 0.71, height * 0.3), (0.6, height * 0.5),
        (width - 1.8, height - 3.3), (2.2, 2.3), (width * 0.55, height - 0.7),
    ]  # fmt: skip
    rows, columns = np.mgrid[:height, :width]
    spread = 2 * (2 * height / 64) ** 2
    maps = np.stack([np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / spread) for x, y in spots])
    return torch.from_numpy((maps + noise * rng.standard_normal(maps.shape)).astype(np.float32))[
        None
    ]


@pytest.mark.parametrize(
    ("how", "coding", "size", "noise", "expected"),
    [
        ("dark", "udp", (64, 48), 0.05, [[19.1596, 28.748], [34.087, 19.2447], [0.0119, 32.0369],
         [46.9592, 61.387], [0.9554, 1.0065], [26.4863, 63.5042]]),
        ("dark", "udp", (64, 48), 0.1, [[19.1324, 28.6925], [34.0917, 19.2859], [0.014, 32.0764],
         [46.9366, 61.3375], [1.5046, 1.0155], [26.5754, 63.5068]]),
        ("dark", "udp", (96, 72), 0.1, [[28.7353, 43.1313], [51.1466, 28.8692], [-0.499, 47.9203],
         [71.4968, 94.7298], [0.5106, 0.2079], [39.4762, 94.9996]]),
        ("dark", "msra", (64, 48), 0.05, [[19.1599, 28.7468], [34.087, 19.246], [1, 32], [46, 60],
         [2.3616, 2.3931], [27, 63]]),
        ("dark", "msra", (64, 48), 0.1, [[19.134, 28.6918], [34.091, 19.2889], [1, 32], [46, 60],
         [2.3482, 2.3459], [27, 63]]),
        ("dark", "msra", (96, 72), 0.1, [[28.734, 43.1255], [51.1495, 28.8684], [0, 49], [71, 93],
         [2.8527, 2.9136], [39, 94]]),
        ("quarter", "msra", (64, 48), 0.1, [[19.75, 28.25], [34.75, 19.25], [1, 32],
         [45.75, 60.25], [2.75, 2.25], [27, 63]]),
    ],
)  # fmt: skip
def test_decoding_as_published(
    how: Any, coding: Any, size: tuple[int, int], noise: float, expected: list[list[float]]
) -> None:
    """What ViTPose's keypoints_from_heatmaps (commit c050ed2, mmpose/core/evaluation/
    top_down_eval.py, OpenCV's blur) finds on the same maps, run beside ours with its last step,
    from map to image, left out: use_udp=True, post_process="unbiased" and "default", kernel 11 at
    a height of 64 and 17 at 96. Over 300 seeds at noise 0.05 the largest difference was 1.2e-5."""
    found, _ = decode_heatmaps(noisy_maps(*size, noise), how, coding)
    assert torch.allclose(found[0], torch.tensor(expected, dtype=torch.float32), atol=2e-4)


def test_decode_at_the_edge_stays_inside() -> None:
    maps, _ = draw_targets(
        torch.tensor([[[0.0, 0, 1], [47, 63, 1]]]), (64, 48), (64, 48), "udp", 2.0, True
    )
    for how in ("argmax", "quarter", "dark"):
        points, _ = decode_heatmaps(maps, how)  # type: ignore[arg-type]
        assert torch.allclose(points[0], torch.tensor([[0.0, 0], [47, 63]]), atol=0.75)


class Oracle(nn.Module):
    """Blue minus red and red minus blue: answers that mirror as they should, so the flip test must
    change nothing but names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Joint k lies where channel 0 is brightest, shifted by nothing: symmetric joints are told
        apart by the sign of channel 1.
        """
        left, right = x[:, 0] * (x[:, 1] > 0), x[:, 0] * (x[:, 1] < 0)
        order = [right] * 3 + [left] * 3 + [right] * 3 + [left] * 3 + [left + right] * 2
        return torch.stack(order, 1)


def test_flip_test_mirrors_names_and_pixels() -> None:
    """A network blind to sides sees the mirrored image mirrored: after flipping back, left and
    right maps have changed places, and averaging makes them equal."""
    x = torch.zeros(1, 3, 8, 6)
    x[0, 0, 2, 1], x[0, 1, 2, 1] = 1, 1  # a left joint at (1, 2)
    task = Pose("lsp", flip_test=True)
    maps = task.heatmaps(Oracle(), x)
    assert maps[0, 3, 2, 1] == pytest.approx(0.5) and maps[0, 2, 2, 1] == pytest.approx(0.5)
    assert maps[0, 12, 2, 1] == pytest.approx(1)
    assert maps[0, :, 2, 4].abs().max() == 0
    assert Pose("lsp", flip_test=False).heatmaps(Oracle(), x)[0, 2, 2, 1] == 0


class Perfect(nn.Module):
    """Draws the true heat maps, whatever it is shown: the pipeline around it must then score
    100.
    """

    def __init__(self, task: Pose) -> None:
        super().__init__()
        self.task, self.y, self.none = task, torch.zeros(0), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        return draw_targets(
            self.y[: len(x)], (h, w), (h // 2, w // 2), self.task.targets, 2.0, True
        )[0]


def test_a_perfect_network_scores_a_hundred_at_every_resolution() -> None:
    people = StickFigures(people=3, tests=9).federation(1, 0).test
    assert people is not None
    task = Pose("lsp", flip_test=False, test_batch=9)
    for size in ((128, 96), (64, 48), (48, 36)):
        perfect = Perfect(task)
        perfect.y = people.at(size).batch(torch.arange(9))["y"]
        found = task.find(perfect, people.at(size))
        assert task.judge(found) == {"pck": pytest.approx(100)}
        gap = np.abs(found["predicted"] - found["truth"][..., :2])
        # a map pixel of the smallest is 7 image pixels
        assert gap[found["truth"][..., 2] > 0].max() < 1


def test_coco_is_judged_by_ap(data_pack: Path) -> None:
    pytest.importorskip("pycocotools")
    source = CocoPose(
        folder=str(data_pack / "pose_samples" / "coco"),
        train="test_coco.json",
        val="test_coco.json",
        train_images="",
        val_images="",
    )
    people = source.federation(1, 0).test
    assert people is not None
    task = Pose("coco", patch=16, size=(256, 192), flip_test=False)
    perfect = Perfect(task)
    perfect.y = people.batch(torch.arange(len(people)))["y"]
    assert task.judge(task.find(perfect, people))["ap"] > 95


def test_coco_on_detected_boxes(data_pack: Path) -> None:
    """Boxes as COCO's detection file has them. Whoever answers with the joints of the person whose
    box a detection shares most is almost perfect; without the least certain half of the boxes too.
    Suppression leaves few more poses than there are people."""
    pytest.importorskip("pycocotools")
    source = CocoPose(
        folder=str(data_pack / "pose_samples" / "coco"),
        train="test_coco.json",
        val="test_coco.json",
        train_images="",
        val_images="",
        boxes="test_coco_det_AP_H_56.json",
        least_score=0.1,
    )
    people = source.federation(1, 0).test
    assert people is not None and people.annotated
    assert len(people) > len(people.annotated)
    task = Pose("coco", patch=16, size=(256, 192), flip_test=False)
    joints = []
    for person in people.people:
        there = [a for a in people.annotated if a.image_id == person.image_id]
        gaps = [np.hypot(*np.subtract(a.centre, person.centre)) / max(a.box) for a in there]
        gaps = [g + abs(math.log(a.box[1] / person.box[1])) for g, a in zip(gaps, there)]
        joints.append(there[int(np.argmin(gaps))].joints)
    found = {
        "predicted": np.stack(joints)[..., :2],
        "peaks": np.ones((len(people), 17)),
        "area": np.array([p.area for p in people.people]),
        "image": np.array([p.image_id for p in people.people]),
        "score": np.array([p.score for p in people.people]),
    }
    assert task.judge(found, people.annotated)["ap"] > 90
    shifted = {**found, "predicted": found["predicted"] + 300}
    assert task.judge(shifted, people.annotated)["ap"] < 5
    """The whole way, with a network that answers nothing."""
    small = people.subset(range(3))
    perfect = Perfect(task)
    perfect.y = torch.zeros(3, 17, 3)
    judged = task.evaluate(perfect, small)
    assert judged["ap"] < 5 and set(judged) >= {"ap", "ap_256x192", "ar_256x192"}


def test_a_federation_learns_and_its_model_is_of_use(tmp_path: Path) -> None:
    """Two rounds of RAF: the loss falls; then the run's files serve `apply`, on images of another
    shape and at a resolution of one's own."""
    task = Pose("lsp", "vit-tiny", sizes=((32, 24), (48, 36)))
    source = StickFigures(people=24, tests=4, sizes=((32, 24), (16, 12)), scale=0.1, rotation=10)
    federation = source.federation(2, 0)
    algorithm = stack(
        FedAvg(task, lr=2e-3, optimizer="adamw", batch=6, epochs=2),
        MultiResolution(sizes=source.sizes),
    )
    rounds: list[Any] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(
            algorithm,
            engine,
            3,
            test=federation.test,
            evaluate_every=3,
            after_round=lambda _, r: rounds.append(r),
        )
    assert rounds[-1].loss < rounds[0].loss
    assert set(rounds[-1].metrics) == {"pck", "pck_32x24", "pck_48x36"}
    pictures = task.pictures(algorithm.result(state), federation)
    assert (
        len(pictures) == 6
        and pictures[0].labels == ["32x24", "48x36"]
        and pictures[0].images[0].shape == pictures[0].images[1].shape
    )

    task.save(state, tmp_path)
    warnings.filterwarnings("ignore", "no boxes and no detector")
    (tmp_path / "in").mkdir()
    Image.new("RGB", (200, 50), (90, 80, 70)).save(tmp_path / "in" / "wide.png")
    Image.fromarray(source.draw(3).image).save(tmp_path / "in" / "figure.jpg")  # type: ignore[arg-type]
    said = task.apply(
        tmp_path, tmp_path / "in", tmp_path / "out", size="64x48", capture="32x24", how="bicubic"
    )
    assert said.startswith("2 people in 2 images")
    found = json.loads((tmp_path / "out" / "keypoints.json").read_text())
    assert [i["file_name"] for i in found["images"]] == ["figure.jpg", "wide.png"] and found[
        "images"
    ][1]["width"] == 200
    assert (
        len(found["annotations"][0]["keypoints"]) == 3 * 14
        and found["categories"][0]["keypoints"][0] == "right_ankle"
    )
    with Image.open(tmp_path / "out" / "wide-pose.png") as overlay:
        assert overlay.size == (200, 50)
    boxes = [
        {"file_name": "figure.jpg", "bbox": [10, 10, 50, 90]},
        {"file_name": "figure.jpg", "bbox": [60, 10, 50, 90]},
    ]
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    assert task.apply(
        tmp_path, tmp_path / "in", tmp_path / "out", boxes=tmp_path / "boxes.json"
    ).startswith("2 people in 2 images")
    for wrong, why in (
        ({"size": "63x48"}, "multiples of 4"),
        ({"size": "big"}, "HEIGHTxWIDTH"),
        ({"how": "cubic"}, "bilinear, area or bicubic"),
        ({"capture": "0x24"}, "at least one pixel a side"),
        ({"zoom": 2}, "no option 'zoom'"),
        ({"boxes": tmp_path / "model.safetensors"}, "not a list of boxes"),
    ):
        with pytest.raises(ValueError, match=why):
            task.apply(tmp_path, tmp_path / "in", tmp_path / "out", **wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in"):
        task.apply(tmp_path, tmp_path / "empty", tmp_path / "x")


@pytest.fixture
def applied(tmp_path: Path) -> Callable[..., str]:
    """`apply` of a model that has learned nothing, from photos/ to out/."""
    task = Pose("lsp", "vit-nano", size=(32, 24))
    save_file(task.model().state_dict(), tmp_path / "model.safetensors")

    def run(boxes: object = None, **options: Any) -> str:
        if boxes is not None:
            (tmp_path / "boxes.json").write_text(json.dumps(boxes))
            options["boxes"] = tmp_path / "boxes.json"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no boxes and no detector")
            return task.apply(tmp_path, tmp_path / "photos", tmp_path / "out", **options)

    return run


def photos(root: Path, *names: str) -> None:
    for name in names:
        (root / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 60), (90, 80, 70)).save(root / "photos" / name)


def written(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "out" / "keypoints.json").read_text())
    return found


def test_every_photo_has_an_overlay_of_its_own(applied: Callable[..., str], tmp_path: Path) -> None:
    photos(tmp_path, "a/1.jpg", "b/1.jpg")
    assert applied().startswith("2 people in 2 images: ")
    assert {p.relative_to(tmp_path / "out").as_posix() for p in tmp_path.glob("out/**/*.png")} == {
        "a/1-pose.png",
        "b/1-pose.png",
    }
    photos(tmp_path, "b/1.png")
    applied()
    assert {"a/1.jpg-pose.png", "b/1.jpg-pose.png", "b/1.png-pose.png"} <= {
        p.relative_to(tmp_path / "out").as_posix() for p in tmp_path.glob("out/**/*.png")
    }


def test_boxes_belong_to_paths_and_are_written_as_they_were_given(
    applied: Callable[..., str], tmp_path: Path
) -> None:
    """The crop is 1.25 times as large and of the input's shape; COCO's box is the person's. A photo
    without people has a size too.
    """
    photos(tmp_path, "a/1.jpg", "b/1.jpg", "b/2.jpg")
    applied(
        [
            {"file_name": "./b/1.jpg", "bbox": [5, 6, 20, 30]},
            {"file_name": "elsewhere/2.jpg", "bbox": [1, 2, 3, 4]},
        ]
    )
    found = written(tmp_path)
    names = [i["file_name"] for i in found["images"]]
    assert [(names[a["image_id"]], a["bbox"], a["area"]) for a in found["annotations"]] == [
        ("b/1.jpg", [5, 6, 20, 30], 600),
        ("b/2.jpg", [1, 2, 3, 4], 12),
    ]
    assert [(i["width"], i["height"]) for i in found["images"]] == [(40, 60)] * 3


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([5], r"not a list of boxes: .* or the annotations of COCO are needed"),
        (5, r"not a list of boxes: .* or the annotations of COCO are needed"),
        (
            [{"file_name": "c.jpg", "bbox": "1234"}],
            r"not a list of boxes: .* or the annotations of COCO are needed",
        ),
        (
            [{"file_name": "1.jpg", "bbox": [5, 6, 20, 30]}],
            r"is 1.jpg the photo a/1.jpg\? Several have this name",
        ),
        (
            [{"file_name": "c.jpg", "bbox": [float("nan"), 6, 20, 30]}],
            r"the box \[nan, 6, 20, 30\] of c.jpg is none: .* are numbers",
        ),
        ([{"file_name": "c.jpg", "bbox": [5, 6, 0, 30]}], "the last two above 0"),
        (
            [{"file_name": "c.jpg", "bbox": [40, 6, 10, 30]}],
            "lies outside the photo, which has 40x60 pixels",
        ),
        ([{"file_name": "x.jpg", "bbox": [4, 6, 10, 30]}], "has no box for any of the images"),
    ],
    ids=[
        "number in a list",
        "number",
        "text",
        "name of two",
        "nan",
        "no width",
        "outside",
        "no photo",
    ],
)
def test_boxes_that_cannot_be_meant(
    applied: Callable[..., str], tmp_path: Path, boxes: object, why: str
) -> None:
    photos(tmp_path, "a/1.jpg", "b/1.jpg", "c.jpg")
    with pytest.raises(ValueError, match=why):
        applied(boxes)


def test_photos_that_cannot_be_read_are_skipped_and_counted(
    applied: Callable[..., str], tmp_path: Path
) -> None:
    photos(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "photos" / "a.jpg").write_text("no picture")
    assert applied().startswith("1 people in 1 images, 1 could not be read (a.jpg): ")
    assert [i["file_name"] for i in written(tmp_path)["images"]] == ["b.jpg"]
    (tmp_path / "photos" / "b.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"none of the 2 images at .* read \(a.jpg, b.jpg\)"):
        applied()


def test_what_is_no_picture_is_counted_and_tiff_and_gif_are_pictures(
    applied: Callable[..., str], tmp_path: Path
) -> None:
    photos(tmp_path, "a.jpg", "b.tif", "c.gif")
    (tmp_path / "photos" / "notes.txt").write_text("hello")
    said = applied()
    assert said.startswith("3 people in 3 images, 1 other files were passed over (notes.txt): ")


def test_without_boxes_a_warning_says_what_counts_as_a_person(tmp_path: Path) -> None:
    task = Pose("lsp", "vit-nano", size=(32, 24))
    save_file(task.model().state_dict(), tmp_path / "model.safetensors")
    photos(tmp_path, "a.jpg")
    with pytest.warns(UserWarning, match="each whole picture counts as one person"):
        task.apply(tmp_path, tmp_path / "photos", tmp_path / "out")


def test_detections_as_coco_has_them(applied: Callable[..., str], tmp_path: Path) -> None:
    """Images by number, a score, 80 categories."""
    photos(tmp_path, "000000000785.jpg", "000000000012.jpg")
    found = {"image_id": 785, "category_id": 1, "bbox": [5, 6, 20, 30]}
    applied(
        [
            {**found, "score": 0.9},
            {**found, "score": 0.1},
            {**found, "score": 0.9, "category_id": 62},
            {**found, "score": 0.9, "image_id": 4},
        ]
    )
    table = written(tmp_path)
    names = {i["id"]: i["file_name"] for i in table["images"]}
    assert [names[a["image_id"]] for a in table["annotations"]] == ["000000000785.jpg"]


class Corner(nn.Module):
    """Stands for a detector: bright pixels are a person."""

    def find(self, image: Tensor) -> Tensor:
        there = (image.float().mean(0) > 128).nonzero()
        if not len(there):
            return torch.zeros(0, 5)
        (top, left), (bottom, right) = there.amin(0).tolist(), there.amax(0).tolist()
        return torch.tensor([[left, top, right + 1, bottom + 1, 0.8]], dtype=torch.float32)


@pytest.fixture
def corner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.tasks.apply.detection._fast", lambda path, least: Corner().find)


def bright(left: int, size: tuple[int, int] = (64, 48)) -> NDArray[Any]:
    """A white figure of 12x20 on black."""
    image = np.zeros((*size, 3), np.uint8)
    image[10:30, left : left + 12] = 255
    return image


def test_a_detector_finds_the_people(
    applied: Callable[..., str], tmp_path: Path, corner: None
) -> None:
    (tmp_path / "photos").mkdir()
    Image.fromarray(bright(7)).save(tmp_path / "photos" / "a.png")
    Image.new("RGB", (30, 30)).save(tmp_path / "photos" / "empty.png")
    assert applied(detector="some.pth").startswith("1 people in 2 images: ")
    (person,) = written(tmp_path)["annotations"]
    assert person["bbox"] == [7, 10, 12, 20] and person["box_score"] == 0.8
    with pytest.raises(ValueError, match="give one of them"):
        applied([{"file_name": "a.png", "bbox": [5, 6, 20, 30]}], detector="some.pth")
    with pytest.raises(ValueError, match="lowest that counts"):
        applied(detector="some.pth", score=2)


def test_a_film_becomes_a_film_with_numbers(tmp_path: Path, corner: None) -> None:
    """The figure walks two pixels a frame, is gone for two frames, and then another stands far
    away: two numbers."""
    av = pytest.importorskip("av")
    task = Pose("lsp", "vit-nano", size=(32, 24))
    save_file(task.model().state_dict(), tmp_path / "model.safetensors")
    frames = [bright(2 * k) for k in range(6)]
    frames += [np.zeros_like(frames[0])] * 2 + [bright(36)] * 2
    with av.open(str(tmp_path / "walk.mp4"), "w") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
    said = task.apply(tmp_path, tmp_path / "walk.mp4", tmp_path / "out", detector="some.pth")
    assert said.startswith("2 people in 8 places in 10 frames: ")
    table = written(tmp_path)
    assert [i["frame"] for i in table["images"]] == list(range(10))
    assert [(a["image_id"], a["track_id"]) for a in table["annotations"]] == [
        *((k, 1) for k in range(6)),
        (8, 2),
        (9, 2),
    ]
    for k, person in enumerate(table["annotations"][:6]):
        assert person["bbox"] == pytest.approx([2 * k, 10, 12, 20], abs=2)
    with av.open(str(tmp_path / "out" / "walk-pose.mp4")) as film:
        shown = [f.to_ndarray(format="rgb24") for f in film.decode(video=0)]
    assert len(shown) == 10 and shown[0].shape == (64, 48, 3)
    assert np.abs(shown[6].astype(int)).max() < 30  # nobody there, nothing drawn
    drawn = shown[3].astype(int)[:, :, 1] - shown[3].astype(int)[:, :, 0]
    assert (drawn > 15).any()  # the green frame
    (tmp_path / "boxes.json").write_text("[]")
    with pytest.raises(ValueError, match="boxes are for photos"):
        task.apply(tmp_path, tmp_path / "walk.mp4", tmp_path / "out", boxes=tmp_path / "boxes.json")


def test_tracks_by_hand() -> None:
    """Two cross over in small steps and keep their numbers; one who was away for longer than the
    patience is somebody new."""
    tracker = Tracker(patience=2)
    assert tracker.follow([(0, 0, 10, 10), (40, 0, 10, 10)]) == [1, 2]
    assert tracker.follow([(38, 0, 10, 10), (2, 0, 10, 10)]) == [2, 1]
    assert tracker.follow([(36, 0, 10, 10)]) == [2]
    assert tracker.follow([(35, 0, 10, 10), (3, 0, 10, 10)]) == [2, 1]
    for _ in range(3):
        assert tracker.follow([(35, 0, 10, 10)]) == [2]
    assert tracker.follow([(3, 0, 10, 10)]) == [3]
    """Half of each is shared: 50 of 150."""
    assert box_overlap((0, 0, 10, 10), (5, 0, 10, 10)) == pytest.approx(1 / 3)


def test_a_portrait_of_a_telephone_is_looked_at_upright(
    applied: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 40)).save(tmp_path / "photos" / "a.jpg", exif=exif)
    applied()
    assert (
        written(tmp_path)["images"][0]["width"],
        written(tmp_path)["annotations"][0]["bbox"],
    ) == (40, [0, 0, 40, 60])
    with Image.open(tmp_path / "out" / "a-pose.png") as overlay:
        assert overlay.size == (40, 60)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no network 'vit'"):
        Pose(network="vit")
    with pytest.raises(
        ValueError, match="30x24 does not fit vit-tiny, whose inputs are multiples of 4"
    ):
        Pose(sizes=((30, 24),))
    with pytest.raises(ValueError, match="multiples of 16"):
        Pose(network="resnet-18", stages=3, sizes=((64, 48), (40, 32)))
    odd = StickFigures(people=2, tests=1, sizes=((64, 48), (30, 22))).federation(2, 0)
    with pytest.raises(
        StackError, match="client 1 has 30x22 inputs, but the model takes multiples of 4"
    ):
        stack(FedAvg(Pose()), MultiResolution(sizes=((64, 48), (32, 24)))).given(odd.facts)
    people = StickFigures(people=2, tests=1).federation(1, 0).holdings[0]
    batch = people.batch(torch.arange(2))
    with pytest.raises(ValueError, match="the data has 14 joints, the skeleton 'mpii' has 16"):
        Pose("mpii").loss(Output(torch.zeros(2, 16, 8, 8)), batch)

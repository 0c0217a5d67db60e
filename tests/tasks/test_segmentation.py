"""IoU, loss and the reference by hand; masks at other resolutions; a user's folder; `apply`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedlens import Federation, Output, run, stack
from fedlens.algorithms import FedAvg
from fedlens.cli.main import invoke
from fedlens.data.images.masks import IGNORED, FigureMasks, Masked, MaskFolder
from fedlens.data.source import DataError
from fedlens.engines.loopback import Loopback
from fedlens.layers import MultiResolution
from fedlens.tasks.segmentation import Segmentation, ious


class Says(nn.Module):
    """Scores that are its input: channel k for class k."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def test_iou_by_hand() -> None:
    """Eight pixels by eight. Truth: the left half is class 1. Said: the upper half is. Both 16,
    either 48 pixels: a third; of the ground likewise. Pixels that nobody knows count nowhere:
    without the lower left quarter, both 16, either 32."""
    left, upper = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    left[..., :4], upper[:, :4] = 1, 1
    images = torch.stack([255 * (1 - upper), 255 * upper, 0 * upper], 1).byte()
    task = Segmentation("dilated")
    whole = task.evaluate(Says(), Masked(images, left.byte(), (8, 8)))
    assert whole == {
        "iou": pytest.approx(100 / 3),
        "iou_8x8": pytest.approx(100 / 3),
        "iou_class_0": pytest.approx(100 / 3),
        "iou_class_1": pytest.approx(100 / 3),
    }
    left[:, 4:, :4] = IGNORED
    assert task.evaluate(Says(), Masked(images, left.byte(), (8, 8)))["iou"] == pytest.approx(50)


def test_a_class_that_is_not_there_has_no_figure() -> None:
    assert ious(torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])) == [75.0, 80.0, None]


def test_the_loss_is_a_mean_over_images_of_known_pixels() -> None:
    """Scores 0 and log 3: class 1 has probability 3/4. First image: all of class 1, -log(3/4).
    Second: one known pixel, of class 0, -log(1/4)."""
    scores = torch.zeros(2, 2, 2, 2)
    scores[:, 1] = math.log(3)
    y = torch.ones(2, 2, 2).long()
    y[1] = IGNORED
    y[1, 0, 0] = 0
    found = Segmentation("dilated").loss(Output(scores), {"y": y}).item()
    assert found == pytest.approx((-math.log(3 / 4) - math.log(1 / 4)) / 2)


def test_one_mask_for_everybody_by_hand() -> None:
    """Two images of 8x8: class 1 in the upper half of the first, the upper quarter of the second.
    The upper half for both: 48 of 64 pixels; the upper quarter: 32 of 48."""
    masks = torch.zeros(2, 8, 8).byte()
    masks[0, :4] = masks[1, :2] = 1
    data = Masked(torch.zeros(2, 3, 8, 8).byte(), masks, (8, 8))
    assert Segmentation("dilated").references(None, data) == {
        "one mask for everybody": {"iou": pytest.approx(75)}
    }


def test_a_pixel_of_a_reduced_mask_is_what_most_of_it_shows() -> None:
    mask = torch.zeros(1, 16, 16).byte()
    mask[:, :, 10:] = 2
    data = Masked(torch.zeros(1, 3, 16, 16).byte(), mask, (16, 16)).at((8, 8))
    assert data.batch(torch.tensor([0]))["y"][0, 0].tolist() == [0, 0, 0, 0, 0, 2, 2, 2]


def test_images_are_mirrored_with_their_masks() -> None:
    x = torch.arange(64).view(1, 1, 8, 8).expand(1, 3, 8, 8).byte()
    data = Masked(x, x[:, 0], (8, 8), flip=1.0)
    batch = data.batch(torch.tensor([0]), torch.Generator().manual_seed(0))
    assert torch.equal(batch["y"][0], x[0, 0].flip(-1).long())
    assert torch.allclose(255 * batch["x"][0, 0], batch["y"][0].float())


@pytest.mark.parametrize("network", ["dilated", "unet"])
def test_cameras_of_two_resolutions_learn_together(network: str) -> None:
    sizes = ((48, 36), (32, 24))
    federation = FigureMasks(figures=12, tests=2, sizes=sizes).federation(2, 0)
    task = Segmentation(network, sizes=sizes)
    algorithm = stack(
        FedAvg(task, lr=1e-2, optimizer="adamw", batch=3, epochs=2), MultiResolution(sizes=sizes)
    )
    losses: list[float] = []
    engine = Loopback(algorithm, federation)
    end = run(algorithm, engine, 4, after_round=lambda _, r: losses.append(r.loss))  # type: ignore[arg-type]
    assert losses[-1] < 0.8 * losses[0] and federation.facts.resolutions == sizes
    found = task.evaluate(algorithm.result(end), federation.test)
    assert {"iou", "iou_48x36", "iou_32x24"} <= found.keys()


def folder(root: Path, levels: tuple[int, ...] = (0, 1)) -> Path:
    """Twelve images with a bright square, and masks of it."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for k in range(12):
        pixels = rng.integers(0, 90, (24, 32, 3), np.uint8)
        mask = np.zeros((24, 32), np.uint8)
        y, x = rng.integers(0, 12), rng.integers(0, 20)
        pixels[y : y + 10, x : x + 10] += 150
        mask[y : y + 10, x : x + 10] = levels[-1]
        Image.fromarray(pixels).save(root / "images" / f"{k}.jpg")
        Image.fromarray(mask).save(root / "masks" / f"{k}.png")
    return root


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    root = folder(tmp_path / "own", (0, 255))
    (root / "images" / "no_mask.png").write_bytes((root / "images" / "0.jpg").read_bytes())
    (root / "images" / "1.jpg").write_bytes(b"broken")
    Image.new("RGB", (32, 24)).save(root / "masks" / "2.png")
    Image.new("L", (8, 8)).save(root / "masks" / "3.png")
    found = MaskFolder(root=str(root), canvas=(24, 32), sizes=((24, 32),)).federation(2, 0)
    said = "\n".join(found.facts.skipped)
    for name, why in (
        ("images/no_mask.png", "it has no mask"),
        ("images/1.jpg", "cannot identify"),
        ("images/2.jpg", "masks/2.png has the mode RGB"),
        ("images/3.jpg", r"its size is (32, 24), that of its mask (8, 8)"),
    ):
        assert name in said and why in said
    assert found.facts.classes == ("0", "1") and "255 is taken for class 1" in found.facts.notes[0]
    assert [len(h) for h in found.holdings] == [3, 3] and len(found.test) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"names": ("one", "two")}, "have the level 3, but data.names has 2 classes"),
        ({"root": "nowhere"}, "there is no folder of images and masks at nowhere"),
        ({"sizes": ((4, 4),)}, "none below 8 pixels"),
    ],
)
def test_a_folder_that_does_not_do(tmp_path: Path, change: dict[str, object], why: str) -> None:
    root = folder(tmp_path / "own", (0, 3))
    with pytest.raises(DataError, match=why):
        MaskFolder(**{"root": str(root), **change}).federation(2, 0)  # type: ignore[arg-type]


def test_from_a_folder_to_masks_by_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run_folder = folder(tmp_path / "own"), tmp_path / "run"
    given = ["data.name=MaskFolder", f"data.root={root}", "data.sizes=[[24,32]]",
             "data.canvas=[24,32]", "task.sizes=[[24,32]]", "rounds=12", "evaluate_every=12",
             "clients=2", "workers=0", "batch=2", "task.norm=group", "lr=0.02"]  # fmt: skip
    assert invoke(["run", "raf-segmentation", "--algorithm", "fedavg", *given,
                 "--out", str(run_folder)]) == 0  # fmt: skip
    assert "one mask for everybody" in capsys.readouterr().out
    out = tmp_path / "found"
    assert invoke(["apply", str(run_folder), str(root / "images"), str(out)]) == 0
    mask = np.asarray(Image.open(out / "0.png"))
    truth = np.asarray(Image.open(root / "masks" / "0.png"))
    assert mask.shape == truth.shape and (out / "0-painted.png").is_file()
    both, either = ((mask == 1) & (truth == 1)).sum(), ((mask == 1) | (truth == 1)).sum()
    assert both / either > 0.6
    assert invoke(["apply", str(run_folder), str(root / "images"), str(out), "size=4x4"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="no network 'vgg'"):
        Segmentation("vgg")
    with pytest.raises(
        ValueError, match="30x20 does not fit unet, whose inputs are multiples of 4"
    ):
        Segmentation("unet", sizes=((30, 20),))
    data = FigureMasks(figures=2, tests=0, sizes=((30, 20),)).federation(2, 0)
    with pytest.raises(ValueError, match="30x20 does not fit"):
        Segmentation("unet").fits(data.facts)
    assert isinstance(data, Federation) and data.test is None

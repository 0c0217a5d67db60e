"""The deblurring task: files, pictures, and the whole way from a recipe to a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens import Message
from fedlens.deblur import Deblurring
from fedlens.deblur.scenes import Scene
from fedlens.deblur.task import framed, mosaic
from fedlens.runs.job import experiment


def test_saves_a_picture_and_the_unrounded_values(tmp_path: Path) -> None:
    x = torch.tensor([[[1.25, 300.0], [-4.0, 99.5]]])
    Deblurring().save(Message({"image": {"scene": x}}), tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "restored.npy"), [[1.25, 255.0], [0.0, 99.5]])
    np.testing.assert_array_equal(
        np.asarray(Image.open(tmp_path / "restored.png")), [[1, 255], [0, 100]]
    )
    rim = torch.zeros(3, 6, 6)
    Deblurring().save(Message({"image": {"a": rim, "b": rim}}, {"pad": 1.0}), tmp_path)
    assert np.load(tmp_path / "restored" / "b.npy").shape == (4, 4, 3)


@pytest.mark.parametrize("observe", ["complete", "partial"])
def test_pictures_show_who_saw_what(observe: str) -> None:
    federation = Scene(size=64, observe=observe, blur="synthesis").federation(9, 0)  # type: ignore[arg-type]
    pictures = Deblurring().pictures({"camera": federation.test["camera"]}, federation)
    kinds = [p.kind for p in pictures]
    assert kinds == (["image"] if observe == "partial" else []) + [
        "sheet",
        "sheet",
        "compare",
        "map",
    ]
    compare, residual = pictures[-2], pictures[-1]
    assert (
        compare.labels
        == [
            "mean of the observations",
            *([] if observe == "partial" else ["best photo", "best photo alone"]),
            "restored",
            "truth",
        ]
        and float(residual.images[0].abs().max()) == 0
    )
    assert all(float(i.min()) >= 0 and float(i.max()) <= 1 for p in pictures[:-1] for i in p.images)


def test_kernels_are_shown_at_one_scale() -> None:
    """A 1 x 3 line in a square of 5 lies in the middle row; the kernel's centre, index size // 2,
    stands at the square's.
    """
    shown = framed(torch.tensor([[1.0, 2.0, 3.0]]), 5)
    assert (
        shown.shape == (1, 5, 5)
        and shown[0, 2].tolist() == [0, 1, 2, 3, 0]
        and float(shown.sum()) == 6
    )


def test_mosaic_is_the_mean_of_those_who_saw_a_pixel() -> None:
    federation = Scene(size=64, observe="partial", noise=0.0, blur="synthesis").federation(4, 0)
    views = [h["camera"] for h in federation.holdings]
    whole = mosaic(views)
    assert float(whole[0, 2, 3]) == float(views[0].pixels[0, 2, 3])
    both = (float(views[0].pixels[0, 2, 34]) + float(views[1].pixels[0, 2, 34 - views[1].left])) / 2
    assert float(whole[0, 2, 34]) == pytest.approx(both)


def test_from_recipe_to_run_folder(tmp_path: Path) -> None:
    """What a user gets from `fedlens run deblur size=64`: scores in summary.json, files, pictures,
    curves of the measured quantities.
    """
    done = experiment(
        "deblur",
        out=tmp_path / "run",
        size=64,
        rounds=30,
        kernel_size=9,
        blur="synthesis",
        clients=3,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        summary["metrics"]["psnr"] == done.metrics["psnr"] > 25
        and 0 < summary["metrics"]["ssim"] <= 1
    )
    image = np.load(tmp_path / "run" / "restored.npy")
    assert image.shape == (64, 64) and (tmp_path / "run" / "restored.png").is_file()
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [x["state"] for x in lines if "objective" in x["state"]]
    assert [x["round"] for x in lines if "objective" in x["state"]] == [0, 10, 20] and measured[2][
        "objective"
    ] < measured[0]["objective"]
    assert (tmp_path / "run" / "pictures" / "index.json").is_file()


@pytest.mark.parametrize(
    "recipe", ["deblur-central", "deblur-local", "deblur-fedavg", "deblur-gd", "deblur-partial"]
)
def test_every_comparison_is_a_recipe(recipe: str, tmp_path: Path) -> None:
    done = experiment(recipe, out=tmp_path / "run", size=64, rounds=2, blur="synthesis", clients=4)
    assert done.metrics["psnr"] > 8

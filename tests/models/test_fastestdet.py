"""FastestDet against its public code (dog-qiuqiu/FastestDet, commit 50473cd): its Detector and
handle_preds were run beside ours with the official weights; the numbers below are theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.core.weights import load_weights
from fedlens.models.fastestdet import FastestDet


@pytest.fixture
def official(data_pack: Path) -> FastestDet:
    net = load_weights(FastestDet(), data_pack / "weights" / "detect" / "fastestdet_280.pth")
    assert isinstance(net, FastestDet)
    return net.eval()


def test_it_has_the_published_size() -> None:
    """The official file fits it strictly (below), so the size is that file's."""
    assert sum(p.numel() for p in FastestDet().parameters()) == 244_490


def test_the_network_answers_as_the_public_one(official: FastestDet) -> None:
    """Pixels of numpy's generator, seed 3."""
    x = np.random.default_rng(3).random((1, 3, 352, 352)).astype(np.float32)
    with torch.no_grad():
        y = official(torch.from_numpy(x))
    assert y.shape == (1, 85, 22, 22)
    assert y.double().sum().item() == pytest.approx(25.2473136, abs=1e-2)
    theirs = [
        0.0819784,
        0.1067279,
        0.0579808,
        2.3288207,
        2.6583240,
        0.0385162,
        0.0002951,
        0.0019905,
    ]
    assert y[0, :8, 10, 11].tolist() == pytest.approx(theirs, abs=1e-4)
    assert y[0, :, 3, 5].double().abs().sum().item() == pytest.approx(3.4890951, abs=1e-4)


@pytest.mark.parametrize(
    ("photo", "theirs"),
    [
        ("000000000785", [[285.02, 50.53, 490.73, 379.11, 0.9342]]),
        (
            "000000040083",
            [[29.58, 127.01, 189.44, 307.64, 0.8643], [300.42, 132.96, 396.29, 292.24, 0.8233]],
        ),
        (
            "000000196141",
            [
                [168.07, 68.20, 400.48, 370.06, 0.9082],
                [445.70, 208.05, 638.75, 411.43, 0.8744],
                [35.91, 70.73, 66.26, 165.32, 0.8545],
                [554.23, 93.22, 607.38, 241.32, 0.8005],
            ],
        ),
        (
            "000000197388",
            [
                [159.67, 62.94, 357.01, 339.63, 0.8721],
                [-21.25, 50.51, 83.92, 278.40, 0.8305],
                [534.79, 55.85, 635.68, 270.78, 0.8025],
            ],
        ),
    ],
)
def test_people_are_found_as_by_the_public_code(
    official: FastestDet, data_pack: Path, photo: str, theirs: list[list[float]]
) -> None:
    """The same people; theirs are read and resized by OpenCV, which rounds otherwise: within a
    pixel and a half."""
    with Image.open(data_pack / "pose_samples" / "coco" / f"{photo}.jpg") as file:
        image = torch.from_numpy(np.asarray(file.convert("RGB")).copy()).permute(2, 0, 1)
    found = official.find(image).numpy()
    assert found.shape == (len(theirs), 5)
    assert np.abs(found[:, :4] - np.array(theirs)[:, :4]).max() < 1.5
    assert np.abs(found[:, 4] - np.array(theirs)[:, 4]).max() < 0.01

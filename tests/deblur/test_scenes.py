"""Scenes: geometry, simulated views, what is refused, and boundaries that do not ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tables import from_table

from fedlens import run
from fedlens.data.images.reading import read_image
from fedlens.data.source import DataError
from fedlens.deblur import FedDeblur
from fedlens.deblur.scenes import Scene, field_of_view, taper
from fedlens.deblur.spectrum import circular_blur as circular_blur
from fedlens.deblur.task import Deblurring
from fedlens.engines.simulator import Simulator


@pytest.fixture
def sharp(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    pixels = np.kron(rng.integers(0, 256, (8, 8)), np.ones((6, 6))).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sharp.png")
    return tmp_path / "sharp.png"


def test_nine_fields_of_view_as_in_the_paper() -> None:
    boxes = [field_of_view(256, 256, k, 9) for k in range(9)]
    assert sorted({b[0] for b in boxes}) == [0, 78, 156] == sorted({b[1] for b in boxes})
    assert {b[2:] for b in boxes} == {(100, 100)}
    assert field_of_view(1356, 2040, 15, 16, (500, 600)) == (856, 1440, 500, 600)
    assert field_of_view(64, 64, 0, 1) == (0, 0, 64, 64)
    for patch, words in (((300, 10), "does not fit"), ((50, 50), "do not overlap")):
        with pytest.raises(DataError, match=words):
            field_of_view(256, 256, 0, 9, patch)


def test_with_nothing_set_there_is_a_scene() -> None:
    scene = Scene()
    federation = scene.federation(scene.default_clients(), seed=0)
    assert len(federation) == 10 and federation.facts.scenes == {"camera": (1, 256, 256)}
    assert Scene(observe="partial").default_clients() == 9
    colour = Scene(image="astronaut", observe="partial", size=64).federation(9, 0)
    assert colour.holdings[4]["astronaut"].pixels.shape == (3, 25, 25)


def test_observations_are_blurred_and_noisy_by_the_book(sharp: Path) -> None:
    """Without noise the observation is the circular convolution; with it, the difference has the
    asked-for deviation. Seeds repeat.
    """
    clean = Scene(image=str(sharp), noise=0.0, blur="motion").federation(3, 0)
    noisy = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 0)
    truth = read_image(sharp)
    for k in range(3):
        seen = clean.holdings[k]["sharp"]
        torch.testing.assert_close(
            seen.pixels.double(), circular_blur(truth, seen.kernel), atol=1e-4, rtol=0
        )
        assert float((noisy.holdings[k]["sharp"].pixels - seen.pixels).std()) == pytest.approx(
            2.0, rel=0.1
        )
    again = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 0)
    other = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 1)
    assert torch.equal(again.holdings[1]["sharp"].pixels, noisy.holdings[1]["sharp"].pixels)
    assert not torch.equal(other.holdings[1]["sharp"].pixels, noisy.holdings[1]["sharp"].pixels)


def test_a_folder_is_many_scenes_and_scores_are_their_mean(sharp: Path) -> None:
    Image.fromarray(np.asarray(Image.open(sharp)).T.copy()).save(sharp.with_name("turned.png"))
    federation = Scene(image=str(sharp.parent), size=32, blur="motion").federation(3, 0)
    assert federation.facts.scenes == {"sharp": (1, 32, 32), "turned": (1, 32, 32)}
    task = Deblurring()
    algorithm = FedDeblur(task, tol=0.0).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        both = run(algorithm, engine, 5)
    alone = Scene(image=str(sharp), size=32, blur="motion").federation(3, 0)
    single = FedDeblur(task, tol=0.0).given(alone.facts)
    with Simulator(single, alone, workers=0) as engine:
        one = run(single, engine, 5)
    # side by side, and none the wiser
    assert torch.equal(both.trees["image"]["sharp"], one.trees["image"]["sharp"])
    result = algorithm.result(both)
    each = [task.evaluate(result, {n: federation.test[n]})["psnr"] for n in result]
    assert task.evaluate(result, federation.test)["psnr"] == pytest.approx(sum(each) / 2)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"image": "nothing"}, "camera"),
        ({"image": "no/where.png"}, "no image at"),
        ({"scene": "/no/where"}, "no folder"),
        ({"noise": -1.0}, "noise must be a number of at least 0"),
        ({"kernel_size": 2}, "kernel_size must be a whole number of at least 3"),
        ({"size": 3}, "at least 16"),
        ({"size": 16}, "larger than the image"),
        ({"scene": "x", "boundary": "circular"}, "simulated"),
    ],
)
def test_other_bad_input(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_table("data", "Scene", **keys).federation(10, 0)


def test_a_text_file_is_not_an_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(DataError, match="not an image"):
        Scene(image=str(tmp_path / "x.png")).federation(2, 0)
    with pytest.raises(DataError, match="no images"):
        (tmp_path / "empty").mkdir()
        Scene(image=str(tmp_path / "empty")).federation(2, 0)


def test_an_unknown_boundary_does_not_ring() -> None:
    """Photos that are not circular: solving for what lies beyond their edges beats tapering them,
    which beats doing nothing. All three see the same data and are scored on the same pixels."""
    scores = {}
    for boundary in ("ignore", "taper", "unknown"):
        federation = Scene(image="camera", size=96, blur="motion", boundary=boundary).federation(
            4, 0
        )
        algorithm = FedDeblur(Deblurring(), eta=0.05, rho=0.03, tol=0.0).given(federation.facts)
        with Simulator(algorithm, federation, workers=0) as engine:
            state = run(algorithm, engine, 120, test=federation.test)
        scores[boundary] = Deblurring().evaluate(algorithm.result(state), federation.test)["psnr"]
    assert scores["unknown"] > scores["taper"] + 1 > scores["ignore"] + 1


def test_tapering_makes_opposite_edges_meet() -> None:
    ramp = torch.linspace(0, 255, 40).expand(1, 40, 40).contiguous()
    soft = taper(ramp, torch.ones(5, 5, dtype=torch.float64) / 25)
    assert abs(float(soft[0, 20, 0] - soft[0, 20, -1])) < 0.5 * 255
    torch.testing.assert_close(soft[:, 12:28, 12:28], ramp[:, 12:28, 12:28])

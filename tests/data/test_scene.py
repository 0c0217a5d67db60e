"""Scenes: geometry, the user's own files, what is refused, and boundaries that do not ring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens import run
from fedlens.algorithms import FedDeblur
from fedlens.data.blur import motion
from fedlens.data.scene import Scene, field_of_view, read_image, resize, taper
from fedlens.data.source import DataError
from fedlens.engines.simulator import Simulator
from fedlens.metrics.image import psnr
from fedlens.spectrum import blur as circular_blur
from fedlens.tasks.deblurring import Deblurring


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
    assert len(federation) == 10 and federation.facts["scenes"] == {"camera": (1, 256, 256)}
    assert Scene(observe="partial").default_clients() == 9
    colour = Scene(image="astronaut", observe="partial", size=64).federation(9, 0)
    assert colour.holdings[4]["astronaut"].pixels.shape == (3, 25, 25)


def test_observations_are_blurred_and_noisy_by_the_book(sharp: Path) -> None:
    """Without noise the observation is the circular convolution; with it, the difference has the asked-for deviation. Seeds repeat."""
    clean = Scene(image=str(sharp), noise=0.0, blur="motion").federation(3, 0)
    noisy = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 0)
    truth = read_image(sharp)
    for k in range(3):
        seen = clean.holdings[k]["sharp"]
        torch.testing.assert_close(seen.pixels.double(), circular_blur(truth, seen.kernel), atol=1e-4, rtol=0)
        assert float((noisy.holdings[k]["sharp"].pixels - seen.pixels).std()) == pytest.approx(2.0, rel=0.1)
    again = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 0)
    other = Scene(image=str(sharp), noise=2.0, blur="motion").federation(3, 1)
    assert torch.equal(again.holdings[1]["sharp"].pixels, noisy.holdings[1]["sharp"].pixels)
    assert not torch.equal(other.holdings[1]["sharp"].pixels, noisy.holdings[1]["sharp"].pixels)


def test_a_folder_is_many_scenes_and_scores_are_their_mean(sharp: Path) -> None:
    Image.fromarray(np.asarray(Image.open(sharp)).T.copy()).save(sharp.with_name("turned.png"))
    federation = Scene(image=str(sharp.parent), size=32, blur="motion").federation(3, 0)
    assert federation.facts["scenes"] == {"sharp": (1, 32, 32), "turned": (1, 32, 32)}
    task = Deblurring()
    algorithm = FedDeblur(task, tol=0.0).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        both = run(algorithm, engine, 5)
    alone = Scene(image=str(sharp), size=32, blur="motion").federation(3, 0)
    single = FedDeblur(task, tol=0.0).given(alone.facts)
    with Simulator(single, alone, workers=0) as engine:
        one = run(single, engine, 5)
    assert torch.equal(both.trees["image"]["sharp"], one.trees["image"]["sharp"])  # side by side, and none the wiser
    result = algorithm.result(both)
    each = [task.evaluate(result, {n: federation.test[n]})["psnr"] for n in result]
    assert task.evaluate(result, federation.test)["psnr"] == pytest.approx(sum(each) / 2)


def own_scene(folder: Path, **changes: Any) -> Path:
    """Three views of a 40 x 36 scene, the last two partial."""
    rng = np.random.default_rng(1)
    truth = np.kron(rng.uniform(20, 230, (5, 6)), np.ones((8, 6)))
    kernel = np.ones((3, 5)) / 15
    blurred = circular_blur(torch.from_numpy(truth)[None], torch.from_numpy(kernel))[0].numpy()
    places = {"a": None, "b": (0, 0), "c": (10, 8)}
    for name, place in places.items():
        (folder / name).mkdir(parents=True)
        y = blurred if place is None else blurred[place[0] : place[0] + 30, place[1] : place[1] + 28]
        np.save(folder / name / "observation.npy", y)
        np.save(folder / name / "kernel.npy", kernel * 15)
        if place:
            (folder / name / "position.json").write_text(json.dumps({"top": place[0], "left": place[1]}))
    (folder / "scene.json").write_text(json.dumps({"height": 40, "width": 36}))
    Image.fromarray(truth.round().astype(np.uint8)).save(folder / "truth.png")
    return folder


def test_own_files(tmp_path: Path) -> None:
    """kernel.png and kernel.mat are kernels too; sums become 1; the scene goes on for half a kernel beyond the photos."""
    from scipy.io import savemat

    folder = own_scene(tmp_path / "scene")
    (folder / "b" / "kernel.npy").unlink()
    Image.fromarray(np.full((3, 5), 200, np.uint8)).save(folder / "b" / "kernel.png")
    (folder / "c" / "kernel.npy").unlink()
    savemat(folder / "c" / "kernel.mat", {"k": np.ones((3, 5))})
    scene = Scene(scene=str(folder))
    federation = scene.federation(scene.default_clients(), 0)
    assert (
        federation.facts["scenes"] == {"scene": (1, 44, 40)} and federation.facts["pad"] == 2 and federation.facts["observe"] == "partial"
    )
    for held in federation.holdings:
        torch.testing.assert_close(held["scene"].kernel, torch.full((3, 5), 1 / 15, dtype=torch.float64))
    assert (federation.holdings[2]["scene"].top, federation.holdings[2]["scene"].left) == (12, 10)
    algorithm = FedDeblur(Deblurring(), eta=0.05, rho=0.05).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 150)
    image, truth = algorithm.result(state)["scene"], federation.test["scene"]
    assert image.shape == (1, 40, 36)
    assert psnr(image.clamp(0, 255), truth) > psnr(federation.holdings[0]["scene"].pixels, truth) + 2


def test_a_missing_kernel_is_estimated_from_a_sharp_reference(tmp_path: Path) -> None:
    """With reference.png beside the clients: kernel.npy where there is one, the estimate elsewhere, also for a partial view."""
    sharp = read_image_of_camera(96)
    kernel = motion(7, 45)
    blurred = circular_blur(sharp, kernel)[0].numpy()
    for name, (top, left) in {"a": (8, 10), "b": (30, 20)}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "observation.npy", blurred[top : top + 60, left : left + 64])
        (tmp_path / name / "position.json").write_text(json.dumps({"top": top, "left": left}))
    np.save(tmp_path / "a" / "kernel.npy", kernel.numpy())
    (tmp_path / "scene.json").write_text('{"height": 96, "width": 96}')
    with pytest.raises(DataError, match=r"no sharp reference\.png"):
        Scene(scene=str(tmp_path)).federation(2, 0)
    Image.fromarray(sharp[0].round().byte().numpy()).save(tmp_path / "reference.png")
    held = Scene(scene=str(tmp_path), kernel_size=7).federation(2, 0).holdings
    torch.testing.assert_close(held[0]["scene"].kernel, kernel)
    found, pad = held[1]["scene"].kernel, (7 - kernel.shape[0]) // 2
    assert float((found - torch.nn.functional.pad(kernel, (pad, pad, pad, pad))).abs().sum()) < 0.1
    Image.new("L", (9, 9)).save(tmp_path / "reference.png")
    with pytest.raises(DataError, match=r"reference\.png is 9 x 9"):
        Scene(scene=str(tmp_path)).federation(2, 0)


def read_image_of_camera(size: int) -> torch.Tensor:
    return Scene(image="camera", size=size).images()["camera"]


def break_kernel(folder: Path, kernel: np.ndarray) -> None:
    np.save(folder / "b" / "kernel.npy", kernel)


BREAKS: dict[str, tuple[Any, str]] = {
    "large kernel": (lambda f: break_kernel(f, np.ones((41, 3))), "larger than the image"),
    "zero kernel": (lambda f: break_kernel(f, np.zeros((3, 3))), "sums to zero"),
    "negative kernel": (lambda f: break_kernel(f, np.array([[1.0, -0.1]])), "negative"),
    "NaN kernel": (lambda f: break_kernel(f, np.array([[1.0, np.nan]])), "NaN"),
    "flat kernel": (lambda f: break_kernel(f, np.ones(3)), "not a matrix"),
    "kernel file": (lambda f: (f / "b" / "kernel.npy").write_text("hello"), "not an array"),
    "bad size": (lambda f: (f / "scene.json").write_text('{"height": -4, "width": 36}'), '"height"'),
    "no kernel": (lambda f: (f / "b" / "kernel.npy").unlink(), "no kernel"),
    "NaN pixels": (lambda f: np.save(f / "a" / "observation.npy", np.full((40, 36), np.nan)), "NaN"),
    "another size": (lambda f: np.save(f / "a" / "observation.npy", np.zeros((40, 35))), "should be 40 x 36"),
    "outside": (lambda f: (f / "c" / "position.json").write_text('{"top": 20, "left": 0}'), "outside the scene"),
    "bad position": (lambda f: (f / "c" / "position.json").write_text('{"y": 20}'), '"top"'),
    "no size": (lambda f: (f / "scene.json").unlink(), "no scene.json"),
    "colour and grey": (lambda f: np.save(f / "a" / "observation.npy", np.zeros((40, 36, 3))), "mixes"),
    "not an image": (lambda f: np.save(f / "a" / "observation.npy", np.zeros((2, 40, 36, 3))), "neither"),
    "truth": (lambda f: Image.new("L", (9, 9)).save(f / "truth.png"), "truth.png"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_scenes_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    spoil, words = BREAKS[name]
    folder = own_scene(tmp_path / "scene")
    spoil(folder)
    with pytest.raises(DataError, match=words) as caught:
        Scene(scene=str(folder)).federation(3, 0)
    assert "\n" not in str(caught.value)


def test_views_that_do_not_meet_are_refused(tmp_path: Path) -> None:
    folder = own_scene(tmp_path / "scene")
    (folder / "scene.json").write_text('{"height": 100, "width": 100}')
    (folder / "c" / "position.json").write_text('{"top": 60, "left": 60}')
    for f in (folder / "a").iterdir():
        f.unlink()
    (folder / "a").rmdir()
    with pytest.raises(DataError, match="overlaps no other"):
        Scene(scene=str(folder)).federation(2, 0)


def test_views_without_positions_must_have_one_size(tmp_path: Path) -> None:
    folder = own_scene(tmp_path / "scene")
    (folder / "scene.json").unlink()
    for name in "bc":
        (folder / name / "position.json").unlink()
    with pytest.raises(DataError, match="differ in size: a is 40 x 36, b is 30 x 28"):
        Scene(scene=str(folder)).federation(3, 0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"image": "nothing"}, "camera"),
        ({"image": "no/where.png"}, "no image at"),
        ({"scene": "/no/where"}, "no folder"),
        ({"noise": -1.0}, "negative"),
        ({"size": 3}, "at least 16"),
        ({"size": 16}, "larger than the image"),
        ({"scene": "x", "boundary": "circular"}, "simulated"),
    ],
)
def test_other_bad_input(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Scene(**keys).federation(10, 0)


def test_a_text_file_is_not_an_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(DataError, match="not an image"):
        Scene(image=str(tmp_path / "x.png")).federation(2, 0)
    with pytest.raises(DataError, match="no images"):
        (tmp_path / "empty").mkdir()
        Scene(image=str(tmp_path / "empty")).federation(2, 0)


def test_sixteen_bits_and_resizing(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 65535, np.uint16)).save(tmp_path / "deep.png")
    assert float(read_image(tmp_path / "deep.png").max()) == pytest.approx(255)
    rng = np.random.default_rng(0)
    big = rng.integers(0, 256, (40, 40)).astype(np.float32)
    want = np.asarray(Image.fromarray(big).resize((20, 20), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(resize(torch.from_numpy(big)[None], 20)[0].numpy(), want.clip(0, 255))


def test_an_unknown_boundary_does_not_ring() -> None:
    """Photos that are not circular: solving for what lies beyond their edges beats tapering them, which beats doing nothing. All three
    see the same data and are scored on the same pixels."""
    scores = {}
    for boundary in ("ignore", "taper", "unknown"):
        federation = Scene(image="camera", size=96, blur="motion", boundary=boundary).federation(4, 0)
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

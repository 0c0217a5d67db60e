"""The user's own observations: what is read, what is estimated, and what is refused in a
sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens import run
from fedlens.data.source import DataError
from fedlens.deblur import FedDeblur
from fedlens.deblur.blur import motion
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import circular_blur as circular_blur
from fedlens.deblur.task import Deblurring
from fedlens.engines.simulator import Simulator
from fedlens.metrics.image import psnr


def own_scene(folder: Path, **changes: Any) -> Path:
    """Three views of a 40 x 36 scene, the last two partial."""
    rng = np.random.default_rng(1)
    truth = np.kron(rng.uniform(20, 230, (5, 6)), np.ones((8, 6)))
    kernel = np.ones((3, 5)) / 15
    blurred = circular_blur(torch.from_numpy(truth)[None], torch.from_numpy(kernel))[0].numpy()
    places = {"a": None, "b": (0, 0), "c": (10, 8)}
    for name, place in places.items():
        (folder / name).mkdir(parents=True)
        y = (
            blurred
            if place is None
            else blurred[place[0] : place[0] + 30, place[1] : place[1] + 28]
        )
        np.save(folder / name / "observation.npy", y)
        np.save(folder / name / "kernel.npy", kernel * 15)
        if place:
            (folder / name / "position.json").write_text(
                json.dumps({"top": place[0], "left": place[1]})
            )
    (folder / "scene.json").write_text(json.dumps({"height": 40, "width": 36}))
    Image.fromarray(truth.round().astype(np.uint8)).save(folder / "truth.png")
    return folder


def test_own_files(tmp_path: Path) -> None:
    """kernel.png and kernel.mat are kernels too; sums become 1; the scene goes on for half a kernel
    beyond the photos.
    """
    from scipy.io import savemat

    folder = own_scene(tmp_path / "scene")
    (folder / "b" / "kernel.npy").unlink()
    Image.fromarray(np.full((3, 5), 200, np.uint8)).save(folder / "b" / "kernel.png")
    (folder / "c" / "kernel.npy").unlink()
    savemat(folder / "c" / "kernel.mat", {"k": np.ones((3, 5))})
    scene = Scene(scene=str(folder))
    federation = scene.federation(scene.default_clients(), 0)
    assert (
        federation.facts.scenes == {"scene": (1, 44, 40)}
        and federation.facts.pad == 2
        and federation.facts.observe == "partial"
    )
    for held in federation.holdings:
        torch.testing.assert_close(
            held["scene"].kernel, torch.full((3, 5), 1 / 15, dtype=torch.float64)
        )
    assert (federation.holdings[2]["scene"].top, federation.holdings[2]["scene"].left) == (12, 10)
    algorithm = FedDeblur(Deblurring(), eta=0.05, rho=0.05).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 150)
    image, truth = algorithm.result(state)["scene"], federation.test["scene"]
    assert image.shape == (1, 40, 36)
    assert (
        psnr(image.clamp(0, 255), truth) > psnr(federation.holdings[0]["scene"].pixels, truth) + 2
    )


def test_a_missing_kernel_is_estimated_from_a_sharp_reference(tmp_path: Path) -> None:
    """With reference.png beside the clients: kernel.npy where there is one, the estimate elsewhere,
    also for a partial view.
    """
    sharp = Scene(image="camera", size=96).images()["camera"]
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


def break_kernel(folder: Path, kernel: np.ndarray) -> None:
    np.save(folder / "b" / "kernel.npy", kernel)


BREAKS: dict[str, tuple[Any, str]] = {
    "large kernel": (lambda f: break_kernel(f, np.ones((41, 3))), "larger than the image"),
    "zero kernel": (lambda f: break_kernel(f, np.zeros((3, 3))), "sums to zero"),
    "negative kernel": (lambda f: break_kernel(f, np.array([[1.0, -0.1]])), "negative"),
    "NaN kernel": (lambda f: break_kernel(f, np.array([[1.0, np.nan]])), "NaN"),
    "flat kernel": (lambda f: break_kernel(f, np.ones(3)), "not a matrix"),
    "kernel file": (lambda f: (f / "b" / "kernel.npy").write_text("hello"), "not an array"),
    "bad size": (
        lambda f: (f / "scene.json").write_text('{"height": -4, "width": 36}'),
        '"height"',
    ),
    "no kernel": (lambda f: (f / "b" / "kernel.npy").unlink(), "no kernel"),
    "NaN pixels": (
        lambda f: np.save(f / "a" / "observation.npy", np.full((40, 36), np.nan)),
        "NaN",
    ),
    "another size": (
        lambda f: np.save(f / "a" / "observation.npy", np.zeros((40, 35))),
        "should be 40 x 36",
    ),
    "outside": (
        lambda f: (f / "c" / "position.json").write_text('{"top": 20, "left": 0}'),
        "outside the scene",
    ),
    "bad position": (lambda f: (f / "c" / "position.json").write_text('{"y": 20}'), '"top"'),
    "no size": (lambda f: (f / "scene.json").unlink(), "no scene.json"),
    "colour and grey": (
        lambda f: np.save(f / "a" / "observation.npy", np.zeros((40, 36, 3))),
        "mixes",
    ),
    "not an image": (
        lambda f: np.save(f / "a" / "observation.npy", np.zeros((2, 40, 36, 3))),
        "neither",
    ),
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

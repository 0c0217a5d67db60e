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


def say_kernel(folder: Path, said: Any) -> None:
    (folder / "b" / "kernel.npy").unlink()
    (folder / "b" / "kernel.json").write_text(json.dumps(said))


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
    "no kernel": (lambda f: (f / "b" / "kernel.npy").unlink(), "too small to find a kernel"),
    "two kernels": (lambda f: (f / "b" / "kernel.png").touch(), "both kernel.npy and kernel.png"),
    "two photos": (lambda f: (f / "b" / "observation.jpg").touch(), "leave one"),
    "said wrongly": (lambda f: say_kernel(f, {"motion": {"length": 5}}), "should read"),
    "said too much": (lambda f: say_kernel(f, {"defocus": {"radius": 1e9}}), "from 0 to 100"),
    "said nothing": (lambda f: say_kernel(f, []), "should read"),
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


def test_a_telephones_photos_are_read_as_they_are(tmp_path: Path) -> None:
    """JPEG held sideways, a 16-bit TIFF, floats from 0 to 1 (which is said); kernels as numbers."""
    rng = np.random.default_rng(0)
    pixels = np.kron(rng.integers(40, 200, (6, 8)), np.ones((8, 8))).astype(np.uint8)
    for name in "abcd":
        (tmp_path / name).mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right shows it upright
    Image.fromarray(np.rot90(pixels).copy()).save(
        tmp_path / "a" / "observation.JPG", exif=exif, quality=98
    )
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "b" / "observation.tif")
    np.save(tmp_path / "c" / "observation.npy", pixels / 255)
    Image.fromarray((pixels / 255).astype(np.float32)).save(tmp_path / "d" / "observation.tiff")
    said = [{"motion": {"length": 5, "angle": 0}}, {"defocus": {"radius": 2}}]
    said += [{"gaussian": {"sigma": 1}}] * 2
    for name, kernel in zip("abcd", said, strict=True):
        (tmp_path / name / "kernel.json").write_text(json.dumps(kernel))
    federation = Scene(scene=str(tmp_path)).federation(4, 0)
    for held in federation.holdings:
        seen = held["scene"].pixels[0].numpy()
        assert seen.shape == (48, 64) and np.abs(seen - pixels).mean() < 3
    told = " ".join(federation.facts.notes)
    assert "c/observation.npy holds numbers from 0 to 1" in told
    assert "d/observation.tiff holds numbers from 0 to 1" in told and "noise was estimated" in told
    kernel = federation.holdings[0]["scene"].kernel
    torch.testing.assert_close(kernel, motion(5, 0))


def test_a_noisier_photo_counts_less(tmp_path: Path) -> None:
    """Four times the noise, a sixteenth of the weight; eta follows the noise that was found."""
    clean = np.kron(np.random.default_rng(0).uniform(60, 190, (8, 8)), np.ones((12, 12)))
    for name, noise in {"a": 1.0, "b": 4.0}.items():
        (tmp_path / name).mkdir()
        noisy = clean + np.random.default_rng(1).normal(0, noise, clean.shape)
        np.save(tmp_path / name / "observation.npy", noisy)
        np.save(tmp_path / name / "kernel.npy", np.ones((3, 3)))
    federation = Scene(scene=str(tmp_path)).federation(2, 0)
    first, second = (held["scene"].confidence for held in federation.holdings)
    assert first is None and float(second.mean()) == pytest.approx(1 / 16, rel=0.2)
    assert federation.facts.noise == pytest.approx(2.5, rel=0.15)
    assert federation.facts.coverage == pytest.approx(1.06, abs=0.02)
    told = Scene(scene=str(tmp_path), noise=1.0).federation(2, 0)
    assert told.facts.noise == 1.0
    few, more = FedDeblur().given(told.facts), FedDeblur().given(federation.facts)
    assert more.eta > 2 * few.eta

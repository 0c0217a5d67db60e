"""Hand-held views come back into register, blurred as they are; what does not fit fades out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedlens import run
from fedlens.data.images.reading import read_image, shipped
from fedlens.data.source import DataError
from fedlens.deblur import FedDeblur
from fedlens.deblur.blur import client_kernel, gaussian, motion
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import circular_blur
from fedlens.deblur.task import Deblurring
from fedlens.deblur.views import (
    as_anchor,
    expected_error,
    jacobian_at,
    match_tones,
    register,
    turn_kernel,
)
from fedlens.engines.simulator import Simulator
from fedlens.metrics.image import psnr

cv2 = pytest.importorskip("cv2")

WARP = np.array([[1.01, 0.03, 5.0], [-0.025, 0.99, -3.0], [1e-5, 2e-5, 1.0]])
NONE = torch.ones(1, 1, dtype=torch.float64)


def scene() -> Tensor:
    return torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 2)


def moved(x: Tensor) -> Tensor:
    """What a camera sees whose pixel WARP p shows what pixel p of the first one shows."""
    plane = cv2.warpPerspective(
        x[0].numpy(), WARP, (256, 256), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT
    )
    return torch.from_numpy(plane)[None].clamp(0, 255)


def photo(x: Tensor, kernel: Tensor, seed: int, noise: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (circular_blur(x, kernel) + noise * torch.randn(x.shape, generator=rng)).float()


def test_a_view_that_is_moved_darkened_and_blurred_otherwise_is_put_back() -> None:
    """Two blurs at right angles, a homography and 70 % of the light: afterwards the view explains
    the scene through its own, turned kernel as if the homography had been told, and counts."""
    first, kernel, other = scene(), motion(9, 0), motion(11, 90)
    anchor = photo(first, kernel, 0)
    view = 0.7 * photo(moved(first), other, 1) + 12
    found = register(view, other, anchor, kernel)
    assert found.fits and found.likeness > 0.95
    inner = (slice(None), slice(24, -24), slice(24, -24))
    ideal = circular_blur(first, found.kernel).float()
    assert psnr(found.pixels[inner], ideal[inner]) > 36
    assert float(found.confidence[24:-24, 24:-24].mean()) > 0.3
    assert float(found.kernel.sum()) == pytest.approx(1)


def test_what_moved_in_one_view_does_not_count_there() -> None:
    """Somebody stands before the scene in the second view only."""
    first, kernel = scene(), gaussian(7, 1.2)
    other = moved(first)
    other[:, 100:160, 90:130] = 250.0
    found = register(photo(other, kernel, 1), kernel, photo(first, kernel, 0), kernel)
    there = np.linalg.inv(WARP) @ [110, 130, 1]
    column, row = (there[:2] / there[2]).round().astype(int)
    assert float(found.confidence[row - 15 : row + 15, column - 8 : column + 8].max()) < 0.02
    assert float(found.confidence[40:80, 180:230].mean()) > 0.3


def test_a_view_of_something_else_does_not_fit() -> None:
    first, kernel = scene(), gaussian(7, 1.2)
    other = torch.nn.functional.avg_pool2d(shipped("coins", "grey")[:, :256, :256], 1)
    found = register(photo(other, kernel, 1), kernel, photo(first, kernel, 0), kernel)
    assert not found.fits and float(found.confidence.max()) == 0
    flat = register(torch.full((1, 256, 256), 90.0), kernel, photo(first, kernel, 0), kernel)
    assert not flat.fits


def test_pixels_that_were_cut_off_do_not_count() -> None:
    first, kernel = scene(), gaussian(5, 1.0)
    bright = (photo(first, kernel, 0) * 1.6).clamp(0, 255)
    found = register(bright, kernel, photo(first, kernel, 1), kernel)
    cut = bright[0] >= 255
    assert float(found.confidence[cut].max()) < 0.02 < float(found.confidence[~cut].mean())
    anchor = as_anchor(bright, kernel)
    assert float(anchor.confidence[cut].max()) == pytest.approx(0.01)
    assert float(anchor.confidence[(bright[0] > 20) & (bright[0] < 200)].min()) == 1


def test_a_kernel_turns_with_its_view() -> None:
    """A quarter turn takes a horizontal line to a vertical one; twice the size halves nothing of
    its light."""
    line = motion(9, 0)
    turned = turn_kernel(line, np.array([[0.0, -1.0], [1.0, 0.0]]))
    assert float(turned.sum()) == pytest.approx(1)
    middle = turned[:, turned.shape[1] // 2]
    assert float(middle.sum()) > 0.95 and int((middle > 0.01).sum()) == 9
    small = turn_kernel(line, np.diag([2.0, 2.0]))
    assert float(small.sum()) == pytest.approx(1)
    assert int((small.sum(0) > 0.02).sum()) in (4, 5)
    np.testing.assert_allclose(jacobian_at(np.diag([2.0, 3.0, 1.0]), 7, 9), np.diag([2.0, 3.0]))


def test_tones_are_a_gain_and_an_offset_whoever_walked_through() -> None:
    rng = np.random.default_rng(0)
    target = rng.uniform(20, 200, (2, 40, 40))
    source = (target - 5) / np.array([0.8, 1.25])[:, None, None]
    source[:, :10, :10] = 0
    gain, offset = match_tones(source, target, np.ones((40, 40), bool))
    np.testing.assert_allclose(gain.ravel(), [0.8, 1.25], rtol=0.02)
    np.testing.assert_allclose(offset.ravel(), [5, 5], atol=2)


def test_the_anchor_is_the_view_that_was_hurt_least() -> None:
    mild, strong = gaussian(5, 0.8), gaussian(15, 3.0)
    assert expected_error(mild, 1.0) < expected_error(strong, 1.0)
    assert expected_error(mild, 1.0) < expected_error(mild, 5.0)


def write_scene(folder: Path, views: dict[str, Tensor], kernels: dict[str, Tensor]) -> None:
    for name, view in views.items():
        (folder / name).mkdir()
        pixels = view[0].clamp(0, 255).round().byte().numpy()
        Image.fromarray(pixels).save(folder / name / "observation.png")
        np.save(folder / name / "kernel.npy", kernels[name].numpy())


def test_a_scene_from_hand_held_views_is_better_than_its_best_view(tmp_path: Path) -> None:
    """Blurred first, aligned afterwards; one of four views shows something else, is named and left
    out; the truth is what the first one would have shown."""
    first = scene()
    kernels = {n: client_kernel("motion", k, "fspecial", 0) for k, n in enumerate("abcx")}
    seen = {"a": first, "b": moved(first), "c": moved(first.flip(-1)).flip(-1)}
    seen["x"] = shipped("coins", "grey")[:, :256, :256]
    views = {n: photo(x, kernels[n], ord(n)) for n, x in seen.items()}
    write_scene(tmp_path, {n: v[:, 20:-20, 20:-20] for n, v in views.items()}, kernels)
    Image.fromarray(first[0, 20:-20, 20:-20].round().byte().numpy()).save(tmp_path / "truth.png")
    source = Scene(scene=str(tmp_path), align=True)
    federation = source.federation(source.default_clients(), 0)
    said = " ".join(federation.facts.notes)
    assert "aligned with a" in said and "view x does not fit and was left out" in said
    assert len(federation) == 4
    assert float(federation.holdings[3]["scene"].weight().max()) == 0
    task = Deblurring()
    algorithm = FedDeblur(task, relax=1.6).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 120)
    together = task.evaluate(algorithm.result(state), federation.test)["psnr"]
    alone = task.references(None, federation.test)
    assert together > alone["best photo alone"]["psnr"] + 0.2
    assert alone["best photo alone"]["psnr"] > alone["best photo"]["psnr"] + 3
    # nothing to restore together
    for name in "bc":
        Image.fromarray(np.full((216, 216), 90, np.uint8)).save(tmp_path / name / "observation.png")
    with pytest.raises(DataError, match="no view fits a"):
        source.federation(4, 0)
    with pytest.raises(DataError, match="anchor=nobody is none of the views: a, b, c, x"):
        Scene(scene=str(tmp_path), align=True, anchor="nobody").federation(4, 0)


@pytest.mark.slow
def test_a_blurred_castle_is_never_worse_than_its_best_view(
    data_pack: Path, tmp_path: Path
) -> None:
    """Real photos with parallax, blurred first. The photo alone is restored to its end."""
    photos = sorted((data_pack / "multiview" / "sceaux_castle").glob("*.JPG"))
    sharp = [torch.nn.functional.avg_pool2d(read_image(p, "grey"), 6) for p in photos[:5]]
    kernels = {f"v{k}": client_kernel("mixed", k, "fspecial", 0) for k in range(5)}
    views = {
        n: photo(x, kernels[n], k)[:, 15:-15, 15:-15]
        for k, (n, x) in enumerate(zip(kernels, sharp, strict=True))
    }
    write_scene(tmp_path, views, kernels)
    truth = sharp[0][0, 15:-15, 15:-15].round().byte().numpy()
    Image.fromarray(truth).save(tmp_path / "truth.png")
    federation = Scene(scene=str(tmp_path), align=True).federation(5, 0)
    task = Deblurring()
    algorithm = FedDeblur(task, relax=1.6).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 300)
    together = task.evaluate(algorithm.result(state), federation.test)["psnr"]
    assert together > task.references(None, federation.test)["best photo alone"]["psnr"]

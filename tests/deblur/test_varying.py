"""A blur that differs across the photo. References: a dense matrix made pixel by pixel, a linear
system solved with it, and a camera that really rotates.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import affine_transform
from torch import Tensor

from fedlens import Federation, StackError, run
from fedlens.data.source import DataError
from fedlens.deblur import CenDeblur, FedDeblur, LocDeblur
from fedlens.deblur.alone import restore_alone
from fedlens.deblur.blur import motion
from fedlens.deblur.fits import CroppedFit, PartialFit, VaryingFit
from fedlens.deblur.observation import Observation, SceneFacts, without_rim
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import backward, forward
from fedlens.deblur.task import Deblurring, explained, kernel_picture
from fedlens.deblur.varying import VaryingBlur, one_size, windows
from fedlens.engines.simulator import Simulator
from fedlens.metrics.image import psnr

SCENE, VIEW, PLACE = (14, 13), (9, 8), (3, 2)


def some_grid(rows: int = 3, columns: int = 2, side: tuple[int, int] = (4, 3)) -> Tensor:
    """Lopsided kernels, one side even, each of sum 1."""
    rng = torch.Generator().manual_seed(rows + columns)
    grid = torch.rand(rows, columns, *side, generator=rng, dtype=torch.float64)
    return grid / grid.sum((-2, -1), keepdim=True)


def dense(
    grid: Tensor,
    view: tuple[int, int] = VIEW,
    scene: tuple[int, int] = SCENE,
    place: tuple[int, int] = PLACE,
) -> np.ndarray:
    """A, a row a pixel of the photo: its own kernel, blended by hand from the four around it, laid
    round the edge of the scene."""
    kernels = grid.numpy()
    counts, sides = kernels.shape[:2], kernels.shape[2:]
    out = np.zeros((view[0] * view[1], scene[0] * scene[1]))
    for p in np.ndindex(view):
        at = [(p[a] + 0.5) / view[a] * counts[a] - 0.5 for a in (0, 1)]
        at = [min(max(s, 0.0), counts[a] - 1.0) for a, s in enumerate(at)]
        low = [min(int(s), counts[a] - 1) for a, s in enumerate(at)]
        high = [min(s + 1, counts[a] - 1) for a, s in enumerate(low)]
        down, right = at[0] - low[0], at[1] - low[1]
        own = (1 - down) * (
            (1 - right) * kernels[low[0], low[1]] + right * kernels[low[0], high[1]]
        )
        own = own + down * (
            (1 - right) * kernels[high[0], low[1]] + right * kernels[high[0], high[1]]
        )
        for j in np.ndindex(sides):
            q = [(place[a] + p[a] - (j[a] - sides[a] // 2)) % scene[a] for a in (0, 1)]
            out[p[0] * view[1] + p[1], q[0] * scene[1] + q[1]] += own[j]
    return out


CASES = {
    "3 x 2 kernels": (some_grid(), VIEW, SCENE, PLACE),
    "one kernel": (some_grid(1, 1), VIEW, SCENE, PLACE),
    "the whole scene, round the edge": (some_grid(2, 4, (5, 5)), SCENE, SCENE, (0, 0)),
    "as many places as pixels": (some_grid(9, 8), VIEW, SCENE, PLACE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_operator_is_that_of_a_matrix_made_pixel_by_pixel(case: str) -> None:
    """Forth and back, and <A x, y> = <x, A^T y>."""
    grid, view, scene, place = CASES[case]
    matrix = dense(grid, view, scene, place)
    blur = VaryingBlur(grid, view, scene, place, torch.float64)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, *scene, generator=rng, dtype=torch.float64)
    y = torch.randn(2, *view, generator=rng, dtype=torch.float64)
    seen, back = blur.forward(forward(x)), backward(blur.adjoint(y), scene[1])
    torch.testing.assert_close(seen.flatten(1), x.flatten(1) @ torch.from_numpy(matrix).T)
    torch.testing.assert_close(back.flatten(1), y.flatten(1) @ torch.from_numpy(matrix))
    assert float((seen * y).sum()) == pytest.approx(float((x * back).sum()), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_bound_holds(case: str) -> None:
    grid, view, scene, place = CASES[case]
    largest = np.linalg.norm(dense(grid, view, scene, place), 2) ** 2
    bound = VaryingBlur(grid, view, scene, place, torch.float64).bound()
    assert largest <= bound <= 2 * largest


@pytest.mark.parametrize(("count", "length"), [(1, 5), (2, 2), (3, 10), (7, 100)])
def test_windows_are_a_partition_of_unity(count: int, length: int) -> None:
    total = torch.zeros(length, dtype=torch.float64)
    for w in windows(count, length, 3, torch.float64):
        total[w.shown] += w.weight
    torch.testing.assert_close(total, torch.ones_like(total))


def holder(grid: Tensor | None, kernel: Tensor, seed: int) -> Observation:
    """A view of noise: what is solved for is a linear system, not a picture."""
    pixels = 255 * torch.rand(1, *VIEW, generator=torch.Generator().manual_seed(seed))
    return Observation(pixels, kernel, *SCENE, *PLACE, None, grid)


def restored(views: list[Observation], rounds: int, **keys: Any) -> Tensor:
    scenes = {"scene": (1, *SCENE)}
    facts = SceneFacts(scenes=scenes, clients=len(views), observe="partial", varying=True)
    federation = Federation([{"scene": v} for v in views], facts=facts)
    algorithm = FedDeblur(Deblurring(), tol=0.0, double=True, **keys).given(facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        return algorithm.result(run(algorithm, engine, rounds))["scene"]


@pytest.mark.parametrize("relax", [1.0, 1.6])
def test_a_run_ends_at_the_solution_of_the_normal_equations(relax: float) -> None:
    """min 1/2 (|A_1 x - y_1|^2 + |A_2 x - y_2|^2) + eta |x|^2 / 2 has the gradient A_1^T A_1 x +
    A_2^T A_2 x - A_1^T y_1 - A_2^T y_2 + eta x, which numpy makes zero."""
    grids, eta = [some_grid(), some_grid(2, 2)], 0.3
    views = [holder(g, g.mean((0, 1)), k) for k, g in enumerate(grids)]
    left, right = eta * np.eye(math.prod(SCENE)), np.zeros(math.prod(SCENE))
    for g, v in zip(grids, views, strict=True):
        a = dense(g)
        left += a.T @ a
        right += a.T @ v.pixels.double().flatten().numpy()
    x = restored(views, 800, prior="ridge", eta=eta, rho=0.2, relax=relax)
    np.testing.assert_allclose(x.flatten().numpy(), np.linalg.solve(left, right), atol=1e-4)


def test_a_grid_of_equal_kernels_gives_the_picture_of_one() -> None:
    kernel = some_grid(1, 1)[0, 0]
    grid = kernel.expand(3, 2, -1, -1)
    keys: dict[str, Any] = {"eta": 20.0, "rho": 0.3}
    one = restored([holder(None, kernel, k) for k in (0, 1)], 600, **keys)
    many = restored([holder(grid, kernel, k) for k in (0, 1)], 600, **keys)
    torch.testing.assert_close(many, one, atol=0.05, rtol=0)


def test_confidence_and_crop_hold_for_a_grid_too() -> None:
    """A pixel that does not count changes nothing; on its crop a client ends where it ends on the
    whole scene."""
    grid = some_grid()
    seen = holder(grid, grid.mean((0, 1)), 0)
    confidence = torch.ones(VIEW)
    confidence[2, 3] = 0
    pixels = seen.pixels.clone()
    pixels[0, 2, 3] = 1e4
    other = [
        Observation(p, seen.kernel, *SCENE, *PLACE, confidence, grid) for p in (seen.pixels, pixels)
    ]
    x = forward(torch.full((1, *SCENE), 100.0))
    first, second = (VaryingFit(v, 2, 0.1, torch.float32) for v in other)
    torch.testing.assert_close(first.step(x, None)[0], second.step(x, None)[0])
    assert isinstance(first, PartialFit)
    wide = Observation(seen.pixels, seen.kernel, 60, 60, 20, 20, None, grid)
    start = forward(100 * torch.rand(1, 60, 60, generator=torch.Generator().manual_seed(3)))
    crop = CroppedFit(wide, 2, 0.1, torch.float32, 1.0, backward)
    whole = VaryingFit(wide, 2, 0.1, torch.float32)
    ends = []
    for fit in (crop, whole):
        kept = None
        for _ in range(300):
            w, kept = fit.step(start, kept)
        ends.append(backward(w, 60) - backward(start, 60))
    torch.testing.assert_close(ends[0], ends[1], atol=0.05, rtol=0)


# -- a camera that rotates -------------------------------------------------------------------------


def rotated(sharp: np.ndarray, degrees: float, about: tuple[float, float]) -> np.ndarray:
    """The mean of what a rotating camera sees: no kernel is involved."""
    total, middle = np.zeros_like(sharp), np.array(about)
    angles = np.radians(np.linspace(-degrees / 2, degrees / 2, 25))
    for a in angles:
        turn = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        total += affine_transform(sharp, turn, middle - turn @ middle, order=3, mode="mirror")
    return total / len(angles)


def numbers_of(
    degrees: float, about: tuple[float, float], side: float, count: int
) -> list[list[dict[str, Any]]]:
    """kernel.json of that camera: at each place of the grid a motion along the circle."""
    rows = []
    for r in range(count):
        row = []
        for c in range(count):
            down = (r + 0.5) * side / count - 0.5 - about[0]
            right = (c + 0.5) * side / count - 0.5 - about[1]
            length = 1 + math.hypot(down, right) * math.radians(degrees)
            angle = math.degrees(math.atan2(-right, -down)) % 360
            row.append({"motion": {"length": length, "angle": angle}})
        rows.append(row)
    return rows


def test_a_rotating_camera_is_restored_by_a_grid_and_not_by_its_mean(tmp_path: Path) -> None:
    """kernel.json says how it moved. The mean kernel makes the photo worse."""
    sharp = Scene(image="camera", size=96).images()["camera"][0].double().numpy()
    photo = rotated(sharp, 8, (47.5, 47.5)) + np.random.default_rng(0).normal(size=sharp.shape)
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "observation.npy", photo[8:-8, 8:-8].clip(0, 255))
    said = numbers_of(8, (39.5, 39.5), 80, 5)
    (tmp_path / "a" / "kernel.json").write_text(json.dumps(said))
    Image.fromarray(sharp[8:-8, 8:-8].round().clip(0, 255).astype(np.uint8)).save(
        tmp_path / "truth.png"
    )
    federation = Scene(scene=str(tmp_path)).federation(1, 0)
    facts, seen = federation.facts, federation.holdings[0]["scene"]
    assert isinstance(facts, SceneFacts) and facts.varying and seen.grid.shape[:2] == (5, 5)
    mean = Observation(seen.pixels, seen.kernel, seen.height, seen.width, seen.top, seen.left)
    truth = federation.test["scene"]  # type: ignore[index]
    alone = [without_rim(restore_alone(v, 2.0, 60), facts.pad) for v in (seen, mean)]
    by_grid, by_mean = (psnr(x.clamp(0, 255), truth) for x in alone)
    assert by_grid > psnr(seen.pixels, truth) + 1 > by_mean + 2
    misfit = explained(seen, {"grid": alone[0], "mean": alone[1]}, facts.pad)
    assert misfit["grid"]["misfit"] < misfit["mean"]["misfit"]
    assert kernel_picture(seen, 9).shape[-1] % 5 == 0
    for kind in (CenDeblur, LocDeblur):
        with pytest.raises(StackError, match="takes one kernel a photo"):
            kind(Deblurring()).given(facts)


# -- a folder --------------------------------------------------------------------------------------


def folder_of(path: Path) -> Path:
    (path / "a").mkdir(parents=True)
    np.save(path / "a" / "observation.npy", np.random.default_rng(0).uniform(0, 255, (30, 30)))
    return path


def test_a_grid_can_be_written_down_in_three_ways(tmp_path: Path) -> None:
    """Motions of 1, 5 and 9 pixels: in numbers, as one array, and as a file a place, whatever its
    kind. Kernels of different sizes share one middle."""
    said = [[{"motion": {"length": n, "angle": 0}} for n in (1, 5, 9)]] * 2
    kernels = [[motion(n, 0) for n in (1, 5, 9)]] * 2
    grid = one_size(kernels)
    # a motion of 1 pixel is 1 x 3 in MATLAB's definition; the longest here is 1 x 9 and one row
    assert grid.shape[:2] == (2, 3) and float(grid[0, 0].max()) == float(kernels[0][0].max())
    middle = [s // 2 for s in grid.shape[2:]]
    assert all(float(grid[0, c, middle[0], middle[1]]) > 0 for c in range(3))
    numbers, array, files = (folder_of(tmp_path / way) for way in ("json", "npy", "files"))
    (numbers / "a" / "kernel.json").write_text(json.dumps(said))
    np.save(array / "a" / "kernel.npy", 7 * grid.numpy())
    for r in range(2):
        np.save(files / "a" / f"kernel_{r}_0.npy", kernels[r][0].numpy())
        (files / "a" / f"kernel_{r}_1.json").write_text(json.dumps(said[r][1]))
        line = (kernels[r][2] / kernels[r][2].max() * 252).round().byte().numpy()
        Image.fromarray(line).save(files / "a" / f"kernel_{r}_2.png")
    for folder in (numbers, array, files):
        seen = Scene(scene=str(folder)).federation(1, 0).holdings[0]["scene"]
        torch.testing.assert_close(seen.grid, grid, atol=1e-3, rtol=0)
        torch.testing.assert_close(seen.kernel, grid.mean((0, 1)), atol=1e-3, rtol=0)


def put(name: str, content: Any) -> Any:
    def write(folder: Path) -> None:
        if isinstance(content, np.ndarray):
            np.save(folder / "a" / name, content)
        else:
            (folder / "a" / name).write_text(json.dumps(content))

    return write


LINE = {"motion": {"length": 3, "angle": 0}}
BAD: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a gap": (
        [put("kernel_0_0.json", LINE), put("kernel_1_1.json", LINE)],
        {},
        "a grid of 2 x 2 kernels without kernel_0_1",
    ),
    "twice": (
        [put("kernel_0_0.json", LINE), put("kernel_0_0.npy", np.ones((3, 3)))],
        {},
        r"both kernel_0_0\.json and kernel_0_0\.npy",
    ),
    "one and many": (
        [put("kernel.json", LINE), put("kernel_0_0.json", LINE)],
        {},
        r"both kernel\.json and kernel_0_0\.json",
    ),
    "ragged": ([put("kernel.json", [[LINE], [LINE, LINE]])], {}, "differ in length: 1, 2"),
    "flat list": ([put("kernel.json", [LINE, LINE])], {}, "list of rows of these"),
    "no rows": ([put("kernel.json", [])], {}, "list of rows of these"),
    "a wrong number": (
        [put("kernel.json", [[LINE, {"motion": {"length": 900, "angle": 0}}]])],
        {},
        r"row 0, column 1 of .*kernel\.json should read .* length from 0 to 200",
    ),
    "a negative kernel": (
        [put("kernel.npy", np.stack([np.ones((1, 3, 3)), -np.ones((1, 3, 3))]))],
        {},
        "the kernel of a at row 1, column 0 has negative values",
    ),
    "three axes": ([put("kernel.npy", np.ones((2, 3, 3)))], {}, "not a matrix"),
    "an empty grid": ([put("kernel.npy", np.ones((0, 2, 3, 3)))], {}, "a grid without kernels"),
    "a kernel too wide": ([put("kernel.npy", np.ones((2, 2, 3, 31)))], {}, "larger than the image"),
    "too fine": ([put("kernel.npy", np.ones((31, 1, 3, 3)))], {}, "31 x 1 kernels, but its photo"),
    "to be aligned": ([put("kernel.json", [[LINE]])], {"align": True}, "a has a grid of kernels"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_with_a_grid_is_said(tmp_path: Path, what: str) -> None:
    writes, keys, words = BAD[what]
    folder = folder_of(tmp_path / "scene")
    for write in writes:
        write(folder)
    with pytest.raises(DataError, match=words):
        Scene(scene=str(folder), **keys).federation(1, 0)

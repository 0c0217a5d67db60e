"""What generators make, by hand where that is possible, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toy import save_png as save

from fedlens.core.client import generator
from fedlens.data.source import DataError
from fedlens.generators import Gaussians, ReadyImages, StableDiffusion
from fedlens.generators.gaussians import draw_gaussian, fit_gaussian
from fedlens.generators.generator import ImageStore, match_classes


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Two classes of four 8x8 images: cats are all red, of four strengths, dogs all blue."""
    for k in range(4):
        for name, channel in (("cat", 0), ("dog", 2)):
            pixels = torch.zeros(3, 8, 8, dtype=torch.uint8)
            pixels[channel] = 60 + 40 * k
            save(tmp_path / "public" / name / f"{k}.png", pixels)
    return tmp_path / "public"


# -- Gaussians -------------------------------------------------------------------------------------


def test_one_direction_by_hand() -> None:
    """Pixels 0.2 and 0.6: mean 0.4, sample deviation sqrt(2 * 0.2^2 / 1) = 0.2828; the sign of the
    direction is free.
    """
    mean, directions = fit_gaussian(torch.tensor([0.2, 0.6]).view(2, 1, 1, 1), 64)
    assert float(mean) == pytest.approx(0.4) and directions.shape == (1, 1, 1, 1)
    assert abs(float(directions)) == pytest.approx(0.28284, abs=1e-5)


def test_samples_have_the_moments_of_the_images() -> None:
    """Images from a known Gaussian, well inside [0, 1]: mean and covariance of 20,000 samples agree
    with those of the images.
    """
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 12, generator=rng) * 0.02
    images = (0.5 + torch.randn(300, 12, generator=rng) @ mix).view(300, 3, 2, 2)
    made = draw_gaussian(*fit_gaussian(images, 12), 20_000, rng).flatten(1)
    flat = images.flatten(1)
    assert torch.allclose(made.mean(0), flat.mean(0), atol=2e-3)
    assert torch.allclose(made.T.cov(), flat.T.cov(), atol=3e-4)


def test_fewer_components_lie_in_their_span(public: Path) -> None:
    """Red images differ in one direction only, all red pixels together: samples are uniform red
    whatever the draw.
    """
    told = Gaussians(str(public), components=5).bind(["cat", "dog"], (3, 8, 8))
    made = told.generate(0, 6, generator(1))
    assert made.shape == (6, 3, 8, 8) and float(made[:, 1:].abs().max()) < 1e-4
    assert (
        float(made[:, 0].flatten(1).std(1).max()) < 1e-4 and float(made[:, 0].mean(0).std()) < 1e-4
    )
    assert torch.equal(made, told.generate(0, 6, generator(1))) and not torch.equal(
        made, told.generate(0, 6, generator(2))
    )
    assert float(told.generate(1, 2, generator(0))[:, 0].max()) < 1e-4


# -- ready images ----------------------------------------------------------------------------------


def test_nothing_twice_before_everything_once(public: Path) -> None:
    told = ReadyImages(str(public)).bind(["dog", "cat"], (3, 8, 8))
    made = told.generate(0, 6, generator(0))[:, 2, 0, 0].tolist()
    assert (
        sorted(made[:4]) == [60, 100, 140, 180]
        and set(made[4:]) <= {60, 100, 140, 180}
        and len(set(made[4:])) == 2
    )
    assert told.generate(1, 1, generator(0))[0, 0, 0, 0] > 0  # classes go by name, not by order


# -- the same questions to all ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Gaussians, ReadyImages])
def test_folders_that_do_not_fit(public: Path, kind: type[Gaussians] | type[ReadyImages]) -> None:
    name = kind.__name__
    with pytest.raises(
        DataError, match=r"has nothing for class 'frog' \(2 of 3 classes are there\)"
    ):
        kind(str(public)).bind(["cat", "dog", "frog"], (3, 8, 8))
    with pytest.raises(DataError, match="knows 2 classes, but 3 are asked for"):
        kind(str(public)).bind(["x", "y", "z"], (3, 8, 8))
    with pytest.raises(
        DataError,
        match=(
            f"{name} .* images of 16x16 with 3 channels, but the clients' are 8x8 with 3 channels"
        ),
    ):
        kind(str(public), size=16).bind(["cat", "dog"], (3, 8, 8))
    with pytest.raises(DataError, match=r"no folder of images for .*nowhere: set generator.root$"):
        kind(str(public / "nowhere")).bind(["cat"], (3, 8, 8))
    with pytest.raises(
        DataError, match=f"say where the folder of images for {name} is: set generator.root"
    ):
        kind().bind(["cat"], (3, 8, 8))
    (public / "empty").mkdir()
    with pytest.raises(DataError, match="has no image for class 'empty'"):
        kind(str(public)).bind(["cat", "empty"], (3, 8, 8))
    with pytest.raises(
        DataError,
        match=f"{name} knows 3 classes, so it cannot make class 7|has no image for class 'empty'",
    ):
        kind(str(public)).generate(7, 1, generator(0))


def test_names_of_another_kind_go_by_order() -> None:
    assert match_classes(["goldfish", "frog"], ["n01", "n02", "n03"], "it") == [0, 1]
    assert match_classes(["b", "a"], ["a", "b"], "it") == [1, 0]


def test_other_files_other_images(public: Path, tmp_path: Path) -> None:
    """The cache must not hand out images of a folder that has changed since."""
    store, shape = ImageStore(tmp_path / "cache"), (3, 8, 8)
    told = ReadyImages(str(public)).bind(["cat", "dog"], shape)
    _, first = store.images(told, {0: 2, 1: 3}, shape, 0, 0)
    _, again = store.images(
        ReadyImages(str(public)).bind(["cat", "dog"], shape), {0: 2, 1: 3}, shape, 0, 0
    )
    save(public / "cat" / "new.png", torch.zeros(3, 8, 8, dtype=torch.uint8))
    _, changed = store.images(
        ReadyImages(str(public)).bind(["cat", "dog"], shape), {0: 2, 1: 3}, shape, 0, 0
    )
    assert (first, again, changed) == (5, 0, 5)
    assert store.images(told, {}, shape, 0, 0) == ({}, 0)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts(tmp_path: Path) -> None:
    told = StableDiffusion("x", "a photo of a {}, seen from the side", classes=("sea_lion", "dog"))
    assert told.texts() == [
        "a photo of a sea lion, seen from the side",
        "a photo of a dog, seen from the side",
    ]
    file = tmp_path / "prompts.toml"
    file.write_text('cat = "a cat on a sofa"\ndog = "a dog in the snow"\n')
    assert StableDiffusion("x", prompts=str(file), classes=("dog", "cat")).texts() == [
        "a dog in the snow",
        "a cat on a sofa",
    ]
    (tmp_path / "prompts.json").write_text(json.dumps({"cat": "a cat", "dog": ""}))
    for name, classes, why in (
        ("prompts.toml", ["dog", "frog"], "has no prompt for class 'frog'"),
        ("prompts.json", ["cat", "dog"], "has no prompt for class 'dog'"),
        ("missing.toml", ["cat"], "there is no file of prompts at"),
    ):
        with pytest.raises(DataError, match=why):
            StableDiffusion("x", prompts=str(tmp_path / name)).bind(classes)
    file.write_text("cat = 3")
    with pytest.raises(DataError, match="is not a file of prompts"):
        StableDiffusion("x", prompts=str(file)).bind(["cat"])
    with pytest.raises(DataError, match="all classes would get the same images"):
        StableDiffusion("x", "a photo")
    with pytest.raises(
        DataError, match="told to make images of 64x64, but the clients' are 8x8 with 3 channels"
    ):
        StableDiffusion("x", size=64).bind(["cat"], (3, 8, 8))

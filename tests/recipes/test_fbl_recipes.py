"""Every table of the FBL paper is a recipe that builds, and its rows are names that `compare`
knows. No data is touched.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tables import from_table
from toy import save_png

from fedlens import experiment
from fedlens.config import recipe as config
from fedlens.data.images.folders import ImageFolder
from fedlens.data.source import DataError
from fedlens.generators import Gaussians, SmallDiffusion, StableDiffusion
from fedlens.layers import Balance
from fedlens.tasks.classification import Classification

PAPER = [
    "fbl-table1",
    "fbl-table2-shards",
    "fbl-table2-clients",
    "fbl-table2-noise",
    "fbl-table3",
    "fbl-table4",
    "fbl-figure4",
    "fbl-extreme",
    "fbl-eurosat",
]
RIVALS = ["fedavg", "fedprox", "scaffold", "moon", "fedgen", "feddyn", "fedntd", "fedcda"]


@pytest.mark.parametrize("name", PAPER)
def test_recipe_is_the_papers_setting(name: str) -> None:
    recipe = config.read(name)
    task = recipe.build_task()
    built = recipe.build_algorithm(Classification("niid", classes=task.classes))  # type: ignore[attr-defined]
    assert isinstance(task, Classification) and task.network == "resnet18"
    assert (
        isinstance(built, Balance)
        and isinstance(built.generator, StableDiffusion)
        and built.generator.bits == 4
    )
    assert (built.period, built.replay, built.drop * 64) == (50, 0.1, 2)
    s = recipe.settings
    assert s.rounds == 200 and s.cohort == s.clients // 2


def test_rows() -> None:
    """Rivals on the recipe's base, FBL's own rows with the recipe's generator and their own
    switches.
    """
    for name in RIVALS:
        recipe = config.read("fbl", algorithm=name)
        assert not any(
            isinstance(p, Balance) for p in recipe.build_algorithm(recipe.build_task()).parts()
        )
    expected = {
        "fbl": ("loss", True, 1 / 32, 0.1, 0.0, 0.0),
        "fbl-m1": ("random", False, 1 / 32, 0.0, 0.0, 0.0),
        "fbl-m3": ("loss", True, 0.0, 0.0, 0.0, 0.0),
        "fbl-m6": ("loss", True, 1 / 32, 0.9, 0.0, 0.0),
        "fbl-75": ("loss", True, 1 / 32, 0.1, 0.75, 0.0),
        "fbl-extreme": ("loss", True, 1 / 32, 0.1, 0.0, 0.3),
    }
    for name, keys in expected.items():
        recipe = config.read("fbl", algorithm=name)
        b = recipe.build_algorithm(recipe.build_task())
        assert isinstance(b, Balance) and isinstance(b.generator, Gaussians) and b.period == 5
        assert (b.sampling, b.align, b.drop, b.replay, b.unconstrained, b.weak) == keys


def test_columns() -> None:
    for text in (
        ["data.name=Cifar100", "task.classes=100"],
        ["data.alpha=0.3"],
        ["generator=ReadyImages", "generator.root=x"],
    ):
        config.read("fbl-table1", text)
    recipe = config.read(
        "fbl",
        [
            "generator=SmallDiffusion",
            "generator.folder=runs/generator",
            "generator.start=Gaussians",
        ],
    )
    b = recipe.build_algorithm(recipe.build_task())
    assert (
        isinstance(b, Balance)
        and isinstance(b.generator, SmallDiffusion)
        and isinstance(b.generator.start, Gaussians)
    )
    assert "_folders" not in recipe.to_toml()


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Two classes of 16x16 images, reddish and bluish, in train, test and public folders."""
    rng = torch.Generator().manual_seed(0)
    for part, n in (("train", 20), ("test", 8), ("public", 8)):
        for name, channel in (("fire", 0), ("water", 2)):
            for k in range(n):
                pixels = torch.randint(0, 120, (3, 16, 16), generator=rng, dtype=torch.uint8)
                pixels[channel] += 90
                save_png(tmp_path / part / name / f"{k}.png", pixels)
    return tmp_path


def test_a_run_shows_what_was_generated(pack: Path, tmp_path: Path) -> None:
    """From recipe to report: real beside generated images, features with and without the shifts,
    counts of what was made in metrics.
    """
    keys = {
        "data.root": str(pack),
        "task.classes": 2,
        "task.size": 16,
        "data.least": 2,
        "federation.clients": 4,
        "federation.cohort": 3,
        "federation.rounds": 2,
        "generator.root": str(pack / "public"),
        "Balance.cache": str(tmp_path / "made"),
        "data.name": "ImageFolder",
        "federation.workers": 0,
    }
    outcome = experiment("fbl", out=tmp_path / "run", **keys)
    index = (outcome.folder / "pictures" / "index.json").read_text()
    assert "what client" in index and "gap before" in index and "gap after" in index
    made = [c["made"] for r in outcome.rounds for c in r["clients"].values()]
    assert sum(made) > 0 and sum(c["generated"] for c in outcome.rounds[0]["clients"].values()) > 0
    again = experiment("fbl", out=tmp_path / "again", **keys)
    assert (
        sum(c["generated"] + c["generating"] for r in again.rounds for c in r["clients"].values())
        == 0
    )
    assert again.metrics == outcome.metrics


def test_training_folder(pack: Path) -> None:
    """A model on the public images alone, judged on the same test images: 16 public ones instead of
    40.
    """
    federation = ImageFolder(root=str(pack), training="public").federation(1, 0)
    assert len(federation.holdings[0]) == 16 and len(federation.test) == 16  # type: ignore[arg-type]
    with pytest.raises(DataError, match="there is no folder private in"):
        ImageFolder(root=str(pack), training="private").federation(1, 0)


def test_noise_is_on_training_images_only(pack: Path) -> None:
    """Standard deviation 0.05: what is added to the clean pixels has it, and a test image has
    nothing.
    """
    clean, noisy = (ImageFolder(root=str(pack), noise=n).federation(1, 0) for n in (0.0, 0.05))
    index = torch.arange(40)
    gap = noisy.holdings[0].batch(index)["x"] - clean.holdings[0].batch(index)["x"]
    assert float(gap.std()) == pytest.approx(0.05, rel=0.05)
    first = torch.arange(16)
    assert torch.equal(noisy.test.batch(first)["x"], clean.test.batch(first)["x"])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"data\.noise must be a number of at least 0"):
        from_table("data", "ImageFolder", root=str(pack), noise=-1.0)

"""The small diffusion model: the sampler against a case whose answer is known, training through a
recipe, use by clients.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from toy import save_png as save

from fedlens import Facts, experiment
from fedlens.core import tree
from fedlens.core.client import generator
from fedlens.data.source import DataError
from fedlens.generators import Gaussians, SmallDiffusion
from fedlens.models.diffusion import Denoiser, schedule
from fedlens.tasks.generation import Generation

TINY = {"patch": 2, "widths": (8, 8), "attention": False}


class Known(Denoiser):
    """Knows the one image there is: x = a x0 + s e, so e = (x - a x0) / s and v = a e - s x0. Class
    1's is the negative.
    """

    image = torch.linspace(-0.8, 0.9, 3 * 8 * 8).view(3, 8, 8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, averaged: bool = False) -> Tensor:
        a = schedule().alphas_cumprod[t].sqrt().view(-1, 1, 1, 1)
        s = (1 - a**2).sqrt()
        x0 = torch.where(y.view(-1, 1, 1, 1) == 0, self.image, -self.image)
        return a * (x - a * x0) / s - s * x0


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_the_sampler_finds_the_one_image_there_is(steps: int) -> None:
    model = Known(2, size=8, **TINY)  # type: ignore[arg-type]
    labels = torch.tensor([0, 1, 0])
    made = model.sample(labels, generator(0), steps)
    expected = torch.stack([Known.image, -Known.image, Known.image]) / 2 + 0.5
    assert torch.allclose(made, expected, atol=2e-3)
    begun = model.sample(labels, generator(0), steps, start=torch.rand(3, 3, 8, 8), strength=0.5)
    assert torch.allclose(begun, expected, atol=2e-3)


def test_guidance_goes_beyond() -> None:
    """ "Any class" here is the negative image; with weight 1 the answer is the class's own, with 0
    the other's.
    """
    model = Known(1, size=8, **TINY)  # type: ignore[arg-type]
    zero = torch.zeros(1, dtype=torch.long)
    ours, theirs = (model.sample(zero, generator(0), 4, guidance=g) for g in (1.0, 0.0))
    assert torch.allclose(ours, Known.image / 2 + 0.5, atol=2e-3) and torch.allclose(
        theirs, 0.5 - Known.image / 2, atol=2e-3
    )


def test_part_of_the_noise_keeps_part_of_the_start() -> None:
    """An untrained network says v = 0, so x0 = a x: behind little noise the start is still there,
    behind all of it nothing is.
    """
    torch.manual_seed(0)
    model = Denoiser(1, size=8, **TINY)  # type: ignore[arg-type]
    torch.nn.init.zeros_(model.mean.conv_out.weight)  # type: ignore[union-attr,arg-type]
    torch.nn.init.zeros_(model.mean.conv_out.bias)  # type: ignore[union-attr,arg-type]
    start = torch.rand(1, 3, 8, 8, generator=generator(3))
    zero = torch.zeros(1, dtype=torch.long)
    near, far = (model.sample(zero, generator(0), 20, start=start, strength=s) for s in (0.1, 1.0))
    alike = [
        float(torch.corrcoef(torch.stack([x.flatten(), start.flatten()]))[0, 1])
        for x in (near, far)
    ]
    assert alike[0] > 0.9 and abs(alike[1]) < 0.3


def test_the_moving_average_by_hand() -> None:
    """Decay min(0.999, (1 + n) / (10 + n)): 0.1, then 2/11. From 0 towards 1: 0.9, then 0.9 * 2/11
    + 9/11.
    """
    model = Denoiser(1, size=8, **TINY)  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.mean.parameters():
            p.zero_()
        for p in model.net.parameters():
            p.fill_(1.0)
    model.follow()
    assert float(next(model.mean.parameters()).flatten()[0]) == pytest.approx(0.9)
    model.follow()
    assert float(next(model.mean.parameters()).flatten()[0]) == pytest.approx(0.9 * 2 / 11 + 9 / 11)
    assert not any(p.requires_grad for p in model.mean.parameters())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe `generator` on two classes that a child could draw: red above, and blue below.
    8x8,
    """
    root = tmp_path_factory.mktemp("generator")
    rng = generator(0)
    for k in range(24):
        for name, channel, rows in (("red", 0, slice(0, 4)), ("sea", 2, slice(4, 8))):
            pixels = torch.randint(0, 30, (3, 8, 8), generator=rng, dtype=torch.uint8)
            pixels[channel, rows] += 200
            save(root / "public" / name / f"{k}.png", pixels)
    outcome = experiment(
        "generator",
        out=root / "run",
        **{
            "data.root": str(root / "public"),
            "data.size": 8,
            "task.size": 8,
            "task.classes": 2,
            "task.widths": [16, 16],
            "task.steps": 8,
            "task.attention": False,
            "federation.rounds": 3,
            "FedAvg.steps": 80,
            "FedAvg.batch": 24,
            "FedAvg.lr": 0.004,
            "task.average": 0.95,
            "federation.threads": 1,
            "federation.evaluate_every": 1,
        },
    )
    losses = [r["metrics"]["denoising_loss"] for r in outcome.rounds]
    assert losses[-1] < 0.8 * losses[0], losses
    return root / "public", outcome.folder


def test_it_learns_what_the_classes_look_like(trained: tuple[Path, Path]) -> None:
    _, folder = trained
    told = SmallDiffusion(str(folder), steps=8, batch=3).bind(["sea", "red"], (3, 8, 8))
    sea, red = (told.generate(label, 8, generator(5)).mean(0) for label in (0, 1))
    assert (
        float(sea[2, 4:].mean() - sea[2, :4].mean()) > 0.3
        and float(red[0, :4].mean() - red[0, 4:].mean()) > 0.3
    )
    assert float(sea[0].mean()) < float(red[0].mean())
    assert torch.equal(told.generate(0, 2, generator(1)), told.generate(0, 2, generator(1)))
    assert (folder / "pictures" / "index.json").is_file()


def test_it_may_begin_with_another_generator(trained: tuple[Path, Path]) -> None:
    public, folder = trained
    told = SmallDiffusion(
        str(folder), steps=8, start=Gaussians(str(public), components=4), strength=0.25
    ).bind(["red", "sea"], (3, 8, 8))
    made = told.generate(0, 3, generator(0))
    assert made.shape == (3, 3, 8, 8) and float(made[:, 0, :4].mean()) > 0.6 > 0.3 > float(
        made[:, 2].mean()
    )
    assert (
        told.identity()
        != SmallDiffusion(str(folder), steps=8).bind(["red", "sea"], (3, 8, 8)).identity()
    )


def test_folders_that_are_no_generator(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = trained
    with pytest.raises(
        DataError, match="needs the folder of a finished run of the recipe generator"
    ):
        SmallDiffusion(str(tmp_path)).bind(["red"])
    with pytest.raises(
        DataError,
        match="makes images of 8x8 with 3 channels, but the clients' are 32x32 with 3 channels",
    ):
        SmallDiffusion(str(folder)).bind(["red"], (3, 32, 32))
    with pytest.raises(DataError, match="has nothing for class 'frog'"):
        SmallDiffusion(str(folder)).bind(["red", "frog"], (3, 8, 8))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.toml").write_text('[task]\nname = "Classification"\n')
    with pytest.raises(DataError, match="is a run of the task Classification, not of a generator"):
        SmallDiffusion(str(tmp_path)).bind(["red"], (3, 8, 8))


def test_the_task_refuses_other_images() -> None:
    task = Generation(classes=2, size=8)
    with pytest.raises(ValueError, match="the data has 3 classes, but the task says 2"):
        task.fits(Facts(classes=("a", "b", "c")))
    with pytest.raises(
        ValueError, match="the images are 32x32 with 3 channels, but the task says 8x8"
    ):
        task.fits(Facts(shape=(3, 32, 32)))
    with pytest.raises(ValueError, match="cannot be halved"):
        Denoiser(2, size=9)


def test_training_leaves_the_average_to_the_model(trained: tuple[Path, Path]) -> None:
    """Both travel: the average is a part of the model like any other, and differs from the
    weights.
    """
    from fedlens.core.weights import read_weights

    weights = read_weights(trained[1] / "model.safetensors")
    net = {n.removeprefix("net."): t for n, t in weights.items() if n.startswith("net.")}
    mean = {n.removeprefix("mean."): t for n, t in weights.items() if n.startswith("mean.")}
    assert net.keys() == mean.keys() and float(weights["seen"]) == 240
    assert 0 < tree.norm(tree.subtract(net, mean)) < 0.5 * tree.norm(net)

"""Learning to generate: a class-conditional diffusion model, trained by the same loop as everything
else, on one client or on many.

The loss is the squared error of the predicted v at a random step of the noise; a class is hidden in
`hide` of the cases, for guidance. The headline metric is that loss on the test images with noise
that is the same every time. `SmallDiffusion` reads the run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Data, Output, generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Share
from fedlens.core.picture import TILE_IMAGES, Picture, first_of_each_class, real_above_made
from fedlens.core.task import Adapt, LearningTask, in_batches
from fedlens.models.diffusion import STEPS, Denoiser, schedule


class Generation(LearningTask):
    """
    Args:
        classes: how many.
        channels: of the images.
        size: side of an image, in pixels.
        patch: so many pixels along each side become channels of the network.
        widths: channels of the network's levels, each at half the resolution of the one before.
        layers: of each level.
        attention: in the coarsest level.
        average: decay of the moving average of the weights.
        hide: share of training images whose class is hidden, for guidance.
        steps: of the sampler that draws the pictures.
        guidance: of that sampler; 1 is none.
        seed: of the pictures and of the noise in tests.
        init: weights to start from.
    """

    def __init__(
        self,
        classes: Count = 10,
        channels: Count = 3,
        size: Count = 32,
        patch: Count = 2,
        widths: tuple[Count, ...] = (32, 64, 96),
        layers: Count = 1,
        attention: bool = True,
        average: Share = 0.999,
        hide: Share = 0.1,
        steps: Count = 20,
        guidance: float = 1.5,
        seed: int = 0,
        init: str | None = None,
    ) -> None:
        self.init = init
        self.classes, self.channels, self.size, self.hide = classes, channels, size, hide
        self.steps, self.guidance, self.seed = steps, guidance, seed
        self.network = {
            "patch": patch,
            "widths": tuple(widths),
            "layers": layers,
            "attention": attention,
            "average": average,
        }
        self._noise: Any = None

    def model(self) -> nn.Module:
        return Denoiser(self.classes, self.channels, self.size, **self.network)  # type: ignore[arg-type]

    def fits(self, facts: Facts) -> None:
        held, shape = len(facts.classes), facts.shape
        if held > self.classes:
            raise ValueError(
                f"the data has {held} classes, but the task says {self.classes}: set"
                f" task.classes={held}"
            )
        if shape and shape != (self.channels, self.size, self.size):
            raise ValueError(
                f"the images are {shape[2]}x{shape[1]} with {shape[0]} channels, but the task says"
                f" {self.size}x{self.size} with {self.channels}: set data.size={self.size} or"
                " task.size"
            )

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        """Predicted and true v at random steps. A training pass also moves the average of the
        weights.
        """
        x, y = batch["x"] * 2 - 1, batch["y"]
        t = torch.randint(STEPS, (len(x),)).to(x.device)
        noise = torch.randn(x.shape).to(x.device)
        if model.training:
            y = torch.where(torch.rand(len(y)).to(y.device) < self.hide, self.classes, y)
            assert isinstance(model, Denoiser)
            model.follow()
        found = model(self.noise.add_noise(x, noise, t), t, y, averaged=not model.training)
        return Output((found, self.noise.get_velocity(x, noise, t)))

    @property
    def noise(self) -> Any:
        if self._noise is None:
            diffusers_ddim = schedule()
            from diffusers import DDPMScheduler

            self._noise = DDPMScheduler.from_config(diffusers_ddim.config)
        return self._noise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_noise": None}

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.mse_loss(*output.prediction)

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        total, place = 0.0, next(result.parameters()).device
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            for batch in in_batches(data, 100, place):
                total += float(self.loss(self.forward(result, batch), batch)) * len(batch["x"])
        return {"denoising_loss": total / max(1, len(data))}

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        """A tile of each class, real above, generated below."""
        source = (
            federation.test
            if federation.test is not None and len(federation.test)
            else federation.holdings[0]
        )
        shown = list(range(min(self.classes, 20)))
        real = first_of_each_class(source, shown, TILE_IMAGES)
        labels = torch.tensor([label for label in real for _ in range(TILE_IMAGES)])
        made = result.sample(labels, generator(self.seed, 0x9E), self.steps, self.guidance).split(
            TILE_IMAGES
        )
        names = federation.facts.classes or [str(k) for k in shown]
        tiles = [real_above_made(x, m) for x, m in zip(real.values(), made, strict=True)]
        return [
            Picture(
                "Real images (above) and generated ones (below)",
                tiles,
                [names[label] for label in real],
                "sheet",
            )
        ]

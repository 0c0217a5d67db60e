"""The small diffusion model that `fedlens run generator` trains on public images, as a client uses
it.

DDIM with few steps. `start` names another generator whose images are taken through part of the
noise and back (`strength`, as SDEdit does): at high noise a diffusion model knows little more than
mean and covariance, so beginning with a class's Gaussian loses nothing, saves most of the steps and
spares a briefly trained network what it is worst at.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from fedlens.core.files import find_named
from fedlens.core.limits import Count, PositiveShare
from fedlens.data.source import DataError
from fedlens.generators.generator import (
    ImageGenerator,
    check_label,
    describe_shape,
    file_stamps,
    match_classes,
)
from fedlens.models.diffusion import Denoiser


@dataclass
class SmallDiffusion(ImageGenerator):
    """
    Args:
        folder: that run.
        steps: of the sampler.
        guidance: of the sampler; 1 is none and twice as fast.
        batch: images at a time.
        start: another generator, whose images the sampler begins with.
        strength: share of the noise that those images lie behind.
    """

    folder: str = ""
    steps: Count = 20
    guidance: float = 1.5
    batch: Count = 50
    start: ImageGenerator | None = None
    strength: PositiveShare = 0.5
    _places: tuple[int, ...] = field(default=(), repr=False)
    _model: Denoiser | None = field(default=None, init=False, repr=False, compare=False)

    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        task = self._task()
        own = (task.channels, task.size, task.size)
        if shape and tuple(shape) != own:
            raise DataError(
                f"SmallDiffusion ({self.folder}) makes images of {describe_shape(own)}, but the"
                f" clients' are {describe_shape(shape)}"
            )
        known = self._names() or [str(k) for k in range(task.classes)]
        places = tuple(match_classes(classes, known, f"SmallDiffusion ({self.folder})"))
        return replace(
            self, _places=places, start=self.start.bind(classes, own) if self.start else None
        )

    def generate(self, label: int, n: int, rng: Generator) -> Tensor:
        model = self._loaded()
        check_label(label, len(self._places) or model.classes, "SmallDiffusion")
        place = self._places[label] if self._places else label
        first = self.start.generate(label, n, rng) if self.start else None
        if first is not None and first.dtype == torch.uint8:
            first = first.float() / 255
        parts = []
        for low in range(0, n, self.batch):
            some = min(self.batch, n - low)
            begin = first[low : low + some] if first is not None else None
            parts.append(
                model.sample(
                    torch.full((some,), place), rng, self.steps, self.guidance, begin, self.strength
                )
            )
        return torch.cat(parts)

    def sources(self) -> Iterable[str]:
        return file_stamps([self._folder() / "model.safetensors"])

    def _loaded(self) -> Denoiser:
        if self._model is None:
            from fedlens.core.weights import load_weights

            model = load_weights(self._task().model(), self._folder() / "model.safetensors").eval()
            assert isinstance(model, Denoiser)
            self._model = model
        return self._model

    def _folder(self) -> Path:
        folder = find_named(self.folder) if self.folder else None
        if (
            folder is None
            or not (folder / "model.safetensors").is_file()
            or not (folder / "config.toml").is_file()
        ):
            raise DataError(
                "SmallDiffusion needs the folder of a finished run of the recipe generator, and"
                f" {self.folder!r} is none"
            )
        return folder

    def _task(self) -> Any:
        from fedlens.tasks.generation import Generation

        table = tomllib.loads((self._folder() / "config.toml").read_text())["task"]
        if table.get("name") != "Generation":
            raise DataError(
                f"{self.folder} is a run of the task {table.get('name')}, not of a generator"
            )
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in table.items()
        }
        del arguments["name"]
        return Generation(**arguments)

    def _names(self) -> list[str]:
        try:
            return list(
                json.loads((self._folder() / "federation.json").read_text())["facts"]["classes"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

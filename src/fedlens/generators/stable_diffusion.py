"""Stable Diffusion, or any other text-to-image pipeline of diffusers, local or from the hub: one
prompt per class.

4-bit weights are made here, in plain torch, so that they work on any device: groups of 64 weights
share a scale, absolute maximum / 7, and two weights share a byte. A layer's weights are unpacked
when it is used: an eighth of the memory, somewhat slower.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.core.files import find_named
from fedlens.core.limits import Count
from fedlens.data.paths import locate, walk
from fedlens.data.source import DataError
from fedlens.generators.generator import ImageGenerator, check_label, describe_shape, file_stamps
from fedlens.models.diffusion import load_diffusers

GROUP_SIZE = 64  # weights that share a scale
INDEX = "model_index.json"  # of a saved pipeline


@dataclass
class StableDiffusion(ImageGenerator):
    """
    Args:
        model: a folder with a saved pipeline, or a name on the hub.
        template: the prompt; {} stands for the class.
        prompts: a TOML or JSON file of class = "prompt" instead.
        classes: their names, where the data does not have them.
        negative: a prompt for what should not be seen.
        resolution: what the pipeline draws at (its own by default).
        size: what its images are shrunk to (the data's by default).
        steps: of the pipeline.
        guidance: of the pipeline.
        batch: images at a time.
        bits: of its weights.
        device: where it runs; "auto" takes a GPU where there is one.
    """

    model: str = "stabilityai/stable-diffusion-2-1"
    template: str = "a photo of a {}"
    prompts: str = ""
    classes: tuple[str, ...] = ()
    negative: str = ""
    resolution: Count | None = None
    size: Count | None = None
    steps: Count = 25
    guidance: float = 7.5
    batch: Count = 4
    bits: Literal[4, 16, 32] = 32
    device: str = "auto"
    _channels: int = field(default=3, repr=False)
    _pipeline: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if "{}" not in self.template and not self.prompts:
            raise DataError(
                f"the template {self.template!r} has no {{}} for the class, so all classes would"
                " get the same images"
            )

    def bind(self, classes: Sequence[str], shape: Sequence[int] = ()) -> ImageGenerator:
        if shape and (len(shape) != 3 or shape[1] != shape[2]):
            raise DataError(
                f"StableDiffusion makes square images, but the clients' are {describe_shape(shape)}"
            )
        size = self.size or (shape[1] if shape else None)
        if shape and size != shape[1]:
            raise DataError(
                f"StableDiffusion was told to make images of {size}x{size}, but the clients' are"
                f" {describe_shape(shape)}"
            )
        bound = replace(self, classes=tuple(classes), size=size, _channels=shape[0] if shape else 3)
        bound.texts()
        bound._find()
        return bound

    def texts(self) -> list[str]:
        """The prompt of every class, or a DataError for one that has none."""
        if not self.prompts:
            return [self.template.format(name.replace("_", " ")) for name in self.classes]
        known = read_prompts(self.prompts)
        if missing := [name for name in self.classes if not known.get(name, "").strip()]:
            raise DataError(f"{self.prompts} has no prompt for class {missing[0]!r}")
        return [known[name] for name in self.classes] if self.classes else list(known.values())

    def generate(self, label: int, n: int, rng: Generator) -> Tensor:
        texts = self.texts()
        check_label(label, len(texts), "StableDiffusion")
        pipeline, parts = self._loaded(), []
        for low in range(0, n, self.batch):
            some = min(self.batch, n - low)
            asked: dict[str, Any] = (
                {"height": self.resolution, "width": self.resolution} if self.resolution else {}
            )
            made = pipeline(
                [texts[label]] * some,
                negative_prompt=[self.negative] * some,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                generator=rng,
                output_type="pt",
                **asked,
            ).images
            parts.append(made.float().cpu())
        images = torch.cat(parts)
        if self.size and images.shape[-1] != self.size:
            images = F.interpolate(
                images, size=(self.size, self.size), mode="bilinear", antialias=True
            )
        return images.mean(1, keepdim=True) if self._channels == 1 else images

    def sources(self) -> Iterable[str]:
        folder = find_named(self.model)
        files = sorted(f for _, _, some in walk(folder) for f in some) if folder else []
        return [*file_stamps(files), *self.texts()]

    def _loaded(self) -> Any:
        if self._pipeline is None:
            self._pipeline = self._load()
        return self._pipeline

    def _find(self) -> None:
        """That there is such a pipeline is found out before any client starts; nothing is
        downloaded.
        """
        load_diffusers()
        from huggingface_hub import model_info, try_to_load_from_cache

        needs = "StableDiffusion needs a saved pipeline of diffusers"
        folder = find_named(self.model)
        if folder is not None:
            if not (folder / INDEX).is_file():
                raise DataError(f"{needs}, and the folder {self.model} has no {INDEX}")
            return
        try:
            if not isinstance(try_to_load_from_cache(self.model, INDEX), str):
                model_info(self.model, timeout=10)
        # no such name, no network, no permission: the hub's library has a kind for each, of three
        # families
        except Exception as e:
            why = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise DataError(
                f"{needs}, and {self.model} is neither a folder here nor found on the hub: {why}"
            ) from None

    def _load(self) -> Any:
        diffusers = load_diffusers()
        kind = torch.float16 if self.bits == 16 else torch.float32
        try:
            with quiet_libraries():
                pipeline = diffusers.DiffusionPipeline.from_pretrained(
                    str(find_named(self.model) or self.model), torch_dtype=kind
                )
        except (OSError, ValueError) as e:
            why = str(e).strip().splitlines()[0]
            raise DataError(f"the pipeline {self.model} could not be loaded: {why}") from None
        if self.bits == 4:
            for part in ("unet", "transformer", "text_encoder"):
                if isinstance(module := getattr(pipeline, part, None), nn.Module):
                    quantise(module)
        if hasattr(pipeline, "safety_checker"):
            # it blackens images at random and is of no use for class names
            pipeline.safety_checker = None
        pipeline.set_progress_bar_config(disable=True)
        place = (
            self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        return pipeline.to(place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the bars, advice and warnings of diffusers and transformers about each other; what
    goes wrong is an exception anyway.
    """
    import diffusers
    import transformers

    libraries = [diffusers.utils.logging, transformers.utils.logging]
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for library, level in zip(libraries, before, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()


def read_prompts(file: str) -> Mapping[str, str]:
    path = locate(file, "file of prompts", "generator.prompts")
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as e:
        raise DataError(f"{file} is not a file of prompts: {e.strerror or e}") from None
    except ValueError as e:
        raise DataError(f"{file} is not a file of prompts: {e}") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise DataError(f'{file} is not a file of prompts: it has to hold class = "prompt" lines')
    return found


# -- four bits -------------------------------------------------------------------------------------


def quantise(module: nn.Module) -> nn.Module:
    """Every linear layer and convolution inside keeps its weights in four bits from now on."""
    for name, child in list(module.named_children()):
        if isinstance(child, (nn.Linear, nn.Conv2d)) and child.weight.numel() >= GROUP_SIZE:
            setattr(module, name, FourBit(child))
        else:
            quantise(child)
    return module


class FourBit(nn.Module):
    """A linear layer or convolution whose weights are whole numbers from -7 to 7 times the scale of
    their group.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer, self.shape = layer, layer.weight.shape
        packed, scales = pack_four_bits(layer.weight.detach())
        self.packed: Tensor
        self.scales: Tensor
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        del layer.weight

    @property
    def weight(self) -> Tensor:
        return unpack_four_bits(self.packed, self.scales, self.shape)

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if isinstance(self.layer, nn.Conv2d):
            found: Tensor = self.layer._conv_forward(x, weight, self.layer.bias)
            return found
        return F.linear(x, weight, self.layer.bias)


def pack_four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights a byte, and a scale for each group; the last group is filled up with zeros."""
    flat = F.pad(weight.flatten().float(), (0, -weight.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)
    scales = flat.abs().amax(1, keepdim=True).clamp_min(1e-12) / 7
    whole = (flat / scales).round().clamp(-7, 7).to(torch.int16).flatten() + 8
    return (whole[::2] + whole[1::2] * 16).to(torch.uint8), scales.to(weight.dtype)


def unpack_four_bits(packed: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], 1).flatten().view(-1, GROUP_SIZE)
    flat = (both.to(scales.dtype) - 8) * scales
    return flat.flatten()[: torch.Size(shape).numel()].view(*shape)

"""A small class-conditional diffusion model: diffusers' UNet2D on patches, its moving average, and
a quick sampler.

Images go in as [0, 1] and are mapped to [-1, 1]. `patch` x `patch` pixels become channels before
the network and pixels behind it: four times less work at patch 2. The network predicts v (Salimans
and Ho, 2022) under the cosine schedule; the class after the last means "any", so that guidance can
weigh the two answers. The moving average of the weights travels as a second, frozen network:
sampling uses that one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

STEPS = 1000  # of the noise schedule


class Denoiser(nn.Module):
    """
    Args:
        classes: how many.
        channels: of the images.
        size: side of an image, in pixels.
        patch: so many pixels along each side become channels of the network.
        widths: channels of the levels, each at half the resolution of the one before.
        layers: of each level.
        attention: in the coarsest level.
        average: decay of the moving average.
    """

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        size: int = 32,
        patch: int = 2,
        widths: tuple[int, ...] = (32, 64, 96),
        layers: int = 1,
        attention: bool = True,
        average: float = 0.999,
    ) -> None:
        super().__init__()
        if size % (patch * 2 ** (len(widths) - 1)):
            raise ValueError(
                f"images of {size} pixels cannot be halved {len(widths) - 1} times in patches of"
                f" {patch}"
            )
        self.classes, self.channels, self.size, self.patch, self.decay = (
            classes,
            channels,
            size,
            patch,
            average,
        )
        self.net = _unet(classes, channels * patch**2, size // patch, widths, layers, attention)
        self.mean = copy.deepcopy(self.net).requires_grad_(False)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, t: Tensor, y: Tensor, averaged: bool = False) -> Tensor:
        """v of images in [-1, 1] that noise has reached step t of; y is the class, or `classes` for
        any.
        """
        net: Any = self.mean if averaged else self.net
        found: Tensor = net(F.pixel_unshuffle(x, self.patch), t, class_labels=y).sample
        return F.pixel_shuffle(found, self.patch)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average a step towards the weights; quicker in the beginning, when it has little
        to average over.
        """
        keep = min(self.decay, float((1 + self.seen) / (10 + self.seen)))
        torch._foreach_lerp_(
            list(self.mean.parameters()), [p.detach() for p in self.net.parameters()], 1 - keep
        )
        self.seen += 1

    @torch.no_grad()
    def sample(
        self,
        labels: Tensor,
        rng: Generator,
        steps: int = 20,
        guidance: float = 1.0,
        start: Tensor | None = None,
        strength: float = 1.0,
    ) -> Tensor:
        """Images in [0, 1] by DDIM. With `start`, from these images behind `strength` of the noise
        instead of from noise alone.
        """
        scheduler = schedule()
        scheduler.set_timesteps(steps)
        times = (
            scheduler.timesteps[steps - max(1, round(strength * steps)) :]
            if start is not None
            else scheduler.timesteps
        )
        place = next(self.parameters()).device
        noise = torch.randn(len(labels), self.channels, self.size, self.size, generator=rng)
        x = (
            noise
            if start is None
            else scheduler.add_noise(start * 2 - 1, noise, times[:1].expand(len(labels)))
        )
        x, labels = x.to(place), labels.to(place)
        for t in times:
            v = self._guided(x, t.to(place), labels, guidance)
            x = scheduler.step(v, t, x).prev_sample
        return (x.cpu() / 2 + 0.5).clamp(0, 1)

    def _guided(self, x: Tensor, t: Tensor, y: Tensor, guidance: float) -> Tensor:
        when = t.expand(len(x))
        if guidance == 1:
            return self(x, when, y, averaged=True)  # type: ignore[no-any-return]
        nobody = torch.full_like(y, self.classes)
        ours, anybody = self(
            torch.cat([x, x]), torch.cat([when, when]), torch.cat([y, nobody]), averaged=True
        ).chunk(2)
        return anybody + guidance * (ours - anybody)  # type: ignore[no-any-return]


def schedule() -> Any:
    """The noise: cosine, v-prediction, ending in pure noise. DDIM's own steps are fast and
    deterministic.
    """
    diffusers = load_diffusers()
    return diffusers.DDIMScheduler(
        num_train_timesteps=STEPS,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        clip_sample=True,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
    )


def _unet(
    classes: int, channels: int, size: int, widths: tuple[int, ...], layers: int, attention: bool
) -> nn.Module:
    diffusers = load_diffusers()
    last = "Attn" if attention else ""
    down = ["DownBlock2D"] * (len(widths) - 1) + [f"{last}DownBlock2D"]
    net: nn.Module = diffusers.UNet2DModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=layers,
        block_out_channels=tuple(widths),
        down_block_types=tuple(down),
        up_block_types=tuple(d.replace("Down", "Up") for d in reversed(down)),
        num_class_embeds=classes + 1,
        norm_num_groups=8,
        attention_head_dim=16,
        add_attention=attention,
    )
    return net


def load_diffusers() -> Any:
    try:
        import diffusers
    except ImportError:
        raise ValueError(
            'diffusion models need diffusers: pip install "fedlens[generate]"'
        ) from None
    return diffusers

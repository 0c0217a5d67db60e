"""What a client saw of a scene: pixels, the kernel they were blurred with, and where in the scene
they lie. FedDeblur sends none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlens.core.facts import Facts
from fedlens.deblur import spectrum
from fedlens.deblur.varying import VaryingBlur


@dataclass(frozen=True)
class SceneFacts(Facts):
    """What everybody may know about the scenes.

    Args:
        scenes: (channels, height, width) of each, by name.
        clients: how many look at them.
        observe: "complete" or "partial" views.
        blur: the kind of kernels.
        noise: grey levels, None where nobody knows.
        pad: width of the rim beyond the photos' edges that is solved for as well.
        coverage: of photos that are fitted in the image, not in the spectrum: how many of them
            count at a pixel, on average.
        varying: whether anybody's blur differs across the photo.
    """

    scenes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    clients: int = 0
    observe: str = "complete"
    blur: str = "mixed"
    noise: float | None = None
    pad: int = 0
    coverage: float | None = None
    varying: bool = False

    @property
    def partial(self) -> bool:
        return self.observe == "partial"


@dataclass(frozen=True)
class Observation:
    """What one client saw of one scene. A client's data is a dict of these, by the name of the
    scene.

    Args:
        pixels: (C, h, w) in [0, 255].
        kernel: its blur; of a grid, the mean.
        height: of the scene.
        width: of the scene.
        top: where a partial view lies; None for a view of the whole scene.
        left: likewise.
        confidence: (h, w) in [0, 1]: how much each pixel counts in the misfit; None is 1
            everywhere. It is for views with a place: a fit in the spectrum alone cannot weigh
            pixels.
        grid: (rows, columns, k, k): kernels of a blur that differs across the photo
            (`varying.py`); None where one does. It is for views with a place as well.
    """

    pixels: Tensor
    kernel: Tensor
    height: int
    width: int
    top: int | None = None
    left: int | None = None
    confidence: Tensor | None = None
    grid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.confidence is not None and self.top is None:
            raise ValueError("a view whose pixels count differently needs a place in the scene")
        if self.grid is not None and (self.top is None or self.grid.dim() != 4):
            raise ValueError(
                "a view with a grid of kernels needs a place in the scene, and a grid has rows,"
                " columns and the height and width of a kernel"
            )

    @property
    def partial(self) -> bool:
        return self.top is not None

    def embed(self, patch: Tensor) -> Tensor:
        """The patch where it lies in the scene, zeros elsewhere."""
        if self.top is None or self.left is None:
            return patch
        out = torch.zeros((*patch.shape[:-2], self.height, self.width), dtype=patch.dtype)
        self.cut(out).copy_(patch)
        return out

    def cut(self, image: Tensor) -> Tensor:
        if self.top is None or self.left is None:
            return image
        return image[
            ...,
            self.top : self.top + self.pixels.shape[-2],
            self.left : self.left + self.pixels.shape[-1],
        ]

    def mask(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(1, H, W): how much each pixel counts, which for a complete view is one everywhere."""
        return self.embed(self.weight(dtype))

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mask inside the view, (1, h, w)."""
        if self.confidence is None:
            return torch.ones(1, *self.pixels.shape[-2:], dtype=dtype)
        return self.confidence.to(dtype)[None]

    def otf(self, dtype: torch.dtype) -> Tensor:
        return spectrum.otf(self.kernel, self.height, self.width, dtype)

    def through(self, x: Tensor, h: Tensor) -> Tensor:
        """h * x where it was observed, of a half-spectrum x and the kernel's transfer function."""
        return self.cut(torch.fft.irfft2(torch.view_as_complex(x) * h, s=(self.height, self.width)))

    def varying(self, dtype: torch.dtype) -> VaryingBlur:
        """The blur of a view with a grid of kernels."""
        assert self.grid is not None and self.top is not None and self.left is not None
        view = int(self.pixels.shape[-2]), int(self.pixels.shape[-1])
        scene, place = (self.height, self.width), (self.top, self.left)
        return VaryingBlur(self.grid, view, scene, place, dtype)

    def blurred(self, x: Tensor) -> Tensor:
        """A half-spectrum x through this view's blur, where it was observed."""
        if self.grid is not None:
            return self.varying(x.dtype).forward(x)
        return self.through(x, self.otf(x.dtype))

    def misfit(self, x: Tensor) -> float:
        """The weighted sum of (h * x - y)^2 over the view, of a half-spectrum x."""
        seen = self.blurred(x)
        squares = (seen - self.pixels.to(seen.dtype)).double().square()
        return float((squares * self.weight(torch.float64)).sum())


class SharpScenes(dict[str, Tensor]):
    """The sharp scenes, by name, for scoring; and, where whoever scores has them, the views, so
    that a restored scene can be held against the photos themselves."""

    def __init__(
        self,
        scenes: Mapping[str, Tensor],
        views: Sequence[Mapping[str, Observation]] = (),
        pad: int = 0,
        noise: float = 1.0,
    ) -> None:
        super().__init__(scenes)
        self.views, self.pad, self.noise = views, pad, noise


def without_rim(x: Tensor, pad: int) -> Tensor:
    """The scene without the rim of `pad` pixels that lies beyond the photos' edges
    (boundary="unknown").
    """
    return x[..., pad : x.shape[-2] - pad, pad : x.shape[-1] - pad]

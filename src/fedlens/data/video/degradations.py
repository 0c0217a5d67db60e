"""How low resolution comes about: what a client's camera does to the world.

"bi": MATLAB's bicubic, as most benchmarks (`degrade.py`). "bd": a Gaussian blur of 0.4 pixels of
the low resolution (sigma 1.6 at x4), then every scale-th pixel; the other benchmark. "real": what
real films went through, of second order: twice blur, resizing, noise and JPEG, then the size that
is wanted and H.264. All numbers of it are drawn anew for every example. "camera": the same, drawn
once for a client and kept; every client has another one.

The order of second-order degradations follows Real-ESRGAN (Wang et al., 2021) and, for the
compression of the whole clip at the end, RealBasicVSR (Chan et al., 2022).
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedlens.core.client import generator
from fedlens.data.source import DataError
from fedlens.data.video.degrade import REACH, mirrored, resized, shrink
from fedlens.data.video.files import load_av

DegradationKind = Literal["bi", "bd", "real", "camera"]
BD_SIGMA = 0.4  # of a pixel of the low resolution
BD_REACH = 6
BLUR_REACH = 10
STREAM = 0xDE6  # of random numbers
TESTER = 0x7E57  # whose camera, where a test has one


class Degradation(ABC):
    """reach: low-resolution pixels around a crop that its own pixels depend on."""

    reach = REACH

    @abstractmethod
    def __call__(self, clip: Tensor, scale: int, rng: Generator | None) -> Tensor:
        """(T, 3, H, W) in [0, 1] to (T, 3, H / scale, W / scale), not yet rounded. Without a
        generator always the same.
        """

    @abstractmethod
    def __str__(self) -> str: ...


class BicubicShrink(Degradation):
    def __call__(self, clip: Tensor, scale: int, rng: Generator | None) -> Tensor:
        return shrink(clip, scale)

    def __str__(self) -> str:
        return "bicubic"


class BlurDecimate(Degradation):
    reach = BD_REACH

    def __call__(self, clip: Tensor, scale: int, rng: Generator | None) -> Tensor:
        return blur_decimate(clip, scale)

    def __str__(self) -> str:
        return "Gaussian blur and decimation"


def blur_decimate(clip: Tensor, scale: int) -> Tensor:
    """BD as DUF's and BasicSR's code makes it: the Gaussian reaches 6 pixels, borders are mirrored
    without repeating the edge, and the first pixel is kept."""
    h, w = clip.shape[-2:]
    if h % scale or w % scale:
        raise ValueError(f"{w}x{h} pixels are not divisible by the scale {scale}")
    place = torch.arange(-BD_REACH, BD_REACH + 1, dtype=torch.float64)
    line = torch.exp(-0.5 * (place / (BD_SIGMA * scale)) ** 2)
    # what lies outside of four sigmas is cut off before the sum is taken, as scipy does
    line[place.abs() > int(4 * BD_SIGMA * scale + 0.5)] = 0
    line = (line / line.sum()).to(clip.dtype)
    x = F.pad(clip.reshape(-1, 1, h, w), (BD_REACH,) * 4, mode="reflect")
    x = F.conv2d(x, line.view(1, 1, -1, 1), stride=(scale, 1))
    x = F.conv2d(x, line.view(1, 1, 1, -1), stride=(1, scale))
    return x.reshape(*clip.shape[:-2], h // scale, w // scale)


# -- second order ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """
    Args:
        blur: sigmas along two axes, in pixels, and the angle of the first one.
        resize: factor.
        how: of resizing.
        noise: standard deviation in levels.
        grey: the same for all colours.
        jpeg: quality.
    """

    blur: tuple[float, float, float]
    resize: float
    how: Literal["area", "bilinear", "bicubic"]
    noise: float
    grey: bool
    jpeg: int


@dataclass(frozen=True)
class CameraSettings:
    """Two passes, and the rate factor of H.264 (0 best, 51 worst)."""

    passes: tuple[Pass, Pass]
    crf: int

    def __str__(self) -> str:
        blurs = ", ".join(f"blur {max(p.blur[:2]):.1f}" for p in self.passes)
        noises = ", ".join(f"noise {p.noise:.0f}" for p in self.passes)
        return f"{blurs}, {noises}, JPEG {self.passes[-1].jpeg}, H.264 {self.crf}"


def draw_settings(rng: Generator) -> CameraSettings:
    """Ranges of Real-ESRGAN's second-order model, the second pass milder than the first."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=rng))

    def one(blur: float, sizes: tuple[float, float], noise: float) -> Pass:
        first, second = between(0.2, blur), between(0.2, blur)
        kind = between(0, 1)
        down, up = between(sizes[0], 1), between(1, sizes[1])
        return Pass(
            (first, second if between(0, 1) < 0.5 else first, between(0, math.pi)),
            up if kind < 0.2 else down if kind < 0.9 else 1.0,
            ("area", "bilinear", "bicubic")[int(between(0, 3)) % 3],  # type: ignore[arg-type]
            between(1, noise),
            between(0, 1) < 0.4,
            int(between(30, 95)),
        )

    return CameraSettings(
        (one(3.0, (0.15, 1.5), 30), one(1.5, (0.3, 1.2), 25)), int(between(18, 38))
    )


@dataclass
class Real(Degradation):
    """
    Args:
        settings: of a camera that is always the same; without, drawn for every clip.
    """

    settings: CameraSettings | None = None
    reach: int = field(default=8, init=False)

    def __call__(self, clip: Tensor, scale: int, rng: Generator | None) -> Tensor:
        rng = rng if rng is not None else generator(STREAM)
        return worsen(clip, scale, self.settings or draw_settings(rng), rng)

    def __str__(self) -> str:
        return str(self.settings or "second order, anew for every example")


def worsen(clip: Tensor, scale: int, settings: CameraSettings, rng: Generator) -> Tensor:
    h, w = clip.shape[-2:]
    smallest = (max(2, h // scale // 2), max(2, w // scale // 2))
    x = clip
    for step in settings.passes:
        x = blurred(x, step.blur)
        size = tuple(max(m, round(n * step.resize)) for n, m in zip(x.shape[-2:], smallest))
        x = x if size == x.shape[-2:] else resized_by(x, (size[0], size[1]), step.how)
        x = jpeg(with_grain(x.clamp(0, 1), step.noise, step.grey, rng), step.jpeg)
    x = resized_by(x, (h // scale, w // scale), "bicubic")
    return h264(x.clamp(0, 1), settings.crf)


def blur_kernel(sigmas: tuple[float, float, float]) -> Tensor:
    """A Gaussian with these standard deviations along two axes, turned by the angle; sum 1."""
    along, across, angle = sigmas
    place = torch.arange(-BLUR_REACH, BLUR_REACH + 1, dtype=torch.float64)
    y, x = torch.meshgrid(place, place, indexing="ij")
    u = x * math.cos(angle) + y * math.sin(angle)
    v = y * math.cos(angle) - x * math.sin(angle)
    kernel = torch.exp(-0.5 * ((u / along) ** 2 + (v / across) ** 2))
    return kernel / kernel.sum()


def blurred(clip: Tensor, sigmas: tuple[float, float, float]) -> Tensor:
    """Borders mirrored with the edge repeated."""
    kernel = blur_kernel(sigmas).to(clip.dtype)[None, None]
    wide = mirrored(clip, BLUR_REACH)
    flat = wide.reshape(-1, 1, *wide.shape[-2:])
    return F.conv2d(flat, kernel).reshape(clip.shape)


def resized_by(clip: Tensor, size: tuple[int, int], how: str) -> Tensor:
    if how == "bicubic":
        return resized(clip, size)
    if how == "area":
        return F.interpolate(clip, size=size, mode="area")
    return F.interpolate(clip, size=size, mode="bilinear", antialias=True, align_corners=False)


def with_grain(clip: Tensor, noise: float, grey: bool, rng: Generator) -> Tensor:
    """Gaussian noise, other in every frame."""
    shape = (len(clip), 1 if grey else 3, *clip.shape[-2:])
    return (clip + noise / 255 * torch.randn(shape, generator=rng)).clamp(0, 1)


def _levels(clip: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return (clip * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def _back(frames: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]) -> Tensor:
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255


def jpeg(clip: Tensor, quality: int) -> Tensor:
    """Each frame by itself."""
    from PIL import Image

    out = []
    for frame in _levels(clip):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "jpeg", quality=quality)
        out.append(np.asarray(Image.open(file).convert("RGB")))
    return _back(out)


def h264(clip: Tensor, crf: int) -> Tensor:
    """The clip through ffmpeg's H.264, by PyAV; odd sides keep full chroma."""
    av = load_av()
    file, frames = io.BytesIO(), _levels(clip)
    _, height, width, _ = frames.shape
    with av.open(file, "w", format="nut") as out:
        stream = out.add_stream("libx264", rate=25)
        stream.pix_fmt = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
        stream.height, stream.width = height, width
        stream.thread_count = 1  # the same bits on every machine
        stream.options = {"crf": str(crf), "preset": "medium"}
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
    file.seek(0)
    with av.open(file, format="nut") as again:
        got = [frame.to_ndarray(format="rgb24") for frame in again.decode(video=0)]
    if len(got) != len(frames):
        raise DataError(f"H.264 gave {len(got)} frames back of {len(frames)}")
    return _back(got)


# -- who has which ---------------------------------------------------------------------------------


def degradation(kind: DegradationKind, seed: int, client: int) -> Degradation:
    if kind == "bi":
        return BicubicShrink()
    if kind == "bd":
        return BlurDecimate()
    if kind == "real":
        return Real()
    return Real(draw_settings(generator(seed, STREAM, client)))

"""Scenes: sharp images that clients observe blurred, noisy and perhaps in part; or the user's own
observations.

Simulated (`image=`): a file, a folder (each image is a scene of its own, and every client observes
all of them through its own kernel), or the name of an image that ships with scikit-image. A run
then restores all scenes side by side, and metrics are means over them.

Own (`scene=DIR`): one sub-folder per client, see `scene_folder.py`.

boundary: what lies beyond the edge of the scene. "circular" is the paper's model, for simulated
views only: the far side. A real photo is blurred from pixels it does not show: "unknown" lets the
scene go on for half a kernel beyond the photo and treats the photo as a partial view of that, which
leaves no ringing; "taper" blends the photo's edges into one another; "ignore" does nothing about
it. With an `image`, these three simulate real photos: the outermost half kernel of the sharp image
is seen only through the blur, and scores count the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from fedlens.core.federation import Federation
from fedlens.core.files import find_named
from fedlens.core.limits import Count, NotNegative
from fedlens.data.images.reading import READABLE, read_image, resize, shipped
from fedlens.data.paths import locate
from fedlens.data.source import DataError, Source
from fedlens.deblur.blur import Blur, Family, check_kernel, client_kernel
from fedlens.deblur.observation import Observation, SceneFacts, SharpScenes, without_rim
from fedlens.deblur.scene_folder import OwnView, client_folders, read_scene
from fedlens.deblur.spectrum import circular_blur

SceneSize = Annotated[int, Ge(16)]
KernelSize = Annotated[int, Ge(3)]  # below, camera shake has nowhere to go


@dataclass
class Scene(Source):
    """
    Args:
        image: file, folder or name (camera, astronaut, coffee, chelsea, ...).
        scene: a folder of the user's own observations.
        size: square to resize to (antialiased bicubic); None is 256 for folders and names, and as
            it is for a file; 0 is always as it is.
        colour: what becomes of it.
        limit: how many images of a folder.
        observe: the whole scene, or one field of a grid each.
        blur: Table 3 (mixed) or 4 (motion) of the paper, or camera shake; None is mixed for
            complete and motion for partial views.
        kernels: MATLAB's definitions or the authors'; authors-dark leaves camera shake that was
            cropped with the light that is left, as their code does.
        kernel_size: of camera shake, and of kernels that are estimated.
        noise: standard deviation in grey levels; None is 1 for simulated views, and estimated from
            each of the user's own.
        patch: height and width of a partial view.
        boundary: what lies beyond the edge of the scene, see above; None is circular for simulated
            views and unknown for the user's own.
        align: bring the user's views into register with reference.png, or with one of them, and
            say what does not fit.
        anchor: the folder whose view the others are aligned with; None is the one that its blur and
            noise hurt least, or the first one where there is a truth.
    """

    image: str = "camera"
    scene: str | None = None
    size: SceneSize | Literal[0] | None = None
    colour: Literal["auto", "grey", "rgb"] = "auto"
    limit: Count | None = None
    observe: Literal["complete", "partial"] = "complete"
    blur: Blur | None = None
    kernels: Family = "fspecial"
    kernel_size: KernelSize = 15
    noise: NotNegative | None = None
    patch: tuple[Count, Count] | None = None
    boundary: Literal["circular", "unknown", "taper", "ignore"] | None = None
    align: bool = False
    anchor: str | None = None

    def __post_init__(self) -> None:
        if self.scene is not None and self.boundary == "circular":
            raise DataError(
                "boundary=circular is for simulated views: a real photo does not continue on its"
                " far side"
            )
        if self.anchor is not None and not self.align:
            raise DataError("anchor says what views are aligned with: it needs align=true")

    def default_clients(self) -> int:
        """How many clients there are when nobody says: one per folder, nine fields of view, or ten
        cameras.
        """
        if self.scene is not None:
            return len(client_folders(self._folder()))
        return 9 if self.observe == "partial" else 10

    def federation(self, clients: int, seed: int) -> Federation:
        return self._own(clients) if self.scene is not None else self._simulated(clients, seed)

    # -- simulated ---------------------------------------------------------------------------------

    def _simulated(self, clients: int, seed: int) -> Federation:
        images = self.images()
        what = self.blur or ("motion" if self.observe == "partial" else "mixed")
        kernels = [
            client_kernel(what, k, self.kernels, seed, self.kernel_size) for k in range(clients)
        ]
        boundary = self.boundary or "circular"
        level = 1.0 if self.noise is None else self.noise
        pad = 0 if boundary == "circular" else max(max(k.shape) // 2 for k in kernels)
        holdings: list[dict[str, Observation]] = [{} for _ in range(clients)]
        for s, (name, sharp) in enumerate(images.items()):
            for k, kernel in enumerate(kernels):
                check_kernel(kernel, f"client {k}", sharp.shape[-2:])
                rng = torch.Generator().manual_seed((seed * 1009 + k) * 10007 + s)
                noise = level * torch.randn(sharp.shape, generator=rng, dtype=torch.float64)
                holdings[k][name] = self._view(
                    circular_blur(sharp, kernel) + noise, kernel, k, clients, pad, boundary
                )
        scored = {name: without_rim(x, pad) for name, x in images.items()}
        # the scene is solved for beyond what is scored
        beyond = pad if boundary == "unknown" else 0
        facts = SceneFacts(observe=self.observe, blur=what, noise=level, pad=beyond)
        return _federation(holdings, scored, facts)

    def _view(
        self, blurred: Tensor, kernel: Tensor, k: int, clients: int, pad: int, boundary: str
    ) -> Observation:
        height, width = blurred.shape[-2:]
        box = [pad, pad, height - 2 * pad, width - 2 * pad]
        if self.observe == "partial":
            top, left, rows, columns = field_of_view(box[2], box[3], k, clients, self.patch)
            box = [pad + top, pad + left, rows, columns]
        pixels = (
            blurred[..., box[0] : box[0] + box[2], box[1] : box[1] + box[3]].float().contiguous()
        )
        if boundary in ("taper", "ignore"):
            height, width, box[0], box[1] = (
                height - 2 * pad,
                width - 2 * pad,
                box[0] - pad,
                box[1] - pad,
            )
        if self.observe == "complete" and boundary != "unknown":
            pixels = taper(pixels, kernel) if boundary == "taper" else pixels
            return Observation(pixels, kernel, height, width)
        return Observation(pixels, kernel, height, width, box[0], box[1])

    def images(self) -> dict[str, Tensor]:
        """The sharp scenes, (C, H, W) in [0, 255], by name."""
        name = Path(self.image)
        if find_named(self.image) is None and not name.suffix and len(name.parts) == 1:
            return {self.image: self._fit(shipped(self.image, self.colour), 256)}
        path = locate(self.image, "image", "data.image")
        if path.is_file():
            return {path.stem: self._fit(read_image(path, self.colour), 0)}
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in READABLE)[: self.limit]
        if not files:
            raise DataError(f"{path} holds no images ({', '.join(READABLE)})")
        return {p.stem: self._fit(read_image(p, self.colour), 256) for p in files}

    def _fit(self, x: Tensor, otherwise: int) -> Tensor:
        size = otherwise if self.size is None else self.size
        return x if size == 0 or tuple(x.shape[-2:]) == (size, size) else resize(x, size)

    # -- the user's own ----------------------------------------------------------------------------

    def _folder(self) -> Path:
        assert self.scene is not None
        return locate(self.scene, "folder of observations", "data.scene")

    def _own(self, clients: int) -> Federation:
        folder = self._folder()
        if clients != (there := len(client_folders(folder))):
            raise DataError(f"{folder} holds the views of {there} clients, not of {clients}")
        own = read_scene(folder, self.colour, self.align, self.kernel_size, self.anchor)
        boundary = self.boundary or "unknown"
        pad = max(max(v.kernel.shape) // 2 for v in own.views) if boundary == "unknown" else 0
        holdings = [{"scene": _place(v, own.size, pad, boundary)} for v in own.views]
        observe = "partial" if any(v.place for v in own.views) else "complete"
        truth = {} if own.truth is None else {"scene": own.truth}
        level, notes = self.noise, list(own.notes)
        if level is None:
            level = round(statistics.median(v.noise for v in own.views), 2)
            notes.append(f"noise was estimated at {level:g} grey levels (noise=.. sets it)")
        placed = any(held["scene"].partial for held in holdings)
        # The strengths were published for the kinds of blur of the paper; what a user's kernels are
        # is unknown.
        facts = SceneFacts(
            observe=observe,
            blur="motion" if observe == "partial" else "mixed",
            noise=level,
            pad=pad,
            varying=any(v.grid is not None for v in own.views),
            coverage=_coverage(own.views) if observe == "complete" and placed else None,
            notes=tuple(notes),
        )
        return _federation(holdings, truth, facts)


def _place(v: OwnView, size: tuple[int, int], pad: int, boundary: str) -> Observation:
    whole = v.place is None and v.confidence is None and v.grid is None
    if whole and boundary != "unknown":
        return Observation(
            taper(v.pixels, v.kernel) if boundary == "taper" else v.pixels, v.kernel, *size
        )
    top, left = v.place or (0, 0)
    # a complete view that is fitted in the image all the same has no rim to hide its edges in
    tapered = boundary == "taper" and v.place is None and v.confidence is None
    return Observation(
        taper(v.pixels, v.kernel) if tapered else v.pixels,
        v.kernel,
        size[0] + 2 * pad,
        size[1] + 2 * pad,
        top + pad,
        left + pad,
        v.confidence,
        v.grid,
    )


def _coverage(views: Sequence[OwnView]) -> float:
    """How many views count at a pixel, on average."""
    return round(sum(1.0 if v.confidence is None else float(v.confidence.mean()) for v in views), 2)


def _federation(
    holdings: Sequence[dict[str, Observation]], truth: Mapping[str, Tensor], facts: SceneFacts
) -> Federation:
    scenes = {
        name: (seen.pixels.shape[0], seen.height, seen.width) for name, seen in holdings[0].items()
    }
    whole = replace(facts, scenes=scenes, clients=len(holdings))
    test = SharpScenes(truth, holdings, facts.pad, facts.noise or 0.0) if truth else None
    return Federation(holdings, test=test, facts=whole)


# -- geometry --------------------------------------------------------------------------------------


def field_of_view(
    height: int, width: int, k: int, clients: int, patch: tuple[int, int] | None = None
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of field k of a grid as square as `clients` allows. Fields overlap
    by about a fifth: 3 x 3 fields of 100 pixels on 256 begin at 0, 78 and 156, as in the paper."""
    rows = max(r for r in range(1, math.isqrt(clients) + 1) if clients % r == 0)
    columns = clients // rows
    tall, wide = patch or (_span(height, rows), _span(width, columns))
    if tall > height or wide > width:
        raise DataError(
            f"a view of {tall} x {wide} pixels does not fit into a scene of {height} x {width}"
        )
    if (rows > 1 and tall * rows < height) or (columns > 1 and wide * columns < width):
        raise DataError(
            f"{rows} x {columns} views of {tall} x {wide} pixels do not overlap on a scene of"
            f" {height} x {width}"
        )
    row, column = divmod(k, columns)
    return _start(height, tall, row, rows), _start(width, wide, column, columns), tall, wide


def _span(length: int, parts: int) -> int:
    return length if parts == 1 else math.ceil(length * 100 / 256 * 3 / parts)


def _start(length: int, span: int, k: int, parts: int) -> int:
    return 0 if parts == 1 else round((length - span) * k / (parts - 1))


def taper(pixels: Tensor, kernel: Tensor) -> Tensor:
    """Near the edges, blend into the circularly blurred photo, so that opposite edges meet.
    Weights: the kernel's autocorrelation.
    """
    weight = torch.ones(1, dtype=torch.float64)
    for axis in (0, 1):
        line, length = kernel.double().sum(1 - axis), pixels.shape[-2 + axis]
        spectrum = torch.fft.fft(line, length - 1).abs().square()
        alike = torch.fft.ifft(spectrum).real
        alike = torch.cat([alike, alike[:1]])
        profile = 1 - alike / alike.max()
        weight = weight * (profile[:, None] if axis == 0 else profile[None, :])
    return (weight * pixels.double() + (1 - weight) * circular_blur(pixels, kernel)).float()

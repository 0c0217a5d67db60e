"""Scenes: sharp images that clients observe blurred, noisy and perhaps in part; or the user's own observations.

Simulated (`image=`): a file, a folder (each image is a scene of its own, and every client observes all of them through its own kernel), or
the name of an image that ships with scikit-image. A run then restores all scenes side by side, and metrics are means over them.

Own (`scene=DIR`): one sub-folder per client with observation.png|npy, kernel.npy|png|mat and, for a partial view, position.json
({"top": .., "left": ..}, in pixels of the scene); at the top scene.json ({"height": .., "width": ..}; without it every view is complete)
and, where it is known, truth.png. All pixels become [0, 255]; a 16-bit file is scaled to that. Where there is a sharp picture of the
scene that every client may see, reference.png at the top, a client without a kernel estimates it from that picture and its own photo.

boundary: what lies beyond the edge of the scene. "circular" is the paper's model, for simulated views only: the far side. A real photo
is blurred from pixels it does not show: "unknown" lets the scene go on for half a kernel beyond the photo and treats the photo as a
partial view of that, which leaves no ringing; "taper" blends the photo's edges into one another; "ignore" does nothing about it. With
an `image`, these three simulate real photos: the outermost half kernel of the sharp image is seen only through the blur, and scores
count the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.data.blur import Blur, Family, client_kernel
from fedlens.data.source import DataError, Source
from fedlens.federation import Federation
from fedlens.observation import Observation, inside
from fedlens.spectrum import blur as circular_blur

KERNELS = (".npy", ".png", ".mat")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".npy")


@dataclass
class Scene(Source):
    """image: file, folder or name (camera, astronaut, coffee, chelsea, ...). scene: a folder of the user's own observations. size: square
    to resize to (antialiased bicubic); None is 256 for folders and names, and as it is for a file; 0 is always as it is. colour: what
    becomes of it. limit: how many images of a folder. observe: the whole scene, or one field of a grid each. blur: Table 3 (mixed) or 4
    (motion) of the paper, or camera shake; None is mixed for complete and motion for partial views. kernels: MATLAB's definitions or the
    authors'. kernel_size: of camera shake, and of kernels that are estimated. noise: standard deviation in grey levels. patch: height and
    width of a partial view. align: bring the user's views into register with the first one, or with reference.png, (ECC) and match their
    histograms first.
    """

    image: str = "camera"
    scene: str | None = None
    size: int | None = None
    colour: Literal["auto", "grey", "rgb"] = "auto"
    limit: int | None = None
    observe: Literal["complete", "partial"] = "complete"
    blur: Blur | None = None
    kernels: Family = "fspecial"
    kernel_size: int = 15
    noise: float = 1.0
    patch: tuple[int, int] | None = None
    boundary: Literal["circular", "unknown", "taper", "ignore"] | None = None
    align: bool = False

    def __post_init__(self) -> None:
        if self.noise < 0:
            raise DataError(f"noise is {self.noise}: a standard deviation cannot be negative")
        if self.size is not None and self.size != 0 and self.size < 16:
            raise DataError(f"size is {self.size}: a scene needs at least 16 pixels a side")
        if self.kernel_size < 3:
            raise DataError(f"kernel_size is {self.kernel_size}: camera shake needs at least 3 pixels")
        if self.scene is not None and self.boundary == "circular":
            raise DataError("boundary=circular is for simulated views: a real photo does not continue on its far side")

    def default_clients(self) -> int:
        """How many clients there are when nobody says: one per folder, nine fields of view, or ten cameras."""
        if self.scene is not None:
            return len(client_folders(Path(self.scene)))
        return 9 if self.observe == "partial" else 10

    def federation(self, clients: int, seed: int) -> Federation:
        return self._own(clients) if self.scene is not None else self._simulated(clients, seed)

    # -- simulated -----------------------------------------------------------------------------------------------------------------

    def _simulated(self, clients: int, seed: int) -> Federation:
        images = self.images()
        what = self.blur or ("motion" if self.observe == "partial" else "mixed")
        kernels = [client_kernel(what, k, self.kernels, seed, self.kernel_size) for k in range(clients)]
        boundary = self.boundary or "circular"
        pad = 0 if boundary == "circular" else max(max(k.shape) // 2 for k in kernels)
        holdings: list[dict[str, Observation]] = [{} for _ in range(clients)]
        for s, (name, sharp) in enumerate(images.items()):
            for k, kernel in enumerate(kernels):
                check_kernel(kernel, f"client {k}", sharp.shape[-2:])
                rng = torch.Generator().manual_seed((seed * 1009 + k) * 10007 + s)
                noise = self.noise * torch.randn(sharp.shape, generator=rng, dtype=torch.float64)
                holdings[k][name] = self._view(circular_blur(sharp, kernel) + noise, kernel, k, clients, pad, boundary)
        scored = {name: inside(x, pad) for name, x in images.items()}
        beyond = pad if boundary == "unknown" else 0  # the scene is solved for beyond what is scored
        return _federation(holdings, scored, beyond, self.observe, what, self.noise)

    def _view(self, blurred: Tensor, kernel: Tensor, k: int, clients: int, pad: int, boundary: str) -> Observation:
        height, width = blurred.shape[-2:]
        box = [pad, pad, height - 2 * pad, width - 2 * pad]
        if self.observe == "partial":
            top, left, rows, columns = field_of_view(box[2], box[3], k, clients, self.patch)
            box = [pad + top, pad + left, rows, columns]
        pixels = blurred[..., box[0] : box[0] + box[2], box[1] : box[1] + box[3]].float().contiguous()
        if boundary in ("taper", "ignore"):
            height, width, box[0], box[1] = height - 2 * pad, width - 2 * pad, box[0] - pad, box[1] - pad
        if self.observe == "complete" and boundary != "unknown":
            pixels = taper(pixels, kernel) if boundary == "taper" else pixels
            return Observation(pixels, kernel, height, width)
        return Observation(pixels, kernel, height, width, box[0], box[1])

    def images(self) -> dict[str, Tensor]:
        """The sharp scenes, (C, H, W) in [0, 255], by name."""
        path = Path(self.image)
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)[: self.limit]
            if not files:
                raise DataError(f"{path} holds no images ({', '.join(SUFFIXES)})")
            return {p.stem: self._fit(read_image(p, self.colour), 256) for p in files}
        if path.is_file():
            return {path.stem: self._fit(read_image(path, self.colour), 0)}
        if path.suffix or len(path.parts) > 1:
            raise DataError(f"there is no image at {path}")
        return {self.image: self._fit(shipped(self.image, self.colour), 256)}

    def _fit(self, x: Tensor, otherwise: int) -> Tensor:
        size = otherwise if self.size is None else self.size
        return x if size == 0 or tuple(x.shape[-2:]) == (size, size) else resize(x, size)

    # -- the user's own --------------------------------------------------------------------------------------------------------------

    def _own(self, clients: int) -> Federation:
        assert self.scene is not None
        folder = Path(self.scene)
        folders = client_folders(folder)
        if clients != len(folders):
            raise DataError(f"{folder} holds the views of {len(folders)} clients, not of {clients}")
        sharp = read_image(folder / "reference.png", self.colour) if (folder / "reference.png").is_file() else None
        raw = [read_view(f, self.colour, sharp is not None) for f in folders]
        size = read_size(folder, raw)
        if sharp is not None and tuple(sharp.shape[-2:]) != size:
            raise DataError(f"reference.png is {_by(sharp)}, the scene is {size[0]} x {size[1]}")
        if self.align:
            from fedlens.data.views import register

            first = [] if sharp is None else [sharp]
            registered = register([*first, *(v.pixels for v in raw)])[len(first) :]
            raw = [replace(v, pixels=x) for v, x in zip(raw, registered, strict=True)]
        if sharp is not None:
            raw = [self._with_kernel(v, sharp) for v in raw]
        boundary = self.boundary or "unknown"
        pad = max(max(v.kernel.shape) // 2 for v in raw) if boundary == "unknown" else 0
        channels = {v.pixels.shape[0] for v in raw}
        if len(channels) > 1:
            raise DataError(f"{folder} mixes grey and colour observations: set colour=grey or colour=rgb")
        holdings = []
        for v in raw:
            check_view(v, size)
            top, left = v.place or (0, 0)
            seen = Observation(v.pixels, v.kernel, size[0] + 2 * pad, size[1] + 2 * pad, top + pad, left + pad)
            if v.place is None and boundary != "unknown":
                pixels = taper(v.pixels, v.kernel) if boundary == "taper" else v.pixels
                seen = Observation(pixels, v.kernel, *size)
            holdings.append({"scene": seen})
        observe = "partial" if any(v.place for v in raw) else "complete"
        check_overlap(raw)
        truth = {"scene": read_image(folder / "truth.png", self.colour)} if (folder / "truth.png").is_file() else {}
        if truth and tuple(truth["scene"].shape[-2:]) != size:
            raise DataError(f"truth.png is {_by(truth['scene'])}, the scene is {size[0]} x {size[1]}")
        # The strengths were published for the kinds of blur of the paper; what a user's kernels are is unknown.
        return _federation(holdings, truth, pad, observe, "motion" if observe == "partial" else "mixed", self.noise)

    def _with_kernel(self, v: OwnView, sharp: Tensor) -> OwnView:
        if v.kernel.numel():
            return v
        from fedlens.data.views import estimate_kernel

        check_place(v, (int(sharp.shape[-2]), int(sharp.shape[-1])))
        top, left = v.place or (0, 0)
        same = sharp[..., top : top + v.pixels.shape[-2], left : left + v.pixels.shape[-1]]
        return replace(v, kernel=estimate_kernel(v.pixels, same, self.kernel_size, v.name))


@dataclass(frozen=True)
class OwnView:
    """One client's folder, as read. An empty kernel is yet to be estimated."""

    name: str
    pixels: Tensor
    kernel: Tensor
    place: tuple[int, int] | None


def _federation(
    holdings: Sequence[dict[str, Observation]], truth: Mapping[str, Tensor], pad: int, observe: str, blur: str, noise: float
) -> Federation:
    scenes = {name: (seen.pixels.shape[0], seen.height, seen.width) for name, seen in holdings[0].items()}
    facts = {"scenes": scenes, "clients": len(holdings), "observe": observe, "blur": blur, "noise": noise, "pad": pad}
    return Federation(holdings, test=dict(truth) or None, facts=facts)


# -- geometry ------------------------------------------------------------------------------------------------------------------------


def field_of_view(height: int, width: int, k: int, clients: int, patch: tuple[int, int] | None = None) -> tuple[int, int, int, int]:
    """(top, left, height, width) of field k of a grid as square as `clients` allows. Fields overlap by about a fifth: 3 x 3 fields of 100
    pixels on 256 begin at 0, 78 and 156, as in the paper."""
    rows = max(r for r in range(1, math.isqrt(clients) + 1) if clients % r == 0)
    columns = clients // rows
    tall, wide = patch or (_span(height, rows), _span(width, columns))
    if tall > height or wide > width:
        raise DataError(f"a view of {tall} x {wide} pixels does not fit into a scene of {height} x {width}")
    if (rows > 1 and tall * rows < height) or (columns > 1 and wide * columns < width):
        raise DataError(f"{rows} x {columns} views of {tall} x {wide} pixels do not overlap on a scene of {height} x {width}")
    row, column = divmod(k, columns)
    return _start(height, tall, row, rows), _start(width, wide, column, columns), tall, wide


def _span(length: int, parts: int) -> int:
    return length if parts == 1 else math.ceil(length * 100 / 256 * 3 / parts)


def _start(length: int, span: int, k: int, parts: int) -> int:
    return 0 if parts == 1 else round((length - span) * k / (parts - 1))


def taper(pixels: Tensor, kernel: Tensor) -> Tensor:
    """Near the edges, blend into the circularly blurred photo, so that opposite edges meet. Weights: the kernel's autocorrelation."""
    weight = torch.ones(1, dtype=torch.float64)
    for axis in (0, 1):
        line, length = kernel.double().sum(1 - axis), pixels.shape[-2 + axis]
        spectrum = torch.fft.fft(line, length - 1).abs().square()
        alike = torch.fft.ifft(spectrum).real
        alike = torch.cat([alike, alike[:1]])
        profile = 1 - alike / alike.max()
        weight = weight * (profile[:, None] if axis == 0 else profile[None, :])
    return (weight * pixels.double() + (1 - weight) * circular_blur(pixels, kernel)).float()


# -- reading and checking ------------------------------------------------------------------------------------------------------------


def shipped(name: str, colour: str) -> Tensor:
    """An image inside scikit-image; those that it would have to download are refused."""
    try:
        from skimage import data
    except ImportError as e:
        raise DataError("the shipped images come with scikit-image: pip install scikit-image, or give image=PATH") from e
    known = (
        "astronaut",
        "brick",
        "camera",
        "cat",
        "chelsea",
        "clock",
        "coffee",
        "coins",
        "grass",
        "gravel",
        "moon",
        "page",
        "rocket",
        "text",
    )
    if name not in known:
        raise DataError(f"there is no image {name!r}: give a path, or one of {', '.join(known)}")
    try:
        return _to_tensor(getattr(data, name)(), colour, name)
    except DataError:
        raise
    except Exception as e:  # scikit-image tries to download what its wheel does not hold
        raise DataError(f"the image {name!r} is not in this installation of scikit-image: try camera or astronaut") from e


def read_image(path: Path, colour: str = "auto") -> Tensor:
    """(C, H, W) in [0, 255]."""
    from PIL import Image, UnidentifiedImageError

    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as opened:
                keep = opened.mode in ("L", "RGB") or opened.mode.startswith("I")
                array = np.asarray(opened if keep else opened.convert("L" if opened.mode in ("1", "LA") else "RGB"))
    except FileNotFoundError as e:
        raise DataError(f"there is no image at {path}") from e
    except (OSError, ValueError, UnidentifiedImageError) as e:
        raise DataError(f"{path} is not an image that can be read: {e}") from e
    return _to_tensor(array, colour, str(path))


def _to_tensor(array: np.ndarray, colour: str, name: str) -> Tensor:
    scale = 255 / 65535 if array.dtype in (np.uint16, np.int32) else 1.0
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)) * scale
    if x.dim() == 3 and x.shape[-1] in (1, 3, 4):
        x = x[..., :3].movedim(-1, 0)
    elif x.dim() == 2:
        x = x[None]
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        raise DataError(f"{name} has the shape {tuple(array.shape)}, which is neither a grey nor an RGB image")
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{name} holds NaN or infinite pixels")
    if colour == "grey" and x.shape[0] == 3:
        x = (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    if colour == "rgb" and x.shape[0] == 1:
        x = x.expand(3, -1, -1)
    return x.contiguous()


def resize(x: Tensor, size: int) -> Tensor:
    """Bicubic with antialiasing, a channel at a time and without rounding, kept inside [0, 255]."""
    from PIL import Image

    planes = [np.asarray(Image.fromarray(p.numpy()).resize((size, size), Image.Resampling.BICUBIC)) for p in x]
    return torch.from_numpy(np.stack(planes)).clamp(0, 255)


def client_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    found = sorted(p for p in folder.iterdir() if p.is_dir() and any((p / f"observation{s}").is_file() for s in (".png", ".npy")))
    if not found:
        raise DataError(f"{folder} has no sub-folder with an observation.png or observation.npy")
    return found


def read_view(folder: Path, colour: str, estimated: bool = False) -> OwnView:
    """`estimated`: a missing kernel is no error."""
    png = folder / "observation.png"
    pixels = read_image(png if png.is_file() else folder / "observation.npy", colour)
    place = None
    if (spot := folder / "position.json").is_file():
        try:
            told = json.loads(spot.read_text())
            place = int(told["top"]), int(told["left"])
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f'{spot} should read {{"top": .., "left": ..}}') from e
    missing = estimated and not any((folder / f"kernel{s}").is_file() for s in KERNELS)
    return OwnView(folder.name, pixels, torch.empty(0, 0) if missing else read_kernel(folder), place)


def read_kernel(folder: Path) -> Tensor:
    """kernel.npy, kernel.png or kernel.mat, scaled to sum 1."""
    found = [folder / f"kernel{s}" for s in KERNELS if (folder / f"kernel{s}").is_file()]
    if not found:
        raise DataError(f"{folder} has no kernel.npy, kernel.png or kernel.mat, and there is no sharp reference.png to estimate it from")
    path = found[0]
    if path.suffix == ".mat":
        kernel = _read_mat(path)
    elif path.suffix == ".png":
        kernel = read_image(path, "grey")[0].double()
    else:
        try:
            kernel = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float64))
        except (OSError, ValueError, TypeError, EOFError) as e:
            raise DataError(f"{path} is not an array of numbers that numpy can read") from e
    check_kernel(kernel, folder.name)
    return kernel / kernel.sum()


def _read_mat(path: Path) -> Tensor:
    """The first matrix of a MATLAB file, old format or HDF5 (which is stored transposed)."""
    try:
        from scipy.io import loadmat

        arrays = [v for k, v in loadmat(path).items() if not k.startswith("__")]
    except NotImplementedError:
        try:
            import h5py
        except ImportError as e:
            raise DataError(f'{path} is a MATLAB 7.3 file: pip install "fedlens[deblur]" reads it') from e
        with h5py.File(path) as f:
            arrays = [np.asarray(v).T for v in f.values() if getattr(v, "ndim", 0) == 2]
    matrices = [a for a in arrays if getattr(a, "ndim", 0) == 2 and np.issubdtype(a.dtype, np.number)]
    if not matrices:
        raise DataError(f"{path} holds no matrix")
    return torch.from_numpy(np.ascontiguousarray(matrices[0], dtype=np.float64))


def read_size(folder: Path, views: Sequence[OwnView]) -> tuple[int, int]:
    if (told := folder / "scene.json").is_file():
        try:
            size = json.loads(told.read_text())
            height, width = int(size["height"]), int(size["width"])
            if min(height, width) < 1:
                raise ValueError
            return height, width
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f'{told} should read {{"height": .., "width": ..}}') from e
    if any(v.place for v in views):
        raise DataError(f"{folder} has views with a position but no scene.json with the scene's height and width")
    first = views[0]
    for v in views[1:]:
        if v.pixels.shape[-2:] != first.pixels.shape[-2:]:
            raise DataError(f"the observations differ in size: {first.name} is {_by(first.pixels)}, {v.name} is {_by(v.pixels)}")
    return int(first.pixels.shape[-2]), int(first.pixels.shape[-1])


def check_kernel(kernel: Tensor, whose: str, size: Sequence[int] | None = None) -> None:
    if kernel.dim() != 2:
        raise DataError(f"the kernel of {whose} is not a matrix: its shape is {tuple(kernel.shape)}")
    if not bool(torch.isfinite(kernel).all()):
        raise DataError(f"the kernel of {whose} holds NaN or infinite values")
    if float(kernel.min()) < 0:
        raise DataError(f"the kernel of {whose} has negative values: light does not subtract")
    if float(kernel.sum()) <= 0:
        raise DataError(f"the kernel of {whose} sums to zero")
    if size is not None and (kernel.shape[0] > size[0] or kernel.shape[1] > size[1]):
        raise DataError(f"the kernel of {whose} ({kernel.shape[0]} x {kernel.shape[1]}) is larger than the image ({size[0]} x {size[1]})")


def check_view(v: OwnView, size: tuple[int, int]) -> None:
    check_kernel(v.kernel, v.name, v.pixels.shape[-2:])
    check_place(v, size)


def check_place(v: OwnView, size: tuple[int, int]) -> None:
    if v.place is None:
        if tuple(v.pixels.shape[-2:]) != size:
            raise DataError(f"{v.name} has no position.json, so it should be {size[0]} x {size[1]} like the scene, not {_by(v.pixels)}")
        return
    top, left = v.place
    if top < 0 or left < 0 or top + v.pixels.shape[-2] > size[0] or left + v.pixels.shape[-1] > size[1]:
        raise DataError(f"the view of {v.name} ({_by(v.pixels)} at {top}, {left}) reaches outside the scene of {size[0]} x {size[1]}")


def check_overlap(views: Sequence[OwnView]) -> None:
    """A view that meets no other one has nothing to agree on."""
    boxes = [(*v.place, v.place[0] + v.pixels.shape[-2], v.place[1] + v.pixels.shape[-1]) for v in views if v.place]
    if len(boxes) < len(views) or len(views) < 2:
        return  # a complete view meets them all
    for v, a in zip(views, boxes, strict=True):
        if not any(b is not a and a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in boxes):
            raise DataError(f"the view of {v.name} overlaps no other view, so there is nothing to agree on")


def _by(x: Any) -> str:
    return f"{x.shape[-2]} x {x.shape[-1]}"

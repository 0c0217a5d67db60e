"""A super-resolution network on a user's films: read, enlarge, write, a window at a time. What was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from fedlens.core.picture import magnify
from fedlens.core.training import find_device
from fedlens.core.weights import load_weights, result_file
from fedlens.data.paths import clips_below, frame_files, is_image, is_video
from fedlens.data.source import DataError
from fedlens.data.video.degrade import enlarge
from fedlens.data.video.files import FileFrames, open_frames
from fedlens.data.video.frames import Stretch
from fedlens.data.video.writer import WRITTEN, writer
from fedlens.models.clips import ClipModel
from fedlens.tasks.tiles import Tiles

if TYPE_CHECKING:
    from fedlens.tasks.super_resolution import SuperResolution

QUALITY = 16  # of H.264, as its crf; 0 is best, 51 smallest
SHARE = 0.5  # of the memory that is free
OPTIONS = (
    "quality", "device", "progress", "tile", "margin", "window", "overlap", "half", "threads",
    "preview", "noise",
)  # fmt: skip
DEEP, SHALLOW = 65535, 255  # levels


def upscale_file(
    task: SuperResolution, folder: Path, source: Path, target: Path, options: Mapping[str, Any]
) -> str:
    """folder: of the run, or a file of weights. source: a video file, a picture, a folder of
    frames, or a folder of several of these."""
    check_values(options)
    several = source.is_dir() and not frame_files(source)
    if "quality" in options and not several and not is_video(target):  # it would be ignored
        raise ValueError(f"quality is for video files, and {target.name} is none: leave it out")
    model = load_weights(task.model(), result_file(folder)).eval()
    if "noise" in options:
        if not isinstance(model, ClipModel) or model.noise is None:
            raise ValueError(f"{type(model).__name__} with these weights is not told any noise")
        model.noise = float(options["noise"])
    # they change no figure, only where and how fast it is made
    plan = {k: v for k, v in options.items() if k not in ("device", "progress", "threads")}
    plan["weights"] = network_digest(model)
    ready = made_ready(model, str(options.get("device", "cpu")))
    with torch_threads(options.get("threads")), reduced_precision(ready, options.get("half")):
        if several:
            return upscale_all(task, ready, source, target, options, plan)
        return upscale(task, ready, source, target, options, plan)


def check_values(options: Mapping[str, Any]) -> None:
    quality = options.get("quality", QUALITY)
    if quality not in range(52) or isinstance(quality, bool):
        raise ValueError(
            f"quality is a whole number from 0 (best) to 51 (smallest file), not {quality}"
        )
    for name, least in (("tile", 8), ("margin", 0), ("window", 1), ("overlap", 0), ("threads", 1)):
        value = options.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is a whole number, at least {least}, not {value}")
    if not isinstance(options.get("half", False), bool):
        raise ValueError(f"half is true or false, not {options['half']}")
    noise = options.get("noise", 0)
    if not isinstance(noise, (int, float)) or isinstance(noise, bool) or not 0 <= noise <= 255:
        raise ValueError(f"noise is a number of levels from 0 to 255, not {noise}")
    seconds_of(options.get("preview"))


def seconds_of(text: Any) -> float | None:
    """ "3s" or 3 as seconds."""
    if text is None:
        return None
    try:
        seconds = float(str(text).removesuffix("s"))
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e6:
        raise ValueError(f"preview is a number of seconds, such as 3s, not {text}")
    return seconds


# -- the network -----------------------------------------------------------------------------------


def network_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def made_ready(model: nn.Module, device: str) -> nn.Module:
    """On its device, laid out for speed, and without tiles of its own: `Tiles` cuts."""
    if getattr(model, "channels_last", False):
        # a type checker sees no memory_format here
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(model, ClipModel):
        model.tile = None
    return model.to(find_device(device))


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reduced_precision(model: nn.Module, wanted: bool | None) -> Any:
    if not wanted:
        return nullcontext()
    kind = place_of(model).type
    return torch.autocast(kind, torch.bfloat16 if kind == "cpu" else torch.float16)


def place_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def free_memory(place: torch.device) -> int:
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    return int(psutil.virtual_memory().available)


def cut_for(
    task: SuperResolution, model: nn.Module, size: tuple[int, int], options: Mapping[str, Any]
) -> Tiles:
    """The options, else what the task says, else what fits into a share of the free memory."""
    given = {k: options[k] for k in ("margin", "overlap") if k in options}
    return replace(task.tiles, **given).fitted(
        model,
        size,
        int(SHARE * free_memory(place_of(model))),
        options.get("tile", task.tile),
        options.get("window", task.window),
    )


# -- films -----------------------------------------------------------------------------------------


def upscale_all(
    task: SuperResolution,
    model: nn.Module,
    source: Path,
    target: Path,
    options: Mapping[str, Any],
    plan: Mapping[str, Any],
) -> str:
    """Every film below a folder, each to the same place below the target; those that are there
    already are left alone.
    """
    if is_video(target) or is_image(target) or target.is_file():
        raise DataError(f"{source} holds several films: {target} must be a folder")
    films = clips_below(source)
    places = [target / film.relative_to(source) for film in films]
    places = [
        p.with_suffix(".mp4") if is_video(p) and p.suffix.lower() not in WRITTEN else p
        for p in places
    ]
    if twice := [p for p in places if places.count(p) > 1]:
        raise DataError(f"two films in {source} would both become {twice[0]}")
    there = 0
    for film, place in zip(films, places, strict=True):
        if place.exists() and not (place / ".plan").exists():
            there += 1
        else:
            upscale(task, model, film, place, options, plan)
    said = f"{len(films) - there} films of {source} are in {target}"
    return said + (f"; {there} were there already" if there else "")


def upscale(
    task: SuperResolution,
    model: nn.Module,
    source: Path,
    target: Path,
    options: Mapping[str, Any],
    plan: Mapping[str, Any],
) -> str:
    """One film. A target with a video suffix becomes a file (H.264), anything else a folder of
    PNGs; what is said about it.
    """
    frames, notes = open_frames(source), []
    deep = isinstance(frames, FileFrames) and frames.bits > 8
    if isinstance(frames, FileFrames) and deep:
        frames.deep = is_video(target)
        notes.append(
            f"its {frames.bits} bits a colour "
            + ("were kept as 10" if frames.deep else "became 8, as pictures are written with")
        )
    levels = DEEP if deep and is_video(target) else SHALLOW
    shown = seconds_of(options.get("preview"))
    if shown:
        count = max(1, round(shown * float(frames.rate or 25)))
        frames = Stretch(frames, count, max(0, (len(frames) - count) // 2))
        notes.append("without sound")
    tiles = cut_for(task, model, frames.size, options)
    size = (frames.size[0] * tiles.scale, frames.size[1] * tiles.scale)
    progress, quality = options.get("progress", True), options.get("quality", QUALITY)

    def read(low: int, high: int) -> Tensor:
        return frames.read(low, high).float() / levels

    whole = json.dumps({**plan, **identity(source), "frames": len(frames)}, sort_keys=True)
    with writer(target, frames, size, quality, whole, levels == DEEP) as write:
        began = write.done
        with progress_bar(len(frames), began, bool(progress)) as done:
            try:
                for part in tiles.run(
                    model, read, len(frames), levels=levels, start=began, done=done
                ):
                    write(part)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"stopped in the middle of {target}: the same command goes on from there"
                ) from None
    if began:
        notes.insert(0, f"the first {began} were there already")
    if shown:
        picture = compare_picture(task, model, tiles, read, len(frames), target)
        notes.append(f"before and after: {picture}")
    (h, w), (height, width) = frames.size, size
    said = f"{len(frames)} frames of {w}x{h} became {width}x{height} in {target}"
    return "; ".join([said, *notes])


def identity(source: Path) -> dict[str, Any]:
    facts = source.stat()
    return {"source": str(source.resolve()), "bytes": facts.st_size, "time": facts.st_mtime_ns}


def compare_picture(
    task: SuperResolution,
    model: nn.Module,
    tiles: Tiles,
    read: Callable[[int, int], Tensor],
    length: int,
    target: Path,
) -> Path:
    """The part with most detail of the middle frame: by interpolation, by the network, and four
    times what the network changed.
    """
    from PIL import Image, ImageDraw

    from fedlens.tasks.super_resolution import busiest

    k = length // 2
    before, after = tiles.context(model)
    low, high = max(0, k - before), min(length, k + after + 1)
    clip = read(low, high)
    ours = torch.cat(
        list(
            replace(tiles, window=len(clip)).run(
                model, lambda a, b: clip[a:b], len(clip), levels=None
            )
        )
    )[k - low]
    plain = enlarge(clip[k - low], task.scale).clamp(0, 1)
    rows, columns = busiest(ours, 200)
    gain = (ours - plain).mul(4).add(0.5).clamp(0, 1)
    panels = [magnify(p[..., rows, columns], 2) for p in (plain, ours, gain)]
    names = ["bicubic" if task.scale > 1 else "as it was", type(model).__name__, "change x4"]
    wall = torch.cat([torch.cat([p, p.new_ones(3, p.shape[1], 4)], 2) for p in panels], 2)
    wall = torch.cat([wall.new_ones(3, 18, wall.shape[2]), wall], 1)
    levels = (wall.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(np.ascontiguousarray(levels))
    for i, name in enumerate(names):
        ImageDraw.Draw(image).text((i * (panels[0].shape[2] + 4) + 4, 3), name, fill=(0, 0, 0))
    place = target.with_name(f"{target.stem}-compared.png")
    place.parent.mkdir(parents=True, exist_ok=True)
    image.save(place)
    return place


@contextmanager
def progress_bar(total: int, done: int, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Frames done, time left; on stderr, so that nothing else is disturbed."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        job = progress.add_task("frames", total=total, completed=done)
        yield lambda n: progress.advance(job, n)

"""A trained super-resolution network on a user's film: read, enlarge, write, a window at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedlens.core.training import find_device
from fedlens.core.weights import load_weights, result_file
from fedlens.data.paths import is_video
from fedlens.data.video.files import open_frames
from fedlens.data.video.frames import Frames
from fedlens.data.video.writer import writer
from fedlens.tasks.tiles import Tiles

if TYPE_CHECKING:
    from fedlens.tasks.super_resolution import SuperResolution

QUALITY = 16  # of H.264, as its crf; 0 is best, 51 smallest


def upscale_file(
    task: SuperResolution, folder: Path, source: Path, target: Path, options: Mapping[str, Any]
) -> str:
    """folder: of the run, or a file of weights. source: a video file or a folder of frames."""
    quality, device = options.get("quality", QUALITY), options.get("device", "cpu")
    if quality not in range(52):
        raise ValueError(
            f"quality is a whole number from 0 (best) to 51 (smallest file), not {quality}"
        )
    if "quality" in options and not is_video(target):  # the writer would ignore it
        raise ValueError(f"quality is for video files, and {target.name} is none: leave it out")
    model = load_weights(task.model(), result_file(folder)).eval()
    return upscale(
        model.to(find_device(str(device))),
        open_frames(source),
        target,
        task.tiles,
        quality,
        options.get("progress", True),
    )


def upscale(
    model: nn.Module,
    frames: Frames,
    target: Path,
    tiles: Tiles,
    quality: int = QUALITY,
    progress: bool = True,
) -> str:
    """Read, enlarge, write, a window at a time. A target with a video suffix becomes a file
    (H.264), anything else a folder of PNGs.
    """
    h, w = (n * tiles.scale for n in frames.size)
    bar = progress_bar(len(frames), progress)
    with writer(target, frames, (h, w), quality) as write, bar as done:
        for part in tiles.run(
            model, lambda a, b: frames.read(a, b).float() / 255, len(frames), done=done
        ):
            write(part)
    return f"{len(frames)} frames of {frames.size[1]}x{frames.size[0]} became {w}x{h} in {target}"


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Frames done, time left; on stderr, so that nothing else is disturbed."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        job = progress.add_task("frames", total=total)
        yield lambda n: progress.advance(job, n)

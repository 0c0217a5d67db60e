"""Speed and memory of enlarging a film, through the whole path: decode, network, encode.

    python benchmarks/upscale.py                       # what each measure brings, in one run
    python benchmarks/upscale.py --only memory         # a 720p film of 60 frames, x2

Steps, each on top of the one before, each in a process of its own with one thread: `before` (all
frames of a window at once, fixed tiles and context), `frames` (one by one), `keep` (malloc keeps
what is freed), `layout` (channels last), `context` (only the context that a network looks at, tiles
that fit the memory): what `fedlens apply` does. `loop` is the plain one: windows of 16 frames
straight through the network, no context. Ends by printing one JSON object. Claims: `context` takes
at most 1/1.5 of the time of `before` and no more than `loop`, and its PSNR against the true film is
within 0.01 dB; a 720p clip of 60 frames becomes twice as large within 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core import heap
from fedlens.core.client import generator
from fedlens.core.message import Message
from fedlens.data.video.degrade import degrade
from fedlens.data.video.files import open_frames
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.moving_textures import moving_texture
from fedlens.data.video.writer import writer
from fedlens.metrics.frames import frame_psnr
from fedlens.tasks.apply import upscaling
from fedlens.tasks.super_resolution import SuperResolution

STEPS = ("loop", "before", "frames", "keep", "layout", "context")
SCALE, SIZE, REPEATED = 4, (256, 340), 4  # of the film that is enlarged
LENGTHS = {"light": 32, "rlfn_ntire": 8}  # frames


class AllAtOnce(nn.Module):
    """Networks work frame by frame where no gradient can be asked for: here it could be."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.model(x)  # type: ignore[no-any-return]


class Unmarked(nn.Module):
    """Without what a network says about itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def truth(length: int) -> Tensor:
    few = moving_texture(REPEATED, *(n * SCALE for n in SIZE), generator(0), generator(1))
    return few[torch.arange(length) % REPEATED]


def make_film(path: Path, clip: Tensor) -> None:
    like = ArrayFrames(clip[:1], rate=Fraction(25))
    with writer(path, like, (clip.shape[2], clip.shape[3]), quality=4) as write:
        write(clip)


def network(task: SuperResolution) -> nn.Module:
    """Random, so that every layer shows in the result."""
    torch.manual_seed(0)
    model = task.model()
    for name, p in model.named_parameters():
        if "upsample.last.weight" in name:
            nn.init.normal_(p, std=0.01)
    return model


def measure_step(name: str, step: str, folder: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    level = STEPS.index(step)
    task = SuperResolution(name, scale=SCALE)
    made_ready = upscaling.made_ready
    if level >= STEPS.index("keep"):
        heap.keep()

    def ready(model: nn.Module, device: str) -> nn.Module:
        if level >= STEPS.index("layout"):
            model = made_ready(model, device)
        if level < STEPS.index("frames"):
            model = AllAtOnce(model)
        return model if step == "context" else Unmarked(model)

    upscaling.made_ready = ready
    options: dict[str, Any] = {"progress": False, "threads": 1}
    if step == "loop":
        options |= {"tile": 4096, "window": 16, "overlap": 0}
    elif step != "context":
        options |= {"tile": 256, "window": 16}
    target = folder / f"{name}-{step}.mp4"
    wall, cpu = time.perf_counter(), time.process_time()
    task.apply(folder / name, folder / f"{name}.mp4", target, **options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    made = open_frames(target).read(0, 4).float() / 255
    psnr = float(frame_psnr(made, truth(4).float() / 255).mean())
    frames = LENGTHS[name]
    return {
        "frames_per_second": round(frames / wall, 3),
        "processor_seconds": round(cpu / frames, 4),
        "psnr": round(psnr, 4),
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def compare_steps() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, length in LENGTHS.items():
            task = SuperResolution(name, scale=SCALE)
            (folder / name).mkdir()
            task.save(Message({"model": network(task).state_dict()}), folder / name)
            small = (degrade(truth(REPEATED), SCALE) * 255).byte()
            make_film(folder / f"{name}.mp4", small[torch.arange(length) % REPEATED])
            rows: dict[str, Any] = {}
            for step in STEPS:
                command = [sys.executable, __file__, "--step", name, step, scratch]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows[step] = json.loads(done.stdout)
                print(name, step, rows[step], file=sys.stderr, flush=True)
            speed = {step: row["frames_per_second"] for step, row in rows.items()}
            found[name] = {
                "steps": rows,
                "speed_over_before": round(speed["context"] / speed["before"], 2),
                "speed_over_loop": round(speed["context"] / speed["loop"], 2),
                "psnr_change": round(rows["context"]["psnr"] - rows["before"]["psnr"], 4),
            }
    return found


def large_film() -> dict[str, Any]:
    heap.keep()
    torch.set_num_threads(1)
    task = SuperResolution("light", scale=2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task.save(Message({"model": task.model().state_dict()}), folder)
        few = moving_texture(4, 720, 1280, generator(0), generator(1))
        like = ArrayFrames(few[:1], rate=Fraction(25))
        with writer(folder / "small.mp4", like, (720, 1280)) as write:
            for k in range(60):
                write(few[k % 4][None])
        del few, like
        began = time.perf_counter()
        said = task.apply(folder, folder / "small.mp4", folder / "large.mp4", progress=False)
        seconds = time.perf_counter() - began
    return {"what": said.split(" in ")[0], "peak_gb": round(peak(), 2), "seconds": round(seconds)}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--only", choices=("speed", "memory"), default="speed")
    parse.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parse.parse_args()
    if options.step:
        name, step, folder = options.step
        print(json.dumps(measure_step(name, step, Path(folder))))
    else:
        print(json.dumps(large_film() if options.only == "memory" else compare_steps(), indent=1))


if __name__ == "__main__":
    main()

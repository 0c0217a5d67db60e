"""Memory and time of enlarging a film with the light network, through the whole path: decode,
tiles, encode.

    python benchmarks/upscale.py [--frames 60] [--height 720 --width 1280] [--scale 2] [--threads 1]

Ends by printing one JSON object. Claim: a 720p clip of 60 frames becomes twice as large within 4
GB. The peak is that of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import torch

from fedlens.core.client import generator
from fedlens.core.message import Message
from fedlens.data.video.files import open_frames
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.moving_textures import moving_texture
from fedlens.data.video.writer import writer
from fedlens.tasks.super_resolution import SuperResolution


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("frames", 60),
        ("height", 720),
        ("width", 1280),
        ("scale", 2),
        ("threads", 1),
    ):
        parse.add_argument(f"--{name}", type=int, default=default)
    options = parse.parse_args()
    torch.set_num_threads(options.threads)
    task = SuperResolution("light", scale=options.scale)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task.save(Message({"model": task.model().state_dict()}), folder)
        size = (options.height, options.width)
        few = moving_texture(4, *size, generator(0), generator(1))
        like = ArrayFrames(few[:1].expand(options.frames, -1, -1, -1), rate=Fraction(25))
        with writer(folder / "small.mp4", like, size) as write:
            for k in range(options.frames):
                write(few[k % 4][None])
        del few, like
        began = time.perf_counter()
        told = task.apply(folder, folder / "small.mp4", folder / "large.mp4", progress=False)
        seconds = time.perf_counter() - began
        assert len(open_frames(folder / "large.mp4")) == options.frames
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(
        json.dumps(
            {
                "what": told.split(" in ")[0],
                "peak_gb": round(peak, 2),
                "seconds": round(seconds, 1),
                "threads": options.threads,
            }
        )
    )


if __name__ == "__main__":
    main()

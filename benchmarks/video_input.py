"""How fast videos become training examples: decoded, shrunk, cut and augmented, against plain
decoding with PyAV.

    python benchmarks/video_input.py [--root jhmdb21] [--videos 120] [--repeats 5] [--task CtP]

Ends by printing one JSON object. Claims: one epoch of examples costs at most 1/0.8 of decoding the
same videos with PyAV and nothing else (open, decode all frames, RGB arrays, one thread), and a
second epoch, from the cache, at least five times less than the first. Times are processor seconds
of this process, one core: the clock on the wall shows what else a shared machine is doing. Epochs
and plain decoding take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import summary

from fedlens.core.client import generator
from fedlens.data.video.files import load_av
from fedlens.data.video.video_set import RetrievalTest
from fedlens.data.video.videos import Videos
from fedlens.tasks.ctp import CtP
from fedlens.tasks.speed import Speed
from fedlens.tasks.vcop import VCOP
from fedlens.tasks.video_clips import Examples


def plain(paths: list[Path]) -> None:
    av = load_av()
    for path in paths:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"
            for frame in container.decode(stream):
                frame.to_ndarray(format="rgb24")


def epoch(data: Examples, seed: int) -> None:
    rng = generator(seed)
    for index in torch.split(torch.randperm(len(data), generator=rng), 8):
        data.batch(index, rng)


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--root", default="jhmdb21")
    parse.add_argument("--videos", type=int, default=120)
    parse.add_argument("--repeats", type=int, default=5)
    parse.add_argument("--frames", type=int, default=8)
    parse.add_argument("--size", type=int, default=32)
    parse.add_argument("--task", choices=("CtP", "VCOP", "Speed"), default="CtP")
    options = parse.parse_args()
    torch.set_num_threads(1)
    common = {"backbone": "r3d10s", "frames": options.frames, "size": options.size}
    task = {
        "CtP": lambda: CtP(**common, stride=3),
        "VCOP": lambda: VCOP(**common, gap=2),
        "Speed": lambda: Speed(**common),
    }[options.task]()
    first, second, bare = [], [], []
    for repeat in range(options.repeats):
        # a cache of its own
        search = (
            Videos(root=options.root, side=round(options.size * 9 / 7), limit=options.videos)
            .federation(1, 0)
            .test
        )
        assert isinstance(search, RetrievalTest)
        videos = search.gallery.at_least(task.least)
        data = Examples(videos, task)
        paths = [clip.frames.path for clip in videos.clips]  # type: ignore[attr-defined]
        for clip in videos.clips:
            clip.frames.opened.files.clear()  # type: ignore[attr-defined]
        bare.append(seconds(lambda p=paths: plain(p)))  # type: ignore[misc]
        first.append(seconds(lambda d=data, r=repeat: epoch(d, r)))  # type: ignore[misc]
        second.append(seconds(lambda d=data, r=repeat: epoch(d, r + 100)))  # type: ignore[misc]
    n = len(videos)
    times = {
        name: summary(values)
        for name, values in (("plain", bare), ("first", first), ("second", second))
    }
    out = {
        "what": (
            f"{options.task} examples of {options.frames} frames {options.size}x{options.size} from"
            f" {n} videos of {options.root}"
        ),
        "videos_per_second_per_core": {
            name: round(n / t["median"], 1) for name, t in times.items()
        },
        "seconds": times,
        "first_over_plain": round(times["plain"]["median"] / times["first"]["median"], 2),
        "second_over_first": round(times["first"]["median"] / times["second"]["median"], 2),
    }
    out["passed"] = out["first_over_plain"] >= 0.8 and out["second_over_first"] >= 5  # type: ignore[operator]
    print(json.dumps(out))


if __name__ == "__main__":
    main()

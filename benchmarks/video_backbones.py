"""A training step of the video backbones: as FedLens runs them (channels last) against the same
modules in torchvision's order.

    python benchmarks/video_backbones.py [--repeats 8] [--large]

Both take turns in one run, on one thread; the least processor time of each counts, so that waiting
for a core does not. Ends by printing one JSON object. Claim: at least 1.2 times as fast for the
small networks, no slower for R3D-18 (--large adds it: half a minute).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measure import best
from torch import Tensor, nn

from fedlens.models.video import VideoBackbone, backbone

CASES = {"r3d10s": (8, 3, 8, 56, 56), "r3d10": (8, 3, 8, 56, 56), "r3d10s small": (8, 3, 8, 32, 32)}
LARGE = {"r3d18": (1, 3, 16, 112, 112)}


def plain(net: VideoBackbone, x: Tensor) -> Tensor:
    """The same layers in the usual order of memory."""
    return nn.Sequential(net.stem, net.layer1, net.layer2, net.layer3, net.layer4)(
        (x - net.mean) / net.std
    )


def step(forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def job() -> None:
        forward(x).square().mean().backward()  # type: ignore[no-untyped-call]

    return job


def main() -> None:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--repeats", type=int, default=8)
    parse.add_argument("--large", action="store_true")
    options = parse.parse_args()
    torch.set_num_threads(1)
    out: dict[str, dict[str, float]] = {}
    for name, shape in (CASES | (LARGE if options.large else {})).items():
        net = backbone(name.split()[0])
        assert isinstance(net, VideoBackbone)
        x = torch.rand(shape)
        jobs = {
            "fedlens": step(net.forward_features, x),
            "plain": step(lambda x, net=net: plain(net, x), x),
        }
        took = best(jobs, options.repeats if name in CASES else 2)
        out[name] = {
            **{k: round(v, 4) for k, v in took.items()},
            "times_as_fast": round(took["plain"] / took["fedlens"], 2),
        }
        print(name, out[name], flush=True)
    print(json.dumps(out))


if __name__ == "__main__":
    main()

"""Claim: the official VRT, RVRT and IART train on a 1x6x3x64x64 clip in 12, 8 and 8 GB, and enlarge
a 180x320 clip of 10 frames in 8 GB.

    python benchmarks/vsr_networks.py [--networks vrt,rvrt,iart] [--parts train,forward,enlarge]
    [--official CHECKOUT] [--keep]

Every figure comes from a process of its own; memory is the peak resident size of that process.
CHECKOUT is a folder with the public VRT code (JingyunLiang/VRT, needs einops): then both networks,
with the same weights, take turns on the same clip. `--tiles N` stops enlarging after N tiles and
extrapolates its time; all tiles have the same size. `--keep` writes what was found to
src/fedlens/models/measured.json, from which `fedlens list models` takes its figures; part `count`
only counts parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "src" / "fedlens" / "models" / "measured.json"
LIMITS = {"vrt": 12.0, "rvrt": 8.0, "iart": 8.0}  # GB for a training step
ENLARGE_LIMIT = 8.0
OFFICIAL = {
    "window_size": [6, 8, 8],
    "img_size": [6, 64, 64],
    "pa_frames": 2,
    "deformable_groups": 12,
}


def main() -> None:
    args = parse()
    if args.measure:
        print(json.dumps(measure(args, args.measure)))
        return
    result: dict[str, Any] = {"threads": args.threads}
    for network in args.networks.split(","):
        found = {part: child(network, part) for part in args.parts.split(",")}
        if "train" in found and network in LIMITS:
            found["train"]["of_limit"] = round(found["train"]["peak_gb"] / LIMITS[network], 3)
        if "enlarge" in found:
            found["enlarge"]["of_limit"] = round(found["enlarge"]["peak_gb"] / ENLARGE_LIMIT, 3)
        result[network] = found
        if args.keep:
            keep(network, found, args)
    if args.official:
        result["vrt_against_official"] = child("vrt", "compare")
    print(json.dumps(result, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="vrt,rvrt,iart")
    parser.add_argument("--parts", default="train,forward,enlarge")
    parser.add_argument("--official", type=Path, help="a checkout of the public VRT code")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--size", type=int, default=64, help="of the clip that is trained on and compared on"
    )
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument(
        "--repeat", type=int, default=3, help="turns of each network in the comparison"
    )
    parser.add_argument("--tiles", type=int, help="stop enlarging after so many tiles")
    parser.add_argument("--keep", action="store_true", help="for fedlens list models")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def keep(network: str, found: dict[str, Any], args: argparse.Namespace) -> None:
    """Beside what is known of other networks and parts."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    mine = kept.setdefault(network.lower(), {})
    commit = subprocess.run(
        ["git", "-C", str(KEPT.parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    about = {"threads": args.threads, "commit": commit.stdout.strip()}
    for part, values in found.items():
        mine["parameters"] = values.pop("parameters")
        if part in ("train", "forward"):
            mine[part] = {"clip": [1, args.frames, 3, args.size, args.size], **about, **values}
        elif part == "enlarge":
            mine[part] = {"clip": [1, 10, 3, 180, 320], **about, **values}
    KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def child(network: str, part: str) -> dict[str, Any]:
    """A fresh process, so that its peak memory is that of this part alone."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", f"{network}:{part}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{network} {part} failed with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{network} {part}: {found}", file=sys.stderr, flush=True)
    return found


def measure(args: argparse.Namespace, what: str) -> dict[str, Any]:
    import torch

    from fedlens.models.by_name import find_network

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    network, part = what.split(":")
    model = find_network(network)()
    clip = torch.rand(1, args.frames, 3, args.size, args.size)
    if part == "compare":
        return compare(args, model, clip)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if part == "train":
        found |= train(model, clip)
    elif part == "count":
        return found
    elif part == "forward":
        with torch.no_grad():
            found["seconds"] = timed(lambda: model.eval()(clip))
    else:
        found |= enlarge(model.eval(), torch.rand(1, 10, 3, 180, 320), args.tiles)
    found["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
    return found


def timed(f: Any) -> float:
    began = time.perf_counter()
    f()
    return round(time.perf_counter() - began, 2)


def train(model: Any, clip: Any) -> dict[str, Any]:
    """One step: forward, backward and Adam."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    kept: dict[str, Any] = {}

    def forward() -> None:
        out = model.train()(clip)
        kept["loss"] = (out - torch.rand_like(out)).square().add(1e-9).sqrt().mean()

    return {
        "forward_seconds": timed(forward),
        "backward_seconds": timed(lambda: kept["loss"].backward()),
        "adam_seconds": timed(optimizer.step),
    }


class Enough(Exception):
    """So many tiles were asked for."""


def enlarge(model: Any, clip: Any, tiles: int | None) -> dict[str, Any]:
    import torch

    from fedlens.models.clips import spans

    sizes = zip((clip.shape[1], *clip.shape[3:]), model.tile, model.overlap)
    total = 1
    for n, tile, overlap in sizes:
        total *= len(list(spans(n, tile, overlap)))
    whole = model.restore
    done: list[Any] = []

    def counted(part: Any) -> Any:
        if tiles and len(done) == tiles:
            raise Enough
        done.append(part.shape)
        return whole(part)

    model.restore = counted

    def run() -> None:
        try:
            with torch.no_grad():
                model(clip)
        except Enough:
            pass

    seconds = timed(run)
    return {
        "tiles": total,
        "tiles_measured": len(done),
        "seconds": round(seconds * total / len(done), 1),
    }


def compare(args: argparse.Namespace, model: Any, clip: Any) -> dict[str, Any]:
    """Both with the same weights, taking turns, so that a busy machine is busy for both."""
    import torch

    spec = importlib.util.spec_from_file_location(
        "official_vrt", args.official / "models" / "network_vrt.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    official = module.VRT(upscale=4, **OFFICIAL).eval()
    model.load_state_dict(official.state_dict(), strict=True)
    ours, theirs, gap = [], [], 0.0
    with torch.no_grad():
        try:
            official(clip[..., :32, :32])
            small = "runs"
        except RuntimeError as e:
            small = f"fails: {e}"
        for _ in range(args.repeat):
            kept: dict[str, Any] = {}
            theirs.append(timed(lambda: kept.update(a=official(clip))))  # noqa: B023
            ours.append(timed(lambda: kept.update(b=model.eval()(clip))))  # noqa: B023
            gap = max(gap, float((kept["a"] - kept["b"]).abs().max()))
    return {
        "ours_seconds": ours,
        "official_seconds": theirs,
        "time_ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "largest_difference": gap,
        "official_at_32_pixels": small,
    }


if __name__ == "__main__":
    main()

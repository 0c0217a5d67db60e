"""A round of FedDeblur through the real simulator, against a plain implementation and against bare
Fourier transforms.

    python benchmarks/deblur.py [--blocks N] [--skip-large]

Ten clients, 256 x 256, total variation, complete views, one thread. The plain form is Algorithm 1
as it stands in the paper: complex fft2 and ifft2 per client and round, float64, the same FFT
library. The third opponent is ten looped float32 rfft2 + irfft2 pairs and nothing else. All three
take turns in blocks within one process, so that a busy machine is busy for all; the headline
compares the quickest round of each, since noise only ever adds, and medians stand beside it. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedlens.core.federation import Federation
from fedlens.core.rounds import Progress, run
from fedlens.deblur import FedDeblur
from fedlens.deblur.scenes import Scene
from fedlens.deblur.task import Deblurring, score
from fedlens.engines.simulator import Simulator

CLIENTS, SIZE = 10, 256


def plain(federation: Federation, eta: float, rho: float) -> Iterator[Tensor]:
    """Algorithm 1, options 2 and A, line by line; yields x after every round."""
    views = [held["camera"] for held in federation.holdings]
    n, (height, width) = len(views), (views[0].height, views[0].width)
    kernels = []
    for v in views:
        padded = torch.zeros(height, width, dtype=torch.float64)
        padded[: v.kernel.shape[0], : v.kernel.shape[1]] = v.kernel
        kernels.append(
            torch.fft.fft2(
                padded.roll((-(v.kernel.shape[0] // 2), -(v.kernel.shape[1] // 2)), (0, 1))
            )
        )
    fixed = [
        2 / n * h.conj() * torch.fft.fft2(v.pixels[0].double())
        for h, v in zip(kernels, views, strict=True)
    ]
    below = [2 / n * h.abs() ** 2 + rho for h in kernels]
    delta = torch.zeros(height, width, dtype=torch.float64)
    delta[0, 0] = 1
    gram = (
        torch.fft.fft2(delta - delta.roll(1, 0)).abs() ** 2
        + torch.fft.fft2(delta - delta.roll(1, 1)).abs() ** 2
    )
    x = torch.full((height, width), 127.5, dtype=torch.float64)
    local, dual = [x] * n, [torch.zeros_like(x)] * n
    mu = torch.zeros(2, height, width, dtype=torch.float64)
    while True:
        for k in range(n):
            local[k] = torch.fft.ifft2(
                (fixed[k] + torch.fft.fft2(rho * x - dual[k])) / below[k]
            ).real
            dual[k] = dual[k] + rho * (local[k] - x)
        w = sum(local[k] + dual[k] / rho for k in range(n)) / n
        a = torch.stack([x - x.roll(1, 1), x - x.roll(1, 0)]) - mu / rho
        size = a.square().sum(0).sqrt()
        z = a * (size - eta / rho).clamp_min(0) / size.clamp_min(1e-6)
        q = z + mu / rho
        back = q[0] - q[0].roll(-1, 1) + q[1] - q[1].roll(-1, 0)
        x = torch.fft.ifft2(torch.fft.fft2(n * w + back) / (n + gram)).real
        mu = mu + rho * (z - torch.stack([x - x.roll(1, 1), x - x.roll(1, 0)]))
        yield x


def pairs(images: list[Tensor]) -> float:
    began = time.perf_counter()
    for x in images:
        torch.fft.irfft2(torch.fft.rfft2(x), s=(SIZE, SIZE))
    return time.perf_counter() - began


def rounds(algorithm: Any, engine: Any, progress: Progress, upto: int) -> list[float]:
    """Seconds of each round, the whole of it: broadcast, every client, the sum, the server."""
    times: list[float] = []
    run(
        algorithm, engine, upto, progress=progress, after_round=lambda p, r: times.append(r.seconds)
    )
    return times


def per_pixel(size: int, upto: int) -> float:
    federation = Scene(size=size).federation(CLIENTS, 0)
    algorithm = FedDeblur(tol=0.0).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        return min(rounds(algorithm, engine, Progress(algorithm.init()), upto)[1:]) / size**2


def partial_round(size: int, clients: int, crop: bool, upto: int = 4) -> float:
    """Seconds of the quickest round with partial views."""
    federation = Scene(size=size, observe="partial").federation(clients, 0)
    algorithm = FedDeblur(tol=0.0, crop=crop).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        return min(rounds(algorithm, engine, Progress(algorithm.init()), upto)[1:])


def growth() -> dict[str, float]:
    """A crop against the whole scene for every client, and four times the clients, at 1024 x
    1024."""
    whole, crop = partial_round(1024, 16, False), partial_round(1024, 16, True)
    few = partial_round(1024, 4, True)
    return {
        "partial_16_clients_1024_seconds": round(whole, 3),
        "partial_16_clients_1024_crop_seconds": round(crop, 3),
        "crop_speedup": round(whole / crop, 2),
        "crop_16_clients_over_4": round(crop / few, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--skip-large", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)
    federation = Scene().federation(CLIENTS, 0)
    algorithm = FedDeblur(Deblurring(), tol=0.0).given(federation.facts)
    assert algorithm.eta is not None and algorithm.rho is not None
    opponent = plain(federation, algorithm.eta, algorithm.rho)
    images = [torch.randn(SIZE, SIZE) for _ in range(CLIENTS)]
    took: dict[str, list[float]] = {"ours": [], "plain": [], "pairs": [], "two_workers": []}
    x = torch.zeros(0)
    with (
        Simulator(algorithm, federation, workers=0) as inline,
        Simulator(algorithm, federation, workers=2) as crew,
    ):
        here, there = Progress(algorithm.init()), Progress(algorithm.init())
        for block in range(told.blocks):
            upto = 10 * (block + 1)
            took["ours"] += rounds(algorithm, inline, here, upto)
            for _ in range(10):
                began = time.perf_counter()
                x = next(opponent)
                took["plain"].append(time.perf_counter() - began)
            took["pairs"] += [pairs(images) for _ in range(10)]
            took["two_workers"] += rounds(algorithm, crew, there, upto)
        same = torch.equal(
            here.state.trees["image"]["camera"], there.state.trees["image"]["camera"]
        )
    truth = federation.test["camera"]  # type: ignore[index]
    # the first block fills caches and pages
    skipped = {name: times[10:] for name, times in took.items()}
    best, middle = ({n: f(t) * 1e3 for n, t in skipped.items()} for f in (min, statistics.median))
    told_psnr = (
        score(here.state.trees["image"]["camera"], truth)["psnr"],
        score(x[None], truth)["psnr"],
    )
    large = (
        {}
        if told.skip_large
        else {
            "cost_per_pixel_2048_over_256": round(per_pixel(2048, 4) / per_pixel(256, 30), 2),
            **growth(),
        }
    )
    print(
        json.dumps(
            {
                "speedup_over_plain": round(best["plain"] / best["ours"], 2),
                "ratio_to_fft_pair": round(best["ours"] / best["pairs"], 3),
                "median_speedup_over_plain": round(middle["plain"] / middle["ours"], 2),
                "median_ratio_to_fft_pair": round(middle["ours"] / middle["pairs"], 3),
                "ms": {n: {"best": round(best[n], 3), "median": round(middle[n], 3)} for n in took},
                "psnr": round(told_psnr[0], 4),
                "psnr_plain": round(told_psnr[1], 4),
                "rounds": 10 * told.blocks,
                "two_workers_same_bits": same,
                **large,
                "setting": (
                    f"n={CLIENTS}, {SIZE}x{SIZE}, TV, complete, one thread, float32,"
                    " Simulator(workers=0)"
                ),
            }
        )
    )


if __name__ == "__main__":
    main()

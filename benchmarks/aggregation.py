"""How fast are the sums? Weighted mean, coordinate-wise median and loss-aware weights against
copying and numpy, in one run.

Weighted mean: 20 replies of 35.6 M float32 parameters, against copying the same bytes
(`torch.Tensor.copy_`). Median: 10 x 10 M against `numpy.median`. LossAware: its server step against
FedAvg's, on the same 20 replies, with the gate closed (losses within 15 %, the usual case) and wide
open; open, by single replies (one mean with the final weights) and by two sums, as workers keep
them. Measurements alternate, 20 of each. Ends by printing one JSON object.

    python benchmarks/aggregation.py [--repeats 20] [--parameters 35600000]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measure import summary
from torch import Tensor

from fedlens import Algorithm, Client, Message, Replies
from fedlens.core.replies import gather
from fedlens.layers import LossAware
from fedlens.layers.robust.median import median


@dataclass
class Mean(Algorithm):
    """The plain weighted mean, nothing else."""

    trains = True

    def init(self) -> Message:
        return Message()

    def broadcast(self, state: Message) -> Message:
        return state

    def client_step(self, message: Message, client: Client) -> Message:
        return Message()

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state.put(model=replies.mean("delta"))


def timed(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def alternate(repeats: int, **work: Callable[[], object]) -> dict[str, list[float]]:
    """Each of them in turn, so that a busy machine hurts all alike; the first turn only warms
    up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, f in work.items():
            spent = timed(f)
            if turn:
                seconds[name].append(spent)
    return seconds


def ratio(a: list[float], b: list[float]) -> float:
    return summary([x / y for x, y in zip(a, b, strict=True)])["median"]


def make_replies(n: int, parameters: int, losses: list[float]) -> tuple[Replies, list[Tensor]]:
    """Two arrays a reply, as a network would have several. `importance` is what LossAware's client
    half sends.
    """
    rng = torch.Generator().manual_seed(0)
    arrays = [torch.randn(parameters, generator=rng) for _ in range(n)]
    messages = []
    for i, (a, loss) in enumerate(zip(arrays, losses, strict=True)):
        tree = {"body": a[: parameters - 1000], "head": a[parameters - 1000 :]}
        value = torch.tensor(1 / loss, dtype=torch.float64)
        m = Message(
            {"delta": tree, "importance": {"value": value, "root": value.sqrt()}},
            {"loss": loss},
            sender=i,
        )
        messages.append(m.weigh("delta", mean=float(50 + i), uniform=1.0, loss=1 / loss))
    return gather(messages, range(n))[0], arrays


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=35_600_000)
    parser.add_argument("--median-parameters", type=int, default=10_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"replies": 20, "parameters": args.parameters}

    result |= means(args.parameters, args.repeats) | medians(
        args.median_parameters, max(3, args.repeats // 3)
    )
    print(json.dumps(result))


def means(parameters: int, repeats: int) -> dict[str, Any]:
    plain, aware, at_once = (
        Mean(),
        LossAware().around(Mean()),
        LossAware(by="replies").around(Mean()),
    )
    state = Message().with_header(round=0)
    close, arrays = make_replies(20, parameters, [1 + 0.15 * i / 19 for i in range(20)])
    target = [torch.empty_like(a) for a in arrays]

    def copy() -> None:
        for a, t in zip(arrays, target, strict=True):
            t.copy_(a)

    def server(algorithm: Algorithm, replies: Replies) -> Callable[[], object]:
        return lambda: algorithm.server_step(state, replies)

    work = alternate(repeats, copy=copy, mean=server(plain, close), aware=server(aware, close))
    target.clear()
    far, _ = make_replies(20, parameters, [0.01 if i == 0 else 0.5 for i in range(20)])
    wide = alternate(
        repeats, mean=server(plain, far), aware=server(aware, far), at_once=server(at_once, far)
    )
    return {
        "copy_seconds": summary(work["copy"]),
        "mean_seconds": summary(work["mean"]),
        "mean_speed_relative_to_copy": ratio(work["copy"], work["mean"]),
        "loss_aware_seconds": summary(work["aware"]),
        "loss_aware_over_mean": ratio(work["aware"], work["mean"]),
        "loss_aware_by_replies_over_mean_gate_open": ratio(wide["at_once"], wide["mean"]),
        "loss_aware_by_sums_over_mean_gate_open": ratio(wide["aware"], wide["mean"]),
    }


def medians(parameters: int, repeats: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    rows = [torch.randn(parameters, generator=rng) for _ in range(10)]
    trees, stacked = [{"w": r} for r in rows], torch.stack(rows).numpy()
    seconds = alternate(
        repeats, ours=lambda: median(trees), numpy=lambda: np.median(stacked, axis=0)
    )
    return {
        "median_seconds": summary(seconds["ours"]),
        "numpy_median_seconds": summary(seconds["numpy"]),
        "median_speedup_over_numpy": ratio(seconds["numpy"], seconds["ours"]),
        "median_agrees": bool(np.allclose(median(trees)["w"].numpy(), np.median(stacked, axis=0))),
    }


if __name__ == "__main__":
    main()

"""What RAF costs: a training step with three levels (1, 3/4, 1/2) against a plain one at the same
native resolution. Claim: at most twice as much.

Areas say 1 + 9/16 + 1/4 = 1.81. Both kinds of step alternate in one process on one thread; the
least processor times are compared, because neighbours on a shared machine only ever add to them.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from fedlens import Batch, stack
from fedlens.algorithms import FedAvg
from fedlens.core import heap
from fedlens.core.client import Output
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.layers import MultiResolution
from fedlens.tasks.pose import Pose

SIZES = ((64, 48), (48, 36), (32, 24))


def measure(network: str, repeats: int, batch_size: int) -> dict[str, Any]:
    task = Pose("lsp", network, patch=4)
    layer = stack(FedAvg(task), MultiResolution(sizes=SIZES))
    assert isinstance(layer, MultiResolution)
    people = StickFigures(people=batch_size, tests=1, sizes=SIZES).federation(1, 0).holdings[0]
    model = task.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(0)

    def step(distil: bool) -> float:
        batch: Batch = people.batch(torch.arange(batch_size), rng)
        began = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        output: Output = task.forward(model, batch)
        loss = task.loss(output, batch)
        if distil:
            loss = loss + layer.distil(model, batch, output)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.process_time() - began

    times: dict[bool, list[float]] = {False: [], True: []}
    for k in range(repeats + 2):
        for distil in (False, True):
            spent = step(distil)
            if k >= 2:  # the first ones warm up
                times[distil].append(spent)
    plain, raf = (min(times[d]) for d in (False, True))
    middle = statistics.median(times[True]) / statistics.median(times[False])
    return {
        "network": network,
        "plain_ms": 1000 * plain,
        "raf_ms": 1000 * raf,
        "ratio": raf / plain,
        "ratio_of_medians": middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep()  # as in every worker process
    found = [
        measure(network, options.repeats, options.batch) for network in ("vit-tiny", "vit-small")
    ]
    holds = all(f["ratio"] <= 2 for f in found)
    print(
        json.dumps(
            {
                "benchmark": "raf",
                "claim": "ratio <= 2",
                "levels": SIZES,
                "holds": holds,
                "cells": found,
            }
        )
    )


if __name__ == "__main__":
    main()

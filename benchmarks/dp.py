"""What a step of DPSGD costs, beside a plain step and beside Opacus, in one run; and its memory.

    python benchmarks/dp.py [--batch 32] [--repeats 15]

One thread, processor time, best of the turns. resnet8 (group normalisation): a plain step of SGD, a
step of DPSGD. Opacus (if it is installed) stops at what resnet8 changes in place, so the two are
compared on `niid` and on a resnet8 that changes nothing in place. A step of Opacus: forward,
backward, clipping, noise and the optimiser's step, on a batch of the same size.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

sys.path.insert(0, str(Path(__file__).parent))

from measure import best

from fedlens.core.client import Batch, NoisySteps
from fedlens.core.noisy_steps import noisy_gradients
from fedlens.models.classification import classifier

Step = Callable[[], None]


def out_of_place(net: nn.Module) -> nn.Module:
    """The same arithmetic without any change in place, at which Opacus stops."""
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        if isinstance(module, BasicBlock):
            module.forward = functools.partial(_block, module)
    return net


def _block(block: BasicBlock, x: Tensor) -> Tensor:
    out = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    return block.relu(out + (x if block.downsample is None else block.downsample(x)))


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = name.removesuffix(", nothing in place")
    net = classifier(kind, 10, norm="group").train()
    return net if kind == name else out_of_place(net)


def plain_step(net: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        optimizer.step()

    return step


def noisy_step(net: nn.Module, batch: Batch, real: bool) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rng = None if real else torch.Generator().manual_seed(0)
    size = len(batch["y"])

    def loss(part: Batch) -> Tensor:
        return nn.functional.cross_entropy(net(part["x"]), part["y"])

    differentiate = noisy_gradients(net, loss, NoisySteps(1.0, 1.0, size, rng), size)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        differentiate(batch)
        optimizer.step()

    return step


def opacus_step(net: nn.Module, batch: Batch) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped: Any = GradSampleModule(net)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer = DPOptimizer(
        inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(batch["y"])
    )

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(batch["x"]), batch["y"]).backward()
        optimizer.step()

    return step


def peak(step: Step) -> float:
    """Megabytes of tensors at the highest point of a step, beyond those that were there."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def measure_network(name: str, batch: Batch, repeats: int, opacus: bool) -> dict[str, Any]:
    steps: dict[str, Step] = {
        "plain": plain_step(network(name), batch),
        "dpsgd": noisy_step(network(name), batch, real=False),
        "dpsgd, system noise": noisy_step(network(name), batch, real=True),
    }
    if opacus:
        steps["opacus"] = opacus_step(network(name), batch)
    seconds = best(steps, repeats)
    out: dict[str, Any] = {
        "milliseconds": {n: round(1e3 * s, 2) for n, s in seconds.items()},
        "times_plain": {n: round(s / seconds["plain"], 3) for n, s in seconds.items()},
        "peak_megabytes": {n: round(peak(step), 1) for n, step in steps.items()},
    }
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.rand(given.batch, 3, 32, 32, generator=rng),
        "y": torch.randint(10, (given.batch,), generator=rng),
    }
    try:
        version = importlib.metadata.version("opacus")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    found: dict[str, Any] = {}
    for name in ("resnet8", "niid", "resnet8, nothing in place"):
        opacus = bool(version) and name != "resnet8"
        found[name] = measure_network(name, batch, given.repeats, opacus)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr)  # one by one, as they come
    table = {
        "batch": given.batch,
        "torch": str(torch.__version__),
        "opacus": version or "not installed",
        "networks": found,
        "at_most_2.2_times_plain": found["resnet8"]["times_plain"]["dpsgd"] <= 2.2,
    }
    if version:
        timed = {n: f["milliseconds"] for n, f in found.items() if "opacus" in f["milliseconds"]}
        table["ahead_of_opacus"] = {n: t["dpsgd"] < t["opacus"] for n, t in timed.items()}
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()

"""The high-frequency loss: against the same seven bands through ptwt, and on top of a training step
of the light network.

    python benchmarks/highfrequency.py [--repeats 15] [--crop 128]

Both sides of each comparison take turns in one run, on one thread; the best time of each counts.
Time is CPU time, so that waiting for a core on a busy machine does not count. Ends by printing one
JSON object. Claims: at least 3 times as fast as ptwt (loss and gradient), at most 2 % on top of a
training step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measure import best
from torch import Tensor

from fedlens.layers.high_frequency import high_frequency_loss
from fedlens.models.vsr import LightVSR
from fedlens.tasks.super_resolution import charbonnier


def ptwt_loss(prediction: Tensor, target: Tensor, eps: float = 1e-9) -> Tensor:
    import ptwt

    def details(clip: Tensor) -> Tensor:
        volume = clip.transpose(1, 2).flatten(0, 1)
        bands = ptwt.wavedec3(volume, "haar", level=1, mode="zero")[1]
        return torch.cat([bands[k] for k in sorted(bands)])

    gap = details(prediction) - details(target)
    return (gap * gap + eps).sqrt().mean()


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--repeats", type=int, default=15)
    parse.add_argument("--crop", type=int, default=128)
    parse.add_argument("--batch", type=int, default=2)
    parse.add_argument("--frames", type=int, default=6)
    options = parse.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (options.batch, options.frames, 3, options.crop, options.crop)
    target = torch.rand(shape)
    guess = torch.rand(shape, requires_grad=True)

    def once(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def job() -> None:
            guess.grad = None
            loss(guess, target).backward()  # type: ignore[no-untyped-call]

        return job

    model = LightVSR()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    small = torch.rand(*shape[:3], options.crop // 4, options.crop // 4)

    def step() -> None:
        optimizer.zero_grad()
        charbonnier(model(small), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    # The difference of two steps would drown in noise: the step and the loss are timed each on its
    # own, and divided.
    t = best(
        {"ours": once(high_frequency_loss), "ptwt": once(ptwt_loss), "step": step}, options.repeats
    )
    same = abs(
        float(high_frequency_loss(guess.detach(), target))
        - float(ptwt_loss(guess.detach(), target))
    )
    out = {
        "shape": shape,
        "milliseconds": {k: round(v * 1e3, 3) for k, v in t.items()},
        "times_faster_than_ptwt": round(t["ptwt"] / t["ours"], 2),
        "percent_of_a_training_step": round(100 * t["ours"] / t["step"], 2),
        "difference_of_the_losses": same,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()

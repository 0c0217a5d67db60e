"""The same run under a protection: what it changes at the clients, and what it leaves to see.

Simulated: noise comes from the run's seed, and "SecureSum" means that an attack is given the mean
of the replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fedlens.audit.attack import Probe, summed
from fedlens.audit.noise import ClipAndNoise
from fedlens.audit.probe import fedavg_of, working
from fedlens.core import tree
from fedlens.engines.recorder import Exchange
from fedlens.runs.setup import Setup

MORE = 4  # times as large batches
LONGER = 5  # times as many local epochs or steps

Seen = Sequence[Exchange]


@dataclass(frozen=True)
class Protection:
    """A row of the page.

    change: the run's objects under it, from what was sent without it; None where only what the
    server sees changes. seen: what it sees of the rounds. probe: the same for a client of whom a
    picture is sought, None where the run itself is attacked.
    """

    name: str
    about: str
    change: Callable[[Setup, Seen], Setup] | None = None
    seen: Callable[[Seen], Seen] = list
    probe: Probe | None = None


def noisy(noise: float, share: float = math.inf) -> Callable[[Setup, Seen], Setup]:
    """share: of the median norm of the replies, to which they are clipped."""

    def change(setup: Setup, sent: Seen) -> Setup:
        norms = [tree.norm(r.trees["delta"]) for e in sent for r in e.replies.values()
                 if "delta" in r.trees]  # fmt: skip
        bound = share * median(norms) if norms and math.isfinite(share) else math.inf
        layer = ClipAndNoise(noise=noise, bound=bound)
        return replace(setup, algorithm=layer.around(setup.algorithm))

    return change


def larger_batches(setup: Setup, sent: Seen) -> Setup:
    base = fedavg_of(setup)
    assert base is not None
    return replace(setup, algorithm=working(setup.algorithm, batch=MORE * base.batch))


def longer_work(setup: Setup, sent: Seen) -> Setup:
    base = fedavg_of(setup)
    assert base is not None
    longer = {"steps": LONGER * base.steps} if base.steps else {"epochs": LONGER * base.epochs}
    return replace(setup, algorithm=working(setup.algorithm, **longer))


SECURE_SUM = Protection("SecureSum", "the server sees the sum of all replies only", seen=summed)
DEBLURRING = (
    Protection("noise 1 %", "Gaussian noise of 1 % on every number of w - x", noisy(0.01)),
    Protection("noise 10 %", "Gaussian noise of 10 % on every number of w - x", noisy(0.1)),
    SECURE_SUM,
)
CLIPPED = "clipped to half the median norm, Gaussian noise of {} % on every number"
TRAINING = (
    Protection("larger batches", f"{MORE} times as many images in a batch", larger_batches),
    Protection("more local steps", f"{LONGER} times as many", longer_work),
    Protection("clipping, noise 10 %", CLIPPED.format(10), noisy(0.1, 0.5)),
    Protection("clipping, noise 100 %", CLIPPED.format(100), noisy(1.0, 0.5)),
    SECURE_SUM,
)
WORST_CASE = Protection(
    "worst case", "a client with one image that makes one local step", probe=Probe(1, 1)
)
PROBES = (
    Probe(MORE, 1),
    Probe(1, LONGER),
    Probe(1, 1, noise=0.1),
    Probe(1, 1, noise=1.0),
    Probe(1, 1, together=True),
)
FROM_THE_WORST = (
    WORST_CASE,
    *(
        replace(p, about=f"worst case, but {p.about}", probe=probe)
        for p, probe in zip(TRAINING, PROBES, strict=True)
    ),
)

"""What a layer with differential privacy declares about itself; `trust.accounting` turns it into an
epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["example", "client"]
Where = Literal["site", "server", "clients"]
# How who is in a sum is chosen: each by chance of its own, so many of all, or no secret is made
# of it.
Sampling = Literal["poisson", "fixed", "none"]


@dataclass(frozen=True)
class Mechanism:
    """Gaussian noise on a sum of clipped parts: what one round costs one client.

    Args:
        unit: whose presence is hidden: one example of a client, or a whole client.
        noise: multiplier: the noise's deviation over the bound of one part.
        rate: share of all that is in a sum, where sampling hides who.
        sampling: how they are chosen.
        steps: noisy sums in a round.
        delta: the chance that is left to the guarantee to fail.
        max_epsilon: the run ends before it is exceeded.
        where: who adds the noise; one share each, if all clients do.
        seeded: the noise follows from the run's seed, as in a simulation: it protects nobody.
    """

    unit: Unit
    noise: float
    rate: float
    sampling: Sampling
    steps: int
    delta: float
    max_epsilon: float | None = None
    seeded: bool = True
    where: Where = "site"

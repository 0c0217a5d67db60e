"""Epsilons by a second accountant, PRV (Gopi, Lee and Wutschitz, 2021), for a grid of settings.

`python tests/prv_grid.py` writes prv_grid.json anew; it needs the package prv-accountant.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("prv_grid.json")
DELTA = 1e-5
GRID = [
    (noise, rate, steps)
    for noise in (0.7, 1.0, 2.0, 4.0)
    for rate in (0.001, 0.02, 0.2)
    for steps in (10, 500, 4000)
]


def prv_epsilon(noise: float, rate: float, steps: int) -> tuple[float, float]:
    """Below and above the true epsilon."""
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    mechanism = PoissonSubsampledGaussianMechanism(
        noise_multiplier=noise, sampling_probability=rate
    )
    accountant = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.02, delta_error=DELTA / 1000
    )
    low, _, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])
    return float(low), float(high)


def main() -> None:
    rows: list[Any] = []
    for noise, rate, steps in GRID:
        try:
            rows.append([noise, rate, steps, *prv_epsilon(noise, rate, steps)])
        except (RuntimeError, ValueError, MemoryError) as e:
            print(f"left out: {noise} {rate} {steps}: {e}")
    made = f"prv-accountant {importlib.metadata.version('prv-accountant')}, eps_error 0.02"
    table = {"made": made, "delta": DELTA, "rows": rows}
    FILE.write_text(json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main()

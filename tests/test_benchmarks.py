"""Benchmarks reach into the parts they measure, so they are what breaks unseen when those change.
Here the two that reach deepest run at sizes that measure nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SMALL = {
    "secure_sum": ["--only", "masks", "--parameters", "2000000", "--clients", "6", "--lost", "1"],
    "engines": ["--only", "megabyte", "--rounds", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_ends_in_one_json_object(name: str) -> None:
    pytest.importorskip("flwr")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *SMALL[name]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(v > 0 for k, v in found.items() if k.endswith(("_s", "seconds")))
    assert found.get("exact", True)

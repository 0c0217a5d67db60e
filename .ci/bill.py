"""The bill of materials of an environment: every package in it with its version and licence, as
CycloneDX JSON. `make bill` and `make release-check` call it with the Python of an environment that
has cyclonedx-bom:

    python .ci/bill.py PYTHON FILE

Addresses are left out: some are those of the machine or of the package index that it was made with,
and a package is known by its name and version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def without_addresses(bill: Any) -> Any:
    if isinstance(bill, dict):
        kept = {key: value for key, value in bill.items() if key != "externalReferences"}
        return {key: without_addresses(value) for key, value in kept.items()}
    return [without_addresses(value) for value in bill] if isinstance(bill, list) else bill


def bill_of(python: str) -> Any:
    words = ["-m", "cyclonedx_py", "environment", "--pyproject", str(PROJECT)]
    made = subprocess.run(
        [sys.executable, *words, "--output-reproducible", python],
        capture_output=True,
        text=True,
        check=True,
    )
    return without_addresses(json.loads(made.stdout))


if __name__ == "__main__":
    bill = bill_of(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    print(f"{sys.argv[2]}: {len(bill['components'])} packages")

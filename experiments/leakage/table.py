"""The table of README.md from results/: `python experiments/leakage/table.py`."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    print("| method | attack | protection | attacker | learned nothing | leaks | s |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted((HERE / "results").glob("*.json")):
        for row in json.loads(path.read_text()):
            print(
                f"| {row['cell']} | {row['attack']} ({row['measure']}) | {row['protection']} |"
                f" {row['score']:.3g} | {row['baseline']:.3g} | {'yes' if row['leaks'] else 'no'} |"
                f" {row['seconds']} |"
            )


if __name__ == "__main__":
    main()

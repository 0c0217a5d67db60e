"""What a ledger and a policy cost: a site answers a message with a reply of 142 MB, with and
without them, in turns, in the same run. Nothing is trained: a reply is made and goes through the
site's two doors. A round over Flower takes seconds more, of which this is the site's part.

    python benchmarks/ledger.py [--site-only]

Then a real round with such replies is measured by engines.py, unless --site-only is given, and the
share of it is what counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fedlens
from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Client
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.engines.flower.site import Site, answer_request, federation_of_one, to_pieces
from fedlens.trust.ledger import LEDGER_FILE, Leaving, Ledger
from fedlens.trust.signing import make_signing_key
from fedlens.trust.verify import verify

ARRAYS, EACH = 60, 593_000  # 35.6 million float32: 142 MB
TURNS = 7


class Echo(Algorithm):
    """Replies with as many numbers as it got."""

    def init(self) -> Message:
        return Message({"model": {f"layer.{k}": torch.randn(EACH) for k in range(ARRAYS)}})

    def broadcast(self, state: Message) -> Message:
        return state

    def client_step(self, message: Message, client: Client) -> Message:
        delta: Tree = {name: t * 0.5 for name, t in message.trees["model"].items()}
        return Message({"delta": delta}, {"loss": 1.0}).weigh("delta", 1.0)

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state


def main() -> None:
    algorithm = Echo()
    down = algorithm.broadcast(algorithm.init()).with_header(population=3, cohort=3)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_signing_key(folder / "key")
        (folder / "policy.toml").write_text("trees = ['delta']\nmax_bytes_round = 200000000\n")
        guarded = {"key": str(folder / "key"), "policy": str(folder / "policy.toml")}
        nodes: dict[str, dict[str, Any]] = {"plain": {}, "ledger and policy": guarded}
        seconds: dict[str, list[float]] = {name: [] for name in nodes}
        for turn in range(TURNS + 1):
            for name, settings in nodes.items():
                node = {"client": 0, "folder": str(folder / name), **settings}
                site = Site(0, algorithm, federation_of_one(0, None), folder / name, "r")
                spent = timed(site, node, down.with_header(round=turn))
                if turn:  # the first one warms up
                    seconds[name].append(spent)
        assert verify(folder / "ledger and policy" / LEDGER_FILE).lines == TURNS + 2
        line = time_lines(folder)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    added = medians["ledger and policy"] - medians["plain"]
    found = {
        "reply_megabytes": round(4 * ARRAYS * EACH / 1e6, 1),
        "site_seconds_plain": round(medians["plain"], 3),
        "site_seconds_guarded": round(medians["ledger and policy"], 3),
        "added_seconds": round(added, 3),
        "share_of_the_sites_own_part": round(added / medians["plain"], 3),
        "milliseconds_a_small_line": round(1e3 * line, 2),
    }
    if "--site-only" not in sys.argv:
        found["round_seconds"] = whole = round_seconds()
        found["share_of_a_round"] = round(added / whole, 4)
    print(json.dumps(found, indent=1))


def timed(site: Site, node: dict[str, Any], message: Message) -> float:
    request = {"version": fedlens.__version__, "recipe": "r", "job": "j", "heard": -1}
    header = {"kind": "train", "request": {**request, "forgive": True}}
    pieces = to_pieces(message)
    began = time.perf_counter()
    fields, _ = answer_request(header, pieces, node, lambda *_: site, print)
    spent = time.perf_counter() - began
    assert "lost" not in fields, fields
    return spent


def round_seconds() -> float:
    """Of a round over Flower in which two sites reply with 142 MB."""
    program = Path(__file__).with_name("engines.py")
    command = [sys.executable, str(program), "--only", "payload", "--rounds", "2"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds: float = json.loads(text[text.index("{") :])["payload_s"]
    return seconds


def time_lines(folder: Path) -> float:
    """Seconds for a line about nothing, on disk."""
    ledger = Ledger(folder / "small.jsonl", folder / "key")
    began = time.perf_counter()
    for k in range(50):
        ledger.append(Leaving("greeting", 0, round=k))
    return (time.perf_counter() - began) / 50


if __name__ == "__main__":
    main()

"""What SecureSum costs: a client's masking, the server's unmasking, bytes on the wire; beside the
primitives of Flower's own SecAgg+ on the same vectors, in the same run. And a round of three real
sites with it and without.

    python benchmarks/secure_sum.py [--parameters 35600000] [--clients 20] [--lost 2]
        [--rounds 8] [--only masks|sites]

Masks: one thread, processor time. A client: checking everybody's keys, the hash of the model it was
sent, quantising, one mask with each of the others and one of its own. The server: shares to
secrets, the masks that are left, means. The sum is held to the plain sum of the same whole numbers,
bit for bit. Against Flower only what both do is timed, given the keys: ours quantises and adds as
many masks, theirs calls `quantize`, `pseudo_rand_gen`, additions and `parameters_mod`, as its
`secaggplus_mod` does; of three turns each, the fastest. Sites: the study of docs/sites.md, whose
rounds train and evaluate, over `fedlens serve` with TLS and all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedlens import Algorithm, Client, Federation, Message, Replies
from fedlens.core.algorithm import Trip, Trips
from fedlens.core.memory import Memory
from fedlens.core.replies import gather
from fedlens.core.tree import Tree
from fedlens.engines.worker import Job, Worker
from fedlens.trust.fixed_point import Slot, to_whole
from fedlens.trust.masking import add_masks
from fedlens.trust.secure_sum import DEAL, GREET, OPEN_SUM, WORK, SecureSum

ROOT = Path(__file__).resolve().parents[1]
BOUND = 8.0


@dataclass
class Vectors(Algorithm):
    """Every client replies with the same long vector, under one or two weights."""

    size: int
    names: tuple[str, ...] = ("mean",)
    draws: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    _one: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def weighs(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        return {"delta": self.names}

    @property
    def vector(self) -> torch.Tensor:
        if "x" not in self._one:
            rng = torch.Generator().manual_seed(0)
            self._one["x"] = torch.randn(self.size, generator=rng).clamp_(-BOUND, BOUND)
        found: torch.Tensor = self._one["x"]
        return found

    def init(self) -> Message:
        return Message()

    def broadcast(self, state: Message) -> Message:
        return Message({"model": {"w": self.vector}})

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return {"delta": {"w": self.vector}}

    def client_step(self, message: Message, client: Client) -> Message:
        reply = Message({"delta": {"w": self.vector}})
        return reply.weigh("delta", **dict.fromkeys(self.names, 1.0))

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state


class Round:
    """One round by hand, so that each part can be timed."""

    def __init__(self, algorithm: Algorithm, clients: int) -> None:
        self.algorithm = algorithm
        self.worker = Worker(algorithm, Federation([None] * clients), Memory())
        self.state = algorithm.init().with_header(population=clients)
        table = json.loads(self.state.texts["secure"])
        keys = [f"delta/{name}/w" for name in algorithm.weighing()["delta"]]
        table["bounds"] = dict.fromkeys(keys, 3)  # as after a first round
        self.state = Message(texts={"secure": json.dumps(table)}, header=self.state.header)
        self.trips = Trips(list(range(clients)))

    def next(self) -> Trip:
        trip = self.algorithm.next_trip(self.state, self.trips)
        assert trip is not None
        header = {"cohort": len(self.trips.asked), "trip": trip.number}
        message = trip.message.with_header(self.state.header, **header)
        return Trip(message, trip.ids, trip.number)

    def make(self, trip: Trip, without: int = 0) -> list[float]:
        """Ask all but the last few; seconds of each."""
        self.worker.begin(trip.message, sums=True)
        seconds, outcomes = [], []
        for position, i in enumerate(trip.ids[: len(trip.ids) - without]):
            began = time.process_time()
            outcomes += self.worker.work([Job(position, i)])
            seconds.append(time.process_time() - began)
        replies, lost = gather([*outcomes, self.worker.finish()], trip.ids)
        assert not lost, lost
        self.trips.made.append(trip)
        self.trips.replies.append(replies)
        self.trips.lost.append(lost)
        return seconds


def one_sum(size: int, clients: int, lost: int, **options: Any) -> dict[str, Any]:
    """Times of a client and of the server, and whether the sum is exact."""
    secure = SecureSum(**options)
    here = Round(secure.around(Vectors(size)), clients)
    for number in (GREET, DEAL):
        trip = here.next()
        assert trip.number == number
        here.make(trip)
    work = here.next()
    assert work.number == WORK
    client = here.make(work, without=lost)
    folded = here.trips.replies[-1]
    up = sum(h.bytes for h in folded.heard.values()) / len(folded)
    opening = here.next()
    assert opening.number == OPEN_SUM
    here.make(opening)
    began = time.process_time()
    brought = here.algorithm.read(here.state, here.trips)
    server = time.process_time() - began
    assert not brought.skipped, brought.skipped
    layer = here.algorithm
    assert isinstance(layer, SecureSum)
    layout = layer._layout(work.message)
    slot = layout.slots[0]
    exact: bool | None = None
    if slot.bits == 32:
        plain = torch.empty(size, dtype=torch.int32)
        to_whole(Vectors(size).vector, 1.0, slot, layout.clients, plain)
        flats = layer._opened(here.trips, 2)[1]
        exact = bool(torch.equal(flats[32], plain * (clients - lost)))
    return {"client": min(client), "server": server, "bytes": up, "exact": exact}


def two_sums(size: int, clients: int) -> float:
    here = Round(SecureSum().around(Vectors(size, ("uniform", "loss"))), clients)
    for _ in (GREET, DEAL):
        here.make(here.next())
    work = here.next()
    return min(here.make(Trip(work.message, work.ids[:3], WORK)))


def our_primitives(vector: torch.Tensor, clients: int) -> float:
    """The vector as whole numbers, one mask with each of the others and one of its own."""
    slot = Slot("delta", "mean", "w", vector.shape, vector.dtype, 32, 0, bound=3)
    streams = [(os.urandom(32), bool(k % 2)) for k in range(clients)]
    began = time.process_time()
    whole = torch.empty(len(vector), dtype=torch.int32)
    to_whole(vector, 1.0, slot, clients, whole)
    add_masks([whole], streams)
    return time.process_time() - began


def flower_primitives(vector: torch.Tensor, clients: int) -> float:
    """The same vector with as many masks, by the functions of Flower's SecAgg+ client."""
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    began = time.process_time()
    whole = quantize([vector.numpy()], BOUND, 1 << 22)
    modulus = 1 << 32
    shapes = [a.shape for a in whole]
    whole = parameters_addition(whole, pseudo_rand_gen(b"s" * 32, modulus, shapes))
    for k in range(clients - 1):
        mask = pseudo_rand_gen(np.random.bytes(32), modulus, shapes)
        whole = (parameters_addition if k % 2 else parameters_subtraction)(whole, mask)
    parameters_mod(whole, modulus)
    return time.process_time() - began


def masking(size: int, n: int, lost: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    wide = one_sum(size, n, lost)
    narrow = one_sum(size, n, lost, ring=16)
    vector = Vectors(size).vector
    turns = [(our_primitives(vector, n), flower_primitives(vector, n)) for _ in range(3)]
    ours, theirs = (min(side) for side in zip(*turns, strict=True))
    return {
        "parameters": size,
        "clients": n,
        "lost": lost,
        "client_seconds": round(wide["client"], 3),
        "client_seconds_two_sums": round(two_sums(size, n), 3),
        "client_seconds_16_bit": round(narrow["client"], 3),
        "server_seconds": round(wide["server"], 3),
        "bytes_of_float32": round(wide["bytes"] / (4 * size), 4),
        "bytes_of_float32_16_bit": round(narrow["bytes"] / (4 * size), 4),
        "exact": wide["exact"],
        "masking_seconds": round(ours, 3),
        "flower_masking_seconds": round(theirs, 3),
        "times_faster_than_flower": round(theirs / ours, 1),
    }


# -- three real sites ------------------------------------------------------------------------------


def sites(rounds: int) -> dict[str, Any]:
    """Seconds of a round, by the server's clock: the median after the first, in which models are
    built and keys agreed on.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from deployment import deployment

    walkthrough = (ROOT / "docs" / "sites.md").read_text()
    program = walkthrough.split("python - <<'END'\n")[1].split("END")[0]
    recipe = walkthrough.split("server/study.toml <<'END'\n")[1].split("END")[0]
    found: dict[str, Any] = {"rounds": rounds}
    with (
        tempfile.TemporaryDirectory(prefix="fedlens-bench-") as folder,
        deployment(Path(folder), 3) as here,
    ):
        subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
        here.serve()
        for i, hospital in enumerate("abc"):
            settings = {
                "data": f"{folder}/hospital-{hospital}/scans",
                "key": str(here.keys / f"site-{i}"),
                "peers": str(here.keys),
                "trust-server": True,
            }
            here.site(i, "fedlens.sites.site", **settings)
        for name, secure in (("plain", "false"), ("secure", "true")):
            other = f"rounds = {rounds}\nsecure = {secure}"
            out = here.folder / name
            here.study(recipe.replace("rounds = 2", other), out, name)
            here.wait_for(lambda out=out: (out / "summary.json").exists(), 600, f"the {name} run")
            lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
            assert [line["heard"] for line in lines] == [3] * rounds
            seconds = [float(line["seconds"]) for line in lines]
            print(f"{name}: {seconds}", file=sys.stderr, flush=True)
            found[f"{name}_round_seconds"] = round(statistics.median(seconds[1:]), 3)
            found[f"{name}_first_round_seconds"] = round(seconds[0], 3)
            # by the clock, so whatever else the machine did counts: 4 busy processes are our own
            found[f"{name}_load_average"] = round(os.getloadavg()[0], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, default=35_600_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--lost", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=("masks", "sites"))
    given = parser.parse_args()
    out: dict[str, Any] = {}
    if given.only != "sites":
        out |= masking(given.parameters, given.clients, given.lost)
    if given.only != "masks":
        out["three_sites"] = sites(given.rounds)
    print(json.dumps(out))


if __name__ == "__main__":
    main()

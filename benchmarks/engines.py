"""Seconds a round for simulator, Ray and Flower on the same work, the same bits checked at the end;
and a large payload through Flower.

    python benchmarks/engines.py [--rounds 8] [--clients 2] [--only local|flower|floor|payload]

Work: ResNet-8 on 32 x 32 images, a few hundred per client, one epoch. Simulator and Ray take turns
round by round, so that whatever else the machine does troubles both alike. "floor" is a round in
which clients do nothing: what the engine itself costs. The payload part sends 35.6 M float32 (142
MB) down and up, once per round, and reports the peak resident memory of each kind of process above
what it holds without the payload, in copies of the payload.

Prints progress to stderr and ends with one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "src")]

import psutil  # noqa: E402
import torch  # noqa: E402

from fedlens import Algorithm, Client, Federation, Message, Progress, Round, run  # noqa: E402
from fedlens.algorithms import FedAvg  # noqa: E402
from fedlens.core.replies import Replies  # noqa: E402
from fedlens.data.images.tensors import Tensors  # noqa: E402
from fedlens.engines.flower.site import Site, federation_of_one  # noqa: E402
from fedlens.tasks.classification import Classification  # noqa: E402

torch.set_num_threads(1)
PAYLOAD = 35_600_000  # float32


def federation(clients: int, examples: int = 256) -> Federation:
    rng = torch.Generator().manual_seed(0)

    def one() -> Tensors:
        x = torch.randint(256, (examples, 3, 32, 32), dtype=torch.uint8, generator=rng)
        return Tensors({"x": x, "y": torch.randint(10, (examples,), generator=rng)})

    return Federation([one() for _ in range(clients)])


@dataclass
class Echo(Algorithm):
    """A tree down, the same tree up: nothing but transport. `at`: when the client had it, to tell
    the way down from the way up.
    """

    size: int = 1

    def init(self) -> Message:
        return Message({"x": {"x": torch.ones(self.size)}})

    def broadcast(self, state: Message) -> Message:
        return Message(state.trees)

    def expects(self, message: Message) -> Mapping[str, Any]:
        return message.trees

    def client_step(self, message: Message, client: Client) -> Message:
        return Message(message.trees).note(at=time.time())

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state


def make_algorithm(name: str) -> Algorithm:
    if name == "train":
        return FedAvg(Classification(model="resnet8"), lr=0.05, batch=32)
    return Echo(PAYLOAD if name == "payload" else 1)


def make_site(node: Mapping[str, Any], config: Mapping[str, Any]) -> Site:
    id, name = int(node["client"]), str(config["work"])
    data = federation(int(config["clients"])).holdings[id] if name == "train" else ()
    return Site(id, make_algorithm(name), federation_of_one(id, data), Path(str(node["folder"])))


def main(grid: Any, config: Mapping[str, Any]) -> None:
    """The ServerApp of the Flower part."""
    from fedlens.engines.flower.engine import Flower

    out, name = Path(str(config["out"])), str(config["work"])
    algorithm = make_algorithm(name)
    seconds: list[float] = []
    down: list[float] = []  # from the round's beginning until a client has the message

    def note(here: Progress, done: Round) -> None:
        seconds.append(done.seconds)
        down.extend(
            s["at"] - (time.time() - done.seconds) for s in done.scalars.values() if "at" in s
        )

    engine = Flower(grid, algorithm, int(config["clients"]), job=str(config["job"]), patience=120)
    final = run(algorithm, engine, int(config["rounds"]), after_round=note)
    (out / "state").write_bytes(bits(final) if name == "train" else b"")
    (out / "server.json").write_text(json.dumps({"seconds": seconds, "down": down}))


# -- measuring -------------------------------------------------------------------------------------


def steady(seconds: list[float]) -> float:
    """The first round builds models and fills caches."""
    return round(statistics.median(seconds[1:] or seconds), 4)


def local(work: str, rounds: int, clients: int) -> tuple[float, float, bytes, bool]:
    """Simulator and Ray in turns: steady seconds a round of each, the simulator's state, and
    whether Ray's is the same.
    """
    from fedlens.engines.ray import Ray
    from fedlens.engines.simulator import Simulator

    algorithm, data = make_algorithm(work), federation(clients)
    seconds: tuple[list[float], list[float]] = ([], [])
    with (
        Simulator(algorithm, data, workers=2) as simulator,
        Ray(algorithm, data, workers=2) as cluster,
    ):
        here: list[Progress | None] = [None, None]

        def note(k: int, progress: Progress, done: Round) -> None:
            here[k] = progress
            seconds[k].append(done.seconds)

        for number in range(1, rounds + 1):
            for k, engine in enumerate((simulator, cluster)):
                run(
                    algorithm,
                    engine,
                    number,
                    progress=here[k],
                    after_round=functools.partial(note, k),
                )
    for name, s in zip(("simulator", "ray"), seconds, strict=True):
        tell(f"{name}, {work}", s)
    states = [bits(p.state) for p in here if p]
    return steady(seconds[0]), steady(seconds[1]), states[0], states[0] == states[1]


def bits(state: Message) -> bytes:
    return bytes(Message(state.trees).to_bytes())  # its scalars tell how many rounds were planned


def tell(name: str, seconds: list[float]) -> None:
    print(
        f"{name}: {', '.join(f'{s:.3f}' for s in seconds)} s a round", file=sys.stderr, flush=True
    )


def flower(here: Any, work: str, rounds: int, clients: int) -> tuple[dict[str, Any], Path]:
    from fedlens.engines.flower.engine import write_app

    out = here.folder / work
    out.mkdir()
    write_app(
        here.folder / f"app-{work}",
        "engines:main",
        "engines:make_site",
        {"work": work, "rounds": rounds, "clients": clients, "out": str(out), "job": work},
    )
    here.submit(here.folder / f"app-{work}", f"run-{work}")
    here.wait_for(lambda: (out / "server.json").exists(), 900, f"the end of {work}")
    facts: dict[str, Any] = json.loads((out / "server.json").read_text())
    tell(f"flower, {work}", facts["seconds"])
    return facts, out


def benchmark(rounds: int, clients: int, only: str) -> dict[str, Any]:
    found: dict[str, Any] = {"clients": clients, "rounds": rounds}
    wanted: bytes | None = None
    if only in ("all", "local"):
        wanted = both(rounds, clients, found)
    if only != "local":
        real(rounds, clients, only, wanted, found)
    return found


def both(rounds: int, clients: int, found: dict[str, Any]) -> bytes:
    found["simulator_s"], found["ray_s"], wanted, same = local("train", rounds, clients)
    found["ray_over_simulator"] = round(found["ray_s"] / found["simulator_s"], 3)
    found["simulator_floor_s"], found["ray_floor_s"], *_ = local("floor", 4 * rounds, clients)
    found["ray_same_bits"] = same
    return wanted


def real(rounds: int, clients: int, only: str, wanted: bytes | None, found: dict[str, Any]) -> None:
    from deployment import deployment

    with (
        tempfile.TemporaryDirectory(prefix="fedlens-bench-") as folder,
        deployment(Path(folder)) as here,
    ):
        here.env["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
        here.superlink()
        for client in range(clients):
            here.supernode(client)
        if only not in ("floor", "payload"):
            facts, out = flower(here, "train", rounds, clients)
            found["flower_s"] = steady(facts["seconds"])
            found["flower_same_bits"] = (
                None if wanted is None else (out / "state").read_bytes() == wanted
            )
        with Watch(here) as watch:
            facts, _ = flower(here, "floor", rounds, clients)
        found["flower_floor_s"], found["flower_floor_down_s"] = (
            steady(facts["seconds"]),
            steady(facts["down"]),
        )
        if only in ("all", "payload"):
            found |= large(here, clients, watch.most)
    found["explain"] = (
        "down: an idle SuperNode looks for work every 3 s (1.5 s on average), then Flower starts a"
        " process for the message; up: that process ends, the SuperNode looks for its reply every"
        " 0.5 s, the server every 0.1 s"
    )


def large(here: Any, clients: int, floor: Mapping[str, int]) -> dict[str, Any]:
    """142 MB to every client and back. Copies: the most memory a process of each kind held beyond
    what it held without the payload.
    """
    size = PAYLOAD * 4
    with Watch(here) as watch:
        facts, _ = flower(here, "payload", 2, clients)
    copies = {
        role: round((top - floor.get(role, 0)) / size, 2)
        for role, top in sorted(watch.most.items())
    }
    return {
        "payload_mb": round(size / 1e6, 1),
        "payload_s": steady(facts["seconds"]),
        "payload_copies": copies,
    }


class Watch(threading.Thread):
    """The most memory that any process of each kind ever held, as the kernel counts it (VmHWM);
    looked at twenty times a second, because processes come and go. Where the kernel does not say,
    what they held when they were looked at."""

    ROLES = (
        "flwr-serverapp",
        "flwr-clientapp",
        "flower-superlink",
        "flower-supernode",
        "fedlens.engines.flower.site",
    )

    def __init__(self, here: Any) -> None:
        super().__init__(daemon=True)
        self.here, self.most, self.ended = here, dict[str, int](), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            for process in list(self.here.running.values()):
                with contextlib.suppress(psutil.Error):
                    top = psutil.Process(process.pid)
                    for one in [top, *top.children(recursive=True)]:
                        with contextlib.suppress(psutil.Error):
                            self.note(one)

    def note(self, process: psutil.Process) -> None:
        command = " ".join(process.cmdline())
        role = next((r for r in self.ROLES if r in command), None)
        if role:
            self.most[role] = max(self.most.get(role, 0), peak(process))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


def peak(process: psutil.Process) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) * 1024
    return int(process.memory_info().rss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--only", choices=("all", "local", "flower", "floor", "payload"), default="all"
    )
    options = parser.parse_args()
    print(json.dumps(benchmark(options.rounds, options.clients, options.only)))

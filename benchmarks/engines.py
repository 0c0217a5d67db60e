"""Seconds a round for simulator, Ray and Flower on the same work, the same bits checked at the end;
and a large payload through Flower.

    python benchmarks/engines.py [--rounds 8] [--clients 2]
        [--only local|flower|floor|study|megabyte|payload]

Work: ResNet-8 on 32 x 32 images, a few hundred per client, one epoch. Simulator and Ray take turns
round by round, so that whatever else the machine does troubles both alike. "floor" is a round in
which clients do nothing: what the engine itself costs. "study" is the study of docs/sites.md, whose
rounds train and evaluate; "megabyte" sends 1 MB down and up. The payload part sends 35.6 M float32
(142 MB) down and up, once per round, and reports the peak resident memory of each kind of process
above what it holds without the payload, in copies of the payload. Flower's parts run with `fedlens
serve` and the fleet client of `fedlens join`: TLS, certificates and the front included.

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

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from fedlens import Algorithm, Client, Federation, Message, Progress, Round, run  # noqa: E402
from fedlens.algorithms import FedAvg  # noqa: E402
from fedlens.core.replies import Replies  # noqa: E402
from fedlens.data.images.tensors import Tensors  # noqa: E402
from fedlens.engines.flower.site import Site, federation_of_one  # noqa: E402
from fedlens.sites import site as recipe_site  # noqa: E402
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
    return Echo({"payload": PAYLOAD, "megabyte": 250_000}.get(name, 1))


def make_site(node: Mapping[str, Any], request: Mapping[str, Any]) -> Site:
    if request.get("text"):  # a recipe's
        return recipe_site.make_site({**node, "trust-server": True}, request)
    id, name = int(node["client"]), str(request["job"])
    # an echo looks at no example, but a site without any is not let in
    data = federation(int(node["clients"])).holdings[id] if name == "train" else ("one",)
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

    engine = Flower(grid, algorithm, int(config["clients"]), job=str(config["job"]), wait=120)
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
    config = {"work": work, "rounds": rounds, "clients": clients, "out": str(out), "job": work}
    write_app(here.folder / f"app-{work}", "engines:main", "engines:make_site", config)
    here.submit(here.folder / f"app-{work}", f"run-{work}")
    here.wait_for(lambda: (out / "server.json").exists(), 900, f"the end of {work}")
    facts: dict[str, Any] = json.loads((out / "server.json").read_text())
    tell(f"flower, {work}", facts["seconds"])
    return facts, out


def study(here: Any, rounds: int, clients: int) -> list[float]:
    """Seconds of each round of the study in docs/sites.md, here with so many hospitals; a round
    trains and evaluates. From three on their replies are masked."""
    from fedlens.engines.flower.engine import write_app

    walkthrough = (ROOT / "docs" / "sites.md").read_text()
    recipe = walkthrough.split("server/study.toml <<'END'\n")[1].split("END")[0]
    for key, there, wanted in (("rounds", 2, rounds), ("clients", 3, clients)):
        assert f"\n{key} = {there}\n" in recipe
        recipe = recipe.replace(f"\n{key} = {there}\n", f"\n{key} = {wanted}\n")
    out = here.folder / "study"
    config = {
        "name": "study",
        "text": recipe,
        "out": str(out),
        "resume": False,
        "fresh": False,
        "wait": 120.0,
        "least": clients,
        "forgive": False,
    }
    app = here.folder / "app-study"
    write_app(app, "fedlens.sites.server:run_server", "fedlens.sites.site:make_site", config)
    here.submit(app, "run-study")
    here.wait_for(lambda: (out / "summary.json").exists(), 900, "the end of study")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line)["seconds"]) for line in lines]
    tell("flower, study", seconds)
    return seconds


def scans(folder: Path, clients: int) -> None:
    """Pictures as in docs/sites.md."""
    rng = np.random.default_rng(0)
    for client in range(clients):
        for name, period in (("benign", 4), ("malignant", 8)):
            place = folder / f"scans-{client}" / name
            place.mkdir(parents=True)
            for k in range(40):
                wave = 60 * np.sin(np.arange(16) * 2 * np.pi / period + rng.random() * 6)
                pixels = 100 + 40 * client + wave[None] + rng.normal(0, 20, (16, 16))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{k}.png")


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
        deployment(Path(folder), clients) as here,
    ):
        here.env["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
        scans(here.folder, clients)
        here.serve()
        for client in range(clients):
            data = str(here.folder / f"scans-{client}")
            here.site(client, "engines", clients=clients, data=data)
        if only in ("all", "flower"):
            facts, out = flower(here, "train", rounds, clients)
            found["flower_s"] = steady(facts["seconds"])
            found["flower_same_bits"] = (
                None if wanted is None else (out / "state").read_bytes() == wanted
            )
        if only in ("all", "study"):
            found["study_s"] = steady(study(here, rounds, clients))
        if only in ("all", "megabyte"):
            found["megabyte_s"] = steady(flower(here, "megabyte", rounds, clients)[0]["seconds"])
        with Watch(here) as watch:
            facts, _ = flower(here, "floor", rounds, clients)
        found["flower_floor_s"], found["flower_floor_down_s"] = (
            steady(facts["seconds"]),
            steady(facts["down"]),
        )
        if only in ("all", "payload"):
            found |= large(here, clients, watch.most)
    found["explain"] = (
        "down: a site looks for work every 0.1 s while there is some, every second later; up: the"
        " server looks for replies every 0.1 s"
    )


def large(here: Any, clients: int, floor: Mapping[str, int]) -> dict[str, Any]:
    """142 MB to every client and back. Copies: the most memory a process of each kind held beyond
    what it held without the payload.
    """
    size = PAYLOAD * 4
    with Watch(here) as watch:
        facts, _ = flower(here, "payload", 3, clients)
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

    # a site's two processes: its worker is a child of its network
    ROLES = ("flwr-serverapp", "flower-superlink", "fedlens.cli.main serve", "a_site.py")

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
        "--only",
        choices=("all", "local", "flower", "floor", "study", "megabyte", "payload"),
        default="all",
    )
    options = parser.parse_args()
    print(json.dumps(benchmark(options.rounds, options.clients, options.only)))

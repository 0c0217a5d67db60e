"""Seconds a round for simulator, Ray and Flower on the same work, the same bits checked at the end; and a large payload through Flower.

    python benchmarks/engines.py [--rounds 6] [--clients 2] [--skip-payload]

Work: ResNet-8 on 32 x 32 images, a few hundred per client, one epoch. "floor" is Flower with a client that does nothing: what is left
are Flower's own waits (see `explain`). The payload part sends 35.6 M float32 (142 MB) down and up, once per round, and reports the peak
resident memory of the ServerApp and of the site's worker above their own baseline, in copies of the payload.

Prints progress to stderr and ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402

from fedlens import Algorithm, Client, Federation, Message, Progress, Round, run  # noqa: E402
from fedlens.algorithms import FedAvg  # noqa: E402
from fedlens.data.tensors import Tensors  # noqa: E402
from fedlens.engines.site import Site, alone  # noqa: E402
from fedlens.replies import Replies  # noqa: E402
from fedlens.tasks.classification import Classification  # noqa: E402

torch.set_num_threads(1)
PAYLOAD = 35_600_000  # float32


def federation(clients: int, examples: int = 256) -> Federation:
    rng = torch.Generator().manual_seed(0)
    return Federation([
        Tensors({"x": torch.randint(256, (examples, 3, 32, 32), dtype=torch.uint8, generator=rng), "y": torch.randint(10, (examples,), generator=rng)})
        for _ in range(clients)
    ])  # fmt: skip


@dataclass
class Echo(Algorithm):
    """A tree down, the same tree up: nothing but transport. Sums in place, so that the server holds state, sum and one reply."""

    size: int = 1

    def init(self) -> Message:
        return Message({"x": {"x": torch.ones(self.size)}})

    def broadcast(self, state: Message) -> Message:
        return Message(state.trees)

    def expects(self, message: Message) -> Mapping[str, Any]:
        return message.trees

    def client_step(self, message: Message, client: Client) -> Message:
        return Message(message.trees)

    def server_step(self, state: Message, replies: Replies) -> Message:
        return state


def make_algorithm(name: str) -> Algorithm:
    if name == "train":
        return FedAvg(Classification(model="resnet8"), lr=0.05, batch=32)
    return Echo(PAYLOAD if name == "payload" else 1)


def make_site(node: Mapping[str, Any], config: Mapping[str, Any]) -> Site:
    id, name = int(node["client"]), str(config["work"])
    data = federation(int(config["clients"])).holdings[id] if name == "train" else ()
    return Site(id, Noting(make_algorithm(name), Path(str(config["out"])) / f"site-{id}"), alone(id, data), Path(str(node["folder"])))


def Noting(algorithm: Algorithm, file: Path) -> Algorithm:
    """The same algorithm, which writes down how much memory its process has held at most."""
    inner = algorithm.client_step

    def step(message: Message, client: Client) -> Message:
        file.write_text(str(peak()))
        return inner(message, client)

    algorithm.client_step = step  # type: ignore[method-assign]
    return algorithm


def main(grid: Any, config: Mapping[str, Any]) -> None:
    """The ServerApp of the Flower part."""
    from fedlens.engines.flower import Flower

    out, name = Path(str(config["out"])), str(config["work"])
    algorithm = make_algorithm(name)
    begin = peak()
    state = algorithm.init()
    seconds: list[float] = []
    engine = Flower(grid, algorithm, int(config["clients"]), job=str(config["job"]), patience=120)
    final = run(algorithm, engine, int(config["rounds"]), progress=Progress(state), after_round=lambda p, r: seconds.append(r.seconds))
    (out / "state").write_bytes(final.to_bytes() if name == "train" else b"")
    (out / "server.json").write_text(json.dumps({"seconds": seconds, "peak": peak() - begin}))


def peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- measuring ---------------------------------------------------------------------------------------------------------------------


def steady(seconds: list[float]) -> float:
    """The first round builds models and fills caches."""
    return round(statistics.median(seconds[1:] or seconds), 4)


def local(name: str, rounds: int, clients: int) -> tuple[float, Message]:
    algorithm, data = make_algorithm("train"), federation(clients)
    if name == "ray":
        from fedlens.engines.ray import Ray

        engine: Any = Ray(algorithm, data, workers=2)
    else:
        from fedlens.engines.simulator import Simulator

        engine = Simulator(algorithm, data, workers=2)
    seconds: list[float] = []

    def note(here: Progress, done: Round) -> None:
        seconds.append(done.seconds)

    with engine:
        state = run(algorithm, engine, rounds, after_round=note)
    tell(name, seconds)
    return steady(seconds), state


def tell(name: str, seconds: list[float]) -> None:
    print(f"{name}: {', '.join(f'{s:.3f}' for s in seconds)} s a round", file=sys.stderr, flush=True)


def flower(here: Any, work: str, rounds: int, clients: int) -> tuple[dict[str, Any], Path]:
    from fedlens.engines.flower import write_app

    out = here.folder / work
    out.mkdir()
    write_app(here.folder / f"app-{work}", "engines:main", "engines:make_site",
              {"work": work, "rounds": rounds, "clients": clients, "out": str(out), "job": work})  # fmt: skip
    here.submit(here.folder / f"app-{work}", f"run-{work}")
    here.wait_for(lambda: (out / "server.json").exists(), 900, f"the end of {work}")
    facts: dict[str, Any] = json.loads((out / "server.json").read_text())
    tell(f"flower, {work}", facts["seconds"])
    return facts, out


def benchmark(rounds: int, clients: int, payload: bool) -> dict[str, Any]:
    from deployment import deployment

    found: dict[str, Any] = {"clients": clients, "rounds": rounds}
    found["simulator_s"], wanted = local("simulator", rounds, clients)
    found["ray_s"], state = local("ray", rounds, clients)
    found["ray_over_simulator"] = round(found["ray_s"] / found["simulator_s"], 3)
    same = state.to_bytes() == wanted.to_bytes()
    with tempfile.TemporaryDirectory(prefix="fedlens-bench-") as folder, deployment(Path(folder)) as here:
        here.env["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
        here.superlink()
        for client in range(clients):
            here.supernode(client)
        facts, out = flower(here, "train", rounds, clients)
        found["flower_s"] = steady(facts["seconds"])
        found["same_bits"] = same and Message.from_bytes((out / "state").read_bytes()).trees["model"].keys() == wanted.trees["model"].keys() and (
            (out / "state").read_bytes() == bytes(wanted.to_bytes())
        )  # fmt: skip
        facts, _ = flower(here, "floor", rounds, clients)
        found["flower_floor_s"] = steady(facts["seconds"])
        if payload:
            found |= large(here, clients)
    found["explain"] = "idle SuperNodes look for work every 3 s (1.5 s on average); one new process per message at each site"
    return found


def large(here: Any, clients: int) -> dict[str, Any]:
    """142 MB to every client and back. Copies: the most memory a process held beyond what it held without the payload."""
    size = PAYLOAD * 4
    small = {k: int((here.folder / "floor" / f"site-{k}").read_text()) for k in range(clients)}
    facts, out = flower(here, "payload", 2, clients)
    worker = max(int((out / f"site-{k}").read_text()) - small[k] for k in range(clients))
    return {
        "payload_mb": round(size / 1e6, 1), "payload_s": steady(facts["seconds"]), "payload_server_copies": round(facts["peak"] / size, 2),
        "payload_site_copies": round(worker / size, 2),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--skip-payload", action="store_true")
    options = parser.parse_args()
    print(json.dumps(benchmark(options.rounds, options.clients, not options.skip_payload)))

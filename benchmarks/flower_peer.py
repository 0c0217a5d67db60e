"""The work of `simulator.py` on Flower's own Ray simulation, a round whenever a line arrives on
standard input.

Run by `simulator.py`, which lets its rounds alternate with these. A module of its own, so that
Ray's actors import it and each builds the data once: functions defined in a main program are sent
by value and would build it anew for every client. Every round prints one JSON line with its
seconds, its mean loss and how many clients failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from functools import cache
from typing import Any

import torch
from simulator import BATCH, CLIENTS, COHORT, LR, make_federation, network
from torch import nn

from fedlens.core.client import generator
from fedlens.core.federation import Federation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation


@cache
def federation() -> Federation:
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(1)
    return make_federation()


class Site(NumPyClient):
    def __init__(self, i: int) -> None:
        self.i = i

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        data, model = federation().holdings[self.i], network()
        model.load_state_dict(
            {n: torch.from_numpy(a) for n, a in zip(model.state_dict(), parameters, strict=True)}
        )
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
        for index in torch.split(
            torch.randperm(len(data), generator=generator(0, int(config["round"]), self.i)), BATCH
        ):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(data.columns["x"][index]), data.columns["y"][index]
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return (
            [t.numpy() for t in model.state_dict().values()],
            len(data),
            {"loss": float(torch.stack(losses).mean())},
        )


class Timed(FedAvg):
    """Waits for its turn before a round and says how long the round took."""

    def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
        sys.stdin.readline()
        self.began = time.perf_counter()
        return super().configure_fit(*args, **kwargs)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        out = super().aggregate_fit(server_round, results, failures)
        losses = [r.metrics["loss"] for _, r in results]
        said = {
            "seconds": time.perf_counter() - self.began,
            "failed": len(failures),
            "loss": sum(losses) / max(1, len(losses)),
        }
        print("ROUND", json.dumps(said), flush=True)
        return out


def client_fn(context: Any) -> Any:
    return Site(int(context.node_config["partition-id"])).to_client()


def main(rounds: int, workers: int) -> None:
    """workers: one actor each, with one processor; 0 leaves everything as Flower has it."""

    def server_fn(context: Any) -> Any:
        torch.manual_seed(0)
        start = ndarrays_to_parameters([t.numpy() for t in network().state_dict().values()])
        strategy = Timed(
            fraction_fit=COHORT / CLIENTS,
            fraction_evaluate=0.0,
            min_fit_clients=COHORT,
            min_available_clients=CLIENTS,
            initial_parameters=start,
            on_fit_config_fn=lambda number: {"round": number},
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}} if workers else {}
    backend = {
        **resources,
        "init_args": {"log_to_driver": False, **({"num_cpus": workers} if workers else {})},
    }
    server, client = ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn)
    run_simulation(
        server_app=server, client_app=client, num_supernodes=CLIENTS, backend_config=backend
    )


if __name__ == "__main__":
    from flower_peer import (
        main as imported,
    )  # under its own name, so that actors find what was pickled

    imported(int(sys.argv[1]), int(sys.argv[2]))

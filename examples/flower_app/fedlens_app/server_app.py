"""The server half: the same `run` as everywhere, with Flower as its engine; or Flower's own loop,
with a stack as its Strategy.
"""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord

from fedlens import Progress, Round, run
from fedlens.engines.flower.engine import Flower, make_server_app
from fedlens.engines.flower.strategy import StackStrategy
from fedlens.layers import LossAware
from fedlens_app.task import Stripes, algorithm, data_of


def main(grid: Any, config: Any) -> None:
    rounds = int(config["rounds"])
    if config["strategy"]:
        strategy = StackStrategy(LossAware(tau=0.05), rounds=rounds, fraction_evaluate=0.0)
        strategy.start(
            grid=grid, initial_arrays=ArrayRecord(Stripes().model().state_dict()), num_rounds=rounds
        )
        return

    def tell(here: Progress, done: Round) -> None:
        print(
            f"round {done.number}: loss {done.loss:.4f}, {dict(done.metrics)}, lost"
            f" {list(done.lost)}",
            flush=True,
        )

    stack = algorithm()
    engine = Flower(grid, stack, int(config["clients"]))
    run(stack, engine, rounds, test=data_of(99), evaluate_every=1, after_round=tell)


app = make_server_app(main)

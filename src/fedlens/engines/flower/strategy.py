"""A FedLens stack as a Flower Strategy, for ClientApps that know nothing of FedLens. Called from a
ServerApp of the user's own:

    strategy = StackStrategy(LossAware(tau=0.05), rounds=10)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

Such a ClientApp trains as it likes and replies as Flower's own strategies want it: one ArrayRecord
with the local weights, one MetricRecord with "num-examples" and, for layers that look at losses,
"train_loss". So only layers that merge what comes back can be used; a layer that changes how
clients train is refused when the strategy is built, because nobody would run its other half.

Sampling and evaluation are those of Flower's FedAvg. Replies are sorted by "client" (or
"partition-id") among their metrics, else by node, before they are summed: Flower's own order is the
order of arrival, and so are its last bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as Envelope
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedlens.algorithms.fedavg import FedAvg
from fedlens.core.algorithm import Layer, StackError, stack
from fedlens.core.answer import as_sent
from fedlens.core.client import Client, generator
from fedlens.core.federation import Federation
from fedlens.core.memory import Memory
from fedlens.core.message import Header, Message
from fedlens.core.replies import Lost, gather
from fedlens.engines.worker import Worker

LOSSES = ("train_loss", "train-loss", "loss")
ORDER = ("client", "partition-id")


class TrainedElsewhere(FedAvg):
    """FedAvg whose clients were trained by somebody else: a client's data is what it sent."""

    trains: ClassVar[bool] = False

    def __init__(self, weights: Any = "examples", server_lr: float = 1.0) -> None:
        super().__init__(task=None, weights=weights, server_lr=server_lr)  # type: ignore[arg-type]

    def client_step(self, message: Message, client: Client) -> Message:
        local, metrics = client.data
        delta = {n: local[n] - t for n, t in message.trees["model"].items()}
        reply = Message({"delta": delta}).note(**metrics)
        return reply.weigh("delta", metrics["examples"] if self.weights == "examples" else 1.0)


class StackStrategy(FlowerFedAvg):  # type: ignore[misc]
    """
    Args:
        layers: what merges the replies, as in `stack(FedAvg(...), *layers)`.
        rounds: how many are planned, for layers that change over a run.
        server_lr: as in `FedAvg`.
        seed: of layers that draw random numbers on the server.
        options: everything else goes to Flower's FedAvg (fraction_train, min_train_nodes, ...).
    """

    def __init__(
        self, *layers: Layer, rounds: int = 1, server_lr: float = 1.0, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.algorithm = stack(TrainedElsewhere(server_lr=server_lr), *layers)
        if hiding := self.algorithm.hiding_layer:
            raise StackError(
                f"{hiding} adds masks at the clients, whose replies come as they are here: use"
                " `fedlens serve` and `fedlens join`"
            )
        self.rounds, self.seed = rounds, seed
        self.state: Message | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Envelope]:
        if self.state is None:
            self.state = Message({"model": dict(arrays.to_torch_state_dict())})
        messages: Iterable[Envelope] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid or self.state is None:
            return None, None
        header = Header(server_round - 1, self.rounds, self.seed, population=len(valid))
        state = self.state.with_header(header)
        message = self.algorithm.broadcast(state).with_header(header, cohort=len(valid))
        worker = Worker(self.algorithm, Federation([]), Memory())
        worker.begin(message, self.algorithm.needs != "replies")
        outcomes: list[Any] = []
        for position, envelope in enumerate(sorted(valid, key=self._order)):
            rng = generator(self.seed, server_round, position)
            client = Client(position, self._content(envelope), rng, {})
            reply = self.algorithm.client_step(message, client)
            reply = as_sent(self.algorithm, reply, position, header.round)
            outcomes.append(worker.admit(position, reply))
        merged, lost = gather([*outcomes, worker.finish()], range(len(valid)))
        for item in lost:
            _log_refused(item)
        if len(merged):
            merged = merged.limited_to(self.algorithm.needs, self.algorithm.declared())
            self.state = self.algorithm.server_step(state, merged)
        metrics = self.train_metrics_aggr_fn([e.content for e in valid], self.weighted_by_key)
        return ArrayRecord(self.state.trees["model"]), metrics

    def _content(self, envelope: Envelope) -> tuple[Any, dict[str, float]]:
        content = envelope.content
        metrics = next(iter(content.metric_records.values()))
        scalars = {"examples": float(metrics[self.weighted_by_key])}
        if loss := next((k for k in LOSSES if k in metrics), None):
            scalars["loss"] = float(metrics[loss])
        return next(iter(content.array_records.values())).to_torch_state_dict(), scalars

    @staticmethod
    def _order(envelope: Envelope) -> tuple[int, int]:
        metrics: Any = next(iter(envelope.content.metric_records.values()))
        client = next((metrics[k] for k in ORDER if k in metrics), 0)
        return int(client), envelope.metadata.src_node_id


def _log_refused(lost: Lost) -> None:
    from logging import WARNING

    from flwr.common.logger import log

    log(WARNING, "a reply was refused: %s", lost.reason)

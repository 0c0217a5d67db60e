"""Checks that every algorithm, layer, task, data source and engine must pass, for your own too.

    from fedlens.testing import check_layer
    def test_my_layer():
        check_layer(MyLayer(mu=0.1))

Each check raises an AssertionError that says what is wrong. The project's own conformance tests are
these functions over everything that is exported.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.algorithms.fedavg import FedAvg
from fedlens.core.algorithm import Algorithm, Layer, stack
from fedlens.core.client import Batch, Data, Output
from fedlens.core.federation import Federation
from fedlens.core.message import Message
from fedlens.core.replies import Lost, gather
from fedlens.core.rounds import Engine, Progress, Round, run
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.data.source import Source
from fedlens.engines.loopback import Loopback
from fedlens.engines.worker import Job

MakeAlgorithm = Callable[[], Algorithm]
EngineMaker = Callable[[Algorithm, Federation], Engine]
_ROUNDS = 2


# -- something small to run on ---------------------------------------------------------------------


class SmallNet(nn.Module):
    """Eight numbers in, three classes out: a backbone with BatchNorm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.backbone(x)
        return found


class SmallTask(LearningTask):
    """Three classes, told apart by the signs of the first two numbers."""

    def model(self) -> nn.Module:
        return SmallNet()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        batch = data.batch(torch.arange(len(data)))
        right = self.forward(result, batch).prediction.argmax(1) == batch["y"]
        return {"accuracy": float(right.float().mean())}


def small_data(n: int, rng: torch.Generator) -> Tensors:
    x = torch.randn(n, 8, generator=rng)
    return Tensors({"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()})


def small_federation(clients: int = 7, seed: int = 0) -> Federation:
    """Clients of different sizes, each with a held-out part."""
    rng = torch.Generator().manual_seed(seed)
    train = [small_data(20 + 3 * i, rng) for i in range(clients)]
    held_out = [small_data(10, rng) for _ in range(clients)]
    return Federation(train, held_out, small_data(100, rng))


def arrays_of(message: Message) -> dict[str, Tensor]:
    """All arrays of a message by tree and name."""
    return {f"{tree}/{n}": t for tree, arrays in message.trees.items() for n, t in arrays.items()}


def same_bits(a: Message, b: Message) -> bool:
    """Do two messages hold the same arrays, to the last bit?"""
    x, y = arrays_of(a), arrays_of(b)
    same = (torch.equal(t, y[n]) and t.dtype == y[n].dtype for n, t in x.items() if n in y)
    return x.keys() == y.keys() and all(same)


# -- algorithms and layers -------------------------------------------------------------------------


def check_layer(layer: Layer, *, task: LearningTask | None = None) -> None:
    """All checks of an algorithm, on FedAvg with this layer around it and a small federation.

    Args:
        layer: yours, with its arguments.
        task: for a layer that needs another one than three classes in eight dimensions; then use
            `check_algorithm` with data of that kind.
    """
    check_algorithm(lambda: stack(FedAvg(task or SmallTask(), batch=8), layer), small_federation())


def check_algorithm(make: MakeAlgorithm, federation: Federation) -> None:
    """The same result twice, nothing changed that was given, replies as announced.

    Args:
        make: builds a fresh algorithm.
        federation: data it can work on.
    """
    for check in ALGORITHM_CHECKS:
        check(make, federation)


def repeats_itself(make: MakeAlgorithm, federation: Federation) -> None:
    """The same seed gives the same bits, another seed others, and everything stays finite."""

    def once(seed: int) -> Message:
        algorithm = make()
        return run(algorithm, Loopback(algorithm, federation), _ROUNDS, seed=seed)

    first = once(0)
    assert same_bits(first, once(0)), "two runs with one seed differ"
    # What does not train may have no randomness to seed.
    assert not make().trains or not same_bits(first, once(1)), "another seed changes nothing"
    for name, array in arrays_of(first).items():
        assert bool(torch.isfinite(array).all()), f"{name} is not finite after {_ROUNDS} rounds"


def keeps_its_shape(make: MakeAlgorithm, federation: Federation) -> None:
    """What is sought, a model or an image, keeps names, shapes and types, and moves."""
    algorithm = make()
    start = algorithm.init()
    end = run(algorithm, Loopback(algorithm, federation), _ROUNDS)
    sent = [
        arrays_of(algorithm.broadcast(state.with_header(population=len(federation))))
        for state in (start, end)
    ]
    before, after = sent
    assert before.keys() <= after.keys(), f"{min(before.keys() - after.keys(), default='')} is gone"
    for name, array in before.items():
        assert after[name].shape == array.shape, f"{name} changed its shape"
        assert after[name].dtype == array.dtype, f"{name} changed its type"
    assert any(not torch.equal(after[n], t) for n, t in before.items()), "nothing moved"


def says_what_paces_it(make: MakeAlgorithm, federation: Federation) -> None:
    """Two rounds of two and two of seven differ only where a part is `paced_by` their number: such
    a run cannot be extended.
    """
    algorithm = make()

    def two_of(rounds: int) -> dict[str, Tensor]:
        here = Progress(algorithm.init())

        def enough(progress: Progress, _: Round) -> None:
            if progress.done == _ROUNDS:
                raise TimeoutError

        with contextlib.suppress(TimeoutError):
            engine = Loopback(algorithm, federation)
            run(algorithm, engine, rounds, progress=here, after_round=enough)
        return arrays_of(here.state)

    few, many = two_of(_ROUNDS), two_of(7)
    same = all(torch.equal(t, many[n]) for n, t in few.items())
    paced = any(part.paced_by for part in algorithm.parts())
    assert paced != same, "what a round does depends on how many are planned: say so in `paced_by`"


def changes_nothing_it_was_given(make: MakeAlgorithm, federation: Federation) -> None:
    """State and message are shared with checkpoints and other clients: nobody writes into them."""
    algorithm = make()
    n = len(federation)
    state = algorithm.init().with_header(rounds=_ROUNDS, population=n)
    message = algorithm.broadcast(state).with_header(state.header, cohort=n)
    kept = [copy.deepcopy(arrays_of(m)) for m in (state, message)]
    engine = Loopback(algorithm, federation)
    engine.worker.begin(message, False)
    replies, _ = gather(engine.worker.work([Job(k, k) for k in range(n)]), range(n))
    algorithm.server_step(state, replies.limited_to(algorithm.needs, algorithm.declared()))
    for before, after in zip(kept, (state, message), strict=True):
        for name, array in arrays_of(after).items():
            assert torch.equal(before[name], array), f"{name} was written to"


def sends_what_it_announces(make: MakeAlgorithm, federation: Federation) -> None:
    """`expects` names every tree of a reply, and scalars that are "local" do not leave."""
    algorithm = make()
    engine = Loopback(algorithm, federation)
    run(algorithm, engine, 1)
    down, *up = [Message.from_bytes(b) for b in engine.traffic]
    local = {n for n, scalar in algorithm.declared().items() if scalar.read == "local"}
    assert up, "nobody answered"
    for reply in up:
        assert reply.trees.keys() == algorithm.expects(down).keys()
        assert not local & reply.scalars.keys()


def can_be_sent_to_a_worker(make: MakeAlgorithm, federation: Federation) -> None:
    """A worker process may be spawned: the algorithm survives being pickled, with the same bits."""
    algorithm = make()
    algorithm.init()
    twin: Algorithm = pickle.loads(pickle.dumps(algorithm))
    a = run(algorithm, Loopback(algorithm, federation), 1)
    assert same_bits(a, run(twin, Loopback(twin, federation), 1))


ALGORITHM_CHECKS: tuple[Callable[[MakeAlgorithm, Federation], None], ...] = (
    repeats_itself,
    keeps_its_shape,
    says_what_paces_it,
    changes_nothing_it_was_given,
    sends_what_it_announces,
    can_be_sent_to_a_worker,
)


# -- engines ---------------------------------------------------------------------------------------


class Faulty(FedAvg):
    """FedAvg whose client 2 raises and whose client 3 sends NaN."""

    def client_step(self, message: Message, client: Any) -> Message:
        if client.id == 2:
            raise RuntimeError("the disk of this site is full")
        reply = super().client_step(message, client)
        if client.id == 3:
            reply.trees["delta"]["head.bias"][0] = math.nan
        return reply


@contextlib.contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def check_engine(make: EngineMaker) -> None:
    """The same bits as the loopback, with and without client memory, and a client that fails costs
    its own reply only.

    Args:
        make: an engine for an algorithm and a federation.
    """
    from fedlens.layers.scaffold import Scaffold

    for layers in ((), (Scaffold(),)):
        algorithm = stack(FedAvg(SmallTask(), batch=8), *layers)
        expected = run(algorithm, Loopback(algorithm, small_federation()), 4, cohort=5, seed=3)
        with _closing(make(algorithm, small_federation())) as engine:
            found = run(algorithm, engine, 4, cohort=5, seed=3)
        assert same_bits(found, expected), "the engine changes the result"
    rounds: list[Round] = []
    broken = Faulty(SmallTask(), batch=8)
    with _closing(make(broken, small_federation())) as engine:
        run(broken, engine, 1, after_round=lambda _, done: rounds.append(done))
    lost: list[Lost] = list(rounds[0].lost)
    assert [x.sender for x in lost] == [2, 3], f"lost {lost}, not clients 2 and 3"
    assert [x.refused for x in lost] == [False, True]
    assert sorted(rounds[0].heard) == [0, 1, 4, 5, 6]


# -- tasks and data --------------------------------------------------------------------------------


def check_task(task: LearningTask, data: Data) -> None:
    """A fresh model for each call, a finite loss with a gradient, metrics that are numbers.

    Args:
        task: yours.
        data: examples of the kind it is for.
    """
    batch = data.batch(torch.arange(min(4, len(data))))
    model = task.model()
    assert task.model() is not model, "every call of `model` must build a fresh network"
    loss = task.loss(task.forward(model.train(), batch), batch)
    assert loss.dim() == 0 and bool(torch.isfinite(loss)), f"the loss is {loss}"
    loss.backward()  # type: ignore[no-untyped-call]
    moved = [p for p in model.parameters() if p.grad is not None and bool(p.grad.any())]
    assert moved, "the loss has no gradient"
    with torch.no_grad():
        metrics = task.evaluate(model.eval(), data)
    assert metrics and all(isinstance(v, float) for v in metrics.values()), f"metrics: {metrics}"


def check_source(source: Source, clients: int = 3) -> None:
    """The same seed deals the same data; every client has something, and batches can be drawn.

    Args:
        source: yours.
        clients: among how many to divide.
    """
    first, again = (source.federation(clients, 0) for _ in range(2))
    assert len(first) == clients, f"{len(first)} clients instead of {clients}"
    for mine, twin in zip(first.holdings, again.holdings, strict=True):
        assert isinstance(mine, Data) and len(mine), "a client holds nothing"
        index = torch.arange(min(2, len(mine)))
        a, b = mine.batch(index), twin.batch(index)
        assert all(torch.equal(a[k], b[k]) for k in a), "the same seed gives other data"
    assert first.facts == again.facts

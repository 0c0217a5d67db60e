from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from toy import Toy, flat, same_bits, toy_federation

from fedlens import Batch, Client, Federation, Message, Output, run, stack
from fedlens.algorithms.fedavg import FedAvg
from fedlens.core.client import generator
from fedlens.core.replies import gather
from fedlens.core.task import LearningTask
from fedlens.core.training import lr_factor, shuffled
from fedlens.data.images.tensors import Tensors
from fedlens.deblur.task import Deblurring
from fedlens.engines.loopback import Loopback
from fedlens.layers import Scaffold


class Line(LearningTask):
    """y = w x with a squared loss: gradients are worked out on paper."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        return model

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        return (output.prediction - batch["y"]).square().mean()

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {"weight": float(result.weight.detach())}


def points(*pairs: tuple[float, float]) -> Tensors:
    x, y = torch.tensor(pairs, dtype=torch.float32).T
    return Tensors({"x": x[:, None], "y": y[:, None]})


def client(data: Tensors, **extra: object) -> Client:
    return Client(0, data, generator(0), {}, **extra)  # type: ignore[arg-type]


def test_one_step_by_hand() -> None:
    """w = 1, point (2, 6): loss (2 - 6)^2 = 16, gradient 2 * 2 * (2 - 6) = -16, step -0.1 * -16 =
    1.6.
    """
    fedavg = FedAvg(Line(), lr=0.1)
    reply = fedavg.client_step(fedavg.broadcast(fedavg.init()), client(points((2, 6))))
    assert reply.trees["delta"]["weight"].item() == pytest.approx(1.6)
    assert (
        reply.scalars["loss"] == 16
        and reply.scalars["steps"] == 1
        and reply.scalars["lr_sum"] == pytest.approx(0.1)
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("examples", 1 + (1 * 1.6 + 3 * 0.4) / 4), ("uniform", 1 + (1.6 + 0.4) / 2)],
)
def test_the_mean_of_two_clients_by_hand(weights: str, expected: float) -> None:
    """Client 0: one point (2, 6), delta 1.6 as above. Client 1: three times (1, 3), batch of 3:
    gradient 2 (1 - 3) = -4, delta 0.4.
    """
    federation = Federation([points((2, 6)), points((1, 3), (1, 3), (1, 3))], test=points((1, 1)))
    fedavg = FedAvg(Line(), lr=0.1, weights=weights)  # type: ignore[arg-type]
    seen: dict[str, float] = {}
    run(
        fedavg,
        Loopback(fedavg, federation),
        1,
        test=federation.test,
        evaluate_every=1,
        after_round=lambda p, r: seen.update(r.metrics),
    )
    assert seen["weight"] == pytest.approx(expected)


def test_terms_count_in_the_loss_and_pulls_do_not() -> None:
    """Point (2, 6) as above, gradient -16, loss 16. A term 3 w adds 3 to loss and gradient; a pull
    5 w adds 5 to the gradient only.
    """
    fedavg = FedAvg(Line(), lr=0.1)
    richer = (
        client(points((2, 6)))
        .plus(lambda m, b, o: 3 * m.weight.sum())
        .pull(lambda m: 5 * m.weight.sum())
    )
    reply = fedavg.client_step(fedavg.broadcast(fedavg.init()), richer)
    assert reply.scalars["loss"] == 19
    assert reply.trees["delta"]["weight"].item() == pytest.approx(-0.1 * (-16 + 3 + 5))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(16))

    def forward(self, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        return features + self.p


def test_an_adapter_trains_stays_in_memory_and_does_not_travel() -> None:
    fedavg, federation = FedAvg(Toy(), batch=8), toy_federation(1)
    message, memory = fedavg.broadcast(fedavg.init()), {}
    plain = fedavg.client_step(message, Client(0, federation.holdings[0], generator(0), {}))
    adapted = fedavg.client_step(
        message, Client(0, federation.holdings[0], generator(0), memory).adapt("shift", Shift())
    )
    assert adapted.trees["delta"].keys() == plain.trees["delta"].keys()
    assert memory["shift"]["p"].abs().max() > 0  # type: ignore[index]
    again = Shift()
    fedavg.client_step(
        message, Client(0, federation.holdings[0], generator(0), memory).adapt("shift", again)
    )
    assert not torch.equal(again.p.detach(), memory["shift"]["p"] * 0)  # type: ignore[index]


def test_buffers_are_averaged_and_counters_stay_integers() -> None:
    """Clients 0 and 1 hold 20 and 23 samples: 3 batches of 8 each (8 + 8 + 4, 8 + 8 + 7), so the
    mean counter is 3.
    """
    fedavg, federation = FedAvg(Toy(), batch=8), toy_federation(2)
    state = run(fedavg, Loopback(fedavg, federation), 1)
    counter = state.trees["model"]["backbone.1.num_batches_tracked"]
    assert counter.dtype == torch.int64 and counter == 3
    assert state.trees["model"]["backbone.1.running_mean"].abs().max() > 0


def test_the_rate_rises_during_warm_up() -> None:
    """lr 1, four rounds of warm-up: fifths in rounds 0 to 3, then all of it; a step at 6 halves
    it.
    """
    base = FedAvg(Toy(), lr=1.0, warmup=4, schedule="step", milestones=(6,), decay=0.5)
    rates = [base.lr_at(Message().with_header(round=r, rounds=10)) for r in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.5])
    plain = FedAvg(Toy(), lr=1.0)
    assert plain.lr_at(Message().with_header(round=0, rounds=10)) == 1.0


def test_schedules_by_hand() -> None:
    """Cosine over 4 rounds: 1, 0.854, 0.5, 0.146. Step every 2 by 0.1: 1, 1, 0.1, 0.1, 0.01."""
    cosine = [lr_factor("cosine", t, 4, 30, 0.1) for t in range(4)]
    assert cosine == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert [lr_factor("step", t, 5, 2, 0.1) for t in range(5)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01]
    )


def test_draw_gives_epochs_or_exact_steps_and_never_a_lone_sample() -> None:
    data = points(*[(float(i), 0.0) for i in range(9)])
    sizes = [len(b["x"]) for b in shuffled(data, 4, generator(1), epochs=2)]
    assert sizes == [4, 5, 4, 5]
    seen = torch.cat([b["x"] for b in shuffled(data, 4, generator(1))]).flatten()
    assert sorted(seen.tolist()) == list(range(9))
    assert len(list(shuffled(data, 4, generator(1), steps=5))) == 5


def test_training_equals_a_plain_torch_loop() -> None:
    """The same batches through torch.optim by hand end in the same bits, with momentum, weight
    decay and clipping.
    """
    fedavg, federation = (
        FedAvg(Toy(), batch=8, lr=0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, epochs=2),
        toy_federation(1),
    )
    message, data = fedavg.broadcast(fedavg.init()), federation.holdings[0]
    reply = fedavg.client_step(message, Client(0, data, generator(5), {}))
    model = Toy().model()
    model.load_state_dict(message.trees["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for batch in shuffled(data, 8, generator(5), epochs=2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.head(model.backbone(batch["x"])), batch["y"])  # type: ignore[operator]
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    for name, t in model.state_dict().items():
        assert torch.equal(reply.trees["delta"][name], t - message.trees["model"][name]), name
    assert reply.scalars["loss"] == pytest.approx(sum(losses) / len(losses))


def test_starts_from_given_weights_and_says_what_does_not_fit(tmp_path: Path) -> None:
    start = {n: t + 1 for n, t in FedAvg(Toy()).init().trees["model"].items()}
    save_file(start, tmp_path / "w.safetensors")
    state = FedAvg(Toy(), init_from=str(tmp_path / "w.safetensors")).init()
    assert all(torch.equal(t, start[n]) for n, t in state.trees["model"].items())
    save_file({**start, "head.bias": torch.zeros(4)}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=r"head.bias is \(4,\), expected \(3,\)"):
        FedAvg(Toy(), init_from=str(tmp_path / "bad.safetensors")).init()


def test_server_learning_rate() -> None:
    """Half the step: x + 0.5 mean(delta)."""
    fedavg = FedAvg(Line(), server_lr=0.5)
    delta = Message({"delta": {"weight": torch.tensor([[3.0]])}}, sender=0)
    assert (
        fedavg.server_step(fedavg.init(), gather([delta], [0])[0]).trees["model"]["weight"].item()
        == 2.5
    )


def test_mixed_precision_and_channels_last_run() -> None:
    federation = toy_federation(2)
    fedavg = FedAvg(Toy(), batch=8, mixed_precision=True, channels_last=True)
    state = run(fedavg, Loopback(fedavg, federation), 1)
    assert all(bool(torch.isfinite(t).all()) for t in flat(state).values())
    assert not same_bits(state, fedavg.init())


class Two(LearningTask):
    """y = (slow + fast) x, both 1 at first. At (1, 0): prediction 2, loss 4, gradient 2 * 2 * 1 = 4
    for each.
    """

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {"slow": nn.Linear(1, 1, bias=False), "fast": nn.Linear(1, 1, bias=False)}
        )
        for p in model.parameters():
            nn.init.ones_(p)
        return model

    def forward(self, model: nn.Module, batch: Batch, adapt: object = None) -> Output:
        return Output(model["slow"](batch["x"]) + model["fast"](batch["x"]))  # type: ignore[operator,index]

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        return (output.prediction - batch["y"]).square().mean()

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {}


def test_learning_rate_factors_by_hand() -> None:
    """lr 0.1: fast moves by -0.4, slow, at a quarter of it, by -0.1. The sum of learning rates is
    that of the common one.
    """
    fedavg = FedAvg(Two(), lr=0.1, lr_factors=(("slow.*", 0.25),))
    reply = fedavg.client_step(fedavg.broadcast(fedavg.init()), client(points((1, 0))))
    assert reply.trees["delta"]["fast.weight"].item() == pytest.approx(-0.4)
    assert reply.trees["delta"]["slow.weight"].item() == pytest.approx(-0.1)
    assert reply.scalars["lr_sum"] == pytest.approx(0.1)


@pytest.mark.parametrize(("number", "moved"), [(0, 0.0), (1, 0.0), (2, -0.4)])
def test_frozen_for_two_rounds(number: int, moved: float) -> None:
    fedavg = FedAvg(Two(), lr=0.1, freeze=("slow.*",), freeze_rounds=2)
    reply = fedavg.client_step(
        fedavg.broadcast(fedavg.init()).with_header(round=number), client(points((1, 0)))
    )
    assert reply.trees["delta"]["slow.weight"].item() == pytest.approx(moved)
    assert reply.trees["delta"]["fast.weight"].item() == pytest.approx(-0.4)
    assert all(p.requires_grad for p in fedavg.resident.parameters())


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_knows_the_factors(option: str) -> None:
    """Both options find the gradient 4 for both, though slow moved a quarter as far; frozen,
    nothing is found and nothing kept.
    """
    for frozen, expected in [((), 4.0), (("slow.*",), 0.0)]:
        scaffold = stack(
            FedAvg(Two(), lr=0.1, lr_factors=(("slow.*", 0.25),), freeze=frozen),
            Scaffold(option=option),
        )  # type: ignore[arg-type]
        one = client(points((1, 0)))
        reply = scaffold.client_step(scaffold.broadcast(scaffold.init()), one)
        assert reply.trees["control"]["fast.weight"].item() == pytest.approx(4)
        assert reply.trees["control"]["slow.weight"].item() == pytest.approx(expected)
        assert one.memory["control"]["slow.weight"].item() == pytest.approx(expected)


def test_patterns_that_make_no_sense() -> None:
    with pytest.raises(
        ValueError, match=r"no parameter's name fits 'spynet\.\*': the model consists of fast, slow"
    ):
        FedAvg(Two(), freeze=("spynet.*",)).init()
    with pytest.raises(ValueError, match="must be above 0"):
        FedAvg(Two(), lr_factors=(("slow.*", 0.0),))
    fedavg = FedAvg(Two(), freeze=("*",))
    with pytest.raises(ValueError, match="everything is frozen"):
        fedavg.client_step(fedavg.broadcast(fedavg.init()), client(points((1, 0))))


def test_a_task_without_a_network() -> None:
    with pytest.raises(
        ValueError, match="FedAvg trains a network, but the task Deblurring has none"
    ):
        FedAvg(Deblurring())  # type: ignore[arg-type]
